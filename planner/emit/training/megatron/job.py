"""A training plan as Megatron-LM arguments, by the rows of :mod:`.terms`.

The argument file has one flag per line (``--flag value``), no quotes and no escapes; the launch script reads it line by
line without evaluating anything. What a plan does not decide (learning rate, data, tokenizer, checkpoints) is left to
environment variables of the launch script.

Checked against megatron-core 0.19.2: tests/conformance/megatron runs its parser, its configuration and its process
groups over the emitted flags.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.artifact import Artifact, ParserVerified, commented, stamp
from meshplan.planner.emit.releases import release_notes, spelled
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import feature_rows, write_all
from meshplan.planner.emit.training.adapters import phase_of, refuse_adapters
from meshplan.planner.emit.training.job import Job
from meshplan.planner.emit.training.megatron import script as megatron_script
from meshplan.planner.emit.training.megatron.documents import (
    DOCUMENTS,
    document_flags,
    document_notes,
    has_conversations,
)
from meshplan.planner.emit.training.megatron.hybrid import HYBRIDS, has_pattern
from meshplan.planner.emit.training.megatron.model import (
    Flag,
    checkpoint_flags,
    inexpressible_shape,
    model_flags,
    model_notes,
)
from meshplan.planner.emit.training.megatron.terms import TERMS, ZERO_SHARDED_GRADIENTS
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.torchrun import RANK_TABLE
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules, keeping_to_documents
from meshplan.planner.training.problem.problem import Phase, TrainingConfig

TARGET = "megatron"
ARGUMENTS_FILE = PurePosixPath("megatron_args.txt")
VERIFIED = ParserVerified(
    framework="megatron-core",
    version=MEGATRON.version,
    mode="parse_args, validate_args, core_transformer_config_from_args; initialize_model_parallel on fake processes",
)
# Nothing that a shell, or a reader that splits at spaces, could take for more than one argument.
_SAFE_ARGUMENT = re.compile(r"[A-Za-z0-9_.,:=*|+()\[\]/-]+")
# Choices by name: values that Megatron-LM has an argument for.
_KNOWN_NAMES = {
    "precision": MEGATRON.precisions,
    "activation_recompute": ("none", "selective", "block", "full"),
    "pipeline_schedule": ("none", "1f1b", "interleaved"),
}
# Changes of one choice, from the smallest to the largest, in search of a configuration that is accepted.
_SMALL_CHANGES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("sequence_parallel", (True, False)),
    ("zero_stage", (1,)),
    ("virtual_pipeline_stages", (1,)),
    ("expert_tensor_parallel", (1,)),
    ("context_parallel", (1,)),
    ("expert_parallel", (64, 32, 16, 8, 4, 2, 1)),
    ("tensor_parallel", (8, 4, 2, 1)),
)
# Causal masks are made inside the kernels; the loader would build sequence_length² of them.
FIXED_ARGUMENTS = {"--no-create-attention-mask-in-dataloader": ""}


def arguments(request: TrainingRequest) -> tuple[Flag, ...]:
    """Every flag that the plan and the model decide, one tuple per flag.

    Raises:
        CannotExpressError: Megatron-LM has no arguments for the model, or refuses the configuration.
    """
    config, shape = request.config, request.shape
    # Conversations are padded for context-parallel ranks, other documents are not.
    is_masked = request.documents is not None and request.documents.is_masked and not has_conversations(request)
    _refuse(config, shape, keeping_to_documents(MEGATRON) if is_masked else MEGATRON)
    is_fine_tuned = phase_of(request.plan) is Phase.FINE_TUNING
    of_checkpoint = checkpoint_flags(shape) if is_fine_tuned else ()
    return (*unchecked_flags(config, shape), *of_checkpoint, *document_flags(request))


def unchecked_flags(config: TrainingConfig, shape: ModelShape) -> tuple[Flag, ...]:
    """The flags of :func:`arguments`, whether or not Megatron-LM takes them (for the tests against its parser)."""
    written = {**write_all(TERMS, config, shape), **FIXED_ARGUMENTS}
    flags = [*model_flags(shape), *((flag, *value.split()) for flag, value in written.items())]
    for flag in flags:
        for argument in flag:
            if not _SAFE_ARGUMENT.fullmatch(argument):
                raise EmitError(
                    f"flag {flag[0]} has the unsafe value {argument!r}; only letters, digits and _.,:=*|+()[]/-"
                )
    return tuple(flags)


def _refuse(config: TrainingConfig, shape: ModelShape, rules: FrameworkRules) -> None:
    missing = inexpressible_shape(shape)
    if missing is not None:
        raise CannotExpressError(TARGET, f"{missing.what} of {shape.name}", missing.nearest)
    chunks = config.pipeline_parallel * config.virtual_pipeline_stages
    if len(config.layers_per_chunk) != chunks or sum(config.layers_per_chunk) != shape.num_hidden_layers:
        raise EmitError(
            f"layers_per_chunk has {len(config.layers_per_chunk)} chunks and {sum(config.layers_per_chunk)} layers; "
            f"the plan has {chunks} chunks and the model {shape.num_hidden_layers} layers"
        )
    positions = shape.num_position_embeddings
    if positions and config.sequence_length > positions:
        raise CannotExpressError(
            TARGET,
            f"sequences of {config.sequence_length} tokens with {positions} learned positions",
            f"sequence_length {positions}",
        )
    for field, known in _KNOWN_NAMES.items():
        name = getattr(config, field)
        if name not in known:
            raise CannotExpressError(TARGET, f"{field} {name!r}", "one of " + ", ".join(known))
    broken = rules.broken(shape, config)
    if broken:
        raise CannotExpressError(
            TARGET,
            "this configuration: " + "; ".join(f"{rule.message} ({rule.source})" for rule in broken),
            _nearest(config, shape, rules),
        )


def _nearest(config: TrainingConfig, shape: ModelShape, rules: FrameworkRules) -> str:
    """The first small change after which every rule is met, in prose."""
    for field, values in _SMALL_CHANGES:
        for value in values:
            change: dict[str, Any] = {field: value}
            smaller = field == "sequence_parallel" or value < getattr(config, field)
            if smaller and not rules.broken(shape, replace(config, **change)):
                return f"the same plan with {field} = {value}"
    return "what meshplan plan finds with constraints.target: megatron"


def environment(request: TrainingRequest) -> dict[str, str | None]:
    """Variables that the ranks need: name → value, or None where it must not be set.

    Megatron asks for one hardware queue where tensor or context parallel traffic has to start before the kernels
    that hide it (before Blackwell), and for more than one under its fully sharded data parallelism.
    """
    config = request.config
    if config.zero_stage >= ZERO_SHARDED_GRADIENTS:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    ordered = config.tensor_parallel > 1 or config.context_parallel > 1
    if ordered and (request.device is None or request.device.architecture in MEGATRON.one_queue_architectures):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}


def job(request: TrainingRequest) -> Job:
    """Megatron-LM with its argument file."""
    refuse_adapters(request.plan, TARGET)
    is_fine_tuned = phase_of(request.plan) is Phase.FINE_TUNING
    has_lines = has_conversations(request)
    flags = spelled(TARGET, request.framework_version, arguments(request))
    argument_file = Artifact(path=ARGUMENTS_FILE, content=_argument_text(request, flags))
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=MEGATRON.rank_orders[0],
        environment=environment(request),
        program=megatron_script.program(
            ARGUMENTS_FILE,
            request.shape.vocab_size,
            is_fine_tuned=is_fine_tuned,
            has_conversations=has_lines,
            script="pretrain_hybrid.py" if has_pattern(request.shape) else "pretrain_gpt.py",
        ),
        files=(argument_file,),
        settings=megatron_script.settings(is_fine_tuned=is_fine_tuned, has_conversations=has_lines),
        notes=(
            *model_notes(request.shape, is_fine_tuned=is_fine_tuned),
            *_config_notes(request.config),
            *document_notes(request),
            *release_notes(TARGET, request.framework_version),
        ),
        data="your conversations, from a checkpoint" if has_lines else "synthetic data",
    )


def _argument_text(request: TrainingRequest, flags: tuple[Flag, ...]) -> str:
    head = commented((*stamp(request.plan, VERIFIED), "One flag per line; read by launch.sh."))
    return head + "".join(" ".join(flag) + "\n" for flag in flags)


def _config_notes(config: TrainingConfig) -> tuple[str, ...]:
    notes = []
    if config.zero_stage == ZERO_SHARDED_GRADIENTS:
        notes.append(MEGATRON.notes[0])
    if config.zero_stage >= ZERO_SHARDED_GRADIENTS and max(config.tensor_parallel, config.context_parallel) > 1:
        notes.append(
            "Fully sharded data parallelism wants CUDA_DEVICE_MAX_CONNECTIONS unset, tensor and context parallelism "
            "before Blackwell want it 1: Megatron-LM warns, and part of the overlap is lost."
        )
    return tuple(notes)


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix: one for each term, recurrent layers, documents, the rank table."""
    return (*feature_rows(TERMS), HYBRIDS, DOCUMENTS, RANK_TABLE)
