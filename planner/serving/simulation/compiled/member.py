"""A worker as a compiled run is asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker: its iteration times, its limits, its KV cache and its weight for the router."""

    cost: StepCost
    limits: EngineLimits
    kv_capacity_tokens: int
    weight: int = 1
