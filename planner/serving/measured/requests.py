"""A measured serving run request by request: predicted beside measured, where its recording says when it was answered.

Latencies of the measured server begin when its engine queued a request, where that was recorded, else when the request
arrived; those of the simulation, as in every validation, when it arrived. What a plan states with an interval is a
figure of a whole run: how many requests lie within it says how far single ones scatter about that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.validate import half_width
from meshplan.planner.serving.measured.workloads import recorded_traces
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader
from meshplan.planner.validation.summary import MetricSummary, errors_summary

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairedLatency:
    """One latency of the requests of a run that have it: measured above 0, and of TPOT more than one token.

    Args:
        metric: name in the format of measured rows: ``ttft_s``, ``tpot_s`` or ``latency_s``.
        request: [n] position of each request in the recording, from 0.
        measured: [n] s.
        predicted: [n] s.
        half_width: of the interval that a plan gives this metric, in the logarithm.
    """

    metric: str
    request: IntArray
    measured: FloatArray
    predicted: FloatArray
    half_width: float

    def summary(self, run_id: str) -> MetricSummary:
        """Errors over the requests."""
        factor = math.exp(self.half_width)
        return errors_summary(
            run_id,
            self.metric,
            errors=self.predicted / self.measured - 1.0,
            measured=self.measured,
            predicted=self.predicted,
            low=self.predicted / factor,
            high=self.predicted * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRun:
    """A measured run and its simulation, request by request.

    Args:
        id: of the row.
        arrival_s: [n] from the first request on.
        latencies: those that the recording says something of; each of at least one request.
        queueing_s: [n] measured and predicted wait until a request first runs; None where that was not recorded.
    """

    id: str
    arrival_s: FloatArray
    latencies: tuple[PairedLatency, ...]
    queueing_s: tuple[FloatArray, FloatArray] | None

    @property
    def summaries(self) -> list[MetricSummary]:
        """Errors by metric."""
        return [latency.summary(self.id) for latency in self.latencies]


def compared_runs(rows: Iterable[Mapping[str, Any]], catalog: Catalog, traces: Path | None) -> list[ComparedRun]:
    """The serving runs among rows whose recordings hold measured times, with the constants of the catalog.

    Rows that cannot be predicted, or whose requests do not all fit, are left out.

    Args:
        rows: observations.
        catalog: devices, links and constants.
        traces: folder of the recordings; None where there is none.
    """
    observed = [row for row in rows if row.get("task") == "serving"]
    reader, recorded = MachineReader(catalog), recorded_traces(observed, traces)
    found = []
    for row in observed:
        try:
            prepared = PreparedRun(served_run(row, reader, recorded))
        except UnsupportedError:
            continue
        run = compared_run(prepared, serving_calibration(catalog, *prepared.key))
        if run is not None:
            found.append(run)
    return found


def compared_run(prepared: PreparedRun, calibration: ServingCalibration) -> ComparedRun | None:
    """One run beside its simulation; None where nothing says when it was answered, or not all of it fits.

    Args:
        prepared: the run.
        calibration: constants and their error.
    """
    run, trace = prepared.run, prepared.run.workload.trace
    if trace is None or trace.answered is None:
        return None
    calibration = calibration.for_load(prepared.own_load)
    served = prepared.served(calibration.constants)
    if served.num_rejected:
        return None
    measured, predicted = _measured_s(trace), _predicted_s(served)
    chosen = np.arange(len(trace)) >= run.num_before
    latencies = []
    for metric in (name for name in ("ttft_s", "tpot_s", "latency_s") if name in measured):
        having = chosen & (measured[metric] > 0.0)
        if having.any():
            latencies.append(
                PairedLatency(
                    metric=metric,
                    request=np.flatnonzero(having),
                    measured=measured[metric][having],
                    predicted=predicted[metric][having],
                    half_width=half_width(calibration, run, metric),
                )
            )
    waits = (measured["queueing_s"][chosen], predicted["queueing_s"][chosen]) if "queueing_s" in measured else None
    if not latencies and waits is None:
        return None
    arrival_s = trace.arrival_s[chosen]
    return ComparedRun(id=run.id, arrival_s=arrival_s - arrival_s[0], latencies=tuple(latencies), queueing_s=waits)


def _measured_s(trace: Requests) -> dict[str, FloatArray]:
    """What a recording says of each request: metric → [n] s; a time per token is 0 where there is but one."""
    answered = trace.answered
    if answered is None:
        return {}
    start = trace.arrival_s if answered.queued_s is None else answered.queued_s
    first, finished = answered.first_token_s, answered.finished_s
    found = {}
    if first is not None:
        found["ttft_s"] = first - start
    if first is not None and finished is not None:
        found["tpot_s"] = _per_token(first, finished, trace.output_length)
    if finished is not None:
        found["latency_s"] = finished - start
    if answered.scheduled_s is not None:
        found["queueing_s"] = answered.scheduled_s - start
    return found


def _predicted_s(served: ServingRun) -> dict[str, FloatArray]:
    """The same of a simulation."""
    return {
        "ttft_s": served.first_token_s - served.arrival_s,
        "tpot_s": _per_token(served.first_token_s, served.finish_s, served.output_length),
        "latency_s": served.finish_s - served.arrival_s,
        "queueing_s": served.admitted_s - served.arrival_s,
    }


def _per_token(first: FloatArray, finished: FloatArray, tokens: IntArray) -> FloatArray:
    return np.where(tokens > 1, (finished - first) / np.maximum(tokens - 1, 1), 0.0)
