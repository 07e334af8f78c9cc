"""``meshplan validate``: predicted against measured, row by row and summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, FormatOption, SeedOption
from meshplan.cli.render import Column, Format

if TYPE_CHECKING:
    from meshplan.planner.serving.problem.requests import Requests
    from meshplan.planner.validation.summary import Validation

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_WORST = 10
NAMED_PARTS = 3
PLOTTED_METRIC = "iteration_s"
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
TRACE_SUFFIXES = (".csv.gz", ".csv")


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"


SUMMARY = (
    Column(key="group", title="Rows"),
    Column(key="metric", title="Metric"),
    Column(key="n", title="n", right=True),
    Column(key="median_ape", title="median", right=True, text=_percent),
    Column(key="mape", title="mean", right=True, text=_percent),
    Column(key="p90_ape", title="p90", right=True, text=_percent),
    Column(key="signed_median", title="signed", right=True, text=_signed),
    Column(key="interval_coverage", title="in interval", right=True, text=_percent),
)
_WORST = (
    Column(key="id", title="Run"),
    Column(key="metric", title="Metric"),
    Column(key="error", title="Error", right=True, text=_signed),
    Column(key="measured", title="Measured", right=True, text=lambda value: f"{value:.4g}"),
    Column(key="predicted", title="Predicted", right=True, text=lambda value: f"{value:.4g}"),
    Column(key="parts", title="Largest parts of the prediction"),
)


@app.command()
def validate(
    observations: Annotated[
        list[Path], typer.Argument(metavar="OBSERVATIONS...", help="Measured runs, one JSON object a line.")
    ],
    worst: Annotated[int, typer.Option(help="Rows with the largest error to show.")] = DEFAULT_WORST,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Traces that serving runs replayed, named TYPE.csv[.gz].", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write a scatter plot of the step time.", show_default=False)
    ] = None,
    from_points: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Adapt the constants to N runs of each serving curve, as 'calibrate' does; judge its other runs.",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --from-points: this many curves.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --from-points: processes. Default: one a core.", show_default=False
        ),
    ] = None,
    seed: SeedOption = 0,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Predict measured runs with the constants of the catalog, and show how far off the predictions are.

    Runs from which those constants were fitted are predicted better than new ones; 'meshplan calibrate' prints the
    error on runs that were held out, --from-points what a user's own runs bring.
    """
    from meshplan.planner.serving.resolve import serving_calibration
    from meshplan.planner.training.measured.observations import read_rows
    from meshplan.planner.training.resolve import calibration_for
    from meshplan.planner.validate import validate_rows

    rows = [row for path in observations for row in read_rows(path)]
    catalog = open_catalog(db)
    if from_points is not None:
        from meshplan.cli.reports.own_points import show_points

        show_points(rows, catalog, form, worst, traces, num_points=from_points, seed=seed, sample=sample, jobs=jobs)
        return
    result = validate_rows(
        rows,
        catalog,
        lambda framework, device: calibration_for(catalog, framework, device),
        lambda engine, device: serving_calibration(catalog, engine, device),
        traces=read_traces(rows, traces),
    )
    if plot is not None:
        _plot(result, plot)
    show_validation(result, form, worst)


def read_traces(rows: Iterable[Mapping[str, Any]], folder: Path | None) -> dict[str, Requests]:
    """The traces that rows name, by their type; those whose file is not in the folder are left out.

    A file is TYPE.csv, or any that has the type in its name.
    """
    from meshplan.planner.serving.problem.trace import read_trace

    if folder is None:
        return {}
    workloads = [row.get("workload") for row in rows]
    wanted = {str(w["trace_type"]) for w in workloads if isinstance(w, dict) and w.get("trace_type")}
    files = sorted(path for path in folder.iterdir() if path.name.endswith(TRACE_SUFFIXES)) if folder.is_dir() else []
    found = {}
    for kind in sorted(wanted):
        matching = [path for path in files if kind in path.name]
        if matching:
            found[kind] = read_trace(matching[0])
    return found


def show_validation(
    result: Validation, form: Format, worst: int, *, extra: Mapping[str, Any] | None = None, more: str = ""
) -> None:
    """Print a validation in any format.

    Args:
        result: what was validated.
        form: how to print.
        worst: rows with the largest error that tables show.
        extra: further keys of documents.
        more: what the headline of a table also says.
    """
    from meshplan.cli.render import show_document, show_rows

    summary = [asdict(item) for item in result.summary]
    if form in (Format.JSON, Format.YAML):
        document: dict[str, Any] = {
            "rows": [row.to_document() for row in result.rows],
            "summary": summary,
            "ranking": None if result.ranking is None else asdict(result.ranking),
            "coverage": result.coverage,
            **(extra or {}),
        }
        show_document(document, form)
        return
    if form is Format.CSV:
        show_rows([row.to_document() for row in result.rows], (), form)
        return
    shown = [row for row in summary if row["group"] == "all" or _is_shown(row)]
    show_rows(shown, SUMMARY, form, title=_headline(result) + more)
    show_rows(_worst_rows(result, worst), _WORST, form, title="\nLargest errors")
    for status, title in (("excluded", "Not judged"), ("unsupported", "Not answered"), ("infeasible", "Do not fit")):
        reasons = Counter(row.reason for row in result.rows if row.status == status)
        if reasons:
            columns = (Column(key="rows", title=title, right=True), Column(key="reason", title="Reason"))
            shown_reasons = [{"rows": count, "reason": reason} for reason, count in reasons.most_common(worst)]
            show_rows(shown_reasons, columns, form, title="")


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


def _plot(result: Validation, path: Path) -> None:
    from meshplan.catalogs.errors import EmitError
    from meshplan.planner.validation.scatter import Point, scatter_svg

    points = [
        Point(
            measured=row.measured[PLOTTED_METRIC],
            predicted=row.predicted[PLOTTED_METRIC].value,
            label=f"{row.id}: {row.error[PLOTTED_METRIC]:+.1%}",
            series=row.labels["framework"],
        )
        for row in result.rows
        if PLOTTED_METRIC in row.error
    ]
    if not points:
        raise EmitError("nothing to plot: no observation states a step time")
    try:
        path.write_text(scatter_svg(points, title="Step time", unit="s"), encoding="utf-8")
    except OSError as error:
        raise EmitError(f"cannot write the plot to {path}: {error}") from error
