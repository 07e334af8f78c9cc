"""A training plan as TorchTitan's command line: a registered model, and flags for what the plan decides.

The argument file has one flag a line and, last, the sub-command that chooses activation checkpointing. Checked against
torchtitan 0.3.0: tests/conformance/torchtitan runs its parser and its ``ParallelDims`` over the emitted words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from meshplan.planner.emit.artifact import Artifact, ParserVerified, TrainingRequest, commented, stamp
from meshplan.planner.emit.job import Job, Setting
from meshplan.planner.emit.registry import Feature
from meshplan.planner.emit.terms import Term, feature_rows, refuse
from meshplan.planner.emit.torchrun import RANK_TABLE
from meshplan.planner.problems.pytorch_frameworks import TORCHTITAN, TORCHTITAN_CONFIGS
from meshplan.planner.problems.training import TrainingConfig

TARGET = "torchtitan"
ARGUMENTS_FILE = PurePosixPath("torchtitan_args.txt")
VERIFIED = ParserVerified(
    framework="torchtitan",
    version=TORCHTITAN.version,
    mode="ConfigManager.parse_args, ParallelDims, the model's update_from_config; nothing is built",
)
_PARSER = "parser and ParallelDims"
_KNOWN_NAMES = {
    "precision": ("bf16",),
    "activation_recompute": ("none", "selective", "full"),
    "pipeline_schedule": ("none", "1f1b", "interleaved"),
}
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_ZERO_SHARDED_PARAMETERS = 3
_PARALLELISM = "--parallelism."
_TRAINING = "--training."
SETTINGS = (
    Setting(name="TRAIN_STEPS", default="100", meaning="optimizer steps"),
    Setting(name="HF_ASSETS_PATH", default="", meaning="tokenizer of the model; unset: the path of its configuration"),
)

_PROGRAM = r"""
# --- TorchTitan ---------------------------------------------------------------------------------------------------
program=(-m torchtitan.train)
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


def _data_parallel(config: TrainingConfig) -> Mapping[str, str]:
    """Replicas that share one copy of the states, times copies; nothing is sharded at stage 0."""
    shard = config.data_parallel_shard if config.zero_stage else 1
    return {
        f"{_PARALLELISM}data-parallel-replicate-degree": str(config.data_parallel // shard),
        f"{_PARALLELISM}data-parallel-shard-degree": str(shard),
    }


def _stages(config: TrainingConfig) -> Mapping[str, str]:
    if config.pipeline_parallel == 1:
        return {f"{_PARALLELISM}pipeline-parallel-degree": "1"}
    return {
        f"{_PARALLELISM}pipeline-parallel-degree": str(config.pipeline_parallel),
        f"{_PARALLELISM}pipeline-parallel-schedule": _SCHEDULES[config.pipeline_schedule],
        f"{_PARALLELISM}pipeline-parallel-microbatch-size": str(config.micro_batch_size),
        # By default TorchTitan takes a layer from the first and the last stage.
        f"{_PARALLELISM}pipeline-parallel-first-stage-less-layers": "0",
        f"{_PARALLELISM}pipeline-parallel-last-stage-less-layers": "0",
        f"{_PARALLELISM}pipeline-parallel-layers-per-stage": str(config.layers_per_chunk[0]),
        f"{_TRAINING}disable-cuda-graphs": "",
    }


def _local_batch_size(config: TrainingConfig) -> Mapping[str, str]:
    """Under a pipeline one call takes all micro-batches; otherwise gradients are accumulated over calls."""
    calls = config.num_microbatches if config.pipeline_parallel > 1 else 1
    return {f"{_TRAINING}local-batch-size": str(config.micro_batch_size * calls)}


def _experts(config: TrainingConfig) -> Mapping[str, str]:
    if config.expert_parallel == 1:
        return {}
    return {f"{_PARALLELISM}expert-parallel-degree": str(config.expert_parallel), f"{_TRAINING}disable-cuda-graphs": ""}


TERMS = (
    Term(
        name="tensor_parallel",
        words=lambda config: {f"{_PARALLELISM}tensor-parallel-degree": str(config.tensor_parallel)},
        said_by="--parallelism.tensor-parallel-degree",
        verified_by=_PARSER,
    ),
    Term(
        name="sequence_parallel",
        words=lambda config: (
            {}
            if config.sequence_parallel or config.tensor_parallel == 1
            else {f"{_PARALLELISM}no-enable-sequence-parallel": ""}
        ),
        said_by="--parallelism.no-enable-sequence-parallel",
        verified_by=_PARSER,
    ),
    Term(
        name="pipeline_parallel",
        words=_stages,
        said_by="--parallelism.pipeline-parallel-degree, -schedule, -microbatch-size",
        verified_by=_PARSER,
    ),
    Term(
        name="layers_per_chunk",
        words=lambda _: {},
        said_by="--parallelism.pipeline-parallel-layers-per-stage; equal stages only",
        verified_by="flag and type only: the split is read in the source, not run",
    ),
    Term(
        name="context_parallel",
        words=lambda config: {f"{_PARALLELISM}context-parallel-degree": str(config.context_parallel)},
        said_by="--parallelism.context-parallel-degree",
        verified_by=_PARSER,
    ),
    Term(
        name="data_parallel_shard",
        words=_data_parallel,
        said_by="--parallelism.data-parallel-replicate-degree, --parallelism.data-parallel-shard-degree",
        verified_by=_PARSER,
    ),
    Term(
        name="zero_stage",
        words=lambda config: {
            f"{_PARALLELISM}fsdp-reshard-after-forward": (
                "always" if config.zero_stage == _ZERO_SHARDED_PARAMETERS else "never"
            )
        },
        said_by="--parallelism.fsdp-reshard-after-forward (3: always, 2: never); 0: shard degree 1; 1 is refused",
        verified_by=_PARSER,
    ),
    Term(
        name="expert_parallel",
        words=_experts,
        said_by="--parallelism.expert-parallel-degree",
        verified_by=_PARSER,
    ),
    Term(name="micro_batch_size", words=_local_batch_size, said_by="--training.local-batch-size", verified_by=_PARSER),
    Term(
        name="global_batch_size",
        words=lambda config: {f"{_TRAINING}global-batch-size": str(config.global_batch_size)},
        said_by="--training.global-batch-size",
        verified_by=_PARSER,
    ),
    Term(
        name="sequence_length",
        words=lambda config: {f"{_TRAINING}seq-len": str(config.sequence_length)},
        said_by="--training.seq-len",
        verified_by=_PARSER,
    ),
    Term(
        name="precision",
        words=lambda _: {f"{_TRAINING}mixed-precision-param": "bfloat16"},
        said_by="--training.mixed-precision-param; bf16 only",
        verified_by=_PARSER,
    ),
    Term(
        name="activation_recompute",
        words=lambda config: {f"activation-checkpoint:{config.activation_recompute}": ""},
        said_by="sub-command activation-checkpoint:none|selective|full",
        verified_by=_PARSER,
    ),
)


def arguments(request: TrainingRequest) -> tuple[tuple[str, ...], ...]:
    """Every flag that the plan and the model decide, one tuple a flag; the sub-command last.

    Raises:
        CannotExpressError: TorchTitan has no words for the model or the configuration.
    """
    refuse(TORCHTITAN, request.shape, request.config, _KNOWN_NAMES)
    module, function = TORCHTITAN_CONFIGS[request.shape.slug]
    words = {"--module": module, "--config": function}
    for term in TERMS:
        words.update(term.words(request.config))
    return tuple((flag, value) if value else (flag,) for flag, value in words.items())


def job(request: TrainingRequest) -> Job:
    """TorchTitan with its argument file."""
    head = commented((*stamp(request.plan, VERIFIED), "One flag a line, the sub-command last; read by launch.sh."))
    text = head + "".join(" ".join(flag) + "\n" for flag in arguments(request))
    notes = TORCHTITAN.notes[:1] if request.config.activation_recompute == "selective" else ()
    return Job(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        rank_order=TORCHTITAN.rank_orders[0],
        environment={},
        program=_PROGRAM.format(arguments_file=ARGUMENTS_FILE),
        files=(Artifact(path=ARGUMENTS_FILE, content=text),),
        settings=SETTINGS,
        notes=(
            *notes,
            "Data and optimizer are those of the model's own configuration in TorchTitan; override them by flags.",
        ),
    )


def degrees(words: Sequence[str]) -> dict[str, int]:
    """Our degrees, read back from the words of an argument file."""
    said = {flag: value for flag, value in zip(words, [*words[1:], ""], strict=True) if flag.startswith("--")}
    names = {
        "tensor_parallel": "tensor-parallel-degree",
        "pipeline_parallel": "pipeline-parallel-degree",
        "context_parallel": "context-parallel-degree",
        "expert_parallel": "expert-parallel-degree",
        "replicate": "data-parallel-replicate-degree",
        "shard": "data-parallel-shard-degree",
    }
    found = {name: int(said.get(_PARALLELISM + flag, "1")) for name, flag in names.items()}
    found["data_parallel"] = found.pop("replicate") * found["shard"]
    found["data_parallel_shard"] = found.pop("shard")
    return found


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (*feature_rows(TERMS), RANK_TABLE)
