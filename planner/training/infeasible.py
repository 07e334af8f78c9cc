"""No plan exists: what binds, what comes nearest, and the least change that would lift it.

The limits are relaxed one at a time and the question asked again; the first number of devices that would do is found by
doubling and bisection. Every statement is the result of a search, not a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from meshplan.catalogs.units import (
    SECONDS_PER_HOUR,
    Dimension,
    format_bytes,
    format_duration,
    format_usd,
    parse_quantity,
)
from meshplan.planner.core.solution import tried
from meshplan.planner.goodput.run import RunSetting, Stretches
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.plan import config_document
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import (
    OFFLOADED_LAYERS,
    OFFLOADS,
    TrainingLimits,
    TrainingObjective,
    TrainingProblem,
)
from meshplan.planner.training.problem.switches import GRADIENT_BYTES
from meshplan.planner.training.search.degrees import DegreeSearch, search_degrees
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.report import LIMITS, ScoredConfig, SearchReport

# More than this many times the cluster is no longer advice, but for a small one.
MOST_TIMES = 16
MOST_OF_FEW = 64
# Amounts from a thousand dollars on are shown in whole dollars.
CENTS_SHOWN_BELOW = 100_000
# Names of constraints that no field of the limits has.
NETWORK = "network"
DEVICE_MEMORY = "device memory"
RUN_TIME = "max_run_time"
INTERRUPTIONS = "interruptions"
# A thousandth of the interruptions that were asked about is no longer advice.
MOST_HALVINGS = 10
# How NVIDIA's own presets keep them (Megatron-Bridge, scripts/performance: grad_reduce_in_fp32 is false in all).
SMALL_GRADIENTS = "bf16"
# Rounding of sums in double precision: 2.5 USD must not become 2.51.
ROUNDING = 1e-12


def explain_infeasible(problem: TrainingProblem, report: SearchReport) -> dict[str, Any]:
    """The part of an infeasible plan's ``solution`` that tells what to do.

    Returns:
        ``binding_constraint``, ``nearest_miss`` (limit, excess in words, config), ``least_change`` (a list of changes,
        each of which alone makes the question feasible; empty where none of the tried ones does) and ``tried`` (all
        that was tried, in words).
    """
    changes, words = tried(_attempts(problem, _last_limit(report)))
    return {
        "binding_constraint": _binding(problem, report, [change["constraint"] for change in changes]),
        "nearest_miss": _nearest(report),
        "least_change": changes,
        "tried": words,
    }


def _attempts(
    problem: TrainingProblem, last_limit: str | None
) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    """What is tried, each by itself: a limit lifted, a pin dropped, a network, more devices, states off the devices;
    smaller gradients where the devices' memory is the limit that refused the last, another framework where no limit is.
    """
    if problem.run is not None and _never_ends(problem):
        yield "fewer interruptions", partial(_with_fewer_interruptions, problem, problem.run.setting)
    for name, (lift, _) in _LIFTED.items():
        if lift(problem.limits) != problem.limits:
            yield f"{name} lifted", partial(_without, problem, name)
    for name in problem.fixed:
        yield f"fixed.{name} dropped", partial(_without_pin, problem, name)
    if not problem.machine.is_joined and problem.machine.num_devices > problem.machine.domain_size:
        yield "a network between the nodes", partial(_with_network, problem)
    if last_limit is None:
        others = [rules for rules in FRAMEWORKS.values() if rules not in (problem.rules, ANY_FRAMEWORK)]
        yield f"targets {', '.join(rules.name for rules in others)}", partial(_with_another_framework, problem, others)
    if problem.machine.is_joined and not _beyond_any_budget(problem):
        yield f"up to {_most_devices(problem)} devices", partial(_devices_needed, problem)
    if last_limit == DEVICE_MEMORY and _may_shrink_gradients(problem):
        yield "gradients in 16 bits", partial(_with_small_gradients, problem)
    if _may_offload(problem):
        yield "states in host memory", partial(_with_offload, problem)


def _last_limit(report: SearchReport) -> str | None:
    """The limit that refused the candidates which had passed all limits before it."""
    return next((name for name in reversed(LIMITS) if name in report.nearest_miss), None)


def _binding(problem: TrainingProblem, report: SearchReport, helping: Sequence[str]) -> str:
    """What stands in the way: a limit that helps when lifted, a network that would help, or what refused the last."""
    limits = problem.limits
    if problem.run is not None and _never_ends(problem):
        setting = problem.run.setting
        node_s = 1.0 / setting.rate.per_s(1.0)
        return (
            f"{INTERRUPTIONS}: a run on any number of devices is interrupted before it gets on: each node every "
            f"{format_duration(node_s)} in the mean, {format_duration(setting.restart_s)} until it trains again"
        )
    for name in _LIFTED:
        name_said = RUN_TIME if name == "max_step_time" and limits.max_run_s is not None else name
        if name_said in helping:
            return _limit_text(limits, name_said)
    if NETWORK in helping:
        return f"network: {problem.machine.no_network}"
    last = _last_limit(report)
    if last is None:
        if report.refused:
            message, count = report.refused.most_common(1)[0]
            return f"legality: {message} ({count} candidates)"
        return f"no legal combination of degrees within {problem.most_devices} devices"
    return {
        "device memory": f"device memory: {format_bytes(limits.memory_bytes)} usable on each "
        f"{problem.machine.device.name}",
        "host memory": _limit_text(limits, "host_memory"),
        "step time": _limit_text(limits, RUN_TIME if limits.max_run_s is not None else "max_step_time"),
        "time of the run": _limit_text(limits, RUN_TIME),
        "cost of the run": _limit_text(limits, "max_usd_per_run"),
    }[last]


def _limit_text(limits: TrainingLimits, name: str) -> str:
    """A limit by its name in :data:`_LIFTED` or :data:`RUN_TIME`, in the terms and units in which it was given."""
    if name == RUN_TIME:
        longest = format_duration(limits.max_run_s or 0.0)
        return f"{name}: at most {longest}, interruptions included ({format_duration(limits.max_step_s or 0.0)} a step)"
    return {
        "host_memory": f"host memory: {format_bytes(limits.host_memory_bytes or 0.0)} on each host",
        "max_usd_per_hour": f"{name}: at most {format_usd(limits.max_usd_per_hour or 0.0)} an hour",
        "max_usd_per_run": f"{name}: at most {format_usd(limits.max_usd_per_run or 0.0)} for the run",
        "max_step_time": f"{name}: at most {format_duration(limits.max_step_s or 0.0)} a step",
    }[name]


def _nearest(report: SearchReport) -> dict[str, Any] | None:
    name = _last_limit(report)
    if name is None:
        return None
    excess, config = report.nearest_miss[name]
    say: dict[str, Callable[[float], str]] = {
        "device memory": format_bytes,
        "host memory": format_bytes,
        "step time": format_duration,
        "time of the run": format_duration,
        "cost of the run": format_usd,
    }
    return {
        "limit": name,
        "excess": excess,
        "excess_text": f"{say[name](excess)} too much",
        "config": config_document(config),
    }


# Limits that are lifted one at a time: a copy of the limits without it, and the objective that needs least of it
# (None: the question's own, because nothing minimises host memory).
_LIFTED: dict[str, tuple[Callable[[TrainingLimits], TrainingLimits], TrainingObjective | None]] = {
    "host_memory": (lambda limits: replace(limits, host_memory_bytes=None), None),
    "max_usd_per_hour": (lambda limits: replace(limits, max_usd_per_hour=None), TrainingObjective.NUM_DEVICES),
    "max_usd_per_run": (lambda limits: replace(limits, max_usd_per_run=None), TrainingObjective.USD_PER_RUN),
    "max_step_time": (lambda limits: replace(limits, max_step_s=None, max_run_s=None), TrainingObjective.THROUGHPUT),
}


def _try(problem: TrainingProblem) -> ScoredConfig | None:
    # A change is offered once a usual split of the layers stays within it; finer splits are the plan's own business.
    solution, _ = search_degrees(problem, keep=1, usual_splits=True)
    return solution.assignment


def has_plan(problem: TrainingProblem) -> bool:
    """Whether any usual split of the layers stays within the limits, whatever the objective is.

    Under a limit on time the fastest are looked for: what cannot keep it is then ruled out by its bound, not priced.
    """
    longest_s = problem.limits.max_step_s
    if problem.run is not None:  # f counts interruptions, as the limit on the run does
        run_s, steps = problem.limits.max_run_s, problem.num_steps
        longest_s = None if run_s is None or steps is None else run_s / steps
    if longest_s is None:
        return DegreeSearch(problem, keep=1, usual_splits=True).has_plan()
    fastest = replace(problem, objective=TrainingObjective.THROUGHPUT)
    return DegreeSearch(fastest, keep=1, usual_splits=True, cutoff=longest_s).has_plan()


def _without(problem: TrainingProblem, name: str) -> dict[str, Any] | None:
    """The least that a limit would have to allow; None where lifting it alone does not help."""
    lift, objective = _LIFTED[name]
    found = _try(replace(problem, limits=lift(problem.limits), objective=objective or problem.objective))
    if found is None:
        return None
    usd_per_s = (problem.machine.usd_per_hour_per_device or 0.0) * found.config.world_size / SECONDS_PER_HOUR
    devices = np.asarray(float(found.config.world_size))
    run_s = found.step_s * (problem.num_steps or 0.0) * float(problem.stretch(devices))
    run_usd = float(problem.run_usd(np.asarray(found.step_s), devices))
    constraint = RUN_TIME if name == "max_step_time" and problem.limits.max_run_s is not None else name
    if name == "host_memory":
        return {"constraint": name, "change": "more host memory"}
    value, written, of = {
        "max_usd_per_hour": (usd_per_s * SECONDS_PER_HOUR, _usd_at_least, "an hour"),
        "max_usd_per_run": (run_usd, _usd_at_least, "for the run"),
        "max_step_time": (found.step_s, _duration_at_least, "a step"),
        RUN_TIME: (run_s, _duration_at_least, "for the run"),
    }[constraint]
    # A run that interruptions keep from getting anywhere never ends: no limit on it is wide enough.
    return {"constraint": constraint, "change": f"{written(value)} {of}"} if math.isfinite(value) else None


def _never_ends(problem: TrainingProblem) -> bool:
    """Interruptions leave no time to train, on however many of the devices."""
    counts = np.arange(1.0, problem.most_devices + 1.0)
    return not bool(np.isfinite(problem.stretch(counts)).any())


def _with_fewer_interruptions(problem: TrainingProblem, setting: RunSetting) -> dict[str, Any] | None:
    """A rate of interruptions, halved until a plan remains."""
    for halvings in range(1, MOST_HALVINGS + 1):
        rate = float(f"{setting.rate.per_node_day / 2.0**halvings:.2g}")  # what is printed must be enough
        rarer = replace(problem, run=Stretches(replace(setting, rate=replace(setting.rate, per_node_day=rate))))
        if not _never_ends(rarer):
            if not has_plan(rarer):
                return None
            return {"constraint": INTERRUPTIONS, "change": f"run.failures_per_node_day: {rate:g}"}
    return None


def _without_pin(problem: TrainingProblem, name: str) -> dict[str, Any] | None:
    """A pin that stands in the way by itself."""
    rest = {key: value for key, value in problem.fixed.items() if key != name}
    if not has_plan(problem.with_fixed(rest)):
        return None
    return {"constraint": f"fixed.{name}", "change": f"without fixed.{name}: {problem.fixed[name]}"}


def _may_shrink_gradients(problem: TrainingProblem) -> bool:
    """The framework keeps gradients wider than it could, and the question does not say how."""
    return (
        problem.calibration.recipe.gradient_bytes > GRADIENT_BYTES[SMALL_GRADIENTS]
        and "gradient_precision" not in problem.fixed
    )


def _with_small_gradients(problem: TrainingProblem) -> dict[str, Any] | None:
    """Gradients of half the size, where the framework's rules allow them and they are enough."""
    shrunk = problem.with_fixed({**problem.fixed, "gradient_precision": SMALL_GRADIENTS})
    if not has_plan(shrunk):
        return None
    change = f"fixed.gradient_precision: {SMALL_GRADIENTS} (sums of gradients lose digits)"
    return {"constraint": "gradient_precision", "change": change}


def _may_offload(problem: TrainingProblem) -> bool:
    """The question does not say what may leave the devices."""
    return not problem.limits.offload and not any(
        choice in problem.fixed for choice in (*OFFLOADS.values(), OFFLOADED_LAYERS)
    )


def _with_another_framework(problem: TrainingProblem, others: Sequence[FrameworkRules]) -> dict[str, Any] | None:
    """The first framework that takes the question, by the memory of the one that does not."""
    found = next((rules for rules in others if has_plan(replace(problem, rules=rules))), None)
    change = None if found is None else f"constraints.target: {found.name}"
    return None if change is None else {"constraint": f"constraints.target: {problem.rules.name}", "change": change}


def _with_offload(problem: TrainingProblem) -> dict[str, Any] | None:
    """The least that must leave the devices, where it is enough; how much the host must hold, where nobody said."""
    is_known = problem.machine.host_memory_bytes is not None or problem.limits.host_memory_bytes is not None
    if not has_plan(replace(problem, limits=replace(problem.limits, offload=tuple(OFFLOADS)))):
        return None  # what may leave need not: fewer are not enough either
    for count in range(1, len(OFFLOADS) + 1):
        asked = replace(problem, limits=replace(problem.limits, offload=tuple(OFFLOADS)[:count]))
        search = DegreeSearch(asked, keep=1, usual_splits=True)
        if search.has_plan():
            config = search.best[0].config
            change = f"constraints.offload: [{', '.join(config.offloaded)}] (not validated)"
            if not is_known:
                ranks = min(problem.machine.devices_per_host, config.world_size)
                host_bytes = ranks * max(stage.host_bytes for stage in price(asked, config).stages)
                change += f", which takes {format_bytes(host_bytes)} of each host: give cluster.host_memory"
            return {"constraint": "offload", "change": change}
    return None


def _usd_at_least(value: float) -> str:
    """An amount as text, rounded up: what is printed must be enough."""
    cents = math.ceil(value * 100.0 * (1.0 - ROUNDING))
    return format_usd(cents / 100.0 if cents < CENTS_SHOWN_BELOW else math.ceil(cents / 100.0))


def _duration_at_least(value: float) -> str:
    """A time as text, rounded up; a spec reads it as it stands, so thousands are not set apart."""
    text, longer = _spec_duration(value), value
    while parse_quantity(text, Dimension.S) < value:
        longer *= 1.001
        text = _spec_duration(longer)
    return text


def _spec_duration(value: float) -> str:
    return format_duration(value).replace(",", "")


def _with_network(problem: TrainingProblem) -> dict[str, Any] | None:
    """A network between the nodes, where there is none and one as fast as the links inside a node would do."""
    machine = problem.machine
    found = _try(replace(problem, machine=replace(machine, scale_out_bytes_per_s=machine.scale_up_bytes_per_s)))
    if found is None:
        return None
    nodes = -(-found.config.world_size // machine.domain_size)
    return {"constraint": NETWORK, "change": f"cluster.links.inter_node, for a plan over {nodes} nodes"}


def _beyond_any_budget(problem: TrainingProblem) -> bool:
    """The run costs more than it may on any number of devices: its least work alone does."""
    budget, alone = problem.limits.max_usd_per_run, np.ones(1)
    uninterrupted = replace(problem, run=None)
    least_usd = uninterrupted.run_usd(np.asarray([Objective(uninterrupted).work_s]), alone)
    return budget is not None and float(least_usd[0]) > budget


def _most_devices(problem: TrainingProblem) -> int:
    """The largest cluster that is tried."""
    return max(MOST_TIMES * problem.limits.max_devices, MOST_OF_FEW)


def _devices_needed(problem: TrainingProblem) -> dict[str, Any] | None:
    """The fewest whole domains of the same devices with which the question has an answer."""
    step = problem.machine.domain_size

    def feasible(domains: int) -> bool:
        devices = domains * step
        if devices == problem.machine.num_devices == problem.limits.max_devices:
            return False  # the question itself, which has had its answer
        limits = replace(problem.limits, max_devices=devices)
        asked = replace(problem, limits=limits, machine=replace(problem.machine, num_devices=devices))
        return has_plan(asked)

    start = max(problem.limits.max_devices // step, 1)
    high = start
    while not feasible(high):
        high *= 2
        if high * step > _most_devices(problem):
            return None
    low = max(high // 2, start - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    if high * step <= problem.limits.max_devices:
        return None
    return {
        "constraint": "max_devices",
        "change": f"{high * step} devices of this type instead of {problem.limits.max_devices}",
    }
