"""No deployment keeps every promise: which promise binds, what comes nearest, and the least change that would do.

Promises and limits are relaxed one at a time and the question asked again; every statement is the result of a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshplan.planner.serving.advice import what_if_rows
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Objective
from meshplan.planner.serving.search.branch import Simulated
from meshplan.planner.serving.search.candidates import config_label
from meshplan.planner.serving.search.search import ServingReport, search_serving

# Factors by which a promise is eased until a plan is found, and by which the devices are multiplied.
EASED = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
MORE_DEVICES = (2, 4, 8, 16)


def explain_infeasible(problem: ServingProblem, report: ServingReport, *, seed: int = 0) -> dict[str, Any]:
    """The part of an infeasible plan's ``solution`` that tells what to do.

    Returns:
        ``binding_constraint``, ``nearest_miss`` (in words, with the configuration), ``least_change`` (changes, each of
        which alone makes the question feasible) and ``what_if`` (shapes that no supported engine runs).
    """
    changes = [*_eased_promises(problem, seed), *_more_devices(problem, seed), *_lifted_limits(problem, seed)]
    changes = changes or [*_all_eased(problem, seed)]
    return {
        "binding_constraint": changes[0]["constraint"] if changes else _most_frequent(report),
        "nearest_miss": _nearest(report),
        "least_change": changes,
        "what_if": what_if_rows(problem),
    }


def _eased_promises(problem: ServingProblem, seed: int) -> Iterator[dict[str, Any]]:
    """For each promise the smallest of the tried factors that makes a plan possible."""
    for promise in problem.promises:
        for factor in EASED:
            eased = replace(promise, limit_s=factor * promise.limit_s)
            found = _best(replace(problem, promises=_with(problem.promises, promise, eased)), seed)
            if found is None:
                continue
            value = found.judged.metrics.value(promise)
            yield {
                "constraint": f"{promise.key}: promised {promise.limit_s:g} s",
                "change": f"{promise.key}: {_rounded_up(value):g}",
                "reached": value,
                "label": config_label(found.candidate.config),
            }
            break


def _all_eased(problem: ServingProblem, seed: int) -> Iterator[dict[str, Any]]:
    """The smallest of the tried factors on all promises at once, where no single change does."""
    for factor in EASED:
        eased = tuple(replace(promise, limit_s=factor * promise.limit_s) for promise in problem.promises)
        found = _best(replace(problem, promises=eased), seed)
        if found is None:
            continue
        reached = {promise.key: found.judged.metrics.value(promise) for promise in problem.promises}
        broken = [promise for promise in problem.promises if reached[promise.key] > promise.limit_s]
        yield {
            "constraint": " and ".join(f"{promise.key}: promised {promise.limit_s:g} s" for promise in broken),
            "change": " and ".join(f"{promise.key}: {_rounded_up(reached[promise.key]):g}" for promise in broken),
            "label": config_label(found.candidate.config),
        }
        return


def _more_devices(problem: ServingProblem, seed: int) -> Iterator[dict[str, Any]]:
    for factor in MORE_DEVICES:
        machines = {
            name: replace(machine, num_devices=factor * machine.num_devices)
            for name, machine in problem.machines.items()
        }
        found = _best(replace(problem, machines=machines), seed)
        if found is not None:
            have = sum(machine.num_devices for machine in problem.machines.values())
            yield {
                "constraint": f"devices: {have}",
                "change": f"{found.candidate.config.num_devices} devices instead of {have}",
                "label": config_label(found.candidate.config),
            }
            return


def _lifted_limits(problem: ServingProblem, seed: int) -> Iterator[dict[str, Any]]:
    limits = problem.limits
    money, power = replace(limits, max_usd_per_hour=None), replace(limits, max_power_w=None)
    for name, limit, unit, lifted in (
        ("max_usd_per_hour", limits.max_usd_per_hour, "USD/h", money),
        ("max_power_w", limits.max_power_w, "W", power),
    ):
        found = None if limit is None else _best(replace(problem, limits=lifted), seed)
        if found is not None:
            used = found.candidate.usd_per_hour if lifted is money else found.candidate.power_w
            yield {
                "constraint": f"{name}: {limit:g} {unit}",
                "change": f"{name}: {_rounded_up(used or 0.0):g}",
                "label": config_label(found.candidate.config),
            }


def _best(problem: ServingProblem, seed: int) -> Simulated | None:
    solution, _ = search_serving(problem, seed=seed)
    return solution.assignment


def _with(promises: tuple[Objective, ...], old: Objective, new: Objective) -> tuple[Objective, ...]:
    return tuple(new if promise is old else promise for promise in promises)


def _nearest(report: ServingReport) -> Mapping[str, Any] | None:
    """The simulated deployment whose worst promise is broken by the smallest factor."""
    missed = [simulated for simulated in report.simulated if simulated.judged.broken]
    if not missed:
        return None

    def excess(simulated: Simulated) -> float:
        return max(value / promise.limit_s for promise, value in simulated.judged.broken)

    nearest = min(missed, key=excess)
    promise, value = max(nearest.judged.broken, key=lambda item: item[1] / item[0].limit_s)
    return {
        "label": config_label(nearest.candidate.config),
        "limit": promise.key,
        "excess_text": f"{value:.3g} s, promised {promise.limit_s:g} s",
    }


def _most_frequent(report: ServingReport) -> str:
    if not report.rejected:
        return "no legal layout within the devices"
    reason, count = report.rejected.most_common(1)[0]
    return f"{reason} ({count} workers)"


def _rounded_up(value: float) -> float:
    """Three significant digits, never below ``value``."""
    text = float(f"{value:.2e}")
    return text if text >= value else float(f"{value * 1.005:.2e}")
