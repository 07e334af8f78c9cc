"""No deployment meets every SLO: which constraint binds, what comes nearest, and the smallest change that suffices.

SLOs and limits are relaxed one at a time and the search is repeated, so every statement is the result of a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshplan.planner.serving.advice import what_if_rows
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.branch import Simulated
from meshplan.planner.serving.search.candidates import config_label
from meshplan.planner.serving.search.search import ServingReport, search_serving

# Factors by which an SLO is relaxed until a plan is found, and by which the devices are multiplied.
RELAXED = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
MORE_DEVICES = (2, 4, 8, 16)


def explain_infeasible(problem: ServingProblem, report: ServingReport, *, seed: int = 0) -> dict[str, Any]:
    """The part of an infeasible plan's ``solution`` that says what to change.

    Returns:
        ``binding_constraint``, ``nearest_miss`` (with its configuration), ``least_change`` (changes, each of which
        alone makes the question feasible) and ``what_if`` (deployments that no supported engine runs).
    """
    changes = [*_relaxed_slos(problem, seed), *_more_devices(problem, seed), *_lifted_limits(problem, seed)]
    changes = changes or [*_all_relaxed(problem, seed)]
    return {
        "binding_constraint": changes[0]["constraint"] if changes else _most_frequent(report),
        "nearest_miss": _nearest(report),
        "least_change": changes,
        "what_if": what_if_rows(problem),
    }


def _relaxed_slos(problem: ServingProblem, seed: int) -> Iterator[dict[str, Any]]:
    """For each SLO the smallest of the tried factors that makes a plan possible."""
    for slo in problem.slos:
        for factor in RELAXED:
            relaxed = replace(slo, limit_s=factor * slo.limit_s)
            found = _best(replace(problem, slos=_with(problem.slos, slo, relaxed)), seed)
            if found is None:
                continue
            value = found.judged.shown_s(slo)
            yield {
                "constraint": _limit_text(slo),
                "change": f"{slo.key}: {_rounded_up(value):g}",
                "reached": value,
                "label": config_label(found.candidate.config),
            }
            break


def _all_relaxed(problem: ServingProblem, seed: int) -> Iterator[dict[str, Any]]:
    """The smallest of the tried factors on all SLOs at once, where no single change suffices."""
    for factor in RELAXED:
        relaxed = tuple(replace(slo, limit_s=factor * slo.limit_s) for slo in problem.slos)
        found = _best(replace(problem, slos=relaxed), seed)
        if found is None:
            continue
        reached = {slo.key: found.judged.shown_s(slo) for slo in problem.slos}
        violated = [slo for slo in problem.slos if not slo.is_met(reached[slo.key])]
        yield {
            "constraint": " and ".join(_limit_text(slo) for slo in violated),
            "change": " and ".join(f"{slo.key}: {_rounded_up(reached[slo.key]):g}" for slo in violated),
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


def _with(slos: tuple[Slo, ...], old: Slo, new: Slo) -> tuple[Slo, ...]:
    return tuple(new if slo is old else slo for slo in slos)


def _nearest(report: ServingReport) -> Mapping[str, Any] | None:
    """The simulated deployment whose worst violation exceeds its SLO by the smallest factor."""
    missed = [simulated for simulated in report.simulated if simulated.judged.violated]
    if not missed:
        return None

    def excess(simulated: Simulated) -> float:
        slo, value = simulated.judged.worst_violation
        return value / slo.limit_s

    nearest = min(missed, key=excess)
    slo, value = nearest.judged.worst_violation
    return {
        "label": config_label(nearest.candidate.config),
        "limit": slo.key,
        "excess_text": slo.excess_text(value),
    }


def _limit_text(slo: Slo) -> str:
    return f"{slo.key}: SLO {slo.limit_s:g} s"


def _most_frequent(report: ServingReport) -> str:
    if not report.rejected:
        return "no legal layout within the devices"
    reason, count = report.rejected.most_common(1)[0]
    return f"{reason} ({count} workers)"


def _rounded_up(value: float) -> float:
    """Three significant digits, never below ``value``."""
    text = float(f"{value:.2e}")
    return text if text >= value else float(f"{value * 1.005:.2e}")
