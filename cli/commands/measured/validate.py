"""``meshplan validate``: predicted against measured, row by row and summed up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshplan.cli.database import open_catalog
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption, SeedOption
from meshplan.cli.render import Format
from meshplan.cli.reports.measured.validation import show_validation

if TYPE_CHECKING:
    from meshplan.planner.validation.summary import Validation

app = typer.Typer(rich_markup_mode=None, add_completion=False)

DEFAULT_WORST = 10
PLOTTED_METRIC = "iteration_s"


@app.command()
def validate(
    observations: Annotated[
        list[Path], typer.Argument(metavar="OBSERVATIONS...", help="Measured runs, one JSON object per line.")
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
            help="Adapt the constants to N runs as 'calibrate' does, and judge others: of each serving curve; of each "
            "training cluster, and of each model on it, with constants fitted without their source.",
            show_default=False,
        ),
    ] = None,
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
        from meshplan.cli.reports.measured.own_points import show_points

        show_points(rows, catalog, form, worst, traces, num_points=from_points, seed=seed, sample=sample, jobs=jobs)
        return
    result = validate_rows(rows, catalog, traces=traces)
    if plot is not None:
        _plot(result, plot, force=force)
    show_validation(result, form, worst)


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
