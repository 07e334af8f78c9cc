"""A worker as a compiled run is asked for it, and how KV caches go from one to another."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker: its iteration times, its limits, its KV cache, its role and its weight for the router."""

    cost: StepCost
    limits: EngineLimits
    kv_capacity_tokens: int
    role: Role = Role.MIXED
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """From prefill to decode workers, as :class:`~meshplan.planner.serving.simulation.cluster.KvLink` says.

    Args:
        kv_bytes_per_token: KV cache of all layers.
        bandwidth_bytes_per_s: rate of one link.
        latency_s: added to each transfer.
        reads_prompt_s_per_token: added to each transfer, for each token of the prompt.
        is_shared: all prefill workers share one link.
        holds_slots: a prefilled request keeps its slot until its cache has arrived.
        hides_first_token: the client sees the first token after the first decode iteration only.
    """

    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    latency_s: float
    reads_prompt_s_per_token: float
    is_shared: bool
    holds_slots: bool
    hides_first_token: bool
