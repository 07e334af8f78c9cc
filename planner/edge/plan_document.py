"""An edge plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshplan.planner.core.plan_document import (
    Closed,
    Count,
    Model,
    Name,
    Nothing,
    PartDocument,
    PlanDocument,
    Positive,
    RejectedDocument,
    Section,
    Share,
    SolutionDocument,
    Text,
)
from meshplan.planner.edge.spec import MAX_MACHINES, EdgeSpec, EngineName, Format, Host


class _Machine(Closed):
    type: Name
    role: Literal["alone", "root", "worker", "main host", "server"]
    address: Host | Literal[""]
    memory_bytes: Share
    usable_bytes: Positive
    is_accelerator: bool
    layers: Annotated[int, Field(ge=1, le=10_000)] | None = None


class _Config(Closed):
    engine: EngineName
    weights: Format
    machines: Annotated[list[_Machine], Field(min_length=1, max_length=MAX_MACHINES)]

    @model_validator(mode="after")
    def _stands(self) -> Self:
        if self.engine == "llama.cpp-rpc" and any(one.layers is None for one in self.machines):
            raise ValueError("a pipeline says how many layers each machine has")
        if self.engine == "llama.cpp" and len(self.machines) > 1:
            raise ValueError("llama.cpp alone runs on one machine")
        return self


class _Provenance(Section):
    model: Model
    notes: list[Text]


class _Row(Closed):
    why: Text
    engine: EngineName
    weights: Format
    machines: Text
    num_machines: Count
    tokens_per_s: Positive
    time_per_token_s: Positive
    low_s: Share
    high_s: Share
    compute_s: Share
    network_s: Share
    drive_s: Share
    memory_bytes: Share


class _Change(Section):
    change: Text
    label: Text = ""


class _Miss(Section):
    label: Text
    limit: Text
    excess_text: Text


class _Solution(SolutionDocument):
    nearest_miss: _Miss | None = None
    least_change: tuple[_Change, ...] = ()


class EdgePlanDocument(PlanDocument):
    """A plan of the kind ``edge``."""

    spec: EdgeSpec
    config: _Config | Nothing
    provenance: _Provenance
    breakdown: list[PartDocument]
    alternatives: list[_Row]
    rejected: list[RejectedDocument]
    solution: _Solution

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if isinstance(self.config, Nothing) != (self.solution.status == "infeasible"):
            raise ValueError(f"the status is {self.solution.status}, which does not go with the configuration")
        if not isinstance(self.config, Nothing) and not {"time_per_token_s", "tokens_per_s"} <= set(self.predicted):
            raise ValueError("a plan with a configuration predicts time_per_token_s and tokens_per_s")
        return self


PLAN = EdgePlanDocument
