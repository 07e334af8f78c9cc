"""The mapping of one configuration: which node holds which ranks, and what its step takes."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.cluster.network.network import Network

EXHAUSTIVE, ANNEALING, RANK_ORDER = "all mappings", "annealing", "rank order"
CONSTRUCTED = "nodes in the order of their links"
UNIFORM = "rank order (uniform links)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A mapping of one configuration.

    Args:
        order: node of each slot, then the spare nodes.
        step_s: optimizer step under the mapping.
        bound_s: lower bound of the step under any mapping.
        method: search method that found it.
    """

    order: tuple[int, ...]
    step_s: float
    bound_s: float
    method: str


def usable_order(network: Network) -> tuple[int, ...]:
    """Rank order: usable nodes by number."""
    return tuple(network.usable)
