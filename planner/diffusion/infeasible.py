"""Why no plan keeps every limit: the limit that binds, the nearest miss, the least change that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.planner.core.plan import plain
from meshplan.planner.core.solution import tried
from meshplan.planner.diffusion.problem.degrees import short_config
from meshplan.planner.diffusion.problem.problem import MAX_UTILIZATION, DiffusionProblem
from meshplan.planner.diffusion.problem.spec import DiffusionObjective
from meshplan.planner.diffusion.search.search import (
    COST,
    DEVICES,
    LATENCY,
    MEMORY,
    MONEY,
    POWER,
    RATE,
    Searched,
    search,
)

# Limits that a user can weaken.
_LIFTED = frozenset({LATENCY, COST, MONEY, POWER, RATE})
# More devices are tried up to these, and up to so many times the question's.
_MOST_DEVICES = 4096
_MOST_TIMES = 16
# A limit that helps is named to four digits; this much beyond, so that the rounded one helps, too.
_ROUNDING = 1e-3


def explain_infeasible(problem: DiffusionProblem, searched: Searched) -> dict[str, Any]:
    """Fields of the solution of a question without a plan."""
    found = searched.found
    if found is None:
        reason, _ = searched.illegal.most_common(1)[0] if searched.illegal else ("no degrees are legal", 0)
        changes, words = tried(_attempts(problem, searched, []))
        return {
            "binding_constraint": reason,
            "nearest_miss": None,
            "least_change": [{"change": change} for change in changes],
            "tried": words,
        }
    order = (MEMORY, DEVICES, RATE, LATENCY, COST, MONEY, POWER)
    excess = {name: _excess(problem, searched, name) for name in order}
    counts = np.sum(np.stack([searched.broken[name] for name in order]), axis=0)
    # the nearest miss breaks the fewest limits, and these by the least share
    by = np.sum(np.stack([np.where(searched.broken[name], excess[name], 0.0) for name in order]), axis=0)
    nearest = int(np.lexsort((by, counts))[0])
    broken = [name for name in order if searched.broken[name][nearest]]
    worst = float(excess[broken[0]][nearest])
    changes, words = tried(_attempts(problem, searched, broken))
    return {
        "binding_constraint": broken_text(problem, searched, broken, nearest),
        "nearest_miss": {
            "config": plain(found.config(nearest)),
            "label": short_config(found.config(nearest)),
            "limit": broken[0],
            "excess": worst,
            "excess_text": f"{worst:.1%} too {'little' if broken[0] == RATE else 'much'}",
        },
        "least_change": [{"change": change} for change in changes],
        "tried": words,
    }


def broken_text(problem: DiffusionProblem, searched: Searched, broken: Sequence[str], index: int) -> str:
    """What the limits ask and what the candidate ``index`` needs, for each of those that it breaks."""
    return "; ".join(_sentence(problem, searched, name, index) for name in broken)


def _values(searched: Searched, name: str) -> Any:
    found = searched.found
    assert found is not None  # noqa: S101 - callers have candidates
    return {
        MEMORY: found.memory.bound_bytes,
        DEVICES: found.devices,
        RATE: found.items_per_s * MAX_UTILIZATION,
        LATENCY: found.latency_s,
        COST: found.usd_per_item,
        MONEY: found.usd_per_hour,
        POWER: found.power_w,
    }[name]


def _limit(problem: DiffusionProblem, name: str) -> float:
    limits = {
        MEMORY: problem.machine.device.usable_memory_bytes,
        DEVICES: problem.max_devices,
        RATE: problem.request_rate_per_s,
        LATENCY: problem.max_latency_s,
        COST: problem.max_usd_per_item,
        MONEY: problem.max_usd_per_hour,
        POWER: problem.max_power_w,
    }
    return float(limits[name] or np.inf)


def _excess(problem: DiffusionProblem, searched: Searched, name: str) -> Any:
    """[n] By which share a limit is broken."""
    values, limit = _values(searched, name), _limit(problem, name)
    if name == DEVICES and searched.found is not None:
        return searched.found.replicas / np.maximum(searched.found.room, 0.5) - 1.0
    return limit / values - 1.0 if name == RATE else values / limit - 1.0


def _sentence(problem: DiffusionProblem, searched: Searched, name: str, index: int) -> str:
    value, limit = float(_values(searched, name)[index]), _limit(problem, name)
    texts = {
        MEMORY: f"memory: a rank needs {format_bytes(value)}, {problem.machine.device.name} has {format_bytes(limit)}",
        DEVICES: f"devices: {value:.0f} are needed, {limit:.0f} may be used{_packed(searched, index)}",
        RATE: f"{RATE}: the pinned replicas, busy {MAX_UTILIZATION:.0%} of the time, carry {value:.4g} "
        f"{problem.item}s/s, {limit:.4g} are asked for",
        LATENCY: f"{LATENCY}: {format_duration(value)} at the nearest, the limit is {format_duration(limit)}",
        COST: f"{COST}: {value:.4g} USD at the nearest, the limit is {limit:.4g} USD",
        MONEY: f"{MONEY}: {value:.4g} USD/h at the nearest, the limit is {limit:.4g} USD/h",
        POWER: f"{POWER}: {value:.0f} W at the nearest, the limit is {limit:.0f} W",
    }
    return texts[name]


def _packed(searched: Searched, index: int) -> str:
    """The replicas that are needed and those that fit the hosts, none of which is split over two."""
    found = searched.found
    if found is None:
        return ""
    replicas, room = int(found.replicas[index]), int(found.room[index])
    return f" ({replicas} replicas of {found.configs[index].replica_devices}; {room} fit the hosts)"


def _attempts(
    problem: DiffusionProblem, searched: Searched, broken: list[str]
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """What is tried: a pin less, more devices, a lower rate, PipeFusion, a weaker limit."""
    for name in problem.pinned:
        yield f"{_key(problem, name)} dropped", partial(_without_pin, problem, name)
    if larger := _larger(problem):
        yield f"up to {larger[-1]} devices", partial(_more_devices, problem, larger)
    if DEVICES in broken and problem.request_rate_per_s is not None:
        yield "a lower rate", partial(_without_limit, problem, searched, RATE)
    if not problem.stale_activations:
        yield "PipeFusion", partial(_with_stale_activations, problem)
    for name in broken:
        if name in _LIFTED:
            yield f"{name} lifted", partial(_without_limit, problem, searched, name)


def _key(problem: DiffusionProblem, name: str) -> str:
    """Where the question pins a choice."""
    return "workload.batch_size" if name == "batch_size" and problem.is_batch_asked else f"fixed.{name}"


def _without_pin(problem: DiffusionProblem, name: str) -> str | None:
    rest = {key: value for key, value in problem.pinned.items() if key != name}
    found = search(replace(problem, pinned=rest)).best
    return None if found is None else f"without {_key(problem, name)}: {problem.pinned[name]}"


def _larger(problem: DiffusionProblem) -> list[int]:
    """Clusters that are tried: each twice the one before, until one reaches sixteen times the question's."""
    sizes, most = [], min(_MOST_DEVICES, _MOST_TIMES * problem.max_devices)
    size = problem.max_devices
    while size < most:
        size *= 2
        sizes.append(size)
    return sizes


def _more_devices(problem: DiffusionProblem, sizes: list[int]) -> str | None:
    """The fewest devices of a plan in the first of these clusters that has one."""
    if problem.request_rate_per_s is not None:  # else replicas fill the cluster
        problem = replace(problem, objective=DiffusionObjective.NUM_DEVICES)
    for size in sizes:
        within = search(_of_size(problem, size))
        if within.best is None or within.found is None:
            continue
        fewest = int(within.found.devices[within.best])
        enough = fewest if search(_of_size(problem, fewest)).best is not None else size
        return f"{enough} devices instead of {problem.max_devices}"
    return None


def _of_size(problem: DiffusionProblem, devices: int) -> DiffusionProblem:
    """The question with so many devices that may be used, in whole hosts."""
    host = problem.machine.devices_per_host
    there = max(-(-devices // host) * host, problem.machine.num_devices)
    return replace(problem, max_devices=devices, machine=replace(problem.machine, num_devices=there))


def _with_stale_activations(problem: DiffusionProblem) -> str | None:
    found = search(replace(problem, stale_activations=True)).best
    return "constraints.stale_activations: true (PipeFusion; pictures change)" if found is not None else None


def _without_limit(problem: DiffusionProblem, searched: Searched, name: str) -> str | None:
    """The limit that a plan would keep which keeps all others.

    Without a rate a limit decides how many replicas run, so its candidates, of one replica, are looked at as they are
    priced under it: without it they would fill the cluster.
    """
    if name == RATE:
        searched = search(replace(problem, request_rate_per_s=None))
    kept = ~np.any(np.stack([mask for limit, mask in searched.broken.items() if limit != name]), axis=0)
    if not kept.any():
        return None
    values = _values(searched, name)[kept]
    reached = float(values.max() if name == RATE else values.min())
    room = 1.0 - _ROUNDING if name == RATE else 1.0 + _ROUNDING
    return f"{name}: {reached * room:.4g} instead of {_limit(problem, name):.4g}"
