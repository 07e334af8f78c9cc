"""The training question as users write it: pydantic models, every error at once with its path.

The text form is for people (units in text, names of catalog entries); :mod:`meshplan.planner.service` looks everything
up and makes a :class:`~meshplan.planner.training.problem.problem.TrainingProblem` of it. The JSON Schema of these
models is what ``meshplan catalog schema`` prints for editors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from meshplan.planner.cluster.spec import ClusterSpec, PriceSpec
from meshplan.planner.core.reading.spec_fields import (
    Bytes,
    BytesOrZero,
    BytesPerS,
    Count,
    CountOrNone,
    Dollars,
    Seconds,
    SpecModel,
    TotalTokens,
    Whole,
    WholeOrAuto,
)
from meshplan.planner.core.reading.spec_reader import read_spec
from meshplan.planner.goodput.spec import RunSpec
from meshplan.planner.lengths.spec import SequenceLengthsSpec
from meshplan.planner.training.problem.choice import Choice
from meshplan.planner.training.problem.choices import PINNABLE
from meshplan.planner.training.problem.far_apart import FarApartSpec
from meshplan.planner.training.problem.problem import Phase, TrainingObjective

MAX_SEQUENCE_LENGTH = 16_777_216
MAX_GLOBAL_BATCH = 1_000_000
MAX_BATCH_TOKENS = 10**12
MAX_EXPERT_LOAD = 1024.0
MAX_CHUNKS = 1024


# What a plan is for unless the spec says; the default of pretraining launches no adapters.
TARGET, ADAPTER_TARGET = "megatron", "axolotl"


class NoiseSpec(SpecModel):
    """The gradient noise scale, from which the global batch follows."""

    tokens: str = Field(
        min_length=1, description="tokens such as '4M', or over the progress of the run: '0:1M,0.5:4M,1:8M'"
    )
    reference_batch: Annotated[int, Whole(most=MAX_BATCH_TOKENS, tokens=True)] | None = Field(
        default=None,
        description="batch, tokens, at which the run takes num_training_tokens; a very small one unless said",
    )
    batches: Annotated[list[Annotated[int, Whole(most=MAX_BATCH_TOKENS, tokens=True)]], Field(max_length=32)] = Field(
        default=[], description="batches to compare, tokens; chosen around the noise scale unless said"
    )


class WorkloadSpec(SpecModel):
    """What one optimizer step must do, and how many steps there are."""

    sequence_length: Annotated[int, Whole(most=MAX_SEQUENCE_LENGTH, tokens=True)] = Field(
        description="tokens; of an encoder–decoder those of the input"
    )
    decoder_sequence_length: Annotated[int, Whole(most=MAX_SEQUENCE_LENGTH, tokens=True)] | None = Field(
        default=None,
        description="tokens of the target, of an encoder–decoder; unless said those that T5's pre-training makes of a "
        "full input: 2/9 of sequence_length",
    )
    global_batch_size: Annotated[int | Literal["auto"], WholeOrAuto(most=MAX_GLOBAL_BATCH)] | None = Field(
        default=None, description="sequences in one step; auto: the batch that trains soonest"
    )
    gradient_noise_scale: NoiseSpec | None = Field(
        default=None, description="with global_batch_size auto: how much a larger batch learns less from each token"
    )
    global_batch_tokens: Annotated[int, Whole(most=MAX_BATCH_TOKENS, tokens=True)] | None = Field(
        default=None, description="tokens in one step; a multiple of sequence_length"
    )
    precision: Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"] = "bf16"
    optimizer: Literal["adam"] = "adam"
    phase: Phase = Phase.PRETRAINING
    lora_rank: Annotated[int, Whole(most=65536)] | None = None
    lora_targets: Literal["attention", "all-linear"] | None = Field(
        default=None,
        description="matrices of a block that have adapters; those of attention, with phase 'qlora' all, unless said",
    )
    trains_vocabulary: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="beside adapters the embedding and the LM head are trained whole (new tokens)"
    )
    frozen_weights: Literal["nf4", "gptq"] = Field(
        default="nf4", description="format of the frozen weights of phase 'qlora': bitsandbytes' or GPTQ's"
    )
    expert_imbalance: Annotated[float, Field(ge=1, le=MAX_EXPERT_LOAD, allow_inf_nan=False)] = Field(
        default=1.0, description="token copies of the busiest expert-parallel rank over the mean; 1 balanced (dropless)"
    )
    drops_tokens: Annotated[bool, Field(strict=True)] | None = Field(
        default=None, description="experts take a fixed number of rows and drop the tokens beyond; default dropless"
    )
    expert_capacity_factor: Annotated[float, Field(gt=0, le=MAX_EXPERT_LOAD, allow_inf_nan=False)] | None = Field(
        default=None, description="rows of each expert over the mean where tokens are dropped, 1 unless said"
    )
    num_training_tokens: TotalTokens | None = Field(default=None, description="of the whole run, such as 15e12")
    sequence_lengths: SequenceLengthsSpec | None = Field(
        default=None, description="lengths of the documents that lie in a sequence; one document fills it unless said"
    )

    @property
    def adapts_mlp(self) -> bool:
        """Whether adapters sit on the MLP too."""
        usual = "all-linear" if self.phase is Phase.QLORA else "attention"
        return self.phase.has_adapters and (self.lora_targets or usual) == "all-linear"

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadSpec:
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise ValueError("give either global_batch_size (sequences) or global_batch_tokens")
        if self.global_batch_tokens is not None and self.global_batch_tokens % self.sequence_length:
            low = self.global_batch_tokens // self.sequence_length * self.sequence_length
            raise ValueError(
                f"global_batch_tokens {self.global_batch_tokens} is not a multiple of sequence_length "
                f"{self.sequence_length}; nearest: {max(low, self.sequence_length)} or {low + self.sequence_length}"
            )
        if self.has_open_batch and (self.gradient_noise_scale is None or self.num_training_tokens is None):
            raise ValueError("global_batch_size auto needs gradient_noise_scale and num_training_tokens")
        if self.gradient_noise_scale is not None and not self.has_open_batch:
            raise ValueError(
                "gradient_noise_scale chooses the batch of global_batch_size: auto, and this one is stated: leave out "
                "one of them"
            )
        if self.num_sequences > MAX_GLOBAL_BATCH:
            raise ValueError(f"{self.num_sequences} sequences in one step; at most {MAX_GLOBAL_BATCH}")
        if self.phase.has_adapters != (self.lora_rank is not None):
            mend = "add lora_rank: 16, say" if self.lora_rank is None else "add phase: lora (or qlora)"
            raise ValueError(f"phase {self.phase.value!r}, lora_rank {self.lora_rank or 'not said'}: {mend}")
        if self.frozen_weights != "nf4" and self.phase is not Phase.QLORA:
            raise ValueError("frozen_weights goes with phase 'qlora': no other has weights in four bits")
        if self.lora_targets is not None and not self.phase.has_adapters:
            raise ValueError("lora_targets goes with phase 'lora' or 'qlora': the others have no adapters")
        if self.trains_vocabulary and not self.phase.has_adapters:
            raise ValueError("trains_vocabulary goes with phase 'lora' or 'qlora': the others train every weight")
        if self.drops_tokens is False and self.expert_capacity_factor is not None:
            raise ValueError(f"expert_capacity_factor {self.expert_capacity_factor:g} drops tokens: drops_tokens: true")
        if self.has_capacity and self.expert_imbalance > 1:
            raise ValueError(
                "expert_imbalance says nothing where tokens are dropped: every expert gets expert_capacity_factor "
                "times the mean"
            )
        return self

    @property
    def has_capacity(self) -> bool:
        """Tokens beyond an expert's capacity are dropped."""
        return bool(self.drops_tokens) or self.expert_capacity_factor is not None

    @property
    def has_open_batch(self) -> bool:
        """The batch is chosen, not given."""
        return self.global_batch_size == "auto"

    @property
    def num_sequences(self) -> int:
        """Sequences in one step; 1 where it is chosen."""
        if self.global_batch_size == "auto":
            return 1
        if isinstance(self.global_batch_size, int):
            return self.global_batch_size
        return (self.global_batch_tokens or 0) // self.sequence_length


class ConstraintsSpec(SpecModel):
    """What a plan must stay within."""

    memory_headroom_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of device memory to leave free beyond the safe bound"
    )
    memory_headroom: BytesOrZero | None = Field(
        default=None, description="device memory to leave free, such as '4 GiB'; 0 GiB as if left out"
    )
    host_memory: Bytes | None = Field(default=None, description="usable memory of one host, such as '1 TiB'")
    offload: Annotated[list[Literal["optimizer", "parameters", "activations"]], Field(max_length=3)] = Field(
        default=[], description="what may leave the devices, where nothing else fits (not validated)"
    )
    offload_to: Literal["host", "nvme"] = Field(
        default="host",
        description="where offloaded states and layers' activations go; inputs of recomputed layers go to the host",
    )
    nvme_bandwidth: BytesPerS | None = Field(
        default=None, description="of one host's NVMe devices together, such as '12 GB/s'"
    )
    search_over: list[
        Literal["context_parallel_style", "zero_hpz_partition_size", "outer_zero_stage", "gathered_num_layers"]
    ] = Field(
        default=[], description="choices that the search varies too (not validated): else they stay at their defaults"
    )
    unvalidated_schedules: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="the search may take pipeline schedules that no measured run has confirmed"
    )
    max_devices: Count | None = None
    min_devices: Count | None = Field(default=None, description="use at least so many, such as all that are rented")
    max_usd_per_hour: Dollars | None = None
    max_usd_per_run: Dollars | None = None
    max_step_time: Seconds | None = Field(default=None, description="longest optimizer step, such as '30 s'")
    max_run_time: Seconds | None = Field(default=None, description="longest run, such as '14 d'")
    target: str = Field(
        default=TARGET,
        description=f"framework whose rules the plan obeys; of adapters {ADAPTER_TARGET}, unless said",
    )
    price: PriceSpec = PriceSpec()


def _pin_type(choice: Choice) -> Any:
    """The spec field of a choice."""
    if choice.values:
        one: Any = Literal[choice.values]
        several: Any = list[one]
        return Annotated[several, Field(min_length=1)] if choice.kind is tuple else one
    if choice.kind is tuple:
        return Annotated[list[CountOrNone], Field(min_length=1, max_length=MAX_CHUNKS)]
    if choice.kind is bool:
        return Annotated[bool, Field(strict=True)]
    return Annotated[int, Whole(least=choice.least, most=choice.most)]


# One optional field for each pinnable choice; a type checker cannot see fields that are made, and reads Any.
if TYPE_CHECKING:

    class _Pins(SpecModel):
        def __getattr__(self, name: str) -> Any: ...

else:
    _Pins = create_model(
        "_Pins",
        __base__=SpecModel,
        **{one.name: (_pin_type(one) | None, Field(default=None, description=one.about)) for one in PINNABLE},
    )


class StageSpec(SpecModel):
    """One pipeline stage of a job on several node types."""

    node_type: str = Field(min_length=1, description="of cluster.nodes")
    num_layers: Annotated[int, Whole(most=MAX_CHUNKS)]
    tensor_parallel: Annotated[int, Whole()] = 1
    data_parallel: Annotated[int, Whole()]
    micro_batch_size: Annotated[int, Whole()] = 1
    activation_recompute: Literal["none", "selective", "full"] = "none"


class FixedSpec(_Pins):
    """Choices that the user pins; the search decides the others."""

    stages: Annotated[list[StageSpec], Field(min_length=1, max_length=MAX_CHUNKS)] | None = Field(
        default=None, description="every pipeline stage of a job on several node types, in order"
    )

    @model_validator(mode="after")
    def _block_has_layers(self) -> FixedSpec:
        if self.recompute_num_layers is not None and self.activation_recompute != "block":
            raise ValueError("recompute_num_layers goes with activation_recompute: block")
        return self

    @model_validator(mode="after")
    def _a_share_is_of_what_moves(self) -> FixedSpec:
        if self.optimizer_offload_percent is not None and not self.optimizer_offload:
            raise ValueError("optimizer_offload_percent goes with optimizer_offload: true")
        return self

    @model_validator(mode="after")
    def _offloaded_layers_are_kept(self) -> FixedSpec:
        if self.activation_offload_num_layers and self.activation_recompute not in {None, "none"}:
            raise ValueError("activation_offload_num_layers goes with activation_recompute: none")
        return self

    @model_validator(mode="after")
    def _modules_are_selected(self) -> FixedSpec:
        if self.recompute_modules is not None and self.activation_recompute != "selective":
            raise ValueError("recompute_modules goes with activation_recompute: selective")
        return self

    @model_validator(mode="after")
    def _heads_have_a_style(self) -> FixedSpec:
        if self.context_parallel_heads is not None and self.context_parallel_style != "all-to-all+ring":
            raise ValueError("context_parallel_heads goes with context_parallel_style: all-to-all+ring")
        return self

    def pinned(self) -> dict[str, int | str | bool | tuple[int, ...]]:
        """Only what is pinned."""
        values = self.model_dump(exclude_none=True, exclude={"stages"})
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def target_of(document: Mapping[str, Any]) -> str:
    """The framework that a spec as written is planned for: the one that it names, or the default of its phase.

    >>> target_of({"workload": {"phase": "lora"}}), target_of({"constraints": {"target": "torchtitan"}}), target_of({})
    ('axolotl', 'torchtitan', 'megatron')
    """
    constraints, workload = document.get("constraints"), document.get("workload")
    said = constraints.get("target") if isinstance(constraints, Mapping) else None
    if said:
        return str(said)
    phase = workload.get("phase") if isinstance(workload, Mapping) else None
    return ADAPTER_TARGET if any(phase in (one, one.value) for one in Phase if one.has_adapters) else TARGET


class TrainingSpec(SpecModel):
    """A training question."""

    kind: Literal["training"]
    model: str = Field(min_length=1, description="model of the catalog, or path of a Hugging Face config.json")
    cluster: ClusterSpec
    workload: WorkloadSpec
    objective: TrainingObjective = TrainingObjective.THROUGHPUT
    constraints: ConstraintsSpec = ConstraintsSpec()
    fixed: FixedSpec = FixedSpec()
    run: RunSpec | None = Field(default=None, description="interruptions, checkpoints and spares of the whole run")
    far_apart: FarApartSpec | None = Field(
        default=None, description="islands that a slow network joins: local updates and compressed gradients compared"
    )
    mapping: Literal["best", "identity"] | list[Annotated[int, Whole(least=0)]] = Field(
        default="best",
        description="which rank on which node where links differ: the best found, rank order, or the nodes in order",
    )

    @model_validator(mode="before")
    @classmethod
    def _target_of_the_phase(cls, given: Any) -> Any:
        constraints = given.get("constraints", {}) if isinstance(given, Mapping) else None
        if not isinstance(constraints, Mapping) or "target" in constraints or target_of(given) == TARGET:
            return given
        return {**given, "constraints": {**constraints, "target": ADAPTER_TARGET}}

    @model_validator(mode="after")
    def _nvme_for_states(self) -> TrainingSpec:
        constraints, fixed = self.constraints, self.fixed
        states = {"optimizer", "parameters"} & set(constraints.offload)
        pinned = fixed.optimizer_offload or fixed.parameter_offload
        layers = "activations" in constraints.offload or fixed.activation_offload_num_layers
        if constraints.offload_to == "nvme" and not (states or pinned or (layers and constraints.target == "any")):
            raise ValueError(
                "constraints.offload_to nvme is for states: add optimizer or parameters to offload (activations go to "
                "drives with target any alone: no framework copies them there)"
            )
        if constraints.nvme_bandwidth is not None and constraints.offload_to != "nvme":
            raise ValueError("constraints.nvme_bandwidth goes with constraints.offload_to: nvme")
        return self

    @model_validator(mode="after")
    def _nodes_come_and_go(self) -> TrainingSpec:
        if self.run is not None and self.run.availability is not None and self.cluster.spare_nodes:
            raise ValueError("run.availability decides which nodes stand by: drop cluster.spare_nodes")
        limits = self.constraints.max_run_time, self.constraints.max_usd_per_run
        if self.run is not None and self.run.availability is not None and limits != (None, None):
            raise ValueError("run.availability and a limit on the run: give run.finish_by, whose probability is told")
        return self

    @model_validator(mode="after")
    def _tokens_where_needed(self) -> TrainingSpec:
        needs = {
            "objective usd_per_run": self.objective is TrainingObjective.USD_PER_RUN,
            "constraints.max_usd_per_run": self.constraints.max_usd_per_run is not None,
            "constraints.max_run_time": self.constraints.max_run_time is not None,
            "run": self.run is not None,
        }
        wanting = [name for name, asked in needs.items() if asked]
        if wanting and self.workload.num_training_tokens is None:
            raise ValueError(f"{', '.join(wanting)} needs workload.num_training_tokens")
        return self


def read_training_spec(document: Mapping[str, Any]) -> TrainingSpec:
    """Validate a document; every problem at once.

    Raises:
        SpecError: with the path and the fix of each problem.
    """
    return read_spec(TrainingSpec, document)


def question_of_plan(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The question of a stored plan as it is asked today.

    Plans of ``global_batch_size: auto`` state the batch that they chose; those stored before 2026-11-27 keep the
    gradient noise scale beside it, which a question may not: it would choose a batch that is stated.
    """
    workload = spec.get("workload") if isinstance(spec, Mapping) else None
    if not isinstance(workload, Mapping) or workload.get("global_batch_tokens") is None:
        return spec
    return {**spec, "workload": {key: value for key, value in workload.items() if key != "gradient_noise_scale"}}
