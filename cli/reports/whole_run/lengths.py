"""Documents of different lengths as a person reads them: what they cost, and what dealing them out would gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.cli.render import Column, Format, Row, rendered_rows
from meshplan.cli.reports.parts import paragraph
from meshplan.cli.reports.quantities import percent, signed_percent
from meshplan.planner.core.plan import Plan

WAYS_COLUMNS = (
    Column(key="name", title="Documents dealt out"),
    Column(key="step_s", title="step", right=True, text=format_duration, wrap=False),
    Column(key="gain", title="", right=True, text=signed_percent, wrap=False),
    Column(key="between", title="9 of 10 steps", right=True, wrap=False),
    Column(key="imbalance", title="imbalance", right=True, text=lambda value: f"{value:.2f}", wrap=False),
    Column(key="gap", title="gap", right=True, text=lambda value: "" if value is None else percent(value), wrap=False),
)
WAYS_TITLE = "What the order of documents is worth (simulated; imbalance: the longest over the mean)"
# Sizes of mixed groups that are listed.
_LISTED = 5


# A gain below this is not worth a sentence.
_WORTHWHILE = 0.01


def lengths_sentence(plan: Plan) -> str:
    """What waits for long documents, and the most that dealing them out gains; empty without lengths."""
    lengths = plan.lengths
    if lengths is None or not lengths["ways"]:
        return ""
    text = f" {percent(_waiting_share(plan, lengths))} of the step waits for longer documents"
    first, best = lengths["ways"][0], min(lengths["ways"], key=lambda way: way["step_s"])
    gain = 1.0 - best["step_s"] / first["step_s"]
    return f"{text}; '{best['name']}' would save {percent(gain)}." if gain >= _WORTHWHILE else f"{text}."


def _waiting_share(plan: Plan, lengths: Mapping[str, Any]) -> float:
    return float(lengths["waiting_s"] / plan.predicted["iteration_s"].value)


def lengths_section(plan: Plan, width: int) -> str:
    """Documents, waiting, and ways to deal them out; empty where the spec says nothing of lengths."""
    lengths = plan.lengths
    if lengths is None:
        return ""
    paragraphs = paragraph(_documents(lengths["documents"]), width) + paragraph(_waiting(plan, lengths), width)
    if not lengths["ways"]:
        return paragraphs
    table = rendered_rows(way_rows(lengths), WAYS_COLUMNS, Format.TABLE, title=WAYS_TITLE, width=width)
    return paragraphs + table + paragraph(_how(lengths), width)


def way_rows(lengths: Mapping[str, Any]) -> list[Row]:
    """Each way to deal documents out, beside the first."""
    first = lengths["ways"][0]["step_s"]
    return [
        {
            **way,
            "gain": way["step_s"] / first - 1.0 if place else None,
            "between": f"{format_duration(way['low_s'])} to {format_duration(way['high_s'])}",
        }
        for place, way in enumerate(lengths["ways"])
    ]


def _documents(documents: Mapping[str, Any]) -> str:
    text = (
        f"Documents: half have at most {documents['median']:,} tokens, 1 in 100 more than {documents['p99']:,}, the "
        f"longest {documents['longest']:,}; mean {documents['mean']:,.0f}. A token attends to "
        f"{documents['mean_context']:,.0f} others on average."
    )
    if documents["longer_token_share"]:
        what = {"split": "split", "truncate": "truncated", "drop": "dropped"}[documents["longer"]]
        text += f" {percent(documents['longer_token_share'])} of tokens lie in documents that are {what}."
    if documents["filled"] < 1.0:
        text += f" {percent(1.0 - documents['filled'])} of a sequence is padding."
    return text


def _waiting(plan: Plan, lengths: Mapping[str, Any]) -> str:
    waits, attention = percent(_waiting_share(plan, lengths)), percent(lengths["attention_share"])
    return (
        f"{waits} of the step is waiting, because attention is {attention} of a mean micro-batch and documents fall to "
        "micro-batches as they come."
    )


def _how(lengths: Mapping[str, Any]) -> str:
    assignment = lengths["assignment"]
    alike = "micro-batches" if assignment["pipeline_parallel"] > 1 else "ranks"
    most, planned = assignment["most_tokens"], assignment["micro_batch_tokens"]
    text = (
        f"The imbalance is that of {alike}. A loader gets these from meshplan.planner.assign_sequences(lengths, plan) "
        f"and document_queue(plan); a micro-batch of at most {most:,} tokens fits ({planned:,} planned)."
    )
    if lengths["group_sizes"]:
        total = sum(row["count"] for row in lengths["group_sizes"])
        often = sorted(lengths["group_sizes"], key=lambda row: -row["count"])[:_LISTED]
        listed = ", ".join(f"{row['size']} ({percent(row['count'] / total)})" for row in often)
        text += f" Mixed groups have these context-parallel sizes: {listed}."
    return text
