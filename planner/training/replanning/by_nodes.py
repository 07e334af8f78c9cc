"""The best plan by number of nodes, and a run on nodes that come and go.

``run.availability`` names a file of how many nodes there were over time. The plan is then made for all nodes, and for
fewer ones, as many different numbers as :data:`MOST_COUNTS`; :mod:`meshplan.planner.goodput.availability` plays its
policy on the trace with their throughputs. What it gets, as a share of all nodes all the time, stretches the run.

Assumption   the trace goes on as it was; a job that loses nodes loses the work since its last checkpoint on average
             half an interval ago, which is chosen for failures and removals together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.planner.core.plan import Plan
from meshplan.planner.goodput.availability.capacity import Capacity, rates_of
from meshplan.planner.goodput.availability.report import Played, played, played_document
from meshplan.planner.goodput.availability.trace import AvailabilityTrace
from meshplan.planner.goodput.checkpoints import best_interval
from meshplan.planner.goodput.forecast import ending
from meshplan.planner.goodput.report import run_document, run_metrics
from meshplan.planner.goodput.run import RunSetting
from meshplan.planner.training.resolve import Resolved

# Numbers of nodes that are planned for; between two of them the plan for fewer nodes is used.
MOST_COUNTS = 16
HOURS_PER_DAY = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ByNodes:
    """The best plan for a number of nodes.

    Args:
        nodes: available.
        plan: the best one; it may use fewer.
    """

    nodes: int
    plan: Plan


def usable_nodes(resolved: Resolved) -> tuple[int, ...]:
    """Numbers of the nodes that a plan may use, spare ones included."""
    machine = resolved.problem.machine
    if machine.network is not None:
        return tuple(int(node) for node in machine.network.usable)
    return tuple(range(machine.num_devices // machine.domain_size))


def without(spec: Mapping[str, Any], nodes: Sequence[int]) -> dict[str, Any]:
    """The question without some nodes, and without its own trace of availability."""
    cluster = dict(spec["cluster"])
    exclude = dict(cluster.get("exclude") or {})
    cluster["exclude"] = {**exclude, "nodes": sorted({*(exclude.get("nodes") or []), *nodes})}
    return {**steady(spec), "cluster": cluster}


def steady(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The question as if all nodes were there all the time."""
    run = spec.get("run")
    if not isinstance(run, Mapping) or "availability" not in run:  # what is malformed is told when it is read
        return dict(spec)
    return {**spec, "run": {name: value for name, value in run.items() if name != "availability"}}


def counts_of(traces: Sequence[AvailabilityTrace], most: int) -> list[int]:
    """Numbers of nodes to plan for, ascending, at most :data:`MOST_COUNTS` and always all nodes.

    Nodes beyond the largest number planned for stand idle. The numbers are taken one by one, each time the one that
    saves the most idle node-seconds on the traces.
    """
    seconds = np.zeros(most + 1)
    for trace in traces:
        np.add.at(seconds, np.minimum(trace.nodes, most), np.diff(trace.times_s))
    numbers = np.arange(most + 1)
    used = np.where(numbers == most, most, 0)
    found = {most}
    while len(found) < MOST_COUNTS:
        saved = [float((seconds * (np.maximum(used, np.where(numbers >= n, n, 0)) - used)).sum()) for n in numbers]
        best = int(np.argmax(saved))
        if saved[best] <= 0.0:
            break
        found.add(best)
        used = np.maximum(used, np.where(numbers >= best, best, 0))
    return sorted(found)


def plans_by_nodes(
    spec: Mapping[str, Any], usable: Sequence[int], counts: Sequence[int], answer: Callable[[Mapping[str, Any]], Plan]
) -> list[ByNodes]:
    """The best plan for each number of nodes; numbers that no plan fits are left out.

    Args:
        spec: the question on all nodes.
        usable: numbers of the nodes.
        counts: how many of them, the first ones.
        answer: searches a plan for a question.
    """
    found = []
    for count in counts:
        try:
            plan = answer(without(spec, usable[count:]))
        except SpecError:
            # Pins that hold on all nodes need not on fewer.
            continue
        if plan.config:
            found.append(ByNodes(nodes=count, plan=plan))
    return found


def capacity_of(
    rates: Mapping[int, float], most: int, setting: RunSetting, traces: Sequence[AvailabilityTrace], devices: int
) -> tuple[Capacity, float]:
    """What the job makes of its nodes, and the interval between its checkpoints.

    Args:
        rates: nodes → tokens per second.
        most: nodes of the cluster.
        setting: the run's conditions.
        traces: how many nodes there are.
        devices: of the job on all nodes.
    """
    stops, costs = setting.stops(devices), setting.checkpoints(devices)
    removals = sum(int((np.diff(trace.nodes) < 0).sum()) for trace in traces)
    per_s = stops.per_s + removals / sum(trace.length_s for trace in traces)
    interval = setting.interval_s or best_interval(replace(stops, per_s=per_s), costs).interval_s
    lost_s = 0.5 * (interval + costs.block_s) + costs.durable_s
    capacity = Capacity(
        rates=rates_of(dict(rates), most), change_s=setting.restart_s, forced_s=setting.restart_s + lost_s
    )
    return capacity, interval


def under_availability(
    made: Plan,
    spec: Mapping[str, Any],
    resolved: Resolved,
    traces: Sequence[AvailabilityTrace],
    answer: Callable[[Mapping[str, Any]], Plan],
) -> Plan:
    """A plan with the run that it gets on nodes that come and go.

    Args:
        made: the plan on all nodes.
        spec: its question.
        resolved: looked up.
        traces: how many nodes there are.
        answer: searches a plan for a question.

    Raises:
        SpecError: the traces never have as many nodes as any plan needs.
    """
    run, num_steps = resolved.problem.run, resolved.problem.num_steps
    if run is None or num_steps is None:
        raise AssertionError("run.availability is part of run, which needs the number of tokens")
    usable = usable_nodes(resolved)
    most, devices = len(usable), int(made.config["world_size"])
    seen = [trace.at_most(most) for trace in traces]
    counts = [count for count in counts_of(seen, most) if count < most]
    plans = [*plans_by_nodes(spec, usable, counts, answer), ByNodes(nodes=most, plan=made)]
    rates = {one.nodes: one.plan.predicted["tokens_per_s"].value for one in plans}
    capacity, interval = capacity_of(rates, most, run.setting, seen, devices)
    result = played(seen, capacity)
    if result.progress_share <= 0.0:
        message = (
            f"the job needs {min(rates)} of the nodes and makes no progress on a trace of at most "
            f"{max(int(trace.nodes.max()) for trace in seen)}"
        )
        raise SpecError.at("run.availability", message)
    setting = replace(run.setting, slowdown=run.setting.slowdown / result.progress_share, interval_s=interval)
    step = made.predicted["iteration_s"]
    training_s = step.value * num_steps
    end = ending(setting, devices, training_s, spread=step.high / step.value)
    document = run_document(setting, devices, training_s, end, resolved.assumed)
    document["interruptions"] += result.interruptions_per_day * end.mean_s / SECONDS_PER_DAY
    document["checkpoint"]["is_pinned"] = run.setting.interval_s is not None
    return replace(
        made,
        predicted={**made.predicted, **run_metrics(setting, devices, end, _price(result, resolved, devices))},
        run={**document, **by_nodes_document(result, plans)},
    )


def _price(result: Played, resolved: Resolved, devices: int) -> float | None:
    """Dollars per hour for all nodes available on average, per device of the plan; None where no price is known."""
    if result.usd_per_day is not None:
        return result.usd_per_day / HOURS_PER_DAY / devices
    price = resolved.problem.machine.usd_per_hour_per_device
    return None if price is None else price * result.mean_nodes * resolved.problem.machine.domain_size / devices


def by_nodes_document(result: Played, plans: Sequence[ByNodes]) -> dict[str, Any]:
    """What the plan's ``run`` gains: the trace, and the plan by number of nodes."""
    return {
        "availability": played_document(result),
        "by_nodes": [
            {
                "nodes": one.nodes,
                "tokens_per_s": one.plan.predicted["tokens_per_s"].value,
                "time_share": result.time_shares.get(one.nodes, 0.0),
                "config": dict(one.plan.config),
            }
            for one in plans
        ],
    }
