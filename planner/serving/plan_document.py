"""A serving plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshplan.planner.core.plan_document import (
    Closed,
    Count,
    Model,
    Nothing,
    Number,
    PartDocument,
    PlanDocument,
    Positive,
    RejectedDocument,
    Section,
    Share,
    SolutionDocument,
    Text,
)
from meshplan.planner.serving.config_document import ServingConfigDocument
from meshplan.planner.serving.problem.config import (
    serving_config_from_document,
)
from meshplan.planner.serving.problem.spec import ServingSpec


class _MemoryPool(Section):
    role: Annotated[str, Field(pattern="^(mixed|prefill|decode)$")]
    device: Text
    device_memory_bytes: Share
    budget_bytes: Share
    weights_bytes: Share
    workspace_bytes: Share
    kv_cache_bytes: Share
    kv_bytes_per_token: Share
    kv_capacity_tokens: Count


class _Memory(Section):
    pools: list[_MemoryPool]


class _Part(PartDocument):
    pool: Text


class _Calibration(Section):
    engine: Text
    architecture: Text
    num_runs: Count
    error_p90: dict[Text, Annotated[float, Field(ge=0.0, le=10.0)]]
    start_error_p90: dict[Text, Annotated[float, Field(ge=0.0, le=10.0)]] = Field(default_factory=dict)
    basis: dict[Text, Text] = Field(default_factory=dict)


class _Power(Section):
    error_p90: dict[Text, Share] = Field(default_factory=dict)
    num_runs: Count = 0
    slowdown_error_p90: Share = 0.0


class _Provenance(Section):
    model: Model
    power: _Power = _Power()
    calibration: dict[Text, _Calibration] = Field(default_factory=dict)
    sources: dict[Text, Text] = Field(default_factory=dict)
    not_validated: tuple[Text, ...] = ()
    without_use: tuple[Text, ...] = ()


class _Ranked(Section):
    name: Text
    chosen: bool
    config: ServingConfigDocument
    label: Text
    num_devices: Count
    ttft_p99_s: Number | None
    tpot_mean_s: Number | None
    slo_latencies: dict[Text, Number | None] = Field(default_factory=dict)
    requests_per_s: Number
    output_tokens_per_s_per_device: Number
    usd_per_hour: Number | None
    reason: Text


class _Miss(Section):
    limit: Text
    excess_text: Text
    label: Text


class _Change(Section):
    change: Text
    label: Text


class _Solution(SolutionDocument):
    kept: bool | None = None
    nearest_miss: _Miss | None = None
    least_change: tuple[_Change, ...] = ()


class _Point(Section):
    label: Text
    node_type: Text
    quantization: Text
    num_running: Count
    tokens_per_s_per_user: Positive
    tokens_per_s_per_device: Positive
    keeps_promises: bool


class _Sensitivity(Section):
    change: Text
    ttft_p99_s: Number | None
    tpot_mean_s: Number | None
    broken: list[Text]


class _Ends(Section):
    low: Number
    high: Number


class _Sampling(Section):
    num_requests: Count
    intervals: dict[Text, _Ends]
    attainment: Number = 0.0
    attainment_at_least: Number = 0.0
    kept_by_runs_of: Count | None = None


class _Series(Closed):
    end_s: list[Number]
    decoding: list[Number]
    prefilling: list[Number]
    queued: list[Number]
    kv_use: list[Number]

    @model_validator(mode="after")
    def _are_as_long(self) -> Self:
        lengths = {len(getattr(self, name)) for name in type(self).model_fields}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError("the lists of the series have different lengths, or are empty")
        return self


class _Overlap(Section):
    pool: Text
    requests_per_s: Share
    resource: Text
    share: Share
    batch_share: Share
    order_share: Share
    rest_share: Share
    nano_batches_speedup: Positive | None = None


class _WhatIf(Section):
    name: Text
    label: Text
    num_running: Count
    tpot_s: Number
    tokens_per_s_per_device: Number
    usd_per_million_tokens: Number | None = None


class _Shape(Section):
    name: Text
    label: Text
    by_engine: bool
    ttft_mean_s: Number | None
    ttft_p99_s: Number | None
    tpot_mean_s: Number | None
    num_rejected: Count


class _Hops(Section):
    same_device: Number
    same_node: Number
    other_node: Number


class _Experts(Section):
    pool: Text
    expert_parallel: Count
    unused_because: Text | None = None
    load_factor: Number = 0.0
    hops: _Hops | Nothing = Nothing()
    num_copies: Count = 0
    copies_bytes_per_device: Number = 0.0


class _SpeculationRow(Section):
    num_running: Count
    method: Text | None
    num_draft_tokens: Count
    speed_up: Number


class _SpeculationAnswer(Section):
    by_load: tuple[_SpeculationRow, ...]
    hurts_from: Count | None
    running: Number


class _KvStore(Section):
    store: Text
    bytes_per_device: Number | None = None
    needed_bytes_per_device: Number | None = None
    bytes_per_s_per_device: Number | None = None
    break_even_bytes_per_s_per_device: Number | None = None
    objective: float | None = None
    reason: str = ""
    is_chosen: bool


class _ImagesAnswer(Section):
    tokens: Count
    encoder_bytes: Number
    encode_s: Number


class _SoundAnswer(Section):
    frames: Count
    encoder_bytes: Number
    cache_bytes: Number
    encode_s: Number


class _Prefixes(Section):
    found: Number
    most: Number


class _Answer(Section):
    pareto: tuple[_Point, ...] = ()
    num_running: Number = 0.0
    sensitivity: tuple[_Sensitivity, ...] = ()
    sampling: _Sampling | None = None
    series: _Series | Nothing = Nothing()
    overlap: tuple[_Overlap, ...] = ()
    what_if: tuple[_WhatIf, ...] = ()
    what_if_simulated: tuple[_Shape, ...] = ()
    num_idle_devices: Count = 0
    idle_because: Text | None = None
    useful_batch: Count | None = None
    experts: tuple[_Experts, ...] = ()
    max_request_rate_per_s: Number | None = None
    most_passed_on_per_s: Number | None = None
    prefixes: _Prefixes | Nothing = Nothing()
    speculation: _SpeculationAnswer | Nothing = Nothing()
    kv_stores: tuple[_KvStore, ...] = ()
    images: _ImagesAnswer | Nothing = Nothing()
    sound: _SoundAnswer | Nothing = Nothing()

    @model_validator(mode="after")
    def _idle_has_a_reason(self) -> Self:
        if self.num_idle_devices and self.idle_because is None:
            raise ValueError("idle_because is missing")
        return self


class ServingPlanDocument(PlanDocument):
    """A plan of the kind ``serving``."""

    spec: ServingSpec
    config: ServingConfigDocument
    memory: _Memory | Nothing
    breakdown: list[_Part]
    provenance: _Provenance
    solution: _Solution
    alternatives: list[_Ranked]
    rejected: list[RejectedDocument]
    answer: _Answer | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.config:
            if self.solution.status != "infeasible":
                raise ValueError(f"config is empty, and the status {self.solution.status}")
            return self
        if isinstance(self.memory, Nothing):
            raise ValueError("memory is empty")
        if {pool.role for pool in self.memory.pools} != {pool["role"] for pool in self.config["pools"]}:
            raise ValueError("memory.pools are not the pools of the config")
        if not {"output_tokens_per_s_per_device", "requests_per_s"} <= self.predicted.keys():
            raise ValueError("predicted lacks output_tokens_per_s_per_device or requests_per_s")
        ranks = sum(pool.num_ranks for pool in serving_config_from_document(self.config).pools)
        if self.rank_table is not None and len(self.rank_table) != ranks:
            raise ValueError(f"rank_table has {len(self.rank_table)} ranks for {ranks} devices")
        return self


PLAN = ServingPlanDocument
