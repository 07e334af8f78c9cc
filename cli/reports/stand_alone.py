"""The answer of a stand-alone problem (rank mapping, expert placement, GPU allocation) as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, flattened, rendered_rows
from meshplan.cli.reports.parts import effort_text, paragraph
from meshplan.cli.reports.quantities import percent
from meshplan.planner.core.plan import Plan

# Longer lists are described by their size; --format json has them.
_MOST_LISTED = 8


def report(plan: Plan, *, width: int = TABLE_WIDTH) -> str:
    """Kind, proof, and the answer's own fields."""
    columns = (Column(key="field", title="Answer", wrap=False), Column(key="value", title="value"))
    rows = top_rows(plan)
    return f"{_headline(plan, width)}\n{rendered_rows(rows, columns, Format.TABLE, width=width)}"


def top_rows(plan: Plan) -> list[Row]:
    """The fields of the answer by dotted name, tables by their size only."""
    return [
        {"field": name, "value": _text(value)} for name, value in flattened(plan.answer or {}, most_items=_MOST_LISTED)
    ]


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return str(spec.get("name", ""))


def short_answer(_document: Mapping[str, Any]) -> str:
    """Nothing: such an answer is a table."""
    return ""


def top_columns(_plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`."""
    return (Column(key="field", title="Answer"), Column(key="value", title="value"))


def next_commands(plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
    """Nothing beyond the answer, which ``plans show`` prints again: nothing can be launched."""
    return []


def _headline(plan: Plan, width: int) -> str:
    solution, name = plan.solution, plan.spec.get("name", "")
    text = f"{plan.kind} {name}".strip() + f": {solution['status']}"
    if solution.get("gap") is not None:
        text += (
            f", objective {solution['objective']:.6g}, bound {solution['bound']:.6g} (gap {percent(solution['gap'])})"
        )
    return paragraph(text, width) + paragraph(effort_text(solution), width)


def _text(value: Any) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case list() | tuple() if any(isinstance(item, list | tuple | Mapping) for item in value):
            return f"table of {_size(value)}"
        case list() | tuple() if len(value) > _MOST_LISTED:
            return f"list of {len(value)}"
        case list() | tuple():
            return ", ".join(_text(item) for item in value)
        case _:
            return str(value)


def _size(value: Any) -> str:
    sizes = []
    while isinstance(value, list | tuple):
        sizes.append(str(len(value)))
        value = value[0] if value else None
    return " × ".join(sizes)
