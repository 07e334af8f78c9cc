"""A plan of any kind as its page shows it: the parts that all kinds share, around those of the kind's own module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.database.plan_rows import RecordedRun
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.units import format_duration
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.cli.reports.no_plan import miss_text
from meshplan.cli.reports.parts import effort_text
from meshplan.cli.reports.plan import is_infeasible, next_commands
from meshplan.cli.reports.quantities import percent
from meshplan.cli.web.pages.views import charts, evidence, others, serving, training
from meshplan.planner.core.certificate import AGREES, UNFINISHED
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.emit import edge
from meshplan.planner.launch.registry import TARGETS, framework_names
from meshplan.planner.service import plan_target

_MOST_REASONS = 12
# From here on a whole number is written without a decimal point.
_LONG = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How plans of one kind are shown.

    Args:
        question: what was asked, in one line.
        sections: title, equation, sentences, candidates, memory and whatever else the kind has.
    """

    question: Callable[[Plan], str]
    sections: Callable[[Plan], Mapping[str, Any]]


_KINDS: Mapping[str, Kind] = {
    "training": Kind(question=training.question, sections=training.sections),
    "serving": Kind(question=serving.question, sections=serving.sections),
}
_OTHER = Kind(question=others.question, sections=others.sections)
# What a kind may leave out.
_NOTHING: Mapping[str, Any] = {
    "equation": "",
    "sentences": (),
    "candidates": None,
    "memory": (),
    "pareto": None,
    "series": None,
    "tables": (),
    "pictures": (),
    "notes": (),
    "other_choices": (),
}


def answer_view(plan: Plan, runs: Sequence[RecordedRun] = (), *, catalog: Catalog | None = None) -> dict[str, Any]:
    """What the answer's page shows.

    Args:
        plan: with an answer, or without one; then the page says what binds and what would help.
        runs: what was recorded for it.
        catalog: where the commands that write files look devices up; None where there is no plan.
    """
    kind = _KINDS.get(plan.kind, _OTHER)
    shared = {
        "plan_id": plan.plan_id,
        "kind": plan.kind,
        "question": kind.question(plan),
        "solution": solution_view(plan),
        "rejected": rejected_view(plan),
        "spec_yaml": yaml_text(_whole_numbers(plan.spec), allow_unicode=True),
        "num_recorded": len(runs),
    }
    if is_infeasible(plan) and not plan.config and plan.answer is None:
        return {**shared, **_NOTHING, "no_plan": no_plan_view(plan)}
    slo: Mapping[str, float] = plan.spec.get("slo") or {}
    return {
        **shared,
        **_NOTHING,
        **kind.sections(plan),
        "no_plan": None,
        "predicted": [
            {
                **charts.interval(name, {"value": one.value, "low": one.low, "high": one.high}, _limit(slo.get(name))),
                "badge": evidence.badge_of(plan, name),
            }
            for name, one in sorted(plan.predicted.items(), key=lambda item: item[0] not in slo)
        ],
        "time": time_view(plan),
        "sources": [{"what": what, "source": str(source)} for what, source in _sources(plan).items()],
        "targets": targets_view(plan),
        "commands": next_commands(plan, catalog, "", emitted=False)[0] if catalog else (),
        "certificate": certificate_view(plan),
        "what_if": plan.kind in _KINDS and bool(plan.config),
    }


def _whole_numbers(value: Any) -> Any:
    """A spec in which 1000000000000.0 reads 1000000000000: it means the same.

    >>> _whole_numbers({"tokens": 1e12, "limits": [0.05, 3.0]})
    {'tokens': 1000000000000, 'limits': [0.05, 3.0]}
    """
    if isinstance(value, Mapping):
        return {key: _whole_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_numbers(one) for one in value]
    is_long = isinstance(value, float) and math.isfinite(value) and abs(value) >= _LONG and value.is_integer()
    return int(value) if is_long else value


def _limit(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _sources(plan: Plan) -> Mapping[str, Any]:
    sources = plan.provenance.get("sources", {})
    return sources if isinstance(sources, Mapping) else {}


def solution_view(plan: Plan) -> dict[str, Any]:
    """How good the answer is known to be, and what it took to find out."""
    solution = plan.solution
    gap = solution.get("gap")
    words = {
        "optimal": "Proved: no better plan exists within what the model can tell apart.",
        "feasible": "The best plan found; a better one may exist.",
        "infeasible": "No plan keeps every limit.",
    }[str(solution["status"])]
    if solution["status"] == "feasible" and gap is not None:
        words = f"The best plan found; at most {percent(gap)} from the best possible."
    if solution.get("num_candidates") is None and gap is None and solution["status"] == "feasible":
        words = "One configuration, priced; nothing was searched."
    count = solution.get("num_candidates")
    return {
        "status": solution["status"],
        "words": words,
        "gap": None if gap is None else percent(gap),
        "seen": "" if not count else counted(int(count), "candidate"),
        "effort": effort_text(solution),
    }


def rejected_view(plan: Plan) -> list[dict[str, str]]:
    """Why candidates were rejected, the most frequent reason first."""
    rows = sorted((row for row in plan.rejected if row["count"]), key=lambda row: -row["count"])
    return [{"reason": str(row["reason"]), "count": f"{row['count']:,}"} for row in rows[:_MOST_REASONS]]


def no_plan_view(plan: Plan) -> dict[str, Any]:
    """What binds, how near the nearest miss is, and the least change that helps."""
    solution = plan.solution
    return {
        "binding": str(solution.get("binding_constraint", "unknown")),
        "miss": miss_text(solution),
        "changes": [str(change["change"]) for change in solution.get("least_change", ())],
        "tried": [str(attempt) for attempt in solution.get("tried", ())],
    }


def time_view(plan: Plan) -> list[dict[str, Any]]:
    """Where a step's or an iteration's time goes."""
    largest = max((row["share"] for row in plan.breakdown), default=0.0)
    several = len({row.get("pool") for row in plan.breakdown}) > 1
    return [
        {
            "name": f"{row['pool']}: {row['name']}" if several else str(row["name"]),
            "share": percent(row["share"]),
            "width": charts.share(row["share"], largest),
            "seconds": format_duration(row["seconds"]),
            "badge": evidence.badge_of_part(plan, str(row["name"]), str(row["evidence"])),
        }
        for row in plan.breakdown
    ]


def targets_view(plan: Plan) -> list[dict[str, Any]]:
    """For what launcher files can be downloaded; whether a target can express the plan is seen when it is asked."""
    if KINDS[plan.kind].launcher() is None or not (plan.config or plan.answer):
        return []
    serves = plan.kind != "training"
    chosen = str(plan_target(plan) or TARGETS[0].name)
    framework = chosen if chosen in framework_names() else framework_names()[0]
    if plan.kind == "gpu-allocation":
        return [{"name": chosen, "summary": "the fleet's files", "framework": "", "is_first": True}]
    if plan.kind == "diffusion":
        return [{"name": "xdit", "summary": "xDiT's command line", "framework": "", "is_first": True}]
    if plan.kind == "edge":
        return [{"name": chosen, "summary": edge.TARGETS[chosen], "framework": "", "is_first": True}]
    found = [
        {
            "name": target.name,
            "summary": target.summary,
            "framework": framework if target.wraps and not serves else "",
            "is_first": target.name == chosen,
        }
        for target in TARGETS
        if target.serves == serves and (target.wraps or not serves or target.name == chosen)
    ]
    if "stages" in plan.config:  # several node types: one framework has degrees for each stage
        words = "FlagScale configuration: degrees for each stage"
        found = [{**target, "is_first": False} for target in found]
        found.append({"name": "flagscale", "summary": words, "framework": "", "is_first": True})
    return sorted(found, key=lambda target: not target["is_first"])


def certificate_view(plan: Plan) -> dict[str, Any] | None:
    """What a second, independent way says; None where nobody asked."""
    found = plan.certificate
    if found is None:
        return None
    verdict = {AGREES: "agrees", UNFINISHED: "did not come to an end"}.get(found["outcome"], "disagrees")
    return {"verdict": verdict, "method": found["method"], "covers": found["covers"]}
