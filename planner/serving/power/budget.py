"""Copies of a deployment under a power budget: how many fit, at what risk, and what the safety net costs.

Inference draws far less than boards are rated for, and different servers seldom peak together, so that a row of racks
can hold more of them than its rated power says, with power limits of the boards as the safety net (POLCA,
arXiv:2308.12908). One copy is simulated under its own load (:mod:`.draw`); copies are independent of each other, each
with a load of its own that comes as the workload says (:mod:`.copies`). A load that rises for all of them at once, by
day say, must be stated as the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.text import counted
from meshplan.planner.serving.estimator.power.cap import CAPPED_VENDOR, LEAST_CAP_SHARE
from meshplan.planner.serving.power.copies import (
    LEAST_RISK,
    PowerHistogram,
    copies_within,
    exceedance,
    most_copies,
)
from meshplan.planner.serving.power.draw import FEWEST_WINDOWS, WINDOW_S, Draw, draw_over_time, limit_w, summary
from meshplan.planner.serving.problem.config import Pool, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.deployment import server
from meshplan.planner.serving.search.trials import WARM_UP, latencies
from meshplan.planner.serving.simulation.arrivals import make_requests
from meshplan.planner.serving.simulation.metrics import samples_of
from meshplan.planner.serving.simulation.run import ServingRun

DEFAULT_RISK = 0.001
# Simulated time: an hour, in which a risk of 1 in 1,000 windows is some four of them; fewer where that takes more
# requests than MOST_REQUESTS, which are some seconds of simulation.
SIMULATED_S, MOST_REQUESTS = 3600.0, 100_000
# Most windows that are looked at, the first: eleven days, where a trace lasts longer or requests are rare.
MOST_WINDOWS = 1_000_000
# What the price of a power limit is told by.
SHOWN = (Slo(metric="ttft", percentile="p99", limit_s=math.inf), Slo(metric="tpot", percentile="p95", limit_s=math.inf))
NOT_COUNTED = (
    "Copies are independent: a load that rises for all at once is not counted; state the highest rate as the workload.",
    "The interval of watts is that of averages over whole runs; single windows were compared with no measurement.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerBudget:
    """What a rack, a row or a site may draw.

    Args:
        budget_w: power of all copies together, W.
        risk: share of the windows in which they may exceed it.
        host_w: what a host draws beside its boards, W, at all times; None: nothing is known of it, and nothing counted.
    """

    budget_w: float
    risk: float = DEFAULT_RISK
    host_w: float | None = None

    def __post_init__(self) -> None:
        if not LEAST_RISK <= self.risk < 1.0:
            message = f"is a share of the windows from {LEAST_RISK:g} to less than 1, not {self.risk:g}: 0.001 is usual"
            raise SpecError.at("power risk", message, of="the question")
        if not 0.0 < self.budget_w < math.inf:
            raise SpecError.at("power budget", f"is above 0 W, not {self.budget_w:g} W", of="the question")


def under_budget(
    problem: ServingProblem,
    config: ServingConfig,
    budget: PowerBudget,
    *,
    requests_per_s: float,
    num_hosts: int,
    seed: int = 0,
) -> dict[str, Any]:
    """What one copy draws, how many fit, and what the power limit costs that keeps them below the budget.

    Args:
        problem: the question that the plan answered.
        config: the plan's deployment.
        budget: what the copies may draw.
        requests_per_s: rate that the plan predicts, by which the length of the simulation is chosen.
        num_hosts: hosts of one copy.
        seed: for drawing the requests.

    Raises:
        SpecError: nothing is known of the boards' power, the load is a batch or states no rate, or no copy fits.
    """
    _check(problem, config)
    copy = _Copy(
        problem=replace(problem, workload=_long_enough(problem.workload, requests_per_s)),
        hosts_w=num_hosts * (budget.host_w or 0.0),
        seed=seed,
    )
    run, draw = copy.simulated(config)
    rated_w = copy.hosts_w + sum(pool.num_ranks * limit_w(problem, pool) for pool in config.pools)
    rows = _counts(copy.with_hosts(draw), budget, rated_w)
    nets = {count: copy.safety_net(config, budget, count, rated_w) for count in {row["copies"] for row in rows}}
    return {
        "power_budget_w": budget.budget_w,
        "risk": budget.risk,
        "window_s": WINDOW_S,
        "one_copy": {
            "num_devices": config.num_devices,
            "num_hosts": num_hosts,
            "host_w": budget.host_w,
            "rated_w": rated_w,
            "expected": summary(draw.expected_w + copy.hosts_w),
            "upper": summary(draw.upper_w + copy.hosts_w),
            "error_p90": problem.power.error_p90.get("power"),
            "num_windows": len(draw.expected_w),
            **copy.latencies_of(run),
        },
        "copies": [{**row, **nets[row["copies"]]} for row in rows],
        "not_counted": [*NOT_COUNTED, *_hosts_not_counted(problem, config, budget, num_hosts)],
    }


def _hosts_not_counted(
    problem: ServingProblem, config: ServingConfig, budget: PowerBudget, num_hosts: int
) -> Iterator[str]:
    """What is left out of the power of hosts and of devices that no copy uses."""
    hosts = counted(num_hosts, "host")
    if budget.host_w is None:
        yield (
            f"The catalog knows no power of hosts: processors, memory, fans and network of the {hosts} of a copy are "
            "left out unless stated (--host-power)."
        )
    each = problem.machines[config.pools[0].node_type].devices_per_host
    if config.num_devices < num_hosts * each:
        yield (
            f"A copy uses {config.num_devices} of the {num_hosts * each} devices of its {hosts}: the others are taken "
            "to draw nothing, and a host that copies share counts once for each."
        )


def _check(problem: ServingProblem, config: ServingConfig) -> None:
    """Refuse what no draw over time is known of."""
    unknown = [pool.node_type for pool in config.pools if math.isnan(limit_w(problem, pool))]
    if unknown:
        device = problem.machines[unknown[0]].device
        message = f"the catalog knows no power limit of {device.slug}: state its tdp_w (meshplan catalog import FILE)"
        raise SpecError.at("power budget", message, of="the question")
    if any(pool.share is not None or pool.ffn is not None for pool in config.pools):
        message = (
            "the draw over time is that of whole devices that compute all layers; this plan shares devices (MIG, MPS) "
            "or has FFN devices: plan without them"
        )
        raise SpecError.at("power budget", message, of="the question")
    workload = problem.workload
    ends = workload.arrival in (Arrival.ALL_AT_ONCE, Arrival.STATIC_BATCH)
    if ends or problem.has_free_load:
        has = "a batch that ends" if ends else "no rate: it says what the deployment could take"
        message = (
            f"the workload of this plan has {has}, so that no draw over time follows from it: plan with "
            "workload.request_rate_per_s, concurrency or trace"
        )
        raise SpecError.at("power budget", message, of="the question")


def _long_enough(workload: ServingWorkload, requests_per_s: float) -> ServingWorkload:
    """The workload with requests for :data:`SIMULATED_S`; a trace is as long as it is."""
    if workload.trace is not None:
        return workload
    wanted = math.ceil(SIMULATED_S * requests_per_s / (1.0 - WARM_UP))
    return replace(workload, num_requests=max(min(wanted, MOST_REQUESTS), workload.num_requests or 1))


def _counts(draw: Draw, budget: PowerBudget, rated_w: float) -> list[dict[str, Any]]:
    """Copies that fit, by what they are counted with.

    Raises:
        SpecError: not even one fits, or too many to count.
    """
    expected, upper = PowerHistogram.of(draw.expected_w), PowerHistogram.of(draw.upper_w)
    total_w, risk = budget.budget_w, budget.risk
    try:
        fitting = {
            "rated power": copies_within(rated_w, total_w),
            "largest simulated power": copies_within(expected.largest_w, total_w),
            "risk, expected watts": most_copies(expected, total_w, risk),
            "risk, upper end of watts": most_copies(upper, total_w, risk),
        }
    except ValueError as error:
        raise SpecError.at("power budget", str(error), of="the question") from error
    if not any(fitting.values()):
        found = summary(draw.expected_w)
        message = (
            f"{total_w:g} W are less than one copy takes: {rated_w:.0f} W rated, {found['peak_w']:.0f} W at most and "
            f"{found['mean_w']:.0f} W on average in the simulation; give a larger budget, or plan with power_caps_w"
        )
        raise SpecError.at("power budget", message, of="the question")
    return [
        {
            "by": by,
            "copies": copies,
            "rated_w": copies * rated_w,
            "oversubscription": copies * rated_w / total_w,
            "exceedance": exceedance(expected, copies, total_w),
            "exceedance_upper": exceedance(upper, copies, total_w),
        }
        for by, copies in fitting.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One copy of the deployment, which is simulated with and without power limits.

    Args:
        problem: the question, with as many requests as are simulated.
        hosts_w: power of a copy's hosts, W.
        seed: for drawing the requests.
    """

    problem: ServingProblem
    hosts_w: float
    seed: int

    def simulated(self, config: ServingConfig) -> tuple[ServingRun, Draw]:
        """The run after the warm-up, and its draw while requests arrive.

        Raises:
            SpecError: it is too short to show a distribution.
        """
        problem = self.problem
        requests = make_requests(problem.workload, seed=self.seed)
        run = server(problem.site, config, problem.workload)(requests, None)
        first = min(math.ceil(WARM_UP * len(run)), len(run) - 1)
        start, end = float(run.arrival_s[first]), float(run.arrival_s[run.is_served].max(initial=0.0))
        end = min(end, start + MOST_WINDOWS * WINDOW_S)
        draw = draw_over_time(problem, config, run, start_s=start, end_s=end)
        if len(draw.expected_w) < FEWEST_WINDOWS:
            message = (
                f"after the warm-up requests arrive for {max(end - start, 0.0):.0f} s, fewer than the {FEWEST_WINDOWS} "
                f"windows of {WINDOW_S:g} s that show how power varies: give a longer trace"
            )
            raise SpecError.at("power budget", message, of="the question")
        return run.after(first), draw

    def with_hosts(self, draw: Draw) -> Draw:
        """The draw of boards and hosts."""
        return Draw(expected_w=draw.expected_w + self.hosts_w, upper_w=draw.upper_w + self.hosts_w)

    def latencies_of(self, run: ServingRun) -> dict[str, Any]:
        """TTFT p99, TPOT p95 (None where no request has it), and the SLOs that are violated."""
        slos = self.problem.slos
        found = latencies(run, (*SHOWN, *slos))
        has = {slo: math.isfinite(found[slo]) and len(samples_of(run, slo.metric)) > 0 for slo in SHOWN}
        shown = {slo.key: found[slo] if has[slo] else None for slo in SHOWN}
        violated = [f"{slo.key}: {slo.excess_text(found[slo])}" for slo in slos if not slo.is_met(found[slo])]
        return {**shown, "slo_met": not violated, "violated": violated}

    def safety_net(self, config: ServingConfig, budget: PowerBudget, copies: int, rated_w: float) -> dict[str, Any]:
        """The power limit of the boards under which so many copies never exceed the budget, and what it costs.

        ``limits_w`` are the limits, one for each pool; None where none is needed, and where the hosts alone take too
        much. ``without_price`` says why none is priced.
        """
        if not copies or copies * rated_w <= budget.budget_w:
            return {"limits_w": None}
        share = (budget.budget_w / copies - self.hosts_w) / (rated_w - self.hosts_w)
        if share <= 0.0:
            return {"limits_w": None, "without_price": "the hosts alone exceed the budget"}
        capped = replace(config, pools=tuple(self._capped(pool, share) for pool in config.pools))
        limits = [pool.power_cap_w for pool in capped.pools]
        if reasons := self._unpriced(capped.pools):
            return {"limits_w": limits, "without_price": reasons}
        run, _ = self.simulated(capped)
        return {"limits_w": limits, **self.latencies_of(run)}

    def _capped(self, pool: Pool, share: float) -> Pool:
        """The pool with that share of its limit, down to whole watts, so that the sum stays below the budget."""
        watts = share * limit_w(self.problem, pool)
        return replace(pool, power_cap_w=float(math.floor(watts)) or watts)

    def _unpriced(self, pools: Sequence[Pool]) -> str | None:
        """Why the law of clocks under a limit says nothing of these; None where it does."""
        for pool in pools:
            device, limit = self.problem.machines[pool.node_type].device, pool.power_cap_w or 0.0
            least = LEAST_CAP_SHARE * (device.tdp_w or 0.0)
            if device.vendor != CAPPED_VENDOR:
                return f"what a power limit costs on boards of {device.vendor} is not known"
            if limit < least:
                return f"what limits below {least:.0f} W cost, half of the board's own, is not known"
        return None
