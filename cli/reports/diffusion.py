"""A diffusion plan as a person reads it: what to run, what it takes, where the time goes, what else there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.no_plan import no_plan_section
from meshplan.cli.reports.parts import effort_text, machines_text, model_on_cluster, paragraph, rejected_section
from meshplan.cli.reports.quantities import TICK, bar, percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

# Degree → how the table calls it.
SHORT = {
    "ulysses": "ulysses",
    "ring": "ring",
    "cfg_parallel": "cfg",
    "pipefusion": "pipefusion",
    "tensor_parallel": "tensor",
}
_PER_KILO = 1000.0
MEMORY_COLUMNS = (Column(key="part", title="part", wrap=False), Column(key="bytes", title="size", right=True))


def describe(spec: Mapping[str, Any]) -> str:
    """The question in short, for lists of plans."""
    return model_on_cluster(spec)


def short_answer(document: Mapping[str, Any]) -> str:
    """Replicas, their devices and the latency, for lists of plans."""
    if not document["config"]:
        return ""
    replicas, devices = int(document["config"]["replicas"]), int(document["solution"]["num_devices"])
    latency = format_duration(document["predicted"]["latency_s"]["value"])
    return f"{counted(replicas, 'replica')} on {counted(devices, 'device')}, {latency}"


def report(plan: Plan, *, width: int) -> str:
    """The complete report; an infeasible plan names the binding constraint and the least change that helps."""
    if not plan.config:
        sections = [headline(plan, width), no_plan_section(plan.solution, width), rejected_section(plan, width)]
        return "\n".join(section for section in sections if section)
    sections = [
        headline(plan, width),
        figures_section(plan, width),
        candidates_section(plan, width),
        time_section(plan, width),
        memory_text(plan, width),
        rejected_section(plan, width),
        notes_text(plan, width),
    ]
    return "\n".join(section for section in sections if section)


def headline(plan: Plan, width: int) -> str:
    """The question, the answer and how good it is known to be."""
    spec, solution, job = plan.spec, plan.solution, plan.provenance["job"]
    made = f"{job['width']} × {job['height']}"
    made += f", {job['frames']} frames" if job["frames"] > 1 else ""
    asked = f"{plan.provenance['model']['name']} on {machines_text(spec)}: {made}, "
    asked += f"{counted(job['steps'], 'step')}, objective {spec.get('objective', 'latency')}"
    text = paragraph(asked, width)
    if plan.config:
        text += paragraph(f"Run {config_words(plan.config)}.", width)
    return text + paragraph(f"{_status(plan)}; {effort_text(solution)}", width)


def config_words(config: Mapping[str, Any]) -> str:
    """The configuration as a clause."""
    degrees = [f"{SHORT[name]} {config[name]}" for name in SHORT if config[name] > 1]
    replicas = counted(config["replicas"], "replica")
    size = 1
    for name in SHORT:
        size *= config[name]
    split = f" ({' × '.join(degrees)})" if degrees else ""
    return f"{replicas} of {counted(size, 'device')}{split}, batch {config['batch_size']}"


def _status(plan: Plan) -> str:
    solution = plan.solution
    if solution["status"] == "infeasible":
        return "infeasible: no configuration keeps every limit"
    if solution["status"] == "feasible":
        broken = solution.get("broken") or ()
        return f"one configuration, priced; it breaks: {', '.join(broken)}" if broken else "one configuration, priced"
    count = f"{solution['num_candidates']:,} legal configurations"
    if solution["gap"]:
        return f"optimal under the estimate among {count}, to {percent(solution['gap'])} (simpler within the tie width)"
    return f"optimal under the estimate: the least of {count}"


def figures_section(plan: Plan, width: int) -> str:
    """Predictions with their ranges."""
    rows = [
        {"metric": _TITLES.get(name, name), "value": _figure(name, one.value), "between": _between(name, one)}
        for name, one in plan.predicted.items()
    ]
    columns = (
        Column(key="metric", title="Expected", wrap=False),
        Column(key="value", title="value", right=True, wrap=False),
        Column(key="between", title="in 9 of 10 cases between", right=True, wrap=False),
    )
    return rendered_rows(rows, columns, Format.TABLE, width=width)


_TITLES = {
    "latency_s": "latency of a batch",
    "images_per_s": "images/s",
    "videos_per_s": "videos/s",
    "power_w": "average power",
    "energy_per_item_j": "energy per item",
    "usd_per_item": "cost per item",
}


def _figure(name: str, value: float) -> str:
    if name == "latency_s":
        return format_duration(value)
    if name == "usd_per_item":
        return f"{value:.3g} USD"
    if name == "power_w":
        return f"{_three(value / _PER_KILO)} kW"
    if name == "energy_per_item_j":
        return f"{_three(value / _PER_KILO)} kJ"
    return f"{value:.3g}"


def _three(value: float) -> str:
    """Three digits, never an exponent for what a person would write out.

    >>> _three(1300.4), _three(0.0307)
    ('1,300', '0.0307')
    """
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _between(name: str, one: Any) -> str:
    return f"{_figure(name, one.low)} and {_figure(name, one.high)}"


def candidates_section(plan: Plan, width: int) -> str:
    """The best candidates, and the best of each number of devices."""
    return rendered_rows(top_rows(plan), top_columns(plan), Format.TABLE, title="Candidates", width=width)


def top_rows(plan: Plan) -> Sequence[Row]:
    """Rows of the plan's table."""
    item = next((name for name in plan.predicted if name.endswith("s_per_s")), "images_per_s")
    return [
        {
            **row["config"],
            "chosen": TICK if row["why"] == "best" else " ",
            "why": row["why"],
            "num_devices": row["num_devices"],
            "latency_s": row["latency_s"],
            "items_per_s": row.get(item),
            "energy_kj": None if row.get("energy_per_item_j") is None else row["energy_per_item_j"] / _PER_KILO,
            "usd_per_item": row.get("usd_per_item"),
        }
        for row in plan.alternatives
    ]


def top_columns(plan: Plan) -> Sequence[Column]:
    """Columns of :func:`top_rows`; a degree that is 1 throughout is left out."""
    used = [name for name in SHORT if any(row["config"][name] > 1 for row in plan.alternatives)]
    return (
        Column(key="chosen", title="", wrap=False),
        Column(key="num_devices", title="GPUs", right=True, wrap=False),
        Column(key="replicas", title="repl.", right=True, wrap=False),
        *(Column(key=name, title=SHORT[name], right=True, wrap=False) for name in used),
        Column(key="batch_size", title="batch", right=True, wrap=False),
        Column(key="latency_s", title="latency", right=True, text=format_duration, wrap=False),
        Column(key="items_per_s", title="items/s", right=True, text=lambda value: f"{value:.3g}", wrap=False),
        Column(key="energy_kj", title="kJ/item", right=True, text=_three, optional=True),
        Column(key="usd_per_item", title="USD/item", right=True, text=lambda value: f"{value:.3g}", optional=True),
    )


def time_section(plan: Plan, width: int) -> str:
    """Where the latency goes."""
    columns = (
        Column(key="name", title="Where the latency goes", wrap=False),
        Column(key="seconds", title="time", right=True, text=format_duration, wrap=False),
        Column(key="share", title="share", right=True, text=percent, wrap=False),
        Column(key="share", title="", derive=lambda row: bar(row["share"]), wrap=False),
    )
    return rendered_rows(plan.breakdown, columns, Format.TABLE, width=width)


def memory_text(plan: Plan, width: int) -> str:
    """Memory of a rank against the device's."""
    worst, usable = plan.memory["worst"], plan.memory["usable_bytes"]
    return paragraph(
        f"Memory of a rank: at most {format_bytes(worst['bound_bytes'])} of {format_bytes(usable)}, of which "
        f"{format_bytes(worst['transformer_bytes'])} transformer, "
        f"{format_bytes(worst['text_encoders_and_vae_bytes'])} text encoders and VAE, "
        f"{format_bytes(worst['activation_bytes'])} activations.",
        width,
    )


def notes_text(plan: Plan, width: int) -> str:
    """What no measured run confirms, and what a range means."""
    unmeasured = plan.provenance["unmeasured"]
    calibration = plan.provenance["calibration"]
    text = ""
    if unmeasured:
        text += paragraph(f"No measured run confirms {', '.join(unmeasured)}: the ranges are wider.", width)
    if plan.solution.get("utilization", 1.0) < 1.0:
        text += paragraph(f"Replicas are busy {percent(plan.solution['utilization'])} of the time.", width)
    return text + paragraph(
        f"Constants of {calibration['architecture']}: {counted(calibration['num_runs'], 'run')} of xDiT 0.4.5 in bf16 "
        "without torch.compile; latency is that of a batch once the model is loaded, without waiting for a replica.",
        width,
    )


def next_commands(plan: Plan, where: str, *, emitted: bool) -> Sequence[str]:
    """Try a degree that the plan does not have already, write the files."""
    names = ("ulysses", "ring", "replicas", "batch_size")
    differing = ((name, row["config"][name]) for row in plan.alternatives for name in names)
    other = next((f"{name}={value}" for name, value in differing if value != plan.config[name]), None)
    shown = [] if other is None else [f"meshplan explain {plan.plan_id}{where} --instead {other}"]
    return shown if emitted else [*shown, f"meshplan emit {plan.plan_id}{where} --out launch"]
