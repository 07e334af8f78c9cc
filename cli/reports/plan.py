"""Prints a plan of any kind in any format, and the commands that come next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshplan.cli.render import TABLE_WIDTH, Column, Format, show_document, show_rows, show_text, terminal_width
from meshplan.cli.reports import gpu_allocation as allocation_report
from meshplan.cli.reports import serving as serving_report
from meshplan.cli.reports.stand_alone import answer_report, answer_rows
from meshplan.cli.reports.training import TOP_COLUMNS, paragraph, top_rows, training_report
from meshplan.planner.core.plan import Plan

INFEASIBLE = "infeasible"
_LISTED_FILES = 6
_ANSWER_COLUMNS = (Column(key="field", title="Answer"), Column(key="value", title="value"))


def show_plan(plan: Plan, form: Format, *, footer: str = "") -> None:
    """Print a plan: JSON and YAML hold all of it, CSV and Markdown the table of the best candidates.

    Args:
        plan: of any kind.
        form: see :class:`~meshplan.cli.render.Format`.
        footer: what stands below the plan in the form for people.
    """
    report, rows, columns = _views(plan)
    if form in (Format.JSON, Format.YAML):
        show_document(plan.to_document(), form)
    elif form is Format.TABLE:
        width = terminal_width()
        text = report(plan, width=width)
        show_text(f"{text}\n{footer}" if footer else text)
    else:
        show_rows(rows(plan), columns, form)


def _views(
    plan: Plan,
) -> tuple[Callable[..., str], Callable[[Plan], Sequence[Mapping[str, Any]]], tuple[Column, ...]]:
    """How a plan's kind is shown: the report for people, the rows of its table and their columns."""
    if plan.kind == "training":
        return training_report, top_rows, TOP_COLUMNS
    if plan.kind == "serving":
        return serving_report.serving_report, serving_report.top_rows, serving_report.TOP_COLUMNS
    if allocation_report.is_market_plan(plan):
        return allocation_report.allocation_report, allocation_report.top_rows, allocation_report.UNIT_COLUMNS
    return answer_report, answer_rows, _ANSWER_COLUMNS


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
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        lines.append(f"wrote {count} below {out}: {', '.join(names)}{f' and {more} more' if more else ''}")
    if is_infeasible(plan):
        lines.append("not stored: there is no plan to launch or compare")
    elif not stored:
        lines.append(f"plan {plan.plan_id} (not stored)")
    else:
        lines += [
            f"plan {plan.plan_id} is stored; next:",
            *(f"  {line}" for line in next_commands(plan, db, bool(files))),
        ]
    return "".join(paragraph(line, TABLE_WIDTH) if line.startswith("wrote") else f"{line}\n" for line in lines)


def next_commands(plan: Plan, db: str | None, emitted: bool) -> list[str]:
    """Commands that a person would type next."""
    where = f" --db {db}" if db else ""
    commands = [f"meshplan plans show {plan.plan_id}{where}"]
    if plan.kind == "training":
        tensor = int(plan.config["tensor_parallel"])
        other = tensor // 2 if tensor > 1 else 2
        commands = [f"meshplan explain {plan.plan_id}{where} --instead tensor_parallel={other}"]
        if not emitted:
            commands.append(f"meshplan emit {plan.plan_id}{where} --out plans")
        commands.append(f"meshplan plans record {plan.plan_id}{where} measured.json")
    elif allocation_report.is_market_plan(plan):
        commands.append(f"meshplan emit {plan.plan_id}{where} --out fleet")
    elif plan.kind == "serving":
        tensor = int(plan.config["pools"][-1]["layout"]["tensor_parallel"])
        commands = [f"meshplan explain {plan.plan_id}{where} --instead tensor_parallel={max(tensor // 2, 1)}"]
        commands.append(f"meshplan plans record {plan.plan_id}{where} measured.json")
    return commands
