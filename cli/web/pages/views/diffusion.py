"""A diffusion plan on its page: what to run, the candidates, the memory of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshplan.catalogs.units import format_bytes, format_duration
from meshplan.cli.reports import diffusion as report
from meshplan.cli.reports.quantities import metric_text
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

_RATES = {"images_per_s": "images", "videos_per_s": "videos"}
_PARTS = {
    "transformer_bytes": "transformer",
    "text_encoders_and_vae_bytes": "text encoders and VAE",
    "activation_bytes": "activations",
    "context_bytes": "context and buffers",
    "bound_bytes": "at most, together",
}


def question(plan: Plan) -> str:
    """What was asked."""
    return report.describe(plan.spec)


def sections(plan: Plan) -> dict[str, Any]:
    """The parts of the page that are a diffusion plan's own."""
    rows = [{"part": words, "bytes": format_bytes(plan.memory["worst"][name])} for name, words in _PARTS.items()]
    return {
        "title": f"Make {'videos' if 'videos_per_s' in plan.predicted else 'images'} with {plan.spec.get('model')}",
        "equation": f"{counted(plan.solution['num_devices'], 'GPU')} = {report.config_words(plan.config)}",
        "sentences": list(_sentences(plan)),
        "tables": [
            table(report.top_rows(plan), tuple(report.top_columns(plan)), caption="Candidates"),
            table(rows, report.MEMORY_COLUMNS, caption="Memory of a rank"),
        ],
    }


def _sentences(plan: Plan) -> Iterator[str]:
    yield f"Run {report.config_words(plan.config)}."
    yield " ".join(_figures(plan))
    if plan.provenance["unmeasured"]:
        yield f"No measured run confirms {', '.join(plan.provenance['unmeasured'])}: the ranges are wider."


def _figures(plan: Plan) -> Iterator[str]:
    """How long a batch takes, how many items come of all replicas, what one costs."""
    predicted, items = plan.predicted, counted(int(plan.config["batch_size"]), "item")
    latency = predicted["latency_s"]
    between = f"{format_duration(latency.low)} … {format_duration(latency.high)}"
    yield f"A batch of {items} takes about {format_duration(latency.value)} ({between});"
    rates = [f"{predicted[name].value:.3g} {what} a second" for name, what in _RATES.items() if name in predicted]
    cost = predicted.get("usd_per_item")
    at = "" if cost is None else f", at {metric_text('usd_per_item', cost.value)} each"
    yield f"together that is {' and '.join(rates)}{at}."
