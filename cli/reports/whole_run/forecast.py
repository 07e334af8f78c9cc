"""The run of a training plan as a person reads it: how much of its time trains, when it ends, what would help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import SECONDS_PER_HOUR, format_bytes, format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.configuration import config_text
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import metric_text, percent
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.goodput.run import LEAST_RATIO

SPARE_COLUMNS = (
    Column(key="spares", title="Spare nodes"),
    Column(key="waits", title="Waits for a node"),
    Column(key="saved", title="The last one saves"),
)
SPARES_TITLE = "What spare nodes are worth"
NODES_COLUMNS = (
    Column(key="nodes", title="Nodes"),
    Column(key="speed", title="Speed"),
    Column(key="time", title="Of the time"),
    Column(key="config", title="Choices"),
)
NODES_TITLE = "The plan by number of nodes"
# Probabilities nearer to certainty than this are not told apart.
_CERTAIN = 0.005
# Below this probability of ending in time a plan that is best at something else is one that nobody asked for.
_LIKELY = 0.5
# Share of a run from which on what saves it is said beside the answer.
_COUNTS = 0.01


def run_sentence(plan: Plan) -> str:
    """What interruptions make of the run, in one sentence; empty where only steps are asked about."""
    run = plan.run
    if run is None:
        return ""
    ratio = plan.predicted["effective_training_time_ratio"].value
    ends = plan.predicted["run_time_s"]
    if ratio <= LEAST_RATIO:
        return " Interrupted so often the run makes no progress: it takes longer, and costs more, than is said here."
    text = (
        f" Of the run's time {percent(ratio)} trains, with {_expected(run['interruptions'])}: it ends after "
        f"{metric_text('run_time_s', ends.low)} to {metric_text('run_time_s', ends.high)}"
    )
    if run["finish_by_probability"] is not None:
        by = metric_text("run_time_s", run["finish_by_s"])
        text += f", within {by} with probability {probability_text(run['finish_by_probability'])}"
        if run["finish_by_probability"] < _LIKELY and plan.spec.get("objective", "throughput") != "throughput":
            text += f" (constraints.max_run_time: {by} holds plans to it)"
    return f"{text}.{_worth_a_spare(run, ends.value)}"


def _worth_a_spare(run: Mapping[str, Any], run_time_s: float) -> str:
    """The next spare node where it saves a share of the run that counts; empty otherwise."""
    more = int(run.get("spare_nodes") or 0) + 1
    saved = next((row["hours_saved"] for row in run.get("spares", ()) if row["spare_nodes"] == more), None)
    saved_s = (saved or 0.0) * SECONDS_PER_HOUR
    if saved_s < _COUNTS * run_time_s:
        return ""
    return f" One more node as a spare (cluster.spare_nodes: {more}) would end it {format_duration(saved_s)} earlier."


def _expected(interruptions: float) -> str:
    """A number of interruptions to expect, in words."""
    whole = round(interruptions)
    return f"about {counted(whole, 'interruption')}" if whole else "hardly an interruption"


def probability_text(value: float) -> str:
    """A probability in per cent; never 0 or 100 %."""
    if value < _CERTAIN:
        return "below 1 %"
    return "above 99 %" if value > 1.0 - _CERTAIN else f"{value:.0%}"


def run_section(plan: Plan, width: int) -> str:
    """Interruptions, checkpoints, spares, and what was assumed; empty where only steps are asked about."""
    run = plan.run
    if run is None:
        return ""
    if run.get("by_nodes"):
        rows = nodes_rows(run)
        return run_words(run, width) + rendered_rows(rows, NODES_COLUMNS, Format.TABLE, title=NODES_TITLE, width=width)
    table = rendered_rows(spare_rows(run), SPARE_COLUMNS, Format.TABLE, title=SPARES_TITLE, width=width)
    return run_words(run, width) + table


def nodes_rows(run: Mapping[str, Any]) -> list[Row]:
    """The plan by number of nodes."""
    most = max(row["tokens_per_s"] for row in run["by_nodes"])
    return [
        {
            "nodes": row["nodes"],
            "speed": percent(row["tokens_per_s"] / most),
            "time": percent(row["time_share"]),
            "config": config_text(row["config"]),
        }
        for row in run["by_nodes"]
    ]


def run_words(run: Mapping[str, Any], width: int) -> str:
    """How often the run is interrupted, how often it saves, and what of this was assumed."""
    paragraphs = paragraph(_interruptions(run), width) + paragraph(_checkpoints(run["checkpoint"]), width)
    if run.get("availability"):
        paragraphs += paragraph(_availability(run["availability"]), width)
    if run.get("copies"):
        paragraphs += paragraph(_copies(run["copies"], run["effective_training_time_ratio"]), width)
    if run["assumed"]:
        paragraphs += paragraph(f"Not said, and assumed: {', '.join(run['assumed'])}.", width)
    return paragraphs


def _copies(copies: Mapping[str, Any], ratio: float) -> str:
    """What restarting copies apart would come to, beside the restart of the whole job."""
    return (
        f"The plan keeps {copies['count']} copies of all states on nodes of their own: restarted apart (torchft under "
        f"TorchTitan can; meshplan replan --out writes its files), {percent(copies['batch_share'])} of the batches "
        f"train, beside {percent(ratio)} where all restart together."
    )


def spare_rows(run: Mapping[str, Any]) -> list[Row]:
    """What each number of spare nodes comes to."""
    return [
        {"spares": row["spare_nodes"], "waits": percent(row["waiting_share"]), "saved": _saved(row["hours_saved"])}
        for row in run["spares"]
    ]


def _availability(played: Mapping[str, Any]) -> str:
    """What the run makes of nodes that come and go, beside what it could have made of them."""
    text = (
        f"Nodes come and go: {played['mean_nodes']:.1f} on average over {played['days']:.1f} days of "
        f"{counted(played['traces'], 'trace')}; the job is hit {played['interruptions_per_day']:.1f} times a day and "
        f"changes its size {played['changes_per_day']:.1f} times by choice. It trains at "
        f"{percent(played['progress_share'])} of the rate of all nodes all the time; who knew the trace would reach "
        f"{percent(played['hindsight_share'])}, who always took every node {percent(played['every_node_share'])}"
    )
    if played["usd_per_day"] is not None:
        text += f"; the nodes cost ${played['usd_per_day']:,.0f} a day"
    return f"{text}."


def _saved(hours: float | None) -> str:
    return "" if hours is None else f"{hours:,.1f} h"


def _interruptions(run: Mapping[str, Any]) -> str:
    rate, between = run["failures_per_node_day"], run["mean_time_between_interruptions_s"]
    if between is None:
        return "The run: nothing interrupts it."
    return (
        f"The run: {1e3 * rate['value']:.2g} interruptions per 1,000 node-days "
        f"({1e3 * rate['low']:.2g} to {1e3 * rate['high']:.2g}; {rate['source']}): one every "
        f"{format_duration(between)}, {format_duration(run['restart_s'])} to start again."
    )


def _checkpoints(checkpoint: Mapping[str, Any]) -> str:
    how = "pinned" if checkpoint["is_pinned"] else "the best"
    text = (
        f"A checkpoint of {format_bytes(checkpoint['bytes'])} every {format_duration(checkpoint['interval_s'])} of "
        f"training ({how}), training waits {format_duration(checkpoint['block_s'])} for it"
    )
    if checkpoint["durable_s"]:
        text += f", it is stored {format_duration(checkpoint['durable_s'])} later"
    if checkpoint["young_s"] is not None and checkpoint["daly_s"] is not None:
        young, daly = format_duration(checkpoint["young_s"]), format_duration(max(checkpoint["daly_s"], 0.0))
        text += f"; Young's formula says {young}, Daly's {daly}"
    return f"{text}."
