"""A placement of experts as a person reads it: the current one beside the new, step time, noise, curves, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows, show_document, show_rows, show_text, terminal_width
from meshplan.cli.reports.quantities import percent, signed_percent
from meshplan.planner.core.text import counted
from meshplan.planner.expert_placement.pictures import text_picture
from meshplan.planner.expert_placement.placing import Placed, views

_SIDES = (
    Column(key="what", title="", wrap=False),
    Column(key="today", title="current", right=True),
    Column(key="new", title="new", right=True),
)
_FACTS = {
    "balancedness": "balancedness (1 is ideal)",
    "duplicates_on_device": "redundant copies on the same device",
    "cross_device_fraction": "tokens that change device",
    "cross_node_fraction": "tokens that change node",
    "devices_per_token": "devices that a token visits",
    "nodes_per_token": "nodes that a token visits",
}
_CURVES = {
    "slots": "Redundant slots of a layer against balance",
    "traffic": "Traffic against balance",
    "moves": "Moved experts against balance",
}
_CURVE_COLUMNS = (
    Column(key="num_redundant_experts", title="slots", right=True),
    Column(key="moved_experts", title="moves", right=True),
    Column(key="cross_device_fraction", title="change device", right=True, text=percent),
    Column(key="cross_node_fraction", title="change node", right=True, text=percent),
    Column(key="balancedness", title="balancedness", right=True, text="{:.4f}".format),
    Column(key="bound", title="bound", right=True, text="{:.4f}".format),
    Column(key="extra_bytes_per_device", title="memory/device", right=True, text=format_bytes),
    Column(key="expert_time_ratio", title="expert time", right=True, text="{:.3f}×".format),
)


def show_placement(placed: Placed, form: Format, *, files: Sequence[Path]) -> None:
    """Print it: JSON and YAML hold all of it, CSV and Markdown the comparison with the current placement."""
    document = {**placed.document, "files": [str(path) for path in files]}
    if form in (Format.JSON, Format.YAML):
        show_document(document, form)
    elif form is Format.TABLE:
        show_text(_report(placed, document, terminal_width()))
    else:
        show_rows(side_rows(document), _SIDES, form)


def side_rows(document: Mapping[str, Any]) -> list[Row]:
    """Each fact of the current placement and of the new one."""
    current, new = document.get("today", {}), document.get("new", {})
    rows: list[Row] = [
        {"what": title, "today": f"{current[key]:.4f}", "new": f"{new[key]:.4f}"}
        for key, title in _FACTS.items()
        if key in current and not isinstance(current[key], int)
    ]
    rows += [
        {"what": title, "today": str(current[key]), "new": str(new[key])}
        for key, title in _FACTS.items()
        if isinstance(current.get(key), int)
    ]
    step = document.get("step_time")
    if step:
        before, after = format_duration(step["before_s"]), format_duration(step["after_s"])
        rows.append({"what": "step time", "today": before, "new": after})
    return rows


def _report(placed: Placed, document: Mapping[str, Any], width: int) -> str:
    question, answer = document["question"], document["answer"]
    head = (
        f"{counted(question['num_experts'], 'expert')} (+ {question['num_redundant_experts']} redundant) of "
        f"{counted(question['num_layers'], 'layer')} on {counted(question['num_devices'], 'device')}, "
        f"{question['devices_per_node']} per node; "
        f"objective {question['objective']}: {answer['status']}"
    )
    if "gap" not in answer:
        return f"{head}; no placement meets it (bound {answer['bound']:.6g})\n"
    lines = [f"{head}, bound {answer['bound']:.6g} (gap {percent(answer['gap'])})", ""]
    lines.append(rendered_rows(side_rows(document), _SIDES, Format.TABLE, width=width))
    lines += _sentences(document)
    for name, points in document.get("advice", {}).items():
        columns = tuple(column for column in _CURVE_COLUMNS if column.key in points[0])
        lines += ["", rendered_rows(points, columns, Format.TABLE, title=_CURVES[name], width=width).rstrip()]
    lines += ["", text_picture(views(placed), width=width).rstrip()]
    lines += [f"wrote {path}" for path in document["files"]]
    return "\n".join(lines) + "\n"


def _sentences(document: Mapping[str, Any]) -> list[str]:
    lines = []
    step, sampled, answer = document.get("step_time"), document.get("sampled"), document["answer"]
    if step:
        lines.append(f"step time {signed_percent(step['time_ratio'] - 1.0)} against the current placement")
    if "moved_experts" in answer:
        moved = f"{counted(answer['moved_experts'], 'expert')} to move"
        if "moved_bytes" in answer:
            moved += f", {format_bytes(answer['moved_bytes'])}"
        if "migration_s" in answer:
            moved += f" in {format_duration(answer['migration_s'])}"
        lines.append(moved)
    if sampled:
        lines.append(
            f"single batches of {sampled['tokens_per_batch']} tokens reach a balancedness of {sampled['low']:.3f} to "
            f"{sampled['high']:.3f} (expected from the mean load: {sampled['at_the_mean_load']:.3f})"
        )
    for item in document.get("scenarios", []):
        lines.append(
            f"scenario {item['name']}: balancedness {item['balancedness']:.4f}, alone {item['alone']:.4f} "
            f"(regret {item['regret']:.4f})"
        )
    return lines
