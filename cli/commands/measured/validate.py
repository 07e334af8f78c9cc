"""``meshplan validate``: predicted against measured, row by row and summed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, SeedOption, TracesOption
from meshplan.cli.render import Format
from meshplan.cli.reports.measured.validation import show_validation

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.serving.measured.requests import ComparedRun
    from meshplan.planner.validation.summary import Validation

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_WORST = 10
PLOTTED_METRIC = "iteration_s"
RequestsOption = Annotated[
    Path | None,
    typer.Option(
        "--requests",
        metavar="FILE.svg",
        help="Compare serving runs request by request where their traces hold measured times: write a picture of "
        "TTFT, TPOT, latency and queueing, and print the errors.",
        show_default=False,
    ),
]
PointsOption = Annotated[
    int | None,
    typer.Option(
        "--from-points",
        metavar="N",
        min=1,
        help="Adapt the constants to N runs as 'calibrate' does, and judge others: of each serving curve; of each "
        "training cluster, and of each model on it, with constants fitted without their source.",
        show_default=False,
    ),
]


@app.command()
def validate(
    observations: Annotated[
        list[Path], typer.Argument(metavar="OBSERVATIONS...", help="Measured runs, one JSON object per line.")
    ],
    worst: Annotated[int, typer.Option(help="Rows with the largest error to show.")] = DEFAULT_WORST,
    traces: TracesOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write a scatter plot of the step time.", show_default=False)
    ] = None,
    requests: RequestsOption = None,
    from_points: PointsOption = None,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --from-points: this many curves or clusters.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --from-points: processes. Default: one per core.", show_default=False
        ),
    ] = None,
    seed: SeedOption = 0,
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Predict measured runs with the constants of the catalog, and show how far off the predictions are.

    Runs from which those constants were fitted are predicted better than new ones; 'meshplan calibrate' prints the
    error on runs that were held out, --from-points what a user's own runs bring.
    """
    from meshplan.catalogs.errors import SpecError
    from meshplan.planner.validate import validate_rows
    from meshplan.planner.validation.machines import ROWS, read_rows

    rows = [row for path in observations for row in read_rows(path)]
    if not rows:
        files = ", ".join(map(str, observations))
        raise SpecError.at(files, "no measured run is in it; one JSON object a line", of=ROWS)
    catalog = open_catalog(db)
    if from_points is not None:
        for option in (name for name, path in (("--plot", plot), ("--requests", requests)) if path is not None):
            message = "shows predictions with the constants of the catalog; give it without --from-points"
            raise SpecError.at(option, message)
        from meshplan.cli.reports.measured.own_points import show_points

        show_points(rows, catalog, form, worst, traces, num_points=from_points, seed=seed, sample=sample, jobs=jobs)
        return
    result = validate_rows(rows, catalog, traces=traces)
    compared = () if requests is None else _compared(result, rows, catalog, traces)
    if plot is not None:
        _plot(result, plot, force=force)
    if requests is None:
        show_validation(result, form, worst)
        return
    from meshplan.catalogs.writing import write_file
    from meshplan.cli.reports.measured.requests import requests_svg, show_requests  # start-up: --help needs no NumPy

    write_file(requests, requests_svg(compared), force=force)
    show_requests(result, compared, form, worst)


def _compared(
    result: Validation, rows: Sequence[Mapping[str, Any]], catalog: Catalog, traces: Path | None
) -> Sequence[ComparedRun]:
    """The runs whose requests are compared, at least one."""
    from meshplan.catalogs.errors import SpecError
    from meshplan.planner.serving.measured.requests import compared_runs
    from meshplan.planner.validation.machines import ROWS

    found = compared_runs(rows, catalog, traces)
    if found:
        return found
    needed = (
        "no serving run of these files replays a trace with measured times. The trace, in --traces DIR, needs "
        "first_token_s and finished_s (of queueing scheduled_s; queued_s where the engine's clock starts there) beside "
        "arrival_s, input_length and output_length, all seconds on one clock; the row needs workload.arrival 'trace', "
        "workload.trace with the file's name, and the recording's own request_rate_per_s or none"
    )
    refused = [f"{row.id}: {row.reason}" for row in result.rows if row.status in ("unsupported", "infeasible")]
    raise SpecError.at("--requests", "; ".join([needed, *refused[:1]]), of=ROWS)


def _plot(result: Validation, path: Path, *, force: bool) -> None:
    from meshplan.catalogs.errors import EmitError
    from meshplan.catalogs.writing import write_file
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
    write_file(path, scatter_svg(points, title="Step time", unit="s"), force=force)
