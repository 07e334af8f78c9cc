"""A serving question with everything looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.problem.engines import EngineRules
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import (
    Arrival,
    KvTier,
    Objective,
    Role,
    ServingLimits,
    ServingObjective,
    ServingWorkload,
    Speculation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What the user fixed.

    Args:
        is_disaggregated: True or False where the mode is pinned, None where the plan chooses.
        by_role: role → field of ``Layout`` or ``EngineLimits``, or ``num_workers`` → value; MIXED holds for all roles.
    """

    is_disaggregated: bool | None = None
    by_role: Mapping[Role, Mapping[str, int]] = field(default_factory=dict)

    def of(self, role: Role) -> Mapping[str, int]:
        """What is pinned for pools of a role; a role's own word goes before the common one."""
        return {**self.by_role.get(Role.MIXED, {}), **self.by_role.get(role, {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProblem:
    """A serving question with everything looked up.

    Args:
        shape: the model.
        machines: node type → its devices, links and price; ``num_devices`` is what the plan may use of it.
        workload: the requests; without rate and concurrency the plan chooses the load.
        promises: on latency.
        objective: what the plan is best at.
        limits: money and power.
        rules: the target engine's.
        recipe: how the engine schedules.
        calibrations: node type → the estimator's constants.
        quantizations: formats to choose from.
        speculation: None without a draft.
        kv_tier: of mixed workers; None without one.
        pinned: see :class:`Pinned`.
    """

    shape: ModelShape
    machines: Mapping[str, Machine]
    workload: ServingWorkload
    promises: tuple[Objective, ...]
    objective: ServingObjective
    limits: ServingLimits
    rules: EngineRules
    recipe: EngineRecipe
    calibrations: Mapping[str, ServingCalibration]
    quantizations: tuple[Quantization, ...]
    speculation: Speculation | None = None
    kv_tier: KvTier | None = None
    pinned: Pinned = field(default_factory=Pinned)

    @property
    def has_free_load(self) -> bool:
        """Neither rate nor concurrency is given: the plan says how much it can take."""
        load = (self.workload.request_rate_per_s, self.workload.concurrency, self.workload.trace)
        return self.workload.arrival is not Arrival.ALL_AT_ONCE and all(part is None for part in load)

    def limit_s(self, metric: str) -> float:
        """The tightest promise on a latency, at any percentile; infinite without one."""
        return min((promise.limit_s for promise in self.promises if promise.metric == metric), default=float("inf"))
