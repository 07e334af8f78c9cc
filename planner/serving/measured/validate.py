"""One measured serving run against its simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.planner.core.plan import Interval
from meshplan.planner.serving.measured.exclusions import exclusions
from meshplan.planner.serving.measured.layouts import DEGREES
from meshplan.planner.serving.measured.observations import ServedRun, served_run
from meshplan.planner.serving.measured.prediction import PreparedRun, latency_of
from meshplan.planner.serving.measured.workloads import USED, recorded_traces
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader
from meshplan.planner.validation.summary import ValidatedRow
from meshplan.planner.validation.unused import unused_keys

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

ServingCalibrationOf = Callable[[str, str], ServingCalibration]
# Disaggregated runs with more requests in flight are summarised separately: their time to first token is the queue in
# front of whichever pool is saturated, a small difference between two large rates.
MOST_IN_FLIGHT = 128
DOES_NOT_FIT = "not every request fits: weights and KV cache exceed the memory that the engine takes"


def row_validator(
    rows: Iterable[Mapping[str, Any]], catalog: Catalog, traces: Path | None
) -> Callable[[Mapping[str, Any]], ValidatedRow]:
    """Row → its validation with the constants of the catalog; see :mod:`meshplan.planner.core.kinds`."""
    observed = list(rows)
    reader, recorded = MachineReader(catalog), recorded_traces(observed, traces)
    excluded = exclusions(observed)

    def validated(row: Mapping[str, Any]) -> ValidatedRow:
        prepared = PreparedRun(served_run(row, reader, recorded))
        reason = excluded.get(str(row.get("id")), "")
        found = validated_run(prepared, serving_calibration(catalog, *prepared.key), excluded=reason)
        if found.status == "infeasible":
            raise UnsupportedError(found.reason)
        return replace(found, unused=unused_keys(row, workload=USED, parallelism=DEGREES, predicted=found.predicted))

    return validated


def validated_run(prepared: PreparedRun, calibration: ServingCalibration, *, excluded: str = "") -> ValidatedRow:
    """One run simulated with a set of constants, against its measurement; ``infeasible`` where it does not fit.

    Args:
        prepared: the run.
        calibration: constants and their error.
        excluded: why the run is not to be judged by; empty where it is.
    """
    run = prepared.run
    calibration = calibration.for_load(prepared.own_load)
    values = prepared.predicted(calibration.constants)
    measured = {name: float(value) for name, value in {**run.derived, **run.measured}.items() if name in values}
    status = "excluded" if excluded else "ok"
    return ValidatedRow(
        id=run.id,
        group=run.group,
        question=_question(run),
        labels=_labels(run),
        status=status if values else "infeasible",
        reason=excluded if values else DOES_NOT_FIT,
        predicted={name: _interval(calibration, run, name, value) for name, value in values.items()},
        measured=measured,
        error={name: values[name] / measured[name] - 1.0 for name in measured},
        filled=run.filled,
    )


def _interval(calibration: ServingCalibration, run: ServedRun, metric: str, value: float) -> Interval:
    factor = math.exp(half_width(calibration, run, metric))
    return Interval(value=value, low=value / factor, high=value * factor)


def half_width(calibration: ServingCalibration, run: ServedRun, metric: str) -> float:
    """Half-width of a metric's interval, in the logarithm, as a plan gives it.

    Of every latency but the first token it is that of the time per token, tails included. The latency of a static batch
    is its throughput, and has that interval.
    """
    latency, _ = latency_of(metric)
    is_rate = not latency or (latency == "e2e" and run.workload.arrival is Arrival.STATIC_BATCH)
    return calibration.error_p90["throughput" if is_rate else "ttft" if latency == "ttft" else "tpot"]


def _question(run: ServedRun) -> str:
    workload = run.workload
    load = workload.concurrency or workload.request_rate_per_s or workload.num_requests
    return (
        f"{run.recipe.name}: {run.shape.name} on {run.machine.device.slug}, {workload.arrival.value} {load}, "
        f"{workload.input_length:g} in {workload.output_length:g} out"
    )


def _labels(run: ServedRun) -> dict[str, str]:
    if run.config.is_disaggregated:
        kind = "disaggregated"
    elif run.workload.arrival is Arrival.CLOSED_LOOP:
        kind = "aggregated"
    else:
        kind = run.workload.arrival.value
    labels = {
        "engine": f"{run.recipe.constants_name} on {run.architecture}",
        "source": run.group.split("|", maxsplit=1)[0],
        "load": kind,
        "device": run.machine.device.slug,
        "model": run.shape.name,
    }
    concurrency = run.workload.concurrency
    if run.config.is_disaggregated and concurrency is not None:
        is_few = concurrency <= MOST_IN_FLIGHT
        labels["disaggregated"] = f"{'up to' if is_few else 'more than'} {MOST_IN_FLIGHT} in flight"
    return labels
