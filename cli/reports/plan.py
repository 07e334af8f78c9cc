"""Prints a plan of any kind in any format, and the commands that come next."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, show_document, show_rows, show_text, terminal_width
from meshplan.cli.reports.parts import certificate_text, paragraph
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

INFEASIBLE = "infeasible"
_LISTED_FILES = 6
_EMIT = "meshplan emit"
_NO_FILES = "No launcher files"


class Report(Protocol):
    """What a kind's report module has (:class:`meshplan.planner.core.kinds.Kind`)."""

    def describe(self, spec: Mapping[str, Any]) -> str:
        """The question in short, for lists of plans."""

    def short_answer(self, document: Mapping[str, Any]) -> str:
        """The answer of a plan's document in short, for lists of plans; empty where it is a table of its own."""

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
    plan: Plan,
    catalog: Catalog,
    *,
    stored: bool,
    db: str | None,
    files: Sequence[Path] = (),
    out: Path | None = None,
    service: str | None = None,
) -> str:
    """What was stored and written, and the exact commands that come next; why none writes files, where that is so.

    Args:
        plan: of any kind.
        catalog: where it is, or would be, stored.
        stored: whether it is stored there.
        db: the option that names that database.
        files: that were written.
        out: the folder of these.
        service: address of the one that has answered, and stored, the question instead.
    """
    lines = []
    if files:
        names = [str(path.relative_to(out)) if out else str(path) for path in files[:_LISTED_FILES]]
        more = len(files) - len(names)
        lines.append(
            f"wrote {counted(len(files), 'file')} below {out}: {', '.join(names)}{f' and {more} more' if more else ''}"
        )
    if is_infeasible(plan):
        lines.append("not stored: there is no plan to launch or compare")
        return "".join(f"{line}\n" for line in lines)
    commands, refusal = next_commands(plan, catalog, database_option(db), emitted=bool(files))
    if refusal:
        lines.append(refusal)
    if service is not None:
        lines.append(f"plan {plan.plan_id} is stored at {service}/plans/{plan.plan_id}")
    elif not stored:
        lines.append(f"plan {plan.plan_id} (not stored)")
    else:
        lines += [
            f"plan {plan.plan_id} is stored; next{secret_first(db)}:",
            f"  meshplan plans show {plan.plan_id}{database_option(db)}",
            *(f"  {line}" for line in commands),
        ]
    is_prose = ("wrote", _NO_FILES)
    return "".join(paragraph(line, TABLE_WIDTH) if line.startswith(is_prose) else f"{line}\n" for line in lines)


def next_commands(plan: Plan, catalog: Catalog, where: str, *, emitted: bool) -> tuple[Sequence[str], str]:
    """Commands that a person would type next, and why none of them writes launcher files where no target does.

    What writes files is tried in memory first: a target that cannot express the plan is not named. Where the plan's
    own cannot, others of its kind that can are.

    Args:
        plan: of any kind, with a configuration.
        catalog: where the device is looked up.
        where: the option that names the database.
        emitted: the files are there already.
    """
    view: Report = report_of(plan.kind)
    found, refusal = [], ""
    for command in view.next_commands(plan, where, emitted=emitted):
        why = _refusal(command, plan, catalog) if command.startswith(_EMIT) else ""
        if why:
            refusal = f"{_NO_FILES}: {why.rstrip('.')}."
            found += [f"{command} --target {name}" for name in _others(plan, catalog)]
        else:
            found.append(command)
    return found, refusal


def _refusal(command: str, plan: Plan, catalog: Catalog) -> str:
    """Why ``meshplan emit`` as it would be typed writes nothing; empty where it does."""
    from meshplan.catalogs.errors import EmitError  # start-up: most commands print no plan
    from meshplan.planner.service import emit_plan, plan_target

    words = command.split()
    target = words[words.index("--target") + 1] if "--target" in words else plan_target(plan)
    try:
        emit_plan(plan, str(target), catalog)
    except EmitError as error:
        return str(error)
    return ""


def _others(plan: Plan, catalog: Catalog) -> list[str]:
    """Targets that write files of a plan whose own target does not: of training plans, whose choices several read."""
    from meshplan.planner.launch.registry import framework_names  # start-up: most commands print no plan

    if plan.kind != "training" or "stages" in plan.config:
        return []
    return [name for name in framework_names() if not _refusal(f"{_EMIT} --target {name}", plan, catalog)]


def database_option(db: str | None) -> str:
    """The option that names the database in a command; empty where it is the usual one, or a secret."""
    if not db:
        return ""
    # start-up: SQLAlchemy, which a report needs not
    from meshplan.catalogs.database.connection import has_password, without_password

    return "" if has_password(db) else f" --db {shlex.quote(without_password(db))}"


def secret_first(db: str | None) -> str:
    """What has to be said before commands that name a database by a URL with a password, which is printed nowhere."""
    from meshplan.catalogs.database.connection import ENVIRONMENT_VARIABLE, has_password  # start-up: as above

    return f", with {ENVIRONMENT_VARIABLE} set to that URL" if db and has_password(db) else ""
