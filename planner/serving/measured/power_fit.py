"""Fitting the power curve to measured runs, and saying how well it carries over.

Utilisations are those of the simulation with the catalog's serving constants, because a plan has no others; the curve
thus carries their error too, and the errors are taken both ways: as predicted, and with utilisations corrected by the
rate that was measured. Objective: that of :mod:`meshplan.planner.validation.fitting` for the logarithm of the power,
with the logarithms of the constants as parameters and the weight 1/(runs of the group).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.power import PowerCalibration, PowerConstants
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.planner.cluster.power import DeviceWork, peak_bytes_per_j, power_share
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.evidence import UNJUDGED_P90
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.validation.between_sources import expected, log_size, source_errors
from meshplan.planner.validation.fitting import Linear, Loss, Parameters, Prior, gauss_newton, limited, most_probable
from meshplan.planner.validation.held_out import Calibrated, HeldOut, leave_one_out, today

POWER = Parameters(
    names=("waiting_share", "memory_pj_per_bit", "narrow_share", "compute_share", "compute_exponent", "bulk_share")
)
# Scatter of a board's power that no constant explains, in the logarithm: the same model on the same devices, under
# another set of prompts at the same number of requests (ML.ENERGY, Qwen3-30B on two H100: 3 to 7 %).
NOISE = 0.05
# Servers that wait for their host draw as little as half of what their kernels would: no constant of the curve explains
# them, and by Huber's loss each would move it as much as a good row. The scale is that of the serving constants' fit.
LOSS = Loss(huber=1.0, cauchy=1.0)
# Prior of every constant about its default: a factor of e; of a board that waits 1.2, as no run here measures one and
# others have: of a B200's 1,000 W 192 to 196 with a model loaded and nothing to do, 256 to 277 while a server hung with
# its kernels running (NVIDIA/TensorRT-LLM, issues 10278 and 5391, nvidia-smi, read 2026-11-27).
SPREAD, WAITING_SPREAD = 1.0, 0.2
STEP, MAX_MOVE, ITERATIONS, REWEIGHTINGS, CONVERGED = 1e-4, 0.5, 60, 1, 1e-4
# Metrics of the held-out errors: as a plan predicts them, and with the measured rate, where energy errs as power does.
PREDICTED, AT_MEASURED_RATE = "power_w", "power_w (measured rate)"
ENERGY = "energy_per_output_token_j"


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRow:
    """One run whose power was measured.

    Args:
        prepared: the run.
        share: measured power over the board's limit.
        use: utilisations by its simulation.
        rate_error: predicted over measured rate of output tokens; None where the rate was not measured.
    """

    prepared: PreparedRun
    share: float
    use: DeviceWork
    rate_error: float | None

    @property
    def group(self) -> str:
        """Near-duplicates share it."""
        return self.prepared.run.group

    @property
    def bytes_per_j(self) -> float:
        """Of its devices: :func:`peak_bytes_per_j`."""
        return peak_bytes_per_j(self.prepared.run.machine.device)

    def held_out(self, constants: PowerConstants) -> list[HeldOut]:
        """Errors under constants that were fitted without the run."""
        power = float(power_share(constants, self.use, self.bytes_per_j)) / self.share
        found = {PREDICTED: power}
        if self.rate_error is not None:
            corrected = self.use.times(1.0 / self.rate_error)
            found[AT_MEASURED_RATE] = float(power_share(constants, corrected, self.bytes_per_j)) / self.share
            found[ENERGY] = power / self.rate_error
        run = self.prepared.run
        return [
            HeldOut(id=run.id, group=self.group, key=self.prepared.key, metric=name, error=ratio - 1.0)
            for name, ratio in found.items()
        ]


# What is left out together; the first is the headline, and what intervals rest on: nobody's power was measured here.
TOGETHER: Mapping[str, Callable[[PowerRow], Hashable]] = {
    "source": lambda row: row.group.partition("|")[0],
    "group": lambda row: row.group,
    "device": lambda row: row.prepared.run.machine.device.slug,
}


def power_rows(runs: Iterable[PreparedRun], constants: Callable[[PreparedRun], ServingConstants]) -> list[PowerRow]:
    """The aggregated runs with a measured power.

    Args:
        runs: measured serving runs.
        constants: of the serving estimator, for a run.
    """
    return [row for run in runs if (row := _row(run, constants)) is not None]


def _row(prepared: PreparedRun, constants: Callable[[PreparedRun], ServingConstants]) -> PowerRow | None:
    share = measured_share(prepared)
    if share is None or prepared.run.config.is_disaggregated:
        return None
    served = prepared.served(constants(prepared))
    use = prepared.utilization(served)
    if use is None:
        return None
    return PowerRow(prepared=prepared, share=share, use=use, rate_error=_rate_error(prepared, served))


def _rate_error(prepared: PreparedRun, served: ServingRun) -> float | None:
    """Predicted over measured rate of tokens, by the first of these that was measured: tokens/s, time per token."""
    measured = prepared.run.measured
    predicted = prepared.metrics_of(served)
    for name in ("output_tokens_per_s", "total_tokens_per_s"):
        if measured.get(name) and predicted.get(name):
            return float(predicted[name] / measured[name])
    if measured.get("tpot_s") and predicted.get("tpot_s"):
        return float(measured["tpot_s"] / predicted["tpot_s"])
    return None


def measured_share(prepared: PreparedRun) -> float | None:
    """Measured average power over the limit of all boards; None where it was not measured or that is unknown."""
    run, limit = prepared.run, prepared.run.machine.device.tdp_w
    if limit is None:
        return None
    share = run.measured.get("average_power_fraction_of_tdp")
    if share is None and "power_w" in run.measured:
        share = run.measured["power_w"] / run.config.num_devices / limit
    return None if not share else float(share)


def calibrate_power(rows: Sequence[PowerRow], *, source: str, date: str | None = None) -> Calibrated[PowerCalibration]:
    """The curve of all rows, with its errors on rows held out.

    Args:
        rows: runs whose power was measured.
        source: what they are.
        date: day of the fit, ISO 8601; None for today.
    """
    folds = {name: _judged(rows, together) for name, together in TOGETHER.items()}
    found = [item for item in folds["source"] if item.metric == PREDICTED]
    calibration = PowerCalibration(
        constants=fitted(rows),
        error_p90={"power": _width(found)},
        num_runs=len(rows),
        source=source,
        date=date or today(),
    )
    return Calibrated(
        calibrations=(calibration,), folds={name: _with_coverage(items, found) for name, items in folds.items()}
    )


def _judged(rows: Sequence[PowerRow], together: Callable[[PowerRow], Hashable]) -> tuple[HeldOut, ...]:
    """Errors of every row by the curve of the rows that it is not held out together with."""

    def without(left: Hashable) -> PowerConstants:
        return fitted([row for row in rows if together(row) != left])

    return tuple(leave_one_out(rows, together, without, lambda row, constants: row.held_out(constants)))


def _width(found: Sequence[HeldOut]) -> float:
    """Half-width of the interval of power in the logarithm, from predictions of sources that were left out."""
    another = expected([("all sources", source_errors(found, lambda item: item.source))])
    return UNJUDGED_P90 if another is None else round(another.half_width, 4)


def _with_coverage(judged: Sequence[HeldOut], found: Sequence[HeldOut]) -> tuple[HeldOut, ...]:
    """Predictions of power with whether their interval, that of the other sources, holds the measurement."""
    widths = {left: _width([item for item in found if item.source != left]) for left in {i.source for i in judged}}
    return tuple(
        replace(item, is_covered=log_size(item) <= widths[item.source]) if item.metric == PREDICTED else item
        for item in judged
    )


def fitted(rows: Sequence[PowerRow]) -> PowerConstants:
    """The most probable constants; the defaults without rows."""
    if not rows:
        return PowerConstants()
    count = Counter(row.group for row in rows)
    weight = np.array([1.0 / count[row.group] for row in rows])
    measured = np.log([row.share for row in rows])
    names = DeviceWork.__dataclass_fields__
    use = DeviceWork(**{name: np.array([float(getattr(row.use, name)) for row in rows]) for name in names})
    bytes_per_j = np.array([row.bytes_per_j for row in rows])
    start = POWER.vector(PowerConstants())
    spread = [WAITING_SPREAD if name == "waiting_share" else SPREAD for name in POWER.names]
    prior = Prior(mean=start, spread=np.array(spread))

    def predicted(theta: FloatArray) -> FloatArray:
        constants = PowerConstants(**{name: float(value) for name, value in POWER.values(theta).items()})
        return np.log(power_share(constants, use, bytes_per_j))

    def step(theta: FloatArray) -> FloatArray:
        here = predicted(theta)
        slope = np.stack([(predicted(theta + STEP * unit) - here) / STEP for unit in np.eye(len(theta))], axis=1)
        linear = Linear(at=theta, residual=measured - here, slope=slope, noise=np.full(len(rows), NOISE), weight=weight)
        return limited(theta, most_probable(linear, prior, LOSS, rounds=REWEIGHTINGS), MAX_MOVE)

    theta = gauss_newton(step, start, iterations=ITERATIONS, converged=CONVERGED)
    return POWER.replaced(PowerConstants(), theta)
