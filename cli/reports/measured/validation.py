"""How a validation looks: its headline, the summary by group and metric, the worst rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import did_you_mean
from meshplan.cli.render import Column, Format
from meshplan.cli.reports.quantities import percent

if TYPE_CHECKING:
    from meshplan.planner.validation.summary import Validation


NAMED_PARTS = 3


# What a row's largest error is taken from: the first that it has.
_JUDGED_METRICS = ("iteration_s", "tpot_s", "latency_s", "output_tokens_per_s")


_SHOWN_METRICS = (
    "iteration_s",
    "tokens_per_s_per_device",
    "peak_memory_bytes",
    "ttft_s",
    "tpot_s",
    "latency_s",
    "output_tokens_per_s",
)


_SHOWN_LABELS = ("framework=", "strategy=", "source=", "load=", "engine=", "disaggregated=")


SIGNED = "{:+.1%}".format  # a relative error, its sign always shown
SUMMARY = (
    Column(key="group", title="Rows"),
    Column(key="metric", title="Metric"),
    Column(key="n", title="n", right=True),
    Column(key="median_ape", title="median", right=True, text=percent),
    Column(key="mape", title="mean", right=True, text=percent),
    Column(key="p90_ape", title="p90", right=True, text=percent),
    Column(key="signed_median", title="signed", right=True, text=SIGNED),
    Column(key="interval_coverage", title="in interval", right=True, text=percent),
)


_WORST = (
    Column(key="id", title="Run"),
    Column(key="metric", title="Metric"),
    Column(key="error", title="Error", right=True, text=SIGNED),
    Column(key="measured", title="Measured", right=True, text=lambda value: f"{value:.4g}"),
    Column(key="predicted", title="Predicted", right=True, text=lambda value: f"{value:.4g}"),
    Column(key="parts", title="Largest parts of the prediction"),
)


def show_validation(
    result: Validation, form: Format, worst: int, *, extra: Mapping[str, Any] | None = None, more: str = ""
) -> None:
    """Print a validation in any format.

    Args:
        result: what was validated.
        form: how to print.
        worst: rows with the largest error that tables show.
        extra: further keys of documents.
        more: text after the headline of a table.
    """
    from meshplan.cli.render import show_document, show_rows, show_text

    if form in (Format.JSON, Format.YAML):
        show_document({**validation_document(result), **(extra or {})}, form)
        return
    if form is Format.CSV:
        show_rows([row.to_document() for row in result.rows], (), form)
        return
    summary = [asdict(item) for item in result.summary]
    shown = [row for row in summary if row["group"] == "all" or _is_shown(row)]
    if shown:
        show_rows(shown, SUMMARY, form, title=_headline(result) + more)
        show_rows(_worst_rows(result, worst), _WORST, form, title="\nLargest errors")
    else:
        show_text(f"{_headline(result)}{more}\n")
    for status, title in (("excluded", "Not judged"), ("unsupported", "Not answered"), ("infeasible", "Do not fit")):
        reasons = Counter(row.reason for row in result.rows if row.status == status)
        if reasons:
            columns = (Column(key="rows", title=title, right=True), Column(key="reason", title="Reason"))
            shown_reasons = [{"rows": count, "reason": reason} for reason, count in reasons.most_common(worst)]
            show_rows(shown_reasons, columns, form, title="")
    _show_unused(result, form)


def validation_document(result: Validation) -> dict[str, Any]:
    """A validation as plain JSON."""
    return {
        "rows": [row.to_document() for row in result.rows],
        "summary": [asdict(item) for item in result.summary],
        "ranking": None if result.ranking is None else asdict(result.ranking),
        "coverage": result.coverage,
    }


def _show_unused(result: Validation, form: Format) -> None:
    """Keys of observations that nothing reads, by the number of rows that have them."""
    from meshplan.cli.render import show_rows

    counts = Counter(f"{key}{did_you_mean(meant)}" for row in result.rows for key, meant in row.unused.items())
    if counts:
        columns = (Column(key="rows", title="Not used", right=True), Column(key="key", title="Key"))
        show_rows([{"rows": count, "key": key} for key, count in counts.most_common()], columns, form, title="")


def _is_shown(row: dict[str, Any]) -> bool:
    return row["metric"] in _SHOWN_METRICS and row["group"].startswith(_SHOWN_LABELS)


def _headline(result: Validation) -> str:
    answered = sum(row.status in ("ok", "excluded") for row in result.rows)
    text = f"{answered} of {len(result.rows)} observations answered ({result.coverage:.1%})"
    if result.ranking is not None:
        ranking = result.ranking
        text += (
            f"; {ranking.pair_order:.1%} of {ranking.num_pairs} pairs of plans in the measured order, "
            f"regret {ranking.mean_regret:.1%} mean, {ranking.worst_regret:.1%} worst"
        )
    admitted = Counter(row.admitted for row in result.rows if row.admitted)
    if admitted:
        shares = ", ".join(f"{count / admitted.total():.1%} {how}" for how, count in admitted.most_common())
        text += f"; memory of {admitted.total()} runs that worked, admitted by: {shares}"
    return text


def _worst_rows(result: Validation, count: int) -> list[dict[str, Any]]:
    judged = []
    for row in result.rows:
        metric = next((name for name in _JUDGED_METRICS if name in row.error), None)
        if row.status == "ok" and metric is not None:
            judged.append((metric, row))
    judged.sort(key=lambda item: -abs(item[1].error[item[0]]))
    found = []
    for metric, row in judged[:count]:
        parts = sorted(row.breakdown_s.items(), key=lambda item: -item[1])[:NAMED_PARTS]
        total = row.predicted[metric].value
        found.append(
            {
                "id": row.id,
                "metric": metric,
                "error": row.error[metric],
                "measured": row.measured[metric],
                "predicted": total,
                "parts": ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts),
            }
        )
    return found
