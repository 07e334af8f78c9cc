"""A diffusion plan on its page: what to run, the candidates, the memory of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshplan.catalogs.units import format_bytes
from meshplan.cli.reports import diffusion as report
from meshplan.cli.web.pages.views.tables import table
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted

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
    if plan.provenance["unmeasured"]:
        yield f"No measured run confirms {', '.join(plan.provenance['unmeasured'])}: the ranges are wider."
