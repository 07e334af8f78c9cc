"""A fleet for every hour, with margins that grow until the simulation meets the SLOs off the peak, too.

Small fleets need larger margins than the peak's: bursts do not even out over few replicas. So the hours are grouped
into bands of traffic, and each band plans for its traffic times its margin. In every band the fleet that is in use for
most hours is simulated at the highest traffic that it has to carry; where an SLO is violated the band's margin grows,
and the whole schedule is planned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshplan.planner.core.solution import Solution
from meshplan.planner.gpu_allocation.alternatives import scaled, with_headroom_of
from meshplan.planner.gpu_allocation.nodes.problem import FleetAllocation
from meshplan.planner.gpu_allocation.nodes.schedule import Memory, Schedule, solve_schedule
from meshplan.planner.gpu_allocation.replay import NUM_RUNS, NUM_SCREENED, Replay
from meshplan.planner.gpu_allocation.search import Compiled, Searched, replay_scenario

# Upper ends of the bands, as shares of the peak.
BANDS = (0.125, 0.25, 0.5, 0.75, 1.0)
FLEETS_PER_BAND = 1
# Growth of a band's margin where an SLO is violated.
GROWTH = 1.15
MAX_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HourReplay:
    """A fleet of the schedule, replayed.

    Args:
        fleet: its number in the schedule.
        num_hours: hours of its band in which it is in use.
        share_of_peak: traffic that it was replayed with.
        replay: outcome of the simulation.
    """

    fleet: int
    num_hours: int
    share_of_peak: float
    replay: Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyPlan:
    """A schedule and its proof.

    Args:
        solution: the schedule, its cost and bound for the traffic with its margins.
        margins: [bands] what each band's traffic was multiplied by.
        replays: simulations of the last round.
        num_rounds: schedules planned.
    """

    solution: Solution[Schedule]
    margins: tuple[float, ...]
    replays: tuple[HourReplay, ...]
    num_rounds: int


def plan_hours(
    searched: Searched, factors: Sequence[float], *, start_usd: float, stop_usd: float, seed: int
) -> HourlyPlan:
    """Schedule, replay, and widen margins until every replayed fleet meets its SLOs.

    Args:
        searched: the plan of the peak hour; kinds that it does not use get the largest margin of those it does.
        factors: [hours] traffic as a share of the peak's.
        start_usd: USD to start a unit.
        stop_usd: USD to give back a unit.
        seed: random seed of the simulated requests.
    """
    compiled = replace(searched.compiled, problem=with_headroom_of(searched, searched.compiled.problem))
    traffic = np.array(factors, dtype=float)
    band = np.searchsorted(BANDS, traffic * (1.0 - 1e-12))
    margins, memory = np.ones(len(BANDS)), Memory()
    last: HourlyPlan | None = None
    for rounds in range(1, MAX_ROUNDS + 1):
        planned = np.minimum(traffic * margins[band], 1.0)
        solution = solve_schedule(
            compiled.problem, planned.tolist(), start_usd=start_usd, stop_usd=stop_usd, memory=memory
        )
        if solution.assignment is None or not searched.replays:
            return last or HourlyPlan(solution=solution, margins=tuple(margins.tolist()), replays=(), num_rounds=rounds)
        replays = _replays(searched, compiled, solution.assignment, traffic, band, seed + rounds * NUM_RUNS)
        last = HourlyPlan(solution=solution, margins=tuple(margins.tolist()), replays=tuple(replays), num_rounds=rounds)
        missed = {
            int(np.searchsorted(BANDS, one.share_of_peak * (1.0 - 1e-12))) for one in replays if not one.replay.is_kept
        }
        # The peak's fleet is the largest that is planned: a band whose margin reaches it has nothing more to gain.
        missed = {k for k in missed if margins[k] * traffic[band == k].min() < 1.0}
        if not missed:
            break
        for k in missed:
            margins[k] *= GROWTH
    if last is None:
        raise AssertionError("at least one round was made")
    return last


def _replays(
    searched: Searched,
    compiled: Compiled,
    found: Schedule,
    traffic: npt.NDArray[np.float64],
    band: npt.NDArray[np.int64],
    seed: int,
) -> list[HourReplay]:
    """The fleets in use for most hours of each band, each with the most traffic that the band gives it."""
    fleet_of = np.array(found.fleet_of)
    rows = []
    for k in np.unique(band).tolist():
        fleets, counts = np.unique(fleet_of[(band == k) & (traffic > 0.0)], return_counts=True)
        for place in np.argsort(-counts, kind="stable")[:FLEETS_PER_BAND].tolist():
            fleet = int(fleets[place])
            most = float(traffic[(band == k) & (fleet_of == fleet)].max())
            proven = searched.solution.assignment
            if most >= 1.0 and proven is not None and proven.units == found.fleets[fleet].units:
                seen = searched.replays[0]  # the peak's fleet at the peak
            else:
                seen = _replayed(compiled, found.fleets[fleet], most, seed)
            rows.append(HourReplay(fleet=fleet, num_hours=int(counts[place]), share_of_peak=most, replay=seen))
    return rows


def _replayed(compiled: Compiled, fleet: FleetAllocation, share: float, seed: int) -> Replay:
    """All runs, unless a few show already that an SLO is violated."""
    at = replace(compiled, problem=scaled(compiled.problem, share))
    screened = replay_scenario(at, fleet, 0, range(seed, seed + NUM_SCREENED))
    if any(kept.falls_short for kept in screened.kept):
        return screened
    return replay_scenario(at, fleet, 0, range(seed, seed + NUM_RUNS))
