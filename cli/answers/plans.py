"""What the command line and HTTP answer alike: plans, explanations and comparisons as documents.

``--format json`` prints these documents, and the API sends the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, SpecError, StoreError, closest_names, did_you_mean

if TYPE_CHECKING:
    from meshplan.catalogs.database.plan_rows import PlanRow, PlanRows
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.compare import Comparison
    from meshplan.planner.core.plan import Plan

Choices = Mapping[str, int | str | bool]


def listed_plan(row: PlanRow) -> dict[str, Any]:
    """A stored plan in a list: its question and its answer in short, its status, what it is called."""
    from meshplan.cli.reports.plan import report_of

    document: Any = row.document
    try:
        kind, status = report_of(row.kind), str(document["solution"]["status"])
        question, answer = kind.describe(document["spec"]), kind.short_answer(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        question, answer, status = "", "", "damaged: meshplan plans delete"
    return {
        "plan_id": row.plan_id,
        "kind": row.kind,
        "question": question,
        "answer": answer,
        "status": status,
        "tag": row.tag,
        "name": row.name,
        "created_at": row.created_at,
    }


# --- explanations -----------------------------------------------------------------------------------------------------


def explanation_document(made: Plan) -> dict[str, Any]:
    """Why the plan is as it is; of a kind without explanations, the plan itself."""
    from meshplan.cli.reports.plan import report_of
    from meshplan.planner.core.kinds import KINDS

    explain_plan = KINDS[made.kind].offers("explain")
    if explain_plan is None:
        return made.to_document()
    rivals = [dict(row) for row in report_of(made.kind).alternative_rows(made)]
    return {"plan_id": made.plan_id, **explain_plan(made).to_document(), "alternatives": rivals}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """A plan with other choices pinned.

    Args:
        choices: the pinned ones.
        other: the plan that makes them; None where none fits.
        reason: one sentence on the difference.
        comparison: of both plans; None where there is one only.
    """

    choices: Choices
    other: Plan | None
    reason: str
    comparison: Comparison | None

    def to_document(self, made: Plan) -> dict[str, Any]:
        """As ``meshplan explain PLAN --instead … --format json`` prints it."""
        return {
            "plan_id": made.plan_id,
            "instead": dict(self.choices),
            "reason": self.reason,
            "other": None if self.other is None else self.other.to_document(),
            "comparison": None if self.comparison is None else self.comparison.to_document(),
        }


def instead_of(made: Plan, choices: Choices, catalog: Catalog) -> Instead:
    """The best plan that makes other choices, beside the one that was made.

    Raises:
        SpecError: unknown or impossible choices, or the plan has none to change.
    """
    from meshplan.planner.compare import compare_plans
    from meshplan.planner.service import explain_instead

    other, reason = explain_instead(made, choices, catalog)
    comparison = None if other is None else compare_plans([made, other])
    return Instead(choices=choices, other=other, reason=reason, comparison=comparison)


def read_choices(texts: Sequence[str], made: Plan) -> dict[str, int | str | bool]:
    """``["tp=4", "zero_stage=1"]`` as choices under their full names; values are checked with the spec.

    Args:
        texts: as given, each one choice or several with commas between: ``tp=8,pp=1``.
        made: the plan whose choices they change.

    Raises:
        SpecError: a text that is no ``choice=value``, or an unknown choice.
    """
    from meshplan.planner.training.problem.choices import abbreviations_of, full_name

    known = _known_choices(made)
    problems, choices = [], {}
    for text in (one for several in texts for one in _NEXT_CHOICE.split(several)):
        short, separator, value = (part.strip() for part in text.partition("="))
        name = full_name(short, known) if known else short
        if not (separator and short and value):
            problems.append(Problem(path=text, message="must be written CHOICE=VALUE, such as tensor_parallel=4"))
        elif name is None:
            hint = did_you_mean(closest_names(short, [*known, *abbreviations_of(known)]))
            problems.append(Problem(path=short, message=f"unknown choice{hint} (see: meshplan catalog choices)"))
        else:
            choices[name] = _value(value)
    if problems:
        raise SpecError(problems, of="--instead")
    return choices


# A comma that another choice follows: ``recompute_modules=mlp,core_attn`` is one.
_NEXT_CHOICE = re.compile(r",(?=\s*\w+\s*=)")


def _known_choices(made: Plan) -> list[str]:
    """Choices that a spec of the plan's kind may pin; empty where it has none."""
    from meshplan.planner.core.kinds import KINDS

    spec = KINDS[made.kind].offers("SPEC")
    section = None if spec is None else spec.model_fields.get("fixed")
    return [] if section is None else list(section.annotation.model_fields)


def _value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text


# --- comparisons ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Plans side by side, and each against what was measured for it.

    Args:
        comparison: None for one plan alone.
        measured: plan id, time and metrics of every recorded run.
    """

    comparison: Comparison | None
    measured: Sequence[Mapping[str, Any]]

    def to_document(self) -> dict[str, Any]:
        """As ``meshplan compare … --format json`` prints it."""
        return {**({} if self.comparison is None else self.comparison.to_document()), "measured": list(self.measured)}


def compared(plans: Sequence[Plan], rows: PlanRows) -> Compared:
    """Compare plans; the first is the reference.

    Args:
        plans: one or more.
        rows: stored plans with what was recorded for them.

    Raises:
        StoreError: one plan alone, for which nothing was measured.
        SpecError: plans of different kinds.
    """
    from meshplan.cli.reports.comparison import measured_rows
    from meshplan.planner.compare import compare_plans

    stored = {row.plan_id for row in rows.list()}
    runs = {plan.plan_id: rows.runs(plan.plan_id) if plan.plan_id in stored else () for plan in plans}
    if len(plans) == 1 and not runs[plans[0].plan_id]:
        raise StoreError(
            f"nothing was measured for plan {plans[0].plan_id} yet: meshplan plans record {plans[0].plan_id} "
            "measured.json; or name two plans"
        )
    return Compared(
        comparison=compare_plans(plans) if len(plans) > 1 else None,
        measured=[
            {"plan_id": plan.plan_id, "recorded_at": run.recorded_at, "metrics": measured_rows(plan, run.document)}
            for plan in plans
            for run in runs[plan.plan_id]
        ],
    )
