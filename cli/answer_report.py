"""The answer of a stand-alone problem (rank mapping, expert placement, GPU allocation) as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.cli.quantities import percent
from meshplan.cli.render import TABLE_WIDTH, Column, Format, Row, rendered_rows
from meshplan.cli.training_report import effort_text
from meshplan.planner.plan import Plan

# Longer lists are described by their size; --format json has them.
_MOST_LISTED = 8


def answer_report(plan: Plan, *, width: int = TABLE_WIDTH) -> str:
    """Kind, proof, and the answer's own fields."""
    columns = (Column(key="field", title="Answer", wrap=False), Column(key="value", title="value"))
    rows = answer_rows(plan)
    return f"{_headline(plan)}\n\n{rendered_rows(rows, columns, Format.TABLE, width=width)}"


def answer_rows(plan: Plan) -> list[Row]:
    """The fields of the answer, tables by their size only."""
    return [{"field": key, "value": _text(value)} for key, value in (plan.answer or {}).items()]


def _headline(plan: Plan) -> str:
    solution, name = plan.solution, plan.spec.get("name", "")
    text = f"{plan.kind} {name}".strip() + f": {solution['status']}"
    if solution.get("gap") is not None:
        text += (
            f", {solution['objective']:.6g} where {solution['bound']:.6g} is the bound (gap {percent(solution['gap'])})"
        )
    return f"{text}\n{effort_text(solution)}"


def _text(value: Any) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case Mapping():
            inner = [f"{key}: {_text(item)}" for key, item in value.items()]
            return ", ".join(inner[:_MOST_LISTED]) + (" …" if len(inner) > _MOST_LISTED else "")
        case list() | tuple() if len(value) > _MOST_LISTED or any(isinstance(item, list | tuple) for item in value):
            return f"table of {_size(value)}"
        case list() | tuple():
            return "[" + ", ".join(_text(item) for item in value) + "]"
        case _:
            return str(value)


def _size(value: Any) -> str:
    sizes = []
    while isinstance(value, list | tuple):
        sizes.append(str(len(value)))
        value = value[0] if value else None
    return " × ".join(sizes)
