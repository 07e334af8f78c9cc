"""A question without an answer: what binds, what came nearest, what would help, and what was tried to find that out.

One shape for every kind of question; the fields of ``solution`` are those that the kinds' ``infeasible`` modules write:
``binding_constraint``, ``nearest_miss`` (limit, excess_text, and a label or the configuration), ``least_change`` (each
with its change, and the label of the plan that it leads to or the constraint that it moves) and ``tried``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.cli.reports.parts import paragraph

_INDENT = "    "


def no_plan_section(solution: Mapping[str, Any], width: int) -> str:
    """What an infeasible answer says to do."""
    lines = [f"Binding constraint: {solution.get('binding_constraint') or 'unknown'}"]
    miss = miss_text(solution)
    if miss:
        lines.append(f"Nearest miss: {miss}")
    return "".join(paragraph(line, width, _INDENT) for line in [*lines, *_changes(solution), *_tried(solution)])


def miss_text(solution: Mapping[str, Any]) -> str:
    """The limit that the nearest candidate breaks, by how much, and that candidate; empty where there is none."""
    miss = solution.get("nearest_miss")
    if not miss:
        return ""
    return f"{miss['limit']}: {miss['excess_text']} with {miss.get('label') or _config_text(miss['config'])}"


def _config_text(config: Mapping[str, Any]) -> str:
    # Only a training plan names a configuration here: other answers do not pay for what training is made of.
    from meshplan.cli.reports.configuration import config_text

    return config_text(config)


def _changes(solution: Mapping[str, Any]) -> list[str]:
    changes = [_change_text(change) for change in solution.get("least_change", ())]
    if len(changes) > 1:
        return ["Least changes, each sufficient by itself:", *(f"  - {change}" for change in changes)]
    return [f"Least change: {change}" for change in changes]


def _change_text(change: Mapping[str, Any]) -> str:
    """The change, and in brackets the plan that it leads to, or the constraint that it moves and does not name."""
    text, constraint = str(change["change"]), change.get("constraint")
    if change.get("label"):
        return f"{text} (with {change['label']})"
    return f"{text} ({constraint})" if constraint and constraint not in text else text


def _tried(solution: Mapping[str, Any]) -> list[str]:
    """What was looked for, so that "nothing helps" is never said of what nobody tried."""
    tried = "; ".join(solution.get("tried", ()))
    if solution.get("least_change"):
        return [f"Tried: {tried}"] if tried else []
    return [f"Least change: none of those tried: {tried}"] if tried else ["Least change: none was looked for"]
