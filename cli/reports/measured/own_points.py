"""``meshplan validate --from-points``: errors with constants adapted to a few runs of each server or cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.cli.render import Column, Format
from meshplan.cli.reports.quantities import percent

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.validation.points import PointsResult

MEMORY = (
    Column(key="what", title="Peaks"),
    Column(key="num_runs", title="n", right=True),
    Column(key="safe", title="within the bound", right=True, text=percent),
    Column(key="over", title="bound over measured, mean", right=True, text=percent),
)


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
    """Adapt constants to some runs of each group, predict others; print the errors with and without adapting.

    Raises:
        SpecError: no group has more runs than points.
    """
    from meshplan.catalogs.errors import SpecError

    options = {"num_points": num_points, "seed": seed, "sample": sample, "num_processes": jobs or os.cpu_count() or 1}
    tasks = {str(row.get("task")) for row in rows}
    results: list[PointsResult] = []
    if "serving" in tasks:
        results += _serving(rows, catalog, traces, options)
    if "training" in tasks:
        results += _training(rows, catalog, options)
    judged = [result for result in results if result.num_curves]
    if not judged:
        message = f"no curve of these files has more than {num_points} runs: give more runs, or fewer points"
        raise SpecError.at("--from-points", message)
    if form in (Format.JSON, Format.YAML) and len(judged) > 1:
        from meshplan.cli.render import show_document

        show_document({result.drawn_from: _document(result, num_points) for result in judged}, form)
        return
    for result in judged:
        _show(result, form, worst, num_points)


def _serving(
    rows: Sequence[Mapping[str, Any]], catalog: Catalog, traces: Path | None, options: Mapping[str, Any]
) -> list[PointsResult]:
    from meshplan.cli.observed import log, serving_runs
    from meshplan.planner.serving.measured.own_points import predict_from_points
    from meshplan.planner.serving.resolve import serving_calibration

    runs = serving_runs(rows, catalog, traces).runs
    return [predict_from_points(runs, lambda *key: serving_calibration(catalog, *key), **options, log=log)]


def _training(
    rows: Sequence[Mapping[str, Any]], catalog: Catalog, options: Mapping[str, Any]
) -> tuple[PointsResult, ...]:
    from meshplan.cli.observed import log, training_runs
    from meshplan.planner.training.measured.own_points import predict_from_points

    return predict_from_points(training_runs(rows, catalog).runs, **options, log=log)


def _extra(result: PointsResult, num_points: int) -> dict[str, Any]:
    """What documents say beside the validation."""
    return {
        "points_per_curve": num_points,
        "num_curves": result.num_curves,
        "drawn_from": result.drawn_from,
        "started_from": list(result.started_from),
        "without_points": [asdict(item) for item in result.without],
        **({"memory": {name: asdict(found) for name, found in result.memory.items()}} if result.memory else {}),
    }


def _document(result: PointsResult, num_points: int) -> dict[str, Any]:
    from meshplan.cli.reports.measured.validation import validation_document

    return {**validation_document(result.validation), **_extra(result, num_points)}


def _show(result: PointsResult, form: Format, worst: int, num_points: int) -> None:
    from meshplan.cli.render import show_rows
    from meshplan.cli.reports.measured.validation import SUMMARY, show_validation

    extra = _extra(result, num_points)
    more = f"; {result.num_curves} {result.drawn_from}, {num_points} measured point(s) of each given"
    show_validation(result.validation, form, worst, extra=extra, more=more)
    if form not in (Format.JSON, Format.YAML, Format.CSV):
        show_rows(extra["without_points"], SUMMARY, form, title="\nThe same runs without the points")
        if result.memory:
            safety = [{"what": name, **asdict(found)} for name, found in result.memory.items()]
            show_rows(safety, MEMORY, form, title="\nSafe bound of the memory")
        show_rows(
            [{"set": text} for text in result.started_from], (Column(key="set", title="Started from"),), form, title=""
        )
