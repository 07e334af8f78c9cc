"""The question of a training plan as data: the workload, and the choices that a plan makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Self

import numpy as np

from meshplan.catalogs.constants.training import ADAPTERS, DENSE, EXPERTS, Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.goodput.run import Stretches
from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.kernels import kind_of_kernels
from meshplan.planner.training.problem.switches import (
    ALL_TO_ALL,
    AS_IT_COMES,
    CUDA_GRAPHS,
    FRAMEWORKS_OWN,
    FUSED_DISPATCHERS,
    GRADIENT_BYTES,
    USUAL_MODULES,
    TrainingPractice,
    in_order,
)


class Phase(Enum):
    """What is trained."""

    PRETRAINING = "pretraining"
    FINE_TUNING = "sft"  # every weight
    LORA = "lora"  # low-rank adapters on frozen weights (arXiv:2106.09685)
    QLORA = "qlora"  # the same on weights frozen in four bits (arXiv:2305.14314)

    @property
    def has_adapters(self) -> bool:
        """Only low-rank adapters are trained."""
        return self is Phase.LORA or self is Phase.QLORA  # a set would hash it, which members of an Enum do in Python


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkload:
    """What one optimizer step must do.

    Args:
        sequence_length: tokens in one sequence; of an encoder–decoder those that its encoder reads.
        decoder_sequence_length: tokens of one target sequence, of an encoder–decoder; None for other models.
        global_batch_size: sequences in one step.
        precision: of matrix products: ``bf16``, ``fp16``, ``fp32``, ``fp8``, ``mxfp8`` or ``nvfp4``.
        phase: see :class:`Phase`.
        lora_rank: rank of the adapters, 0 where none are trained.
        adapts_mlp: adapters sit on every linear layer of a block, otherwise on those of attention.
        trains_vocabulary: beside adapters, the embedding and the LM head are trained whole.
        frozen_weights: format of weights frozen in four bits: ``nf4`` (bitsandbytes) or ``gptq``.
        drops_tokens: experts drop the tokens beyond their capacity, so that shapes are fixed; otherwise (dropless)
            the host waits in every layer to learn how many tokens arrived.
        expert_capacity_factor: with ``drops_tokens``, rows that every expert gets, padded, over the mean.
        expert_imbalance: without, token copies of the busiest expert-parallel rank over the mean; 1 balanced.
        is_eager: memory-bound operators run one by one (PyTorch without ``torch.compile``), each through memory;
            otherwise they are fused.
        scales_rows: fp8 tensors have one scale for each row or column (torchao's ``rowwise``); otherwise one for the
            tensor, or what the framework's constants were fitted on.
        overlaps_tensor_parallel: tensor-parallel collectives run during the products they feed ("async TP", Transformer
            Engine's user buffers); None: as the framework does by default.
        documents: what lies in a sequence, where documents are shorter than it; None: one document each.
        practice: see :class:`TrainingPractice`.
        recompute_modules: what selective recompute computes again, by Megatron-Core's names.
        gradient_bytes: of one gradient, kept and on the wire; None: as the framework does.
    """

    sequence_length: int
    global_batch_size: int
    precision: str
    decoder_sequence_length: int | None = None
    phase: Phase = Phase.PRETRAINING
    lora_rank: int = 0
    adapts_mlp: bool = False
    trains_vocabulary: bool = False
    frozen_weights: str = "nf4"
    drops_tokens: bool = False
    expert_capacity_factor: float = 1.0
    expert_imbalance: float = 1.0
    is_eager: bool = False
    scales_rows: bool = False
    overlaps_tensor_parallel: bool | None = None
    practice: TrainingPractice = AS_IT_COMES
    recompute_modules: tuple[str, ...] = USUAL_MODULES
    gradient_bytes: float | None = None
    documents: PackedDocuments | None = None

    @property
    def capacity_factor(self) -> float:
        """``expert_capacity_factor`` of a plan: 0 without token dropping."""
        return self.expert_capacity_factor if self.drops_tokens else 0.0

    @property
    def decoder_length(self) -> int:
        """Tokens of a sequence that the decoder predicts: all of them, unless an encoder reads another sequence."""
        return self.decoder_sequence_length or self.sequence_length

    @property
    def of_encoder(self) -> TrainingWorkload:
        """The same of the encoder's layers alone, whose tokens are the sequence."""
        return replace(self, decoder_sequence_length=None)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, padding included; of an encoder–decoder those of the input alone, as the T5
        paper counts (arXiv:1910.10683, §3.1.2).
        """
        return self.sequence_length * self.global_batch_size

    @property
    def trained_tokens_per_step(self) -> float:
        """Tokens of documents in one optimizer step."""
        return self.tokens_per_step * (1.0 if self.documents is None else self.documents.filled)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Every choice of one training plan; what each means stands in :data:`.choices.CHOICES`.

    Devices = tensor × pipeline × context × data. Expert layers regroup the same devices of one pipeline stage as
    expert_tensor × expert × expert-data ("parallel folding", arXiv:2504.14960).
    """

    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline_stages: int
    context_parallel: int
    data_parallel: int
    data_parallel_shard: int
    expert_parallel: int
    expert_tensor_parallel: int
    sequence_parallel: bool
    zero_stage: int
    activation_recompute: str
    pipeline_schedule: str
    layers_per_chunk: tuple[int, ...]
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int
    sequence_length: int
    precision: str
    decoder_sequence_length: int = 0
    recompute_num_layers: int = 0
    optimizer_offload: bool = False
    optimizer_offload_percent: int = 100
    parameter_offload: bool = False
    activation_offload: bool = False
    activation_offload_num_layers: int = 0
    offload_to: str = "host"
    expert_capacity_factor: float = 0.0
    expert_dispatcher: str = ALL_TO_ALL
    expert_parallel_overlap: bool = False
    quantised_weights: bool = False
    context_parallel_style: str = "ring"
    context_parallel_heads: int = 1
    zero_hpz_partition_size: int = 1
    outer_zero_stage: int = 0
    gathered_num_layers: int = 0
    vocabulary_parallel: bool = False
    recompute_modules: tuple[str, ...] = USUAL_MODULES
    gradient_precision: str = FRAMEWORKS_OWN
    cuda_graphs: str = "none"
    loss: str = FRAMEWORKS_OWN
    optimizer: str = FRAMEWORKS_OWN
    optimizer_in_backward: bool = False

    @property
    def choices(self) -> dict[str, Any]:
        """Every choice under its name; what is at a default is left out, so that a new choice changes no old plan."""
        named = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: value for name, (value, default) in named.items() if value != default}

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What lies off the devices, by the names of :data:`OFFLOADS`."""
        moved = {name for name, choice in OFFLOADS.items() if getattr(self, choice)}
        moved |= {"activations"} if self.activation_offload_num_layers else set()
        return tuple(name for name in OFFLOADS if name in moved)

    @property
    def world_size(self) -> int:
        """Devices in use."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def num_copies(self) -> int:
        """Whole copies of weights and optimizer states."""
        return self.data_parallel // (self.data_parallel_shard if self.zero_stage else 1)

    @property
    def expert_data_parallel(self) -> int:
        """Replicas of each expert: what is left of a stage's devices."""
        stage_devices = self.world_size // self.pipeline_parallel
        return stage_devices // (self.expert_parallel * self.expert_tensor_parallel)


class TrainingObjective(Enum):
    """What a training plan is best at. Every objective is minimised internally."""

    THROUGHPUT = "throughput"  # tokens/s of the job
    USD_PER_RUN = "usd_per_run"  # money for all training tokens
    NUM_DEVICES = "num_devices"  # fewest devices that meet the constraints, then fastest
    ENERGY = "energy"  # joules that the devices of the job draw in a step


# What may be offloaded → the switch of a plan that says so.
OFFLOADS = {
    "optimizer": "optimizer_offload",
    "parameters": "parameter_offload",
    "activations": "activation_offload",
}
# The other way to offload activations: those of some layers, none of which is recomputed.
OFFLOADED_LAYERS = "activation_offload_num_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimits:
    """What a plan must stay within; None = no limit.

    Args:
        memory_bytes: device memory that the safe bound of every rank must fit in.
        max_devices: most devices in use.
        min_devices: fewest devices in use.
        host_memory_bytes: of one host; the states of its ranks must fit in it, because a distributed checkpoint
            stages them there.
        max_usd_per_hour: of the devices in use.
        max_usd_per_run: for all training tokens.
        max_step_s: longest optimizer step.
        max_run_s: longest run, where ``max_step_s`` follows from it.
        offload: what may leave the devices where nothing else fits: names of :data:`OFFLOADS`.
        offload_to: where offloaded states and layers' activations go, ``host`` or ``nvme``.
        unvalidated_schedules: the search may take V-Half, V-Min and DualPipeV, where the framework runs them.
    """

    memory_bytes: float
    max_devices: int
    host_memory_bytes: float | None = None
    max_usd_per_hour: float | None = None
    max_usd_per_run: float | None = None
    max_step_s: float | None = None
    max_run_s: float | None = None
    min_devices: int = 1
    offload: tuple[str, ...] = ()
    offload_to: str = "host"
    unvalidated_schedules: bool = False


def _most_of(limit: float, each: FloatArray) -> FloatArray:
    """How many of ``each`` a limit lets be, [n]; infinite where each is nothing."""
    return np.divide(limit, each, out=np.full(np.shape(each), np.inf), where=each > 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProblem:
    """A training question with everything looked up.

    Args:
        shape: the model.
        machine: the cluster.
        workload: what one step must do.
        calibration: the estimator's constants.
        rules: the target framework's own legality rules.
        limits: see :class:`TrainingLimits`.
        objective: see :class:`TrainingObjective`.
        num_training_tokens: of the whole run; None when the spec does not say.
        fixed: choice → value that the user pinned (fields of :class:`TrainingConfig`).
        search_over: choices of :data:`.choices.SEARCHABLE` that the search varies too.
        run: what interruptions make of a run, by number of devices; None where only steps are asked about.
    """

    shape: ModelShape
    machine: Machine
    workload: TrainingWorkload
    calibration: Calibration
    rules: FrameworkRules
    limits: TrainingLimits
    objective: TrainingObjective
    num_training_tokens: float | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    search_over: frozenset[str] = frozenset()
    run: Stretches | None = None

    @property
    def moves_off_devices(self) -> bool:
        """Whether anything may lie off the devices, by the limits or because it is pinned there."""
        return bool(self.limits.offload) or any(self.fixed.get(one) for one in (*OFFLOADS.values(), OFFLOADED_LAYERS))

    def with_fixed(self, fixed: Mapping[str, Any]) -> TrainingProblem:
        """The same question with other pins, and the workload's switches as they say."""
        problem = replace(self, fixed=dict(fixed))
        settled = problem.settled
        practice = TrainingPractice(
            launches=CUDA_GRAPHS[settled["cuda_graphs"]],
            fused_dispatch=settled["expert_dispatcher"] in FUSED_DISPATCHERS,
            overlaps_experts=settled["expert_parallel_overlap"],
            loss=settled["loss"],
            optimizer=settled["optimizer"],
            optimizer_in_backward=settled["optimizer_in_backward"],
        )
        workload = replace(
            self.workload,
            practice=practice,
            recompute_modules=settled["recompute_modules"],
            gradient_bytes=GRADIENT_BYTES.get(settled["gradient_precision"]),
        )
        return replace(problem, workload=workload)

    @property
    def settled(self) -> dict[str, Any]:
        """Choices that the question settles: the same for all of its candidates."""
        return {
            "global_batch_size": self.workload.global_batch_size,
            "sequence_length": self.workload.sequence_length,
            "decoder_sequence_length": self.workload.decoder_sequence_length or 0,
            "precision": self.workload.precision,
            "expert_capacity_factor": self.workload.capacity_factor,
            "quantised_weights": self.workload.phase is Phase.QLORA,
            "expert_dispatcher": str(self.fixed.get("expert_dispatcher", ALL_TO_ALL)),
            "expert_parallel_overlap": bool(self.fixed.get("expert_parallel_overlap", False)),
            "recompute_modules": in_order(self.fixed.get("recompute_modules", USUAL_MODULES)),
            "gradient_precision": str(self.fixed.get("gradient_precision", FRAMEWORKS_OWN)),
            "cuda_graphs": str(self.fixed.get("cuda_graphs", "none")),
            "loss": str(self.fixed.get("loss", FRAMEWORKS_OWN)),
            "optimizer": str(self.fixed.get("optimizer", FRAMEWORKS_OWN)),
            "optimizer_in_backward": bool(self.fixed.get("optimizer_in_backward", False)),
        }

    @property
    def kind_of_work(self) -> str:
        """What intervals depend on; of :data:`~meshplan.catalogs.constants.training.KINDS_OF_WORK`."""
        if self.shape.moe is not None:
            return EXPERTS
        return ADAPTERS if self.workload.phase.has_adapters else DENSE

    @property
    def kernels(self) -> str:
        """What intervals depend on besides: :func:`~.kernels.kind_of_kernels` of the framework's layout."""
        fuses = self.workload.practice.fuses_attention(self.calibration.recipe.flash_attention)
        return kind_of_kernels(self.workload.precision, fuses_attention=fuses)

    def with_calibration(self, calibration: Calibration) -> Self:
        """The question with the constants and intervals that a set has for its model and its kernels."""
        asked = replace(self, calibration=calibration)
        return replace(asked, calibration=calibration.for_kernels(asked.kernels).for_model(self.shape.slug))

    @property
    def most_devices(self) -> int:
        """Most devices that one plan may use: within the limit, and joined by links."""
        return min(self.limits.max_devices, self.machine.joined_devices)

    def stretch(self, devices: FloatArray) -> FloatArray:
        """Wall time of a run over its training time, [n]; 1 where only steps are asked about."""
        return np.ones(np.shape(devices)) if self.run is None else self.run.of(devices)

    def paid_devices(self, devices: FloatArray) -> FloatArray:
        """Devices that a run pays for, [n]: its own and those of its spare nodes."""
        return np.asarray(devices, dtype=float) + (0 if self.run is None else self.run.setting.spare_devices)

    def run_usd(self, step_s: FloatArray, devices: FloatArray) -> FloatArray:
        """Dollars of the whole run, [n]; 0 where no price or no number of steps is known."""
        rate = (self.machine.usd_per_hour_per_device or 0.0) / SECONDS_PER_HOUR
        return np.asarray(step_s * (self.num_steps or 0.0) * self.stretch(devices) * self.paid_devices(devices) * rate)

    def longest_step_s(self, devices: FloatArray) -> FloatArray:
        """The longest step within the limits on time and on money, [n]; infinite where there are none."""
        limits, second = self.limits, np.ones(np.shape(devices))
        longest = np.full(np.shape(devices), math.inf if limits.max_step_s is None else limits.max_step_s)
        usd = self.run_usd(second, devices)
        if limits.max_usd_per_run is not None:
            longest = np.minimum(longest, _most_of(limits.max_usd_per_run, usd))
        if limits.max_run_s is not None and self.run is not None:
            run_s = second * (self.num_steps or 0.0) * self.stretch(devices)
            longest = np.minimum(longest, _most_of(limits.max_run_s, run_s))
        return longest

    @property
    def num_steps(self) -> float | None:
        """Optimizer steps of the whole run."""
        if self.num_training_tokens is None:
            return None
        return self.num_training_tokens / self.workload.trained_tokens_per_step
