"""Prints a plan of any kind in any format, and the commands that come next."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, show_document, show_rows, show_text, terminal_width
from meshplan.cli.reports.parts import certificate_text, paragraph
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

INFEASIBLE = "infeasible"
_LISTED_FILES = 6


class Report(Protocol):
    """What a kind's report module has (:class:`meshplan.planner.core.kinds.Kind`)."""

    def describe(self, spec: Mapping[str, Any]) -> str:
        """The question in short, for lists of plans."""

    def report(self, plan: Plan, *, width: int) -> str:
        """The plan for people."""

    def top_rows(self, plan: Plan) -> Sequence[Row]:
        """Rows of the plan's table, for CSV and Markdown."""

    def top_columns(self, plan: Plan) -> Sequence[Column]:
        """Columns of that table."""

    def next_commands(self, plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
        """Commands that a person would type next; ``where`` is the option that names the database."""


def report_of(kind: str) -> Any:
    """The report module of a kind, a :class:`Report`."""
    return importlib.import_module(KINDS[kind].report)


def _summed_up(plan: Plan, part: str, **options: Any) -> str | None:
    """The first screen or the ticket of a plan; None for kinds whose whole report is short."""
    module = KINDS[plan.kind].summary
    return getattr(importlib.import_module(module), part)(plan, **options) if module else None


def show_plan(plan: Plan, form: Format, *, footer: str = "", full: bool = True) -> None:
    """Print a plan: JSON and YAML hold all of it, CSV the best candidates, Markdown what a ticket needs.

    Args:
        plan: of any kind.
        form: see :class:`~meshplan.cli.render.Format`.
        footer: what stands below the plan in the form for people.
        full: the whole report for people, not the first screen alone.
    """
    view: Report = report_of(plan.kind)
    if form in (Format.JSON, Format.YAML):
        show_document(plan.to_document(), form)
    elif form is Format.TABLE:
        width = terminal_width()
        body = (None if full else _summed_up(plan, "first_screen", width=width)) or view.report(plan, width=width)
        body += certificate_text(plan, width)
        show_text(f"{body}\n{footer}" if footer else body)
    elif form is Format.MARKDOWN and (text := _summed_up(plan, "ticket")):
        show_text(text)
    else:
        show_rows(view.top_rows(plan), tuple(view.top_columns(plan)), form)


def is_infeasible(plan: Plan) -> bool:
    """Whether the question has no answer."""
    return bool(plan.solution["status"] == INFEASIBLE)


def stored_text(
    plan: Plan, *, stored: bool, db: str | None, files: Sequence[Path] = (), out: Path | None = None
) -> str:
    """What was stored and written, and the exact commands that come next."""
    lines = []
    if files:
        names = [str(path.relative_to(out)) if out else str(path) for path in files[:_LISTED_FILES]]
        more = len(files) - len(names)
        lines.append(
            f"wrote {counted(len(files), 'file')} below {out}: {', '.join(names)}{f' and {more} more' if more else ''}"
        )
    if is_infeasible(plan):
        lines.append("not stored: there is no plan to launch or compare")
    elif not stored:
        lines.append(f"plan {plan.plan_id} (not stored)")
    else:
        lines += [
            f"plan {plan.plan_id} is stored; next:",
            f"  meshplan plans show {plan.plan_id}{_database_option(db)}",
            *(f"  {line}" for line in next_commands(plan, db, bool(files))),
        ]
    return "".join(paragraph(line, TABLE_WIDTH) if line.startswith("wrote") else f"{line}\n" for line in lines)


def next_commands(plan: Plan, db: str | None, emitted: bool) -> Sequence[str]:
    """Commands that a person would type next."""
    view: Report = report_of(plan.kind)
    return view.next_commands(plan, _database_option(db), emitted=emitted)


def _database_option(db: str | None) -> str:
    if not db:
        return ""
    from meshplan.catalogs.database.connection import without_password  # start-up: SQLAlchemy, which a report needs not

    return f" --db {shlex.quote(without_password(db))}"
