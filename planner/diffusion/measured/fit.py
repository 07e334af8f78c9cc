"""Constants of diffusion pipelines from measured runs, and their error with a model held out.

The constants of kernels, links and power are fitted for each hardware generation; those of the host are shared, because
hosts of one year are alike. A run counts twice: by its latency, and by how its latency compares with the others of its
cell (same model, device, batch and number of devices, other degrees). The second is known better, since whatever is
wrong with the model cancels, and it decides which degrees are chosen; it has a fifth of the noise.

Power is fitted after the latency, with the times that the fitted constants predict.

The generation ``any`` gets the geometric mean of the fitted ones, and the largest error of a generation that was held
out entirely: predicted by the mean of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from meshplan.catalogs.constants.diffusion import ANY, DiffusionCalibration, DiffusionConstants
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.diffusion.estimator.demand import Demand, demand
from meshplan.planner.diffusion.estimator.latency import latency
from meshplan.planner.diffusion.estimator.power import power_share
from meshplan.planner.diffusion.measured.rows import MeasuredRun
from meshplan.planner.diffusion.problem.degrees import degrees_of
from meshplan.planner.validation.fitting import Linear, Loss, Prior, gauss_newton, most_probable

# Standard deviation of a constant's logarithm about its default. Matrix products are known from surfaces.
SPREAD: Mapping[str, float] = {
    "gemm_efficiency": 0.05,
    "attention_efficiency": 0.4,
    "exponentials_per_flop": 0.5,
    "elementwise_efficiency": 0.4,
    "link_efficiency": 0.4,
    "ulysses_passes": 0.5,
    "ring_passes": 0.7,
    "merge_passes": 0.7,
    "launch_s": 0.5,
    "exchange_host_s": 0.7,
    "ulysses_host_s": 0.7,
    "hop_host_s": 0.7,
    "ulysses_exposed_s": 0.5,
    "ring_exposed_s": 0.7,
    "vae_efficiency": 0.5,
    "image_host_s": 1.0,
    "fixed_s": 1.0,
}
SHARED = frozenset(name for name in SPREAD if name.endswith("_s")) - {"image_host_s"}
POWER = ("waiting_share", "gemm_share", "attention_share", "elementwise_share", "exchange_share", "vae_share")
_POWER_SPREAD = 0.3
# Noise of a logarithm: of a latency, of its contrast inside a cell, of a power.
NOISE, CONTRAST_NOISE, POWER_NOISE = 0.1, 0.02, 0.1
_LOSS = Loss(huber=1.0)
_ITERATIONS, _ROUNDS, _MAX_STEP, _CONVERGED, _STEP = 20, 8, 0.5, 1e-3, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measured runs, ready to be priced.

    Args:
        runs: as read.
        asked: what they ask for, [n].
        generation: index of each run's generation, [n].
        generations: their names.
        cell: index of each run's cell, [n].
        latency_s: measured, [n].
        power_share: measured power of a device over its limit, [n]; NaN where none was measured.
    """

    runs: tuple[MeasuredRun, ...]
    asked: Demand
    generation: IntArray
    generations: tuple[str, ...]
    cell: IntArray
    latency_s: FloatArray
    power_share: FloatArray


def prepared(runs: Sequence[MeasuredRun]) -> Runs:
    """Runs with a measured latency, grouped by model and device, and what they ask for."""
    groups: dict[tuple[object, ...], list[MeasuredRun]] = {}
    for run in runs:
        if "latency_s" in run.measured:
            job, machine = run.job, run.machine
            key = (
                job.model.slug,
                job.height,
                job.width,
                job.frames,
                job.steps,
                machine.device.slug,
                machine.num_devices,
            )
            groups.setdefault(key, []).append(run)
    ordered = tuple(run for members in groups.values() for run in members)
    asked = Demand.joined(
        [
            demand(members[0].job, members[0].machine, degrees_of([run.config for run in members]))
            for members in groups.values()
        ]
    )
    names = tuple(sorted({run.machine.device.architecture for run in ordered}))
    cells = {cell: index for index, cell in enumerate(dict.fromkeys(run.cell for run in ordered))}
    power = np.array([run.measured.get("power_w", np.nan) for run in ordered])
    return Runs(
        runs=ordered,
        asked=asked,
        generation=np.array([names.index(run.machine.device.architecture) for run in ordered]),
        generations=names,
        cell=np.array([cells[run.cell] for run in ordered]),
        latency_s=np.array([run.measured["latency_s"] for run in ordered]),
        power_share=power / (asked.power_limit_w * asked.devices),
    )


def fitted(runs: Runs, kept: FloatArray) -> dict[str, DiffusionConstants]:
    """Generation → constants, from the runs of a mask.

    Args:
        runs: all runs.
        kept: mask [n]; a cell is kept or left out as a whole.
    """
    keys = [
        (name, generation)
        for name in SPREAD
        for generation in ([None] if name in SHARED else range(len(runs.generations)))
    ]
    measured = np.log(runs.latency_s)

    def predicted(theta: FloatArray) -> FloatArray:
        return np.log(latency(runs.asked, _spread_out(runs, keys, theta)).total_s)

    theta = _solve(predicted, measured, keys, SPREAD, kept, runs.cell)
    taken = latency(runs.asked, _spread_out(runs, keys, theta))
    power_keys: list[tuple[str, int | None]] = [(name, g) for name in POWER for g in range(len(runs.generations))]

    def power(theta: FloatArray) -> FloatArray:
        return np.log(power_share(taken, _spread_out(runs, power_keys, theta)))

    known = kept & np.isfinite(runs.power_share)
    spread = dict.fromkeys(POWER, _POWER_SPREAD)
    shares = _solve(power, np.log(runs.power_share), power_keys, spread, known, None)
    return {
        generation: _constants(index, [*keys, *power_keys], np.concatenate([theta, shares]))
        for index, generation in enumerate(runs.generations)
    }


def constants_of(runs: Runs, sets: Mapping[str, DiffusionConstants]) -> DiffusionConstants:
    """The constants of each run's generation as arrays [n]."""
    return DiffusionConstants(
        **{
            one.name: np.array([getattr(sets[name], one.name) for name in runs.generations])[runs.generation]  # type: ignore[arg-type]
            for one in fields(DiffusionConstants)
        }
    )


def mean_constants(sets: Sequence[DiffusionConstants]) -> DiffusionConstants:
    """Geometric mean, constant by constant."""
    return DiffusionConstants(
        **{
            one.name: _rounded(float(np.exp(np.mean([np.log(getattr(each, one.name)) for each in sets]))))
            for one in fields(DiffusionConstants)
        }
    )


def calibrations(
    runs: Runs, errors: Mapping[str, Mapping[str, float]], *, tie: float, order_error: float, source: str, date: str
) -> tuple[DiffusionCalibration, ...]:
    """The sets to ship.

    Args:
        runs: all runs.
        errors: generation (and :data:`ANY`) → metric → 90th percentile of |log(predicted/measured)|, held out.
        tie: see :class:`~meshplan.catalogs.constants.diffusion.DiffusionCalibration`.
        order_error: likewise.
        source: which observations.
        date: ISO 8601.
    """
    sets = fitted(runs, np.ones(len(runs.runs), dtype=bool))
    made = [
        DiffusionCalibration(
            architecture=name,
            constants=constants,
            error_p90=errors[name],
            tie=tie,
            order_error=order_error,
            num_runs=int(np.sum(runs.generation == runs.generations.index(name))),
            devices=tuple(
                sorted({run.machine.device.slug for run in runs.runs if run.machine.device.architecture == name})
            ),
            source=source,
            date=date,
        )
        for name, constants in sets.items()
    ]
    general = replace(
        made[0],
        architecture=ANY,
        constants=mean_constants(list(sets.values())),
        error_p90=errors[ANY],
        num_runs=0,
        devices=(),
    )
    return (general, *made)


# --- the solver -------------------------------------------------------------------------------------------------------

Keys = Sequence[tuple[str, int | None]]


def _start(keys: Keys) -> FloatArray:
    return np.log([getattr(DiffusionConstants(), name) for name, _ in keys])


def _solve(
    predicted: Callable[[FloatArray], FloatArray],
    measured: FloatArray,
    keys: Keys,
    spread: Mapping[str, float],
    kept: FloatArray,
    cell: IntArray | None,
) -> FloatArray:
    """The most probable logarithms of the constants.

    Args:
        predicted: logarithms of the constants → ln of every run's figure, [n].
        measured: ln of the measured figures, [n].
        keys: constant and generation of each logarithm; None for a constant that generations share.
        spread: constant → prior standard deviation of its logarithm.
        kept: mask of the runs that are fitted to, [n].
        cell: of each run: how runs of one cell compare is fitted to as well. None for no such comparison.
    """
    prior = Prior(mean=_start(keys), spread=np.array([spread[name] for name, _ in keys]))

    def rows(values: FloatArray) -> FloatArray:
        """Latencies, and below them how they compare inside their cells."""
        if cell is None:
            return values[kept]
        count = np.bincount(cell)
        mean = np.stack([np.bincount(cell, column) for column in np.atleast_2d(values.T)], axis=-1)
        within = values - (mean[cell] / count[cell][:, None]).reshape(values.shape)
        return np.concatenate([values[kept], within[kept]])

    num_rows = int(kept.sum())
    noise = np.full(num_rows, NOISE if cell is not None else POWER_NOISE)
    if cell is not None:
        noise = np.concatenate([noise, np.full(num_rows, CONTRAST_NOISE)])
    target = rows(np.where(np.isfinite(measured), measured, 0.0))

    def step(theta: FloatArray) -> FloatArray:
        at = predicted(theta)
        moved = [predicted(theta + _STEP * unit) for unit in np.eye(len(theta))]
        slope = np.stack([(one - at) / _STEP for one in moved], axis=1)
        linear = Linear(
            at=theta, residual=target - rows(at), slope=rows(slope), noise=noise, weight=np.ones(len(target))
        )
        solved = most_probable(linear, prior, _LOSS, rounds=_ROUNDS, max_step=_MAX_STEP)
        return theta + np.clip(solved - theta, -_MAX_STEP, _MAX_STEP)

    return gauss_newton(step, prior.mean, iterations=_ITERATIONS, converged=_CONVERGED)


def _spread_out(runs: Runs, keys: Keys, theta: FloatArray) -> DiffusionConstants:
    """Constants as arrays [n], each run with those of its generation."""
    values: dict[str, FloatArray] = {}
    for (name, generation), logarithm in zip(keys, theta, strict=True):
        here = values.setdefault(name, np.zeros(len(runs.generation)))
        here[slice(None) if generation is None else runs.generation == generation] = np.exp(logarithm)
    return DiffusionConstants(**values)  # type: ignore[arg-type]


def _constants(index: int, keys: Keys, theta: FloatArray) -> DiffusionConstants:
    """The constants of one generation, to four digits."""
    return DiffusionConstants(
        **{
            name: _rounded(float(np.exp(logarithm)))
            for (name, generation), logarithm in zip(keys, theta, strict=True)
            if generation in (None, index)
        }
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
