"""A training plan as TorchTitan's command line: a registered model, and flags for what the plan decides.

The argument file has one flag per line and, last, the sub-command that chooses activation checkpointing. Checked
against torchtitan 0.3.0: tests/conformance/torchtitan runs its parser and its ``ParallelDims`` over the emitted
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.artifact import Artifact, ParserVerified, commented, stamp
from meshplan.planner.emit.releases import release_notes, spelled
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, count, feature_rows, stated, write_all
from meshplan.planner.emit.training.adapters import refuse_adapters
from meshplan.planner.emit.training.job import Job, Setting
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.terms import TrainingRows, refuse
from meshplan.planner.emit.training.torchrun import RANK_TABLE
from meshplan.planner.lengths.packing import CONCATENATE
from meshplan.planner.training.problem.frameworks.torchtitan import ALWAYS_FLOAT8, TORCHTITAN, TORCHTITAN_CONFIGS
from meshplan.planner.training.problem.layers import weights_of_splits
from meshplan.planner.training.problem.problem import TrainingConfig

TARGET = "torchtitan"
ARGUMENTS_FILE = PurePosixPath("torchtitan_args.txt")
VERIFIED = ParserVerified(
    framework="torchtitan",
    version=TORCHTITAN.version,
    mode="ConfigManager.parse_args, ParallelDims, the model's update_from_config; nothing is built",
)
_PARSER = "parser and ParallelDims"
_rows = TrainingRows(_PARSER)
_KNOWN_NAMES = {
    "precision": TORCHTITAN.precisions,
    "activation_recompute": ("none", "selective", "full"),
    "pipeline_schedule": ("none", "1f1b", "interleaved", "dualpipe-v"),
}
# As torch.distributed.pipelining.schedules.get_schedule_class knows them.
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "dualpipe-v": "DualPipeV"}
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_ZERO_SHARDED_GRADIENTS, _ZERO_SHARDED_PARAMETERS = 2, 3
SUBCOMMAND = "activation-checkpoint:"
_PARALLELISM = "--parallelism."
_TRAINING = "--training."
_FIRST_WEIGHT = f"{_PARALLELISM}pipeline-parallel-first-stage-less-layers"
_LAST_WEIGHT = f"{_PARALLELISM}pipeline-parallel-last-stage-less-layers"
_USUAL_WEIGHT = 1  # of either, where a command line does not say
COMPILE, NO_COMPILE = "--compile.enable", "--compile.no-enable"
ASYNC, NO_ASYNC = "--compile.enable-async-tensor-parallel", "--compile.no-enable-async-tensor-parallel"
KERNEL_FLAGS = frozenset({COMPILE, NO_COMPILE, ASYNC, NO_ASYNC})
# As the estimate of a spec assumes the kernels; some of TorchTitan's configurations differ.
FIXED_ARGUMENTS = {COMPILE: "", NO_ASYNC: ""}
_BALANCER = f"{_PARALLELISM}context-parallel-load-balancer"
# The release has no flag for float8: its model registry takes converters, and --module the name of any module.
FLOAT8_MODULE, FLOAT8_SUFFIX = "meshplan_torchtitan", "_float8"
_FLOAT8 = '''\
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.{module} import config_registry, model_registry


def {function}{suffix}():
    """{function} with float8 linear layers, a scale for each row; the LM head stays in 16 bits."""
    config = config_registry.{function}()
    float8 = Float8LinearConverter.Config(
        recipe_name="rowwise", filter_fqns=["lm_head"], model_compile_enabled=True
    )
    config.model_spec = model_registry(config.model_spec.flavor, converters=[float8])
    return config
'''
SETTINGS = (
    Setting(name="TRAIN_STEPS", default="100", meaning="optimizer steps"),
    Setting(name="HF_ASSETS_PATH", default="", meaning="tokenizer of the model; unset: the path of its configuration"),
)

_PROGRAM = r"""
# --- TorchTitan ---------------------------------------------------------------------------------------------------
{environment}program=(-m torchtitan.train)
while read -r -a words; do
  [[ ${{#words[@]}} != 0 && ${{words[0]}} != "#" ]] || continue
  if [[ ${{words[0]}} != --* ]]; then
    # The sub-command ends the flags: what the user adds comes before it.
    program+=(--training.steps "${{TRAIN_STEPS:-100}}")
    [[ -z ${{HF_ASSETS_PATH:-}} ]] || program+=(--hf-assets-path "$HF_ASSETS_PATH")
    program+=("$@")
    set --
  fi
  program+=("${{words[@]}}")
done < "$here/{arguments_file}"
"""


def _data_parallel(config: TrainingConfig, _: ModelShape) -> Arguments:
    """Replicas that share one copy of the states, times copies; nothing is sharded at stage 0."""
    shard = config.data_parallel_shard if config.zero_stage else 1
    return {
        f"{_PARALLELISM}data-parallel-replicate-degree": str(config.data_parallel // shard),
        f"{_PARALLELISM}data-parallel-shard-degree": str(shard),
    }


def _stages(config: TrainingConfig, _: ModelShape) -> Arguments:
    if config.pipeline_parallel == 1:
        return {f"{_PARALLELISM}pipeline-parallel-degree": "1"}
    layers, chunks = sum(config.layers_per_chunk), len(config.layers_per_chunk)
    first, last = weights_of_splits(layers, chunks)[config.layers_per_chunk]
    return {
        f"{_PARALLELISM}pipeline-parallel-degree": str(config.pipeline_parallel),
        f"{_PARALLELISM}pipeline-parallel-schedule": _SCHEDULES[config.pipeline_schedule],
        f"{_PARALLELISM}pipeline-parallel-microbatch-size": str(config.micro_batch_size),
        # By default TorchTitan takes a layer from the first and the last stage.
        _FIRST_WEIGHT: str(first),
        _LAST_WEIGHT: str(last),
        f"{_PARALLELISM}pipeline-parallel-layers-per-stage": str(-(-(layers + first + last) // chunks)),
        f"{_TRAINING}disable-cuda-graphs": "",
    }


def _local_batch_size(config: TrainingConfig, _: ModelShape) -> Arguments:
    """Under a pipeline one call takes all micro-batches; otherwise gradients are accumulated over calls."""
    calls = config.num_microbatches if config.pipeline_parallel > 1 else 1
    return {f"{_TRAINING}local-batch-size": str(config.micro_batch_size * calls)}


def _experts(config: TrainingConfig, _: ModelShape) -> Arguments:
    if config.expert_parallel == 1:
        return {}
    return {f"{_PARALLELISM}expert-parallel-degree": str(config.expert_parallel), f"{_TRAINING}disable-cuda-graphs": ""}


def _read_stages(arguments: Arguments) -> Mapping[str, Any]:
    """``layers_per_stage`` and the weights of the ends become layers of each chunk where the model is known."""
    schedule = arguments.get(f"{_PARALLELISM}pipeline-parallel-schedule")
    if schedule is not None and schedule not in _SCHEDULES.values():
        raise ValueError(f"the schedule {schedule!r} has no name here; known: {', '.join(_SCHEDULES.values())}")
    named = next((ours for ours, theirs in _SCHEDULES.items() if theirs == schedule), None)
    stages = count(arguments, f"{_PARALLELISM}pipeline-parallel-degree")
    if stages is None or stages == 1:
        return stated(pipeline_parallel=stages)
    return stated(
        pipeline_parallel=stages,
        pipeline_schedule=named,
        micro_batch_size=count(arguments, f"{_PARALLELISM}pipeline-parallel-microbatch-size"),
        layers_per_stage=count(arguments, f"{_PARALLELISM}pipeline-parallel-layers-per-stage"),
        end_weights=(_weight(arguments, _FIRST_WEIGHT), _weight(arguments, _LAST_WEIGHT)),
    )


def _weight(arguments: Arguments, key: str) -> int:
    """Layers that an end counts for."""
    text = str(arguments.get(key, _USUAL_WEIGHT)).strip()
    if text == "0":
        return 0
    return count({key: text}, key) or _USUAL_WEIGHT


def _read_data_parallel(arguments: Arguments) -> Mapping[str, Any]:
    """Shards of -1 (the default) take the ranks that are left: nothing is stated then."""
    shards = f"{_PARALLELISM}data-parallel-shard-degree"
    asked = {} if str(arguments.get(shards, "-1")) == "-1" else arguments
    return stated(
        data_parallel_replicate=count(arguments, f"{_PARALLELISM}data-parallel-replicate-degree"),
        data_parallel_shard=count(asked, shards),
    )


def _read_sharding(arguments: Arguments) -> Mapping[str, Any]:
    policy = arguments.get(f"{_PARALLELISM}fsdp-reshard-after-forward", "default")
    stages = {"always": _ZERO_SHARDED_PARAMETERS, "never": _ZERO_SHARDED_GRADIENTS, "default": None}
    if policy not in stages:
        raise ValueError(f"fsdp-reshard-after-forward is always, never or default, not {policy!r}")
    return stated(zero_stage=stages[policy])


def _read_balancer(arguments: Arguments) -> Mapping[str, Any]:
    """Without a load balancer the ring is plain; the default balances by head and tail."""
    split = (count(arguments, f"{_PARALLELISM}context-parallel-degree") or 1) > 1
    plain = str(arguments.get(_BALANCER, "headtail")) == "None"
    return {"context_parallel_style": "ring-plain"} if plain and split else {}


def _read_sequence_parallel(arguments: Arguments) -> Mapping[str, Any]:
    if f"{_PARALLELISM}no-enable-sequence-parallel" in arguments:
        return {"sequence_parallel": False}
    return {"sequence_parallel": True} if f"{_PARALLELISM}enable-sequence-parallel" in arguments else {}


def _read_precision(arguments: Arguments) -> Mapping[str, Any]:
    name = arguments.get(f"{_TRAINING}mixed-precision-param")
    if name not in {None, *_PRECISIONS}:
        raise ValueError(f"mixed-precision-param is {' or '.join(_PRECISIONS)}, not {name!r}")
    return {} if name is None else {"precision": _PRECISIONS[name]}


def _read_offload(arguments: Arguments) -> Mapping[str, Any]:
    """A switch of the command line, or a value of a TOML file."""
    value = str(arguments.get(f"{_TRAINING}enable-cpu-offload", "false")).lower()
    return {"parameter_offload": True, "optimizer_offload": True} if value in {"", "true"} else {}


def _read_recompute(arguments: Arguments) -> Mapping[str, Any]:
    policies = [key.partition(":")[2] for key in arguments if key.startswith(SUBCOMMAND)]
    for policy in policies:
        if policy not in _KNOWN_NAMES["activation_recompute"]:
            raise ValueError(f"{SUBCOMMAND}{policy} has no name here; known: none, selective, full")
    return stated(activation_recompute=policies[-1] if policies else None)


def _read_batch(arguments: Arguments) -> Mapping[str, Any]:
    """-1 (the default) means: local batch × replicas."""
    key = f"{_TRAINING}global-batch-size"
    return {} if str(arguments.get(key, "-1")) == "-1" else stated(global_batch_size=count(arguments, key))


TERMS = (
    _rows.number(f"{_PARALLELISM}tensor-parallel-degree", "tensor_parallel"),
    _rows.term(
        "sequence_parallel",
        lambda config, _: (
            {}
            if config.sequence_parallel or config.tensor_parallel == 1
            else {f"{_PARALLELISM}no-enable-sequence-parallel": ""}
        ),
        _read_sequence_parallel,
        f"{_PARALLELISM}no-enable-sequence-parallel",
        f"{_PARALLELISM}enable-sequence-parallel",
        expressed_by="--parallelism.no-enable-sequence-parallel",
    ),
    _rows.term(
        "pipeline_parallel",
        _stages,
        _read_stages,
        f"{_PARALLELISM}pipeline-parallel-degree",
        f"{_PARALLELISM}pipeline-parallel-schedule",
        f"{_PARALLELISM}pipeline-parallel-microbatch-size",
        f"{_PARALLELISM}pipeline-parallel-layers-per-stage",
        _FIRST_WEIGHT,
        _LAST_WEIGHT,
        f"{_TRAINING}disable-cuda-graphs",
        expressed_by="--parallelism.pipeline-parallel-degree, -schedule, -microbatch-size",
    ),
    _rows.covered(
        "layers_per_chunk",
        "--parallelism.pipeline-parallel-layers-per-stage, -first-stage-less-layers 0 or 1, -last-stage-less-layers "
        "0 to 3",
        verified_by="TorchTitan's own split into stages, by name of layer",
    ),
    _rows.number(f"{_PARALLELISM}context-parallel-degree", "context_parallel"),
    _rows.term(
        "context_parallel_style",
        lambda config, _: {_BALANCER: "None"} if config.context_parallel_style == "ring-plain" else {},
        _read_balancer,
        _BALANCER,
        expressed_by=f"{_BALANCER} None (ring-plain)",
    ),
    _rows.term(
        "data_parallel_shard",
        _data_parallel,
        _read_data_parallel,
        f"{_PARALLELISM}data-parallel-replicate-degree",
        f"{_PARALLELISM}data-parallel-shard-degree",
        expressed_by="--parallelism.data-parallel-replicate-degree, --parallelism.data-parallel-shard-degree",
    ),
    _rows.term(
        "zero_stage",
        lambda config, _: {
            f"{_PARALLELISM}fsdp-reshard-after-forward": (
                "always" if config.zero_stage == _ZERO_SHARDED_PARAMETERS else "never"
            )
        },
        _read_sharding,
        f"{_PARALLELISM}fsdp-reshard-after-forward",
        expressed_by="--parallelism.fsdp-reshard-after-forward (3: always, 2: never); 0: shard degree 1; 1 is refused",
    ),
    _rows.term(
        "parameter_offload",
        lambda config, _: {f"{_TRAINING}enable-cpu-offload": ""} if config.parameter_offload else {},
        _read_offload,
        f"{_TRAINING}enable-cpu-offload",
        f"{_TRAINING}no-enable-cpu-offload",
        expressed_by="--training.enable-cpu-offload: parameters, gradients and optimizer states together "
        "(zero_stage 3)",
    ),
    _rows.covered("optimizer_offload", "--training.enable-cpu-offload, with the parameters"),
    _rows.term(
        "expert_parallel",
        _experts,
        lambda arguments: stated(expert_parallel=count(arguments, f"{_PARALLELISM}expert-parallel-degree")),
        f"{_PARALLELISM}expert-parallel-degree",
        f"{_TRAINING}disable-cuda-graphs",
        expressed_by="--parallelism.expert-parallel-degree",
    ),
    _rows.term(
        "micro_batch_size",
        _local_batch_size,
        lambda arguments: stated(
            local_batch_size=count(arguments, f"{_TRAINING}local-batch-size", f"{_TRAINING}batch-size")
        ),
        f"{_TRAINING}local-batch-size",
        f"{_TRAINING}batch-size",
        expressed_by="--training.local-batch-size",
    ),
    _rows.term(
        "global_batch_size",
        lambda config, _: {f"{_TRAINING}global-batch-size": str(config.global_batch_size)},
        _read_batch,
        f"{_TRAINING}global-batch-size",
        expressed_by="--training.global-batch-size",
    ),
    _rows.number(f"{_TRAINING}seq-len", "sequence_length"),
    _rows.term(
        "precision",
        lambda *_: {f"{_TRAINING}mixed-precision-param": "bfloat16"},
        _read_precision,
        f"{_TRAINING}mixed-precision-param",
        expressed_by="--training.mixed-precision-param bfloat16; fp8 besides by a module with Float8LinearConverter "
        "(rowwise, LM head left out)",
    ),
    _rows.term(
        "activation_recompute",
        lambda config, _: {f"{SUBCOMMAND}{config.activation_recompute}": ""},
        _read_recompute,
        *tuple(f"{SUBCOMMAND}{policy}" for policy in _KNOWN_NAMES["activation_recompute"]),
        expressed_by="sub-command activation-checkpoint:none|selective|full",
    ),
)


def _refuse_documents(request: TrainingRequest) -> None:
    """Stop at documents that TorchTitan's text data do not come in: one after another, cut, and masked, always.

    Source: torchtitan 0.3.0, hf_datasets/text_datasets.py (buffers are cut every seq_len tokens, positions start anew
    with every document) and models/common/config_utils.py (language models mask by document).
    """
    documents = request.documents
    if documents is None:
        return
    if not documents.is_masked:
        raise CannotExpressError(
            TARGET,
            "attention across documents: its language models always keep to documents",
            "workload.sequence_lengths.cross_document_attention: false",
        )
    if documents.packing != CONCATENATE:
        raise CannotExpressError(
            TARGET,
            f"workload.sequence_lengths.packing: {documents.packing}, whole documents with padding: its text data is "
            "cut every sequence_length tokens",
            f"packing: {CONCATENATE}",
        )


def arguments(request: TrainingRequest) -> tuple[tuple[str, ...], ...]:
    """Every flag that the plan and the model decide, one tuple a flag; the sub-command last.

    Raises:
        CannotExpressError: TorchTitan has no arguments for the model, the configuration or the documents.
    """
    refuse(TORCHTITAN, request.shape, request.config, _KNOWN_NAMES)
    _refuse_documents(request)
    module, function = TORCHTITAN_CONFIGS[request.shape.slug]
    if _needs_module(request):
        module, function = FLOAT8_MODULE, f"{function}{FLOAT8_SUFFIX}"
    arguments = {
        "--module": module,
        "--config": function,
        **FIXED_ARGUMENTS,
        **write_all(TERMS, request.config, request.shape),
    }
    return tuple((flag, value) if value else (flag,) for flag, value in arguments.items())


def _needs_module(request: TrainingRequest) -> bool:
    """Whether float8 has to be asked for: one registered configuration has it by itself."""
    return request.config.precision == "fp8" and request.shape.slug not in ALWAYS_FLOAT8


def _float8_module(request: TrainingRequest) -> Artifact:
    """The module whose configuration function is the registered one with float8 linear layers."""
    module, function = TORCHTITAN_CONFIGS[request.shape.slug]
    head = commented(stamp(request.plan, VERIFIED))
    return Artifact(
        path=PurePosixPath(f"{FLOAT8_MODULE}.py"),
        content=f"{head}{_FLOAT8.format(module=module, function=function, suffix=FLOAT8_SUFFIX)}",
    )


def job(request: TrainingRequest) -> Job:
    """TorchTitan with its argument file."""
    refuse_adapters(request.plan, TARGET)
    head = commented((*stamp(request.plan, VERIFIED), "One flag per line, the sub-command last; read by launch.sh."))
    flags = spelled(TARGET, request.framework_version, arguments(request))
    text = head + "".join(" ".join(flag) + "\n" for flag in flags)
    modules = (_float8_module(request),) if _needs_module(request) else ()
    notes = TORCHTITAN.notes[:1] if request.config.activation_recompute == "selective" else ()
    if request.documents is not None:
        notes = (*notes, "Attention keeps to documents, as TorchTitan's language models always do (flex or varlen).")
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=TORCHTITAN.rank_orders[0],
        environment={},
        program=_PROGRAM.format(
            arguments_file=ARGUMENTS_FILE,
            environment="export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}\n" if modules else "",
        ),
        files=(Artifact(path=ARGUMENTS_FILE, content=text), *modules),
        settings=SETTINGS,
        notes=(
            *notes,
            *release_notes(TARGET, request.framework_version),
            "The plan assumes compiled kernels and no asynchronous tensor parallelism; the flags set both.",
            "Data and optimizer are those of the model's own configuration in TorchTitan; override them by flags.",
        ),
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (*feature_rows(TERMS), RANK_TABLE)
