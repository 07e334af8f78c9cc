"""A placement of experts as a person reads it: the current one beside the new, step time, noise, curves, a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows, show_document, show_rows, show_text, terminal_width
from meshplan.cli.reports.quantities import percent, signed_percent
from meshplan.planner.core.text import counted

if TYPE_CHECKING:
    from meshplan.planner.expert_placement.placing import Placed

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
    for title, read in _SERVED if "served" in document else ():
        rows.append({"what": title, **{side: read(document["served"][key]) for side, key in _SIDE_KEYS.items()}})
    return rows


def _hops_text(hops: Mapping[str, float]) -> str:
    """Ways of tokens by level."""
    return " / ".join(percent(hops[level]) for level in ("same_device", "same_node", "other_node"))


_SIDE_KEYS = {"today": "current", "new": "new"}
_SERVED: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("TTFT, mean", lambda side: format_duration(side["ttft_mean_s"])),
    ("TTFT, p99", lambda side: format_duration(side["ttft_p99_s"])),
    ("TPOT, mean", lambda side: format_duration(side["tpot_mean_s"])),
    ("fullest device over the mean", lambda side: f"{side['load_factor']:.3f}"),
    ("ways: same device / node / other node", lambda side: _hops_text(side["hops"])),
    ("tokens of KV cache in a worker", lambda side: f"{side['kv_capacity_tokens']:,}"),
)


def served_experts_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The ``experts`` of a serving plan's answer, a sentence for each pool; empty where there are none."""
    return " ".join(_pool_experts(row) for row in rows)


def _pool_experts(row: Mapping[str, Any]) -> str:
    if row.get("unused_because"):
        return f"The routing given for experts is not used by the {row['pool']} pool: {row['unused_because']}."
    copies = ""
    if row["num_copies"]:
        copies = (
            f"; {counted(row['num_copies'], 'copy', 'copies')} in each layer take "
            f"{format_bytes(row['copies_bytes_per_device'])} of each device from the KV cache"
        )
    return (
        f"Experts of the {row['pool']} pool on {counted(row['expert_parallel'], 'device')}: the fullest has "
        f"{row['load_factor']:.3f} times the mean load; of the ways of tokens stay on the device / stay on the "
        f"node / cross nodes {_hops_text(row['hops'])}{copies}."
    )


def _report(placed: Placed, document: Mapping[str, Any], width: int) -> str:
    from meshplan.planner.expert_placement.pictures import text_picture  # plans of training and serving need neither
    from meshplan.planner.expert_placement.placing import views

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
    lines += _served_sentences(document)
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


def _served_sentences(document: Mapping[str, Any]) -> list[str]:
    """What the placement does to a serving plan, against the current one and against the plan."""
    if "served" not in document:
        return []
    planned, current, new = (document["served"][key] for key in ("as planned", "current", "new"))
    ratios = [
        f"{name} {signed_percent(new[key] / current[key] - 1.0)} (as planned {format_duration(planned[key])})"
        for name, key in (("TTFT", "ttft_mean_s"), ("TPOT", "tpot_mean_s"))
    ]
    moves = document["replacement"]
    lines = ["against the current placement: " + ", ".join(ratios)]
    if planned["load_factor"] is None:
        lines.append("the plan assumed the skew that kernels were timed with; plan again with experts: {loads: FILE}")
    moved = f"placing anew moves {counted(moves['moved_experts'], 'expert')}, {format_bytes(moves['moved_bytes'])}"
    if moves["seconds"] is not None:
        moved += f", in {format_duration(moves['seconds'])} on the links"
    lines.append(moved + (" (of the recorded layers)" if document.get("is_sample") else ""))
    if document["dispatch"] == "returns" and "cross_device_fraction" in document["new"]:
        lines.append("tokens return to their attention rank after each layer: which expert follows which costs nothing")
    return lines
