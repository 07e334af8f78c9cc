"""The first screen of an answer: one sentence, the best plans, memory and time as bars, what comes next.

At most :data:`~meshplan.cli.reports.screens.parts.MOST_LINES` lines at 80 columns; the whole report is printed by
``--full`` and ``meshplan plans show``. ``--format markdown`` prints the same as Markdown, for a ticket.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from meshplan.cli.render import TABLE_WIDTH, Column, Format, rendered_rows
from meshplan.cli.reports.quantities import interval_text, metric_text, metric_title
from meshplan.planner.core.plan import Plan

# Kinds that have a first screen: a plan loads the reports of its own kind alone.
_SCREENS: Mapping[str, str] = {
    "training": "meshplan.cli.reports.screens.training",
    "serving": "meshplan.cli.reports.screens.serving",
}


class Screen(Protocol):
    """What such a module has."""

    REPORT: ModuleType  # the kind's report module

    def answer(self, plan: Plan) -> str:
        """The plan and what it will take, in a sentence or two."""

    def screen(self, plan: Plan, width: int) -> str:
        """The first screen for a plan and a width."""


def first_screen(plan: Plan, *, width: int = TABLE_WIDTH) -> str | None:
    """The first screen; None for kinds whose whole report is short, and where no plan was found."""
    return _screen_of(plan.kind).screen(plan, width) if plan.kind in _SCREENS and plan.config else None


def ticket(plan: Plan) -> str | None:
    """The answer in Markdown, to paste into a ticket; None where :func:`first_screen` has nothing either."""
    if plan.kind not in _SCREENS or not plan.config:
        return None
    module = _screen_of(plan.kind)
    report = module.REPORT
    metrics = [
        {
            "metric": metric_title(name),
            "expected": metric_text(name, interval.value),
            "between": interval_text(name, {"low": interval.low, "high": interval.high}),
        }
        for name, interval in plan.predicted.items()
    ]
    columns = tuple(Column(key=key, title=key.capitalize()) for key in ("metric", "expected", "between"))
    sections = [
        f"### {report.question_text(plan.spec)}\n",
        f"{module.answer(plan)}\n",
        f"{report.status_text(plan)}\n",
        rendered_rows(report.top_rows(plan), report.top_columns(plan), Format.MARKDOWN),
        rendered_rows(metrics, columns, Format.MARKDOWN),
        f"Plan `{plan.plan_id}`: `meshplan plans show {plan.plan_id}`\n",
    ]
    return "\n".join(sections)


def _screen_of(kind: str) -> Screen:
    module: Screen = importlib.import_module(_SCREENS[kind])
    return module
