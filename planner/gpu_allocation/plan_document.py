"""An allocation plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`.

A question with a ``market`` has a fleet with pools to launch; one without has the answer of a stand-alone problem.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from meshplan.planner.core.plan_document import (
    Count,
    Model,
    Name,
    Nothing,
    Number,
    PlanDocument,
    Section,
    Share,
    SolutionDocument,
    Text,
    as_json,
)
from meshplan.planner.gpu_allocation.spec import AllocationSpec
from meshplan.planner.serving.config_document import ServingChoices
from meshplan.planner.serving.problem.config import Role

_Lengths = Annotated[list[Count], Field(min_length=2, max_length=2)]
_Units = Annotated[int, Field(ge=0, le=10**6)]


class _Config(Section):
    services: Annotated[list[ServingChoices], Field(min_length=1)]
    units: dict[Text, _Units]


class _Unit(Section):
    offer: Name
    node_type: Name
    provider: Text
    region: Text | None
    zone: Text | None = None
    terms: Text
    count: _Units
    num_devices: _Units
    usd_per_hour_each: Share
    usd_per_hour: Share
    at_its_cap: bool


class _Replica(Section):
    kind: Name
    service: Text
    offer: Text
    role: Annotated[str, Field(pattern="^(mixed|prefill|decode)$")]
    count: _Units
    spare: _Units
    num_devices: _Units
    ceiling: Number
    utilization: list[Number]


class _Fleet(Section):
    scenarios: list[Text]
    usd_per_hour: Share
    units: list[_Unit]
    replicas: list[_Replica]


class _Scenario(Section):
    scenario: Text
    request_rate_per_s: Share
    weights: dict[Name, Share]
    usd_per_million_requests: Number | None


class _Bucket(Section):
    input_tokens: _Lengths
    output_tokens: _Lengths
    scenarios: Annotated[list[_Scenario], Field(min_length=1)]


class _Service(Section):
    name: Text
    model: Text
    buckets: Annotated[list[_Bucket], Field(min_length=1)]


class _Promise(Section):
    service: Text
    promise: Text
    limit_s: Number
    attained: Number
    lower_limit: Number
    is_kept: bool


class _Replay(Section):
    scenario: Text
    num_requests: Count
    num_runs: Count
    burstiness: Number
    note: Text
    promises: list[_Promise]


class _Point(Section):
    slo_factor: Number
    objective: Share | None


class _Others(Section):
    pareto: list[_Point]


class _Hour(Section):
    hour: Count
    rate_factor: Number
    usd_per_hour: Share
    units: dict[Text, Count]


class _HourReplay(Section):
    is_kept: bool
    num_hours: Count


class _Schedule(Section):
    hours: Annotated[list[_Hour], Field(min_length=1)]
    usd: Share
    switching_usd: Share
    num_switches: Count
    gap: Number
    constant_usd: Share
    replays: list[_HourReplay]


class _Answer(Section):
    objective: Text
    fleets: Annotated[list[_Fleet], Field(min_length=1)]
    services: Annotated[list[_Service], Field(min_length=1)]
    replays: list[_Replay]
    alternatives: _Others
    notes: list[Text]
    schedule: _Schedule | None = None


class _Change(Section):
    change: Text


class _Solution(SolutionDocument):
    kept: bool | None = None
    least_change: tuple[_Change, ...] = ()


class _Provenance(Section):
    models: dict[Text, Model]


class _Rejected(Section):
    reason: Text
    count: Count
    example: Text | None = None


class MarketPlanDocument(PlanDocument):
    """A fleet for a market."""

    spec: AllocationSpec
    config: _Config | Nothing
    provenance: _Provenance
    solution: _Solution
    rejected: list[_Rejected]
    answer: _Answer | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if isinstance(self.config, Nothing) or self.answer is None:
            if self.solution.status != "infeasible" or self.answer is not None:
                raise ValueError(f"config or answer is empty, and the status {self.solution.status}")
            return self
        if self.solution.objective is None or self.solution.gap is None:
            raise ValueError("solution lacks objective or gap")
        known = {service.name for service in self.answer.services}
        for service in self.config.services:
            if service.name not in known or service.name not in self.provenance.models:
                raise ValueError(f"nothing is known of the service {service.name!r}")
            for pool in service.pools:
                if pool.num_devices != pool.layout.num_devices * pool.num_workers or not pool.kind:
                    raise ValueError(f"a pool of {service.name!r} has no kind, or not the devices of its workers")
            self._require_pairs([pool.role for pool in service.pools])
        return self

    def _require_pairs(self, roles: list[Role]) -> None:
        if (Role.PREFILL in roles) != (Role.DECODE in roles):
            raise ValueError("a prefill pool without a decode pool, or the reverse")


class AllocationPlanDocument(PlanDocument):
    """A plan of the kind ``gpu-allocation``: with a market or without."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_form(cls, document: Any) -> Any:
        spec = document.get("spec") if isinstance(document, dict) else None
        if cls is AllocationPlanDocument and isinstance(spec, dict) and "market" in spec:
            as_json(MarketPlanDocument, document)
        return document


PLAN = AllocationPlanDocument
