"""A training plan as Megatron-LM arguments: one row of :data:`TERMS` for each term of the plan.

The argument file has one flag a line (``--flag value``), no quotes and no escapes; the launch script reads it line by
line without evaluating anything. What a plan does not decide (learning rate, data, tokenizer, checkpoints) is left to
environment variables of the launch script.

Checked against megatron-core 0.19.2: tests/conformance/megatron runs its parser, its configuration and its process
groups over the emitted flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.model_shapes import ModelShape
from meshplan.planner.emit import megatron_script
from meshplan.planner.emit.artifact import (
    Artifact,
    ParserVerified,
    TrainingRequest,
    commented,
    stamp,
)
from meshplan.planner.emit.job import Job
from meshplan.planner.emit.megatron_model import Flag, inexpressible_shape, model_flags, model_notes
from meshplan.planner.emit.registry import Feature
from meshplan.planner.emit.torchrun import RANK_TABLE
from meshplan.planner.problems.frameworks import MEGATRON
from meshplan.planner.problems.training import TrainingConfig

TARGET = "megatron"
ARGUMENTS_FILE = PurePosixPath("megatron_args.txt")
VERIFIED = ParserVerified(
    framework="megatron-core",
    version=MEGATRON.version,
    mode="parse_args, validate_args, core_transformer_config_from_args; initialize_model_parallel on fake processes",
)
_PARSER = "parser"
_PARSER_AND_GROUPS = "parser and process groups"
_ARGUMENT_LEVEL = "flags and types only: the rest of the check needs Transformer Engine"
# Nothing that a shell, or a reader that splits at spaces, could take for more than one word.
_SAFE_WORD = re.compile(r"[A-Za-z0-9_.,:=*|+()\[\]/-]+")
# Choices by name: what Megatron-LM has a word for.
_KNOWN_NAMES = {
    "precision": ("bf16", "fp16", "fp8"),
    "activation_recompute": ("none", "selective", "full"),
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
_ZERO_SHARDED_GRADIENTS = 2
_ZERO_SHARDED_PARAMETERS = 3
_PRE_BLACKWELL = frozenset({"volta", "turing", "ampere", "ada", "hopper"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How one term of a plan is said.

    Args:
        name: our term: a field of ``TrainingConfig``.
        flags: (configuration, model) → Megatron's flags; empty where its default already says it.
        said_by: the flags, for the support matrix.
        verified_by: what judged them.
    """

    name: str
    flags: Callable[[TrainingConfig, ModelShape], list[Flag]]
    said_by: str
    verified_by: str = _PARSER


def _count(flag: str, field: str) -> Callable[[TrainingConfig, ModelShape], list[Flag]]:
    return lambda config, _: [(flag, str(getattr(config, field)))]


def _layers(config: TrainingConfig, shape: ModelShape) -> list[Flag]:
    """The split of the layers; also says how many virtual stages there are."""
    if len(set(config.layers_per_chunk)) > 1:
        return [("--pipeline-model-parallel-layout", pipeline_layout(config, shape))]
    if config.virtual_pipeline_stages > 1:
        return [("--num-virtual-stages-per-pipeline-rank", str(config.virtual_pipeline_stages))]
    return []


def _experts(config: TrainingConfig, shape: ModelShape) -> list[Flag]:
    return [] if shape.moe is None else [("--expert-model-parallel-size", str(config.expert_parallel))]


def _expert_tensor(config: TrainingConfig, shape: ModelShape) -> list[Flag]:
    return [] if shape.moe is None else [("--expert-tensor-parallel-size", str(config.expert_tensor_parallel))]


def _zero(config: TrainingConfig, _: ModelShape) -> list[Flag]:
    overlap: list[Flag] = [("--overlap-grad-reduce",)]
    if config.zero_stage == 0:
        return overlap
    sharded: list[Flag] = [("--use-distributed-optimizer",), *overlap, ("--overlap-param-gather",)]
    if config.zero_stage < _ZERO_SHARDED_GRADIENTS:
        return sharded
    strategy = "optim_grads_params" if config.zero_stage == _ZERO_SHARDED_PARAMETERS else "optim_grads"
    sharded += [
        ("--use-megatron-fsdp",),
        ("--data-parallel-sharding-strategy", strategy),
        ("--ckpt-format", "fsdp_dtensor"),
    ]
    if config.zero_stage == _ZERO_SHARDED_PARAMETERS:
        sharded.append(("--init-model-with-meta-device",))
    return sharded


def _shard_groups(config: TrainingConfig, _: ModelShape) -> list[Flag]:
    groups = config.data_parallel // config.data_parallel_shard
    if config.zero_stage == 0 or groups == 1:
        return []
    return [("--num-distributed-optimizer-instances", str(groups))]


def _recompute(config: TrainingConfig, _: ModelShape) -> list[Flag]:
    if config.activation_recompute == "selective":
        return [("--recompute-granularity", "selective"), ("--recompute-modules", "core_attn")]
    if config.activation_recompute == "full":
        return [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    return []


def _precision(config: TrainingConfig, _: ModelShape) -> list[Flag]:
    if config.precision == "fp8":
        return [("--bf16",), ("--fp8-format", "hybrid")]
    return [(f"--{config.precision}",)]


def _sequence_length(config: TrainingConfig, shape: ModelShape) -> list[Flag]:
    positions = shape.num_position_embeddings or max(config.sequence_length, shape.max_sequence_length or 0)
    return [("--seq-length", str(config.sequence_length)), ("--max-position-embeddings", str(positions))]


TERMS = (
    Term(
        name="tensor_parallel",
        flags=_count("--tensor-model-parallel-size", "tensor_parallel"),
        said_by="--tensor-model-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="sequence_parallel",
        flags=lambda config, _: [("--sequence-parallel",)] if config.sequence_parallel else [],
        said_by="--sequence-parallel",
    ),
    Term(
        name="pipeline_parallel",
        flags=_count("--pipeline-model-parallel-size", "pipeline_parallel"),
        said_by="--pipeline-model-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="layers_per_chunk",
        flags=_layers,
        said_by="--pipeline-model-parallel-layout (uneven), --num-virtual-stages-per-pipeline-rank (even)",
    ),
    Term(
        name="context_parallel",
        flags=_count("--context-parallel-size", "context_parallel"),
        said_by="--context-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="expert_parallel",
        flags=_experts,
        said_by="--expert-model-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="expert_tensor_parallel",
        flags=_expert_tensor,
        said_by="--expert-tensor-parallel-size",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="zero_stage",
        flags=_zero,
        said_by="--use-distributed-optimizer (1), --use-megatron-fsdp --data-parallel-sharding-strategy (2, 3)",
    ),
    Term(
        name="data_parallel_shard",
        flags=_shard_groups,
        said_by="--num-distributed-optimizer-instances",
        verified_by=_PARSER_AND_GROUPS,
    ),
    Term(
        name="activation_recompute",
        flags=_recompute,
        said_by="--recompute-granularity, --recompute-modules, --recompute-method, --recompute-num-layers",
    ),
    Term(
        name="precision",
        flags=_precision,
        said_by="--bf16, --fp16, --fp8-format",
        verified_by=f"{_PARSER}; fp8 with experts: {_ARGUMENT_LEVEL}",
    ),
    Term(
        name="micro_batch_size",
        flags=_count("--micro-batch-size", "micro_batch_size"),
        said_by="--micro-batch-size",
    ),
    Term(
        name="global_batch_size",
        flags=_count("--global-batch-size", "global_batch_size"),
        said_by="--global-batch-size",
    ),
    Term(
        name="sequence_length",
        flags=_sequence_length,
        said_by="--seq-length, --max-position-embeddings",
    ),
)


def pipeline_layout(config: TrainingConfig, shape: ModelShape) -> str:
    """``--pipeline-model-parallel-layout``: E embedding, t layer, m multi-token prediction, L loss, | next chunk.

    Chunks are listed in the order in which a token visits them, which is the order of ``layers_per_chunk``.
    """
    chunks = [f"t*{layers}" if layers > 1 else "t" * layers for layers in config.layers_per_chunk]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * shape.num_nextn_predict_layers + "L"
    return "|".join(chunks)


def arguments(request: TrainingRequest) -> tuple[Flag, ...]:
    """Every flag that the plan and the model decide, one tuple a flag.

    Raises:
        CannotExpressError: Megatron-LM has no words for the model, or refuses the configuration.
    """
    config, shape = request.config, request.shape
    _refuse(config, shape)
    return say(config, shape)


def say(config: TrainingConfig, shape: ModelShape) -> tuple[Flag, ...]:
    """The flags of :func:`arguments`, whether or not Megatron-LM takes them (its tests ask it)."""
    flags = [*model_flags(shape), *(flag for term in TERMS for flag in term.flags(config, shape))]
    # Causal masks are made inside the kernels; the loader would build sequence_length² of them.
    flags.append(("--no-create-attention-mask-in-dataloader",))
    for flag in flags:
        for word in flag:
            if not _SAFE_WORD.fullmatch(word):
                raise EmitError(
                    f"flag {flag[0]} has the unsafe value {word!r}; only letters, digits and _.,:=*|+()[]/-"
                )
    return tuple(flags)


def _refuse(config: TrainingConfig, shape: ModelShape) -> None:
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
    broken = MEGATRON.broken(shape, config)
    if broken:
        raise CannotExpressError(
            TARGET,
            "this configuration: " + "; ".join(f"{rule.message} ({rule.source})" for rule in broken),
            _nearest(config, shape),
        )


def _nearest(config: TrainingConfig, shape: ModelShape) -> str:
    """The first small change after which every rule is met, in words."""
    for field, values in _SMALL_CHANGES:
        for value in values:
            change: dict[str, Any] = {field: value}
            smaller = field == "sequence_parallel" or value < getattr(config, field)
            if smaller and not MEGATRON.broken(shape, replace(config, **change)):
                return f"the same plan with {field} = {value}"
    return "what meshplan plan finds with constraints.target: megatron"


def environment(request: TrainingRequest) -> dict[str, str | None]:
    """Variables that the ranks need: name → value, or None where it must not be set.

    Megatron asks for one hardware queue where tensor or context parallel traffic has to start before the kernels
    that hide it (before Blackwell), and for more than one under its fully sharded data parallelism.
    """
    config = request.config
    if config.zero_stage >= _ZERO_SHARDED_GRADIENTS:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    ordered = config.tensor_parallel > 1 or config.context_parallel > 1
    if ordered and (request.device is None or request.device.architecture in _PRE_BLACKWELL):
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {}


def job(request: TrainingRequest) -> Job:
    """Megatron-LM with its argument file."""
    flags = arguments(request)
    argument_file = Artifact(path=ARGUMENTS_FILE, content=_argument_text(request, flags))
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=MEGATRON.rank_orders[0],
        environment=environment(request),
        program=megatron_script.program(ARGUMENTS_FILE, request.shape.vocab_size),
        files=(argument_file,),
        settings=megatron_script.SETTINGS,
        notes=(*model_notes(request.shape), *_config_notes(request.config)),
    )


def _argument_text(request: TrainingRequest, flags: tuple[Flag, ...]) -> str:
    head = commented((*stamp(request.plan, VERIFIED), "One flag a line; read by launch.sh."))
    return head + "".join(" ".join(flag) + "\n" for flag in flags)


def _config_notes(config: TrainingConfig) -> tuple[str, ...]:
    notes = []
    if config.zero_stage == _ZERO_SHARDED_GRADIENTS:
        notes.append(MEGATRON.notes[0])
    if config.zero_stage >= _ZERO_SHARDED_GRADIENTS and max(config.tensor_parallel, config.context_parallel) > 1:
        notes.append(
            "Fully sharded data parallelism wants CUDA_DEVICE_MAX_CONNECTIONS unset, tensor and context parallelism "
            "before Blackwell want it 1: Megatron-LM warns, and part of the overlap is lost."
        )
    return tuple(notes)


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix, one for each term."""
    said = (Feature(name=term.name, expressed_by=term.said_by, verified_by=term.verified_by) for term in TERMS)
    return (*said, RANK_TABLE)
