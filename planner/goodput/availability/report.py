"""What a policy makes of several traces, beside hindsight and beside using every node at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.planner.goodput.availability.capacity import Capacity
from meshplan.planner.goodput.availability.hindsight import best_in_hindsight
from meshplan.planner.goodput.availability.outcome import Seen, play
from meshplan.planner.goodput.availability.policy import LearnedPolicy
from meshplan.planner.goodput.availability.trace import AvailabilityTrace

# A wait that no trace is as long as.
_NEVER_S = 1e12


class EveryNode:
    """Uses every node as soon as it is there: what elastic launchers do by themselves.

    Args:
        capacity: of the job.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.wait_s = _NEVER_S

    def saw(self, time_s: float, nodes: int) -> None:
        """Nothing is learned."""

    def choose(self, seen: Seen) -> int:
        """The fewest nodes with the rate of all."""
        best = max(range(seen.nodes + 1), key=lambda m: (self.capacity.rates[m], -m))
        same = seen.used and self.capacity.rates[best] == self.capacity.rates[seen.used]
        return seen.used if same and not seen.was_hit else best


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run on the traces.

    Args:
        traces: how many.
        days: of all of them.
        mean_nodes: available.
        progress_share: tokens over those of all nodes all the time.
        hindsight_share: the same of the best policy that knew the traces.
        every_node_share: the same of using every node at once.
        interruptions_per_day: times that the job was hit.
        changes_per_day: times that it chose another number of nodes.
        usd_per_day: for all nodes available; None without prices.
        time_shares: number of nodes used → share of the time.
    """

    traces: int
    days: float
    mean_nodes: float
    progress_share: float
    hindsight_share: float
    every_node_share: float
    interruptions_per_day: float
    changes_per_day: float
    usd_per_day: float | None
    time_shares: Mapping[int, float]

    @property
    def regret(self) -> float:
        """Share of the progress in hindsight that the policy misses."""
        return 1.0 - self.progress_share / self.hindsight_share if self.hindsight_share > 0.0 else 0.0


def played(traces: Sequence[AvailabilityTrace], capacity: Capacity) -> Played:
    """The policy, hindsight and every node at once on each trace, weighted by their lengths.

    Args:
        traces: with no more nodes than the capacity knows.
        capacity: of the job.
    """
    length_s = sum(trace.length_s for trace in traces)
    full = capacity.rates[-1] * length_s
    outcomes = [play(trace, capacity, LearnedPolicy(capacity)) for trace in traces]
    prices = [(trace.mean_usd_per_s, trace.length_s) for trace in traces]
    usd = [price * seconds for price, seconds in prices if price is not None]
    spent: dict[int, float] = {}
    for outcome in outcomes:
        for nodes, seconds in outcome.seconds_by_nodes.items():
            spent[nodes] = spent.get(nodes, 0.0) + seconds
    days = length_s / SECONDS_PER_DAY
    return Played(
        traces=len(traces),
        days=days,
        mean_nodes=sum(trace.mean_nodes * trace.length_s for trace in traces) / length_s,
        progress_share=sum(outcome.progress for outcome in outcomes) / full,
        hindsight_share=sum(best_in_hindsight(trace, capacity) for trace in traces) / full,
        every_node_share=sum(play(trace, capacity, EveryNode(capacity)).progress for trace in traces) / full,
        interruptions_per_day=sum(outcome.interruptions for outcome in outcomes) / days,
        changes_per_day=sum(outcome.changes for outcome in outcomes) / days,
        usd_per_day=sum(usd) / days if len(usd) == len(traces) else None,
        time_shares={nodes: seconds / length_s for nodes, seconds in sorted(spent.items())},
    )


def played_document(result: Played) -> dict[str, Any]:
    """The run on the traces as plain JSON."""
    figures = {name: value for name, value in asdict(result).items() if name != "time_shares"}
    return {**figures, "regret": result.regret}
