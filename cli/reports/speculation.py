"""How a report says which drafts a serving plan uses, and from which load on none help."""

from __future__ import annotations

from meshplan.cli.reports.parts import paragraph
from meshplan.planner.core.plan import Plan

LOADS_SHOWN = 4
_METHODS = {"ngram": "n-grams", "eagle3": "EAGLE-3", "mtp": "prediction layers", "draft_model": "a draft model"}


def speculation_text(plan: Plan, width: int) -> str:
    """Chosen drafts, the best by load, and the load from which on they hurt; empty where nothing was to choose."""
    by_load = (plan.answer or {}).get("speculation")
    if not by_load:
        return ""
    drafts = plan.config["speculation"]
    chosen = "none is faster" if drafts is None else _named(drafts["method"], drafts["num_draft_tokens"])
    rows = by_load["by_load"]
    shown = [*rows[: -1 : max(len(rows) // LOADS_SHOWN, 1)], rows[-1]]
    each = dict.fromkeys(
        f"{row['num_running']} running: "
        + (
            "none"
            if row["method"] is None
            else f"{_named(row['method'], row['num_draft_tokens'])} ({row['speed_up']:.2f} times)"
        )
        for row in shown
    )
    until = by_load["hurts_from"]
    end = "Drafts help up to the worker's slots." if until is None else f"From {until} running on they hurt."
    text = f"Speculation: {chosen}. Time per token by load of a worker: {'; '.join(each)}. {end}"
    return paragraph(text, width)


def _named(method: str, drafted: int) -> str:
    return f"{_METHODS.get(method, method)}, {drafted} token{'s' if drafted > 1 else ''} drafted"
