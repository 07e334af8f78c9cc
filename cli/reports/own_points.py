"""``meshplan validate --from-points``: errors with constants adapted to a few runs of each server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.cli.render import Column, Format

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


def show_points(
    rows: Sequence[Mapping[str, Any]],
    catalog: Catalog,
    form: Format,
    worst: int,
    traces: Path | None,
    *,
    num_points: int,
    seed: int,
    sample: int | None,
    jobs: int | None,
) -> None:
    """Adapt constants to some runs of each curve, predict the others; print the errors with and without adapting."""
    from meshplan.catalogs.errors import Problem, SpecError
    from meshplan.cli.observed import log, serving_runs
    from meshplan.cli.render import show_rows
    from meshplan.cli.reports.validation import SUMMARY, show_validation
    from meshplan.planner.serving.measured.own_points import predict_from_points
    from meshplan.planner.serving.resolve import serving_calibration

    result = predict_from_points(
        serving_runs(rows, catalog, traces).runs,
        lambda *key: serving_calibration(catalog, *key),
        num_points=num_points,
        seed=seed,
        sample=sample,
        num_processes=jobs or os.cpu_count() or 1,
        log=log,
    )
    if not result.num_curves:
        message = f"no curve of these files has more than {num_points} serving runs: give more runs, or fewer points"
        raise SpecError([Problem(path="--from-points", message=message)])
    without = [asdict(item) for item in result.without]
    extra = {
        "points_per_curve": num_points,
        "num_curves": result.num_curves,
        "started_from": list(result.started_from),
        "without_points": without,
    }
    more = f"; {result.num_curves} curves, {num_points} measured point(s) of each given"
    show_validation(result.validation, form, worst, extra=extra, more=more)
    if form not in (Format.JSON, Format.YAML, Format.CSV):
        show_rows(without, SUMMARY, form, title="\nThe same runs without the points")
        show_rows(
            [{"set": text} for text in result.started_from], (Column(key="set", title="Started from"),), form, title=""
        )
