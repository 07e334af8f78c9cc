"""A training plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, create_model, model_validator

from meshplan.planner.core.plan_document import (
    MAX_COUNT,
    MAX_LAYERS,
    Closed,
    Count,
    IntervalDocument,
    Model,
    Name,
    Nothing,
    Number,
    PartDocument,
    PlanDocument,
    Positive,
    Section,
    Share,
    SolutionDocument,
    Text,
)
from meshplan.planner.core.reading.spec_fields import MAX_DEVICES
from meshplan.planner.goodput.plan_document import RunDocument
from meshplan.planner.lengths.plan_document import LengthsDocument
from meshplan.planner.training.problem.choices import BY_NAME
from meshplan.planner.training.problem.far_apart import WayName
from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.spec import TrainingSpec, question_of_plan

# What is no degree may be larger than a number of devices.
_LONG = {"sequence_length": MAX_COUNT, "global_batch_size": MAX_COUNT, "num_microbatches": MAX_COUNT}
_LAYERS = Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...], Field(min_length=1)]


def _type_of(name: str, default: Any) -> Any:
    """The type of one choice, from its row in the table of choices."""
    choice = BY_NAME[name]
    if choice.values:
        return Literal[choice.values]
    if choice.kind is bool:
        return bool
    if choice.kind is tuple:
        return _LAYERS
    if choice.kind is float:
        return Share
    least = min(choice.least, default) if isinstance(default, int) else choice.least
    return Annotated[int, Field(ge=least, le=_LONG.get(name) or choice.most or MAX_DEVICES)]


class _Choices(Closed):
    world_size: Annotated[int, Field(ge=1, le=MAX_DEVICES)]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        values: Any = self
        degrees = values.tensor_parallel * values.pipeline_parallel * values.context_parallel * values.data_parallel
        if degrees != self.world_size:
            raise ValueError(f"world_size is {self.world_size}, the degrees make {degrees}")
        chunks = values.pipeline_parallel * values.virtual_pipeline_stages
        if len(values.layers_per_chunk) != chunks:
            raise ValueError(f"layers_per_chunk has {len(values.layers_per_chunk)} entries for {chunks} chunks")
        expert = values.expert_parallel * values.expert_tensor_parallel
        if self.world_size // values.pipeline_parallel % expert:
            raise ValueError(f"{expert} devices of an expert do not divide those of a stage")
        if values.data_parallel % values.data_parallel_shard:
            raise ValueError("data_parallel_shard does not divide data_parallel")
        return self


def _field(default: Any) -> Any:
    return ... if default is MISSING else default


_CHOICES: dict[str, Any] = {
    item.name: (_type_of(item.name, item.default), _field(item.default)) for item in fields(TrainingConfig)
}
_ALWAYS_PREDICTED = frozenset({"tokens_per_s", "tokens_per_s_per_device", "mfu"})
ConfigDocument: Any = create_model("ConfigDocument", __base__=_Choices, **_CHOICES)


class StageDocument(Closed):
    """One pipeline stage of a plan on several node types."""

    node_type: Name
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    data_parallel: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    micro_batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    activation_recompute: Literal["none", "selective", "full"]


class MixedConfigDocument(Closed):
    """The choices of a plan on several node types."""

    stages: Annotated[list[StageDocument], Field(min_length=1, max_length=MAX_LAYERS)]
    pipeline_parallel: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    pipeline_schedule: Literal["none", "1f1b"]
    num_microbatches: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    zero_stage: Literal[0, 1]
    sequence_parallel: bool
    global_batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    sequence_length: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    precision: Text
    world_size: Annotated[int, Field(ge=1, le=MAX_DEVICES)]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        devices = sum(one.tensor_parallel * one.data_parallel for one in self.stages)
        if devices != self.world_size:
            raise ValueError(f"world_size is {self.world_size}, the stages make {devices}")
        if len(self.stages) != self.pipeline_parallel:
            raise ValueError(f"pipeline_parallel is {self.pipeline_parallel}, there are {len(self.stages)} stages")
        if len({one.data_parallel * one.micro_batch_size for one in self.stages}) > 1:
            raise ValueError("data_parallel × micro_batch_size differs between stages")
        return self

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(one.num_layers for one in self.stages)


class _Stage(Section):
    first_stage: Count
    num_stages: Count
    num_layers: Count
    typical_bytes: Share
    safe_bytes: Share

    @model_validator(mode="after")
    def _components_are_sizes(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            is_size = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
            if name.endswith("_bytes") and not is_size:
                raise ValueError(f"{name} is no size: {value!r}")
        return self


class _Memory(Section):
    device_memory_bytes: Share
    limit_bytes: Positive
    worst: _Stage
    stages: list[_Stage]


class _Calibration(Section):
    framework: Text
    architecture: Text
    num_runs: Count
    time_error_p90: Number
    time_error_basis: Text = ""
    start_error_p90: Number | None = None
    basis: Text = ""
    memory_basis: Text = ""


class _Provenance(Section):
    model: Model | None = None  # absent where nothing was found
    share_of_time_by_evidence: dict[str, Share] = Field(default_factory=dict)
    calibration: _Calibration | None = None
    not_validated: tuple[Text, ...] = ()
    sources: dict[str, Text] = Field(default_factory=dict)


class _Ranked(Section):
    """A candidate of the table (``chosen``), or a well-known other choice with its reason."""

    name: Text
    chosen: bool | None = None
    config: ConfigDocument | MixedConfigDocument | None
    iteration_s: Positive | None
    safe_bytes: Share | None
    slower_by: Number | None = None
    objective: Number | None = None  # joules of a step or money of a run, where these are minimised
    dearer_by: Number | None = None
    reason: Text | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        given = self.model_fields_set
        if "chosen" in given and (self.config is None or self.iteration_s is None or self.safe_bytes is None):
            raise ValueError("a candidate has a config, iteration_s and safe_bytes")
        if ("chosen" in given) == ("reason" in given):
            raise ValueError("either 'chosen' or 'reason' is given")
        return self


class _Rejected(Section):
    reason: Text
    count: Count
    nearest_miss: Number | None = None
    example: ConfigDocument | Text | None = None


class _Miss(Section):
    excess_text: Text
    limit: Text
    config: ConfigDocument


class _Change(Section):
    change: Text
    constraint: Text


class _Solution(SolutionDocument):
    oom: bool | None = None
    admitted_by: Literal["typical figure"] | None = None
    nearest_miss: _Miss | None = None
    least_change: tuple[_Change, ...] = ()

    @model_validator(mode="after")
    def _oom_is_given_or_not(self) -> Self:
        if "oom" in self.model_fields_set and self.oom is None:
            raise ValueError("oom is true or false")
        return self


class _Link(Section):
    what: Text
    nodes: Annotated[list[Count], Field(min_length=2, max_length=2)]


class _Mapping(Section):
    method: Text
    gain: Number
    identity_s: Share
    random_mean_s: Share
    gap: Number
    nodes: Annotated[list[Count], Field(min_length=1)]
    node_names: list[Name]
    hosts: tuple[Name, ...] = ()
    spare_nodes: list[Count]
    excluded_nodes: list[Count]
    critical: tuple[_Link, ...] = ()

    @model_validator(mode="after")
    def _nodes_have_names(self) -> Self:
        listed = [*self.nodes, *self.spare_nodes, *self.excluded_nodes]
        listed += [node for link in self.critical for node in link.nodes]
        if listed and max(listed) >= len(self.node_names):
            raise ValueError(f"node {max(listed)} is used, {len(self.node_names)} have names")
        return self


class _Ring(Closed):
    num_sites: Annotated[int, Field(ge=2, le=MAX_DEVICES)]
    bytes_per_s: Positive
    latency_s: Share


class _Site(Closed):
    name: Text
    num_nodes: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    sequences: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    step_s: Positive
    safe_bytes: Share
    config: ConfigDocument


class _WayOverSites(Section):
    """A row of the table of ways; the synchronous plan and sites alone have no ``way``."""

    name: Text
    way: WayName | None
    devices: Count | None
    step_s: Positive | None
    tokens_per_s: Positive | None
    effective_tokens_per_s: Positive | None
    reason: Text
    more_tokens: Share | None = None
    published_loss: Text = ""
    source: Text = ""
    published_steps: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2)] = (1, 1)
    bits: Count | None = None
    sync_steps: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    fragments: Count | None = None
    overlap_steps: Count | None = None
    payload_bytes: Share | None = None
    exposed_s: Share | None = None
    mean_bytes_per_s: Share | None = None
    hiding_bytes_per_s: Share | None = None
    state_bytes: Share | None = None
    host_state_bytes: Share | None = None
    outer_state: Literal["", "device", "host"] | None = None


class _FarApart(Closed):
    """Ways to train over sites."""

    chosen: Text
    why: Text
    ring: _Ring
    sites: Annotated[list[_Site], Field(max_length=MAX_DEVICES)]
    ways: Annotated[list[_WayOverSites], Field(min_length=1, max_length=MAX_COUNT)]

    @model_validator(mode="after")
    def _chosen_is_listed(self) -> Self:
        if self.chosen not in {one.name for one in self.ways}:
            raise ValueError(f"chosen is {self.chosen}, which no way is called")
        return self


class TrainingPlanDocument(PlanDocument):
    """A plan of the kind ``training``."""

    spec: Annotated[TrainingSpec, BeforeValidator(question_of_plan)]
    config: ConfigDocument | MixedConfigDocument | Nothing
    memory: _Memory | Nothing
    breakdown: list[PartDocument]
    provenance: _Provenance
    solution: _Solution
    alternatives: list[_Ranked]
    rejected: list[_Rejected]
    mapping: _Mapping | None = None
    run: RunDocument | None = None
    lengths: LengthsDocument | None = None
    far_apart: _FarApart | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if isinstance(self.config, Nothing):
            if self.solution.status != "infeasible":
                raise ValueError(f"config is empty, and the status {self.solution.status}")
            return self
        self._require_the_parts()
        config: Any = self.config
        if self.provenance.model is None:
            raise ValueError("provenance.model is missing")
        layers = self.provenance.model["num_hidden_layers"]
        if sum(config.layers_per_chunk) != layers:
            raise ValueError(f"layers_per_chunk has {sum(config.layers_per_chunk)} layers, the model {layers}")
        if self.rank_table is not None and len(self.rank_table) != config.world_size:
            raise ValueError(f"rank_table has {len(self.rank_table)} ranks for {config.world_size} devices")
        return self

    def _require_the_parts(self) -> None:
        if isinstance(self.memory, Nothing):
            raise ValueError("memory is empty")
        step: IntervalDocument | None = self.predicted.get("iteration_s")
        if step is None or step.value <= 0 or not self.predicted.keys() >= _ALWAYS_PREDICTED:
            raise ValueError(f"predicted lacks one of {', '.join(sorted({'iteration_s', *_ALWAYS_PREDICTED}))}")


PLAN = TrainingPlanDocument
