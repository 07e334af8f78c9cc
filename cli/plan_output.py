"""Prints a plan of any kind in any format, and the commands that come next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshplan.cli.answer_report import answer_report, answer_rows
from meshplan.cli.render import TABLE_WIDTH, Column, Format, show_document, show_rows, show_text, terminal_width
from meshplan.cli.training_report import TOP_COLUMNS, paragraph, top_rows, training_report
from meshplan.planner.plan import Plan

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
    is_training = plan.kind == "training"
    if form in (Format.JSON, Format.YAML):
        show_document(plan.to_document(), form)
    elif form is Format.TABLE:
        width = terminal_width()
        report = training_report(plan, width=width) if is_training else answer_report(plan, width=width)
        show_text(f"{report}\n{footer}" if footer else report)
    elif is_training:
        show_rows(top_rows(plan), TOP_COLUMNS, form)
    else:
        show_rows(answer_rows(plan), _ANSWER_COLUMNS, form)


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
    return commands
