"""Reading rows of measured training runs: the problem and the configuration that was run, ready to be priced.

The format is documented in ``planner/validation/README.md``. What a row leaves unstated is filled from the framework's
documented recipe (``catalogs/seed/recipes.yaml``) and is listed in :attr:`ObservedRun.filled`. What the estimator
cannot express is refused with a reason, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshplan.catalogs.constants.framework_recipes import Recipe, recipe_observed_as
from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.measured.exclusions import PEAKS, peak_left_out
from meshplan.planner.training.measured.switches import (
    observed_benchmark,
    observed_modules,
    observed_practice,
    with_published_choices,
)
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.layers import split_layers_evenly, split_layers_ignoring_ends
from meshplan.planner.training.problem.problem import (
    Phase,
    TrainingConfig,
    TrainingLimits,
    TrainingObjective,
    TrainingProblem,
    TrainingWorkload,
)
from meshplan.planner.training.problem.switches import RECOMPUTE_MODULES, SAVING_POLICIES
from meshplan.planner.validation.fields import Section, UnsupportedError, caveats, row_id, shown
from meshplan.planner.validation.machines import MachineReader

UNCALIBRATED = Calibration(framework="any", architecture="any")
SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved 1f1b": "interleaved",
    "1f1b-i": "interleaved",
    "gpipe": "gpipe",
    "zb-1p": "zb-1p",
    "zb-2p": "zb-2p",
    "zb-v": "zb-v",
    "zb-h1": "zb-1p",
}
# LoRA rank of observations that fine-tune adapters without stating their rank: that of the MLPerf benchmark.
DEFAULT_LORA_RANK = 16
# Names of a target module that is a matrix of the MLP, or stands for all matrices: LitGPT's, Qwen's, PEFT's.
MLP_MODULES = ("mlp", "w1", "linear", "up_proj", "*_proj")
# torchtune's recipes adapt the MLP (apply_lora_to_mlp in recipes/configs/*/*_lora*.yaml).
RECIPES_OWN = "recipe default"
# How formats of frozen four-bit weights begin.
FOUR_BITS = ("nf4", "int4", "fp4")
# How a source marks mixtures of experts that drop the tokens beyond an expert's capacity.
DROPPING_MARK = "(tokendrop)"
# torchtitan's checkpointing of every second layer: as many layers as half of each chunk.
ALTERNATE_LAYERS = "selective layer"
# How fp8 tensors are scaled, in torchao's terms, and how published rows mark it.
ROW_SCALING = "rowwise"
FLOAT8_SCALINGS = ("tensorwise", ROW_SCALING)
FLOAT8_CAVEAT = "float8 linear layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """One measured run.

    Args:
        id: unique name.
        group: near-duplicates share it; cross-validation leaves out whole groups.
        problem: model, machine and workload; its calibration is set by whoever prices it.
        config: the choices that were run.
        framework: the framework's name in meshplan.
        release: the framework's, as the row states it; empty where it does not.
        measured: metric → value, SI units.
        derived: metric → value that rests on an assumption.
        filled: choices that the observation left out.
        expects_oom: the run ran out of memory.
        peak_left_out: why a measured peak is not among ``measured``; empty where there is nothing to say.
    """

    id: str
    group: str
    problem: TrainingProblem
    config: TrainingConfig
    framework: str
    measured: Mapping[str, Any]
    derived: Mapping[str, Any]
    filled: tuple[str, ...]
    expects_oom: bool
    peak_left_out: str = ""
    release: str = ""

    @property
    def source(self) -> str:
        """Who published the run."""
        return self.group.partition("|")[0]

    @property
    def architecture(self) -> str:
        """Hardware generation."""
        return self.problem.machine.device.architecture

    @property
    def strategy(self) -> str:
        """The kind of run, for summaries: which part of the cost model its error tests."""
        if self.problem.shape.moe is not None:
            return "MoE"
        if self.problem.workload.phase.has_adapters:
            return "LoRA"
        if self.config.zero_stage >= ZERO_PARAMETERS:
            return "dense FSDP"
        return "dense pipeline" if self.config.pipeline_parallel > 1 else "dense data/tensor"


def repeated(run: ObservedRun) -> Hashable:
    """What runs of one plan share: the model, the machine, the workload and all choices."""
    machine = run.problem.machine
    return run.problem.shape.slug, machine.device.slug, machine.num_devices, run.problem.workload, run.config


class ObservationReader(MachineReader):
    """Reads rows of training runs as problems and configurations; devices are looked up in a catalog."""

    def training_run(self, row: Mapping[str, Any], calibration: Calibration = UNCALIBRATED) -> ObservedRun:
        """Read a training row.

        Args:
            row: the observation.
            calibration: constants of the run's problem.

        Raises:
            UnsupportedError: with the reason.
        """
        try:
            return self._training_run(row, calibration)
        except CatalogError as error:
            raise UnsupportedError(str(error)) from error

    def _training_run(self, row: Mapping[str, Any], calibration: Calibration) -> ObservedRun:
        sections = ("model", "hardware", "framework", "workload")
        model, hardware, framework, workload = (Section(row, name) for name in sections)
        precision, phase = _precision(row), _phase(workload)
        benchmark = observed_benchmark(row, precision, phase)
        choices, published = with_published_choices(row, benchmark)
        recipe = recipe_observed_as(
            framework.text("name"),
            precision=precision,
            version=str(framework.values.get("version") or ""),
            mixed_precision_mode=str(choices.values.get("mixed_precision_mode") or "") or None,
        )
        shape = _as_trained(self.shape(model), choices)
        if recipe.unstated.unties_head:
            shape = replace(shape, tie_word_embeddings=False)
        machine = self.machine(hardware)
        practice, unstated_switches = observed_practice(row, choices, benchmark)
        asked = TrainingWorkload(
            sequence_length=workload.whole("sequence_length"),
            global_batch_size=choices.whole("global_batch_size"),
            precision=precision,
            phase=phase,
            drops_tokens=choices.flag("drops_tokens", default=DROPPING_MARK in str(model.values.get("name", ""))),
            is_eager=not choices.flag("torch_compile", default=not recipe.unstated.is_eager),
            scales_rows=_scales_rows(row),
            overlaps_tensor_parallel=_overlaps_tensor_parallel(choices),
            practice=practice,
            recompute_modules=observed_modules(choices),
        )
        problem = TrainingProblem(
            shape=shape,
            machine=machine,
            rules=ANY_FRAMEWORK,
            objective=TrainingObjective.THROUGHPUT,
            calibration=calibration,
            workload=_with_adapters(asked, Section(model.values, "lora", required=False)),
            limits=TrainingLimits(
                memory_bytes=float(machine.device.usable_memory_bytes), max_devices=machine.num_devices
            ),
        )
        config, filled = _config(problem, choices, recipe)
        measured = Section(row, "measured", required=False).measurements()
        no_peak = peak_left_out(row, choices, replace(problem, calibration=framework_layout(recipe)), config, measured)
        name = row_id(row)
        return ObservedRun(
            id=name,
            group=str(row.get("group") or name),
            problem=problem,
            config=config,
            framework=recipe.framework,
            measured={name: value for name, value in measured.items() if not (no_peak and name in PEAKS)},
            derived=Section(row, "derived", required=False).measurements(),
            filled=filled + published + unstated_switches,
            expects_oom=bool(measured.get("oom", False)),
            peak_left_out=no_peak,
            release=benchmark.release,
        )


def framework_layout(recipe: Recipe) -> Calibration:
    """Constants of the literature under a framework's own layout."""
    return replace(UNCALIBRATED, recipe=recipe.recipe)


def _as_trained(shape: ModelShape, choices: Section) -> ModelShape:
    """The model with as many multi-token-prediction layers as the run trained, which its configuration does not tell.

    A script leaves them out, or runs one layer for several tokens ahead. That is priced as so many layers: right in
    time, by one layer's states too much in memory.
    """
    depth = choices.whole("multi_token_prediction", shape.num_nextn_predict_layers, least=0)
    return replace(shape, num_nextn_predict_layers=depth)


def _phase(workload: Section) -> Phase:
    """What is trained; adapters on weights frozen in four bits are a phase of their own."""
    phase = workload.one_of("phase", {phase.value: phase for phase in Phase}, Phase.PRETRAINING.value)
    frozen = str(workload.values.get("quantization") or "")
    if not frozen or phase is Phase.QLORA:
        return phase
    if phase is Phase.LORA and frozen.startswith(FOUR_BITS):
        return Phase.QLORA
    raise UnsupportedError(f"{phase.value} on weights frozen in {shown(frozen)} is not modelled")


def _with_adapters(workload: TrainingWorkload, lora: Section) -> TrainingWorkload:
    """The workload with what a row says of its adapters and of the weights below them."""
    phase = workload.phase
    return replace(
        workload,
        adapts_mlp=phase.has_adapters and _adapts_mlp(lora, phase),
        lora_rank=lora.whole("rank", DEFAULT_LORA_RANK) if phase.has_adapters else 0,
        frozen_weights="gptq" if "gptq" in str(lora.values.get("base_weights") or "").lower() else "nf4",
        trains_vocabulary=phase.has_adapters and "lm_head" in (lora.values.get("trained_fully") or ()),
    )


def _adapts_mlp(lora: Section, phase: Phase) -> bool:
    """Whether one of the stated target modules is of the MLP; of unstated ones, as for a plan."""
    stated = lora.values.get("target_modules")
    named = [stated] if isinstance(stated, str) else stated
    if not isinstance(named, list) or named == [RECIPES_OWN]:
        return named == [RECIPES_OWN] or phase is Phase.QLORA
    return any(word in str(module) for module in named for word in MLP_MODULES)


def _precision(row: Mapping[str, Any]) -> str:
    precision = row.get("precision")
    if precision is None:
        raise UnsupportedError("the observation does not state its precision")
    if precision not in ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"):
        raise UnsupportedError(f"training in the precision {shown(precision)} is not modelled")
    return str(precision)


def _scales_rows(row: Mapping[str, Any]) -> bool:
    """Whether fp8 tensors have a scale for each row: ``float8_scaling``, or the caveat that published rows carry."""
    stated = row.get("float8_scaling")
    if stated is not None:
        if stated not in FLOAT8_SCALINGS:
            raise UnsupportedError(f"float8_scaling must be one of {', '.join(FLOAT8_SCALINGS)}, is {shown(stated)}")
        return bool(stated == ROW_SCALING)
    return any(caveat.startswith(FLOAT8_CAVEAT) and ROW_SCALING in caveat for caveat in caveats(row))


def _overlaps_tensor_parallel(choices: Section) -> bool | None:
    """Whether tensor-parallel collectives overlap with matrix products; None where the row does not state it."""
    for key in ("async_tensor_parallel", "tensor_parallel_comm_overlap"):
        if choices.states(key):
            return choices.flag(key, default=False)
    return None


def _recompute(choices: Section, filled: list[str], recipe: Recipe) -> str:
    if not choices.states("activation_recompute"):
        filled.append("activation_recompute")
        return recipe.unstated.activation_recompute
    stated = choices.text("activation_recompute")
    if stated.lower() == ALTERNATE_LAYERS:
        return "block"
    mode = stated.replace(",", " ").lower().partition(" ")[0]
    if mode in ("none", "full", "selective"):
        return mode
    if mode in RECOMPUTE_MODULES or mode in SAVING_POLICIES:
        return "selective"
    raise UnsupportedError(f"recompute {shown(stated)} is not modelled")


def _config(problem: TrainingProblem, choices: Section, recipe: Recipe) -> tuple[TrainingConfig, tuple[str, ...]]:
    """The choices of a row, and which of them are filled from the recipe because the row leaves them out."""
    filled: list[str] = []
    workload, machine = problem.workload, problem.machine
    tensor, pipeline, context = (choices.whole(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline", "context"))
    data = machine.num_devices // (tensor * pipeline * context)
    stated = choices.whole("data_parallel", max(data, 1))
    if data < 1 or stated * tensor * pipeline * context != machine.num_devices:
        raise UnsupportedError(
            f"degrees {tensor}·{pipeline}·{context}·{stated} are not the {machine.num_devices} devices of the row"
        )
    batch = workload.global_batch_size
    if not choices.states("micro_batch_size") and not choices.states("per_device_batch_size"):
        filled.append("micro_batch_size")
    micro = choices.whole("micro_batch_size", choices.whole("per_device_batch_size", 1))
    zero = _zero_stage(choices, filled, recipe)
    chunks = choices.whole("virtual_pipeline_stages", 1) if pipeline > 1 else 1
    expert, expert_tensor = _expert_degrees(problem, choices, recipe, tensor, tensor * context * data)
    recompute = _recompute(choices, filled, recipe)
    layers = _layers(problem, choices, recipe, pipeline * chunks)
    config = TrainingConfig(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline_stages=chunks,
        context_parallel=context,
        data_parallel=data,
        data_parallel_shard=_shard(choices, data) if zero else 1,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
        sequence_parallel=choices.flag("sequence_parallel", default=recipe.unstated.sequence_parallel) and tensor > 1,
        zero_stage=zero,
        activation_recompute=recompute,
        recompute_modules=workload.recompute_modules,
        recompute_num_layers=max(layers) // 2 if recompute == "block" else 0,
        activation_offload=recompute == "full" and choices.flag("activation_offload", default=False),
        pipeline_schedule=_schedule(choices, pipeline, chunks),
        layers_per_chunk=layers,
        micro_batch_size=micro,
        num_microbatches=choices.whole("num_microbatches", max(batch // (data * micro), 1)),
        global_batch_size=batch,
        sequence_length=workload.sequence_length,
        precision=workload.precision,
    )
    return config, tuple(filled)


def _expert_degrees(
    problem: TrainingProblem, choices: Section, recipe: Recipe, layer_tensor: int, stage_devices: int
) -> tuple[int, int]:
    """Expert and expert-tensor parallelism, checked against the experts and the devices of a stage."""
    expert = choices.whole("expert_parallel", _unstated_expert_parallel(problem, stage_devices))
    splits = recipe.unstated.splits_experts and problem.shape.moe is not None
    # Where that does not divide the devices, the run must have asked for whole experts.
    usual = layer_tensor if splits and stage_devices % (expert * layer_tensor) == 0 else 1
    tensor = choices.whole("expert_tensor_parallel", usual)
    if problem.shape.moe is not None and problem.shape.moe.num_experts % expert:
        raise UnsupportedError(f"expert_parallel {expert} does not divide {problem.shape.moe.num_experts} experts")
    if stage_devices % (expert * tensor):
        raise UnsupportedError(
            f"expert_parallel {expert} × expert_tensor_parallel {tensor} does not divide the {stage_devices} devices "
            "of a stage"
        )
    return expert, tensor


def _unstated_expert_parallel(problem: TrainingProblem, stage_devices: int) -> int:
    """1; where a dispatcher of its own carries tokens, which needs somebody to carry them to, the whole stage."""
    moe = problem.shape.moe
    if moe is None or not problem.workload.practice.fused_dispatch:
        return 1
    return math.gcd(moe.num_experts, stage_devices)


def _shard(choices: Section, data: int) -> int:
    """Number of replicas that share one copy of the sharded states."""
    key = "zero1_group_size" if choices.states("zero1_group_size") else "fsdp_group_size"
    shard = min(choices.whole(key, data), data)
    if data % shard:
        raise choices.wrong(key, f"a divisor of the {data} replicas")
    return shard


def _zero_stage(choices: Section, filled: list[str], recipe: Recipe) -> int:
    if choices.states("zero_stage"):
        return choices.whole("zero_stage", least=0, most=3)
    if choices.values.get("fsdp"):
        return 3
    filled.append("zero_stage")
    return recipe.unstated.zero_stage


def _schedule(choices: Section, pipeline: int, chunks: int) -> str:
    if pipeline == 1:
        return "none"
    stated = choices.text("pipeline_schedule", "interleaved" if chunks > 1 else "1f1b").lower()
    if stated not in SCHEDULES:
        raise UnsupportedError(f"the pipeline schedule {shown(stated)} is not modelled")
    return SCHEDULES[stated]


def _layers(problem: TrainingProblem, choices: Section, recipe: Recipe, chunks: int) -> tuple[int, ...]:
    layers = problem.shape.num_hidden_layers
    if chunks > layers + 2:
        raise UnsupportedError(f"{chunks} model chunks for {layers} layers")
    stated = choices.counts("layers_per_stage")
    if stated is None and recipe.unstated.deals_evenly:
        return split_layers_ignoring_ends(layers, chunks)
    if stated is None:
        return split_layers_evenly(layers, chunks, num_nextn_predict_layers=problem.shape.num_nextn_predict_layers)
    if len(stated) == chunks and sum(stated) == layers + 2:  # the embedding and the LM head counted as layers
        stated = tuple(count - (i == 0) - (i == chunks - 1) for i, count in enumerate(stated))
    if len(stated) != chunks or sum(stated) != layers or min(stated) < 0:
        raise choices.wrong("layers_per_stage", f"{chunks} numbers that sum to {layers} layers")
    return stated
