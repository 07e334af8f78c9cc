"""The serving constants that are fitted to measured runs, the model behind them, and the runs as rows of the fit.

*Notation.* Run i has measured metrics y_im (time to first token, time per token, latency or throughput) and predictions
f_im(θ); θ are the logarithms of :class:`~meshplan.catalogs.constants.serving.ServingConstants`.

*Model.* The constants of an engine's release on a generation are a sum of what all share and of what the engine, the
release and the generation do (:mod:`meshplan.planner.serving.measured.parts`). Each part has a normal prior, so that a
release that was never measured on a generation still has constants, and few runs move only what they depend on.

*Objective.* That of :mod:`meshplan.planner.validation.fitting` for ln y_im − ln f_im(θ), with Huber's loss and then
Cauchy's, which ignores runs that no constants explain (a front end that is its own bottleneck, a flag that the source
does not state); the weight of a run is 1/(runs of its concurrency curve), so that long curves do not outvote short
ones. Derivatives come from simulations with each constant perturbed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.measured.parts import FITTED, OWN_SPREAD, SHARED, parts_of, spread_of
from meshplan.planner.serving.measured.prediction import FITTED_METRICS, TAIL_METRICS, PreparedRun
from meshplan.planner.validation.fitting import Linear, Loss, Parameters, Prior, gauss_newton, limited, most_probable
from meshplan.planner.validation.held_out import HeldOut, Key

# Scatter of a metric that no constant explains, in the logarithm: another release of the same engine moves both
# latencies by about 15 %, and the time to first token three times as much from run to run as the time per token.
NOISE = {"ttft_s": 0.2, "tpot_s": 0.08, "latency_s": 0.08, "output_tokens_per_s": 0.08}
# The same for fits to the runs of one server. Residuals about a server's best constants are correlated between loads:
# of the time to first token 0.57 is shared at twice the concurrency, 0.16 at four times, nothing beyond. So one point
# must not move constants that all loads share by much. Chosen with the own spreads on half of the curves,
# and so that eight runs still move the constants that they depend on.
OWN_NOISE = {"ttft_s": 0.2, "tpot_s": 0.04, "latency_s": 0.04, "output_tokens_per_s": 0.04}
LOSS, OWN_LOSS = Loss(huber=1.5, cauchy=1.0), Loss(huber=1.5)
STEP = 0.1  # by which constants are perturbed for derivatives, in the logarithm
MAX_MOVE = 1.0  # of a constant in one iteration, in the logarithm
MOST_OF_CURVE = 3
REWEIGHTINGS = 24
FIXED_SPREAD = 1e-6  # prior of a constant that may not move
OWN_ITERATIONS = 2
PARAMETERS = Parameters(names=tuple(FITTED))


class Row:
    """One run with what it is fitted to.

    Args:
        prepared: the run.
        noise: metric → scatter that no constant explains.
    """

    def __init__(self, prepared: PreparedRun, noise: Mapping[str, float]) -> None:
        run = prepared.run
        self.prepared = prepared
        self.key: Key = prepared.key
        self.group: str = run.group
        self.metrics = [name for name in FITTED_METRICS[run.workload.arrival] if run.measured.get(name)]
        if "latency_s" in self.metrics:  # contains the time per token, which would count twice
            self.metrics = [name for name in self.metrics if name in ("latency_s", "ttft_s")]
        if "latency_s" in self.metrics and "tpot_s" in run.measured:
            self.metrics = ["ttft_s", "tpot_s"]
        self.log_measured = np.array([np.log(run.measured[name]) for name in self.metrics])
        self.noise = np.array([noise[name] for name in self.metrics])
        pool = run.config.pools[-1]
        self.curve = (
            self.group,
            self.key,
            pool.layout,
            pool.quantization,
            run.workload.input_length,
            run.workload.output_length,
            run.config.num_devices,
        )

    @property
    def source(self) -> str:
        """Who published the run: the first part of its group."""
        return self.group.partition("|")[0]

    def log_predicted(self, theta: FloatArray) -> FloatArray:
        """Ln f at θ; NaN where the run does not fit the device."""
        values = self.prepared.predicted(PARAMETERS.replaced(ServingConstants(), theta))
        return np.array([np.log(values[name]) if name in values else np.nan for name in self.metrics])

    def held_out(self, theta: FloatArray, evidence: str = "") -> list[HeldOut]:
        """The error of each metric under constants that were fitted without the run, to such evidence as is named."""
        run = self.prepared.run
        values = self.prepared.predicted(PARAMETERS.replaced(ServingConstants(), theta))
        tails = [name for name in TAIL_METRICS if run.measured.get(name)]  # judged, though nothing is fitted to them
        return [
            HeldOut(
                id=run.id,
                group=self.group,
                key=self.key,
                metric=name,
                error=float(values[name] / run.measured[name]) - 1.0,
                evidence=evidence,
            )
            for name in (*self.metrics, *tails)
            if name in values
        ]

    def linear(self, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Ln f [M] and its derivatives [M, constants] at θ."""
        here = self.log_predicted(theta)
        slope = np.zeros((len(here), len(theta)))
        for j, name in enumerate(FITTED):
            if name == "first_token_offset_s":  # it is added to the engine's time: ∂ ln f/∂θ = offset/f
                added = np.array([metric in ("ttft_s", "latency_s") for metric in self.metrics])
                slope[:, j] = np.where(added & self.prepared.run.workload.has_front_end, np.exp(theta[j] - here), 0.0)
                continue
            moved = theta.copy()
            moved[j] += STEP
            slope[:, j] = (self.log_predicted(moved) - here) / STEP
        return here, slope


def solve(
    linear: Linear, owners: Sequence[Row], prior: FloatArray, *, kept: Callable[[Row], bool] = lambda _: True
) -> Callable[[Key], FloatArray]:
    """The most probable parts, as a function from keys to θ.

    Args:
        linear: metrics of runs, from :func:`linearised`.
        owners: the run of each metric.
        prior: mean of μ.
        kept: rows that are not left out.
    """
    chosen = [i for i, row in enumerate(owners) if kept(row)]
    parts = sorted({part for i in chosen for part in parts_of(owners[i].key)} | {SHARED})
    offset = {part: i * len(FITTED) for i, part in enumerate(parts)}
    size = len(FITTED)
    rows = linear.only(chosen)
    design = np.zeros((len(chosen), len(parts) * size))
    for row, i in enumerate(chosen):
        for part in parts_of(owners[i].key):
            at = offset[part]
            design[row, at : at + size] = rows.slope[row]
    parts_prior = Prior(
        mean=np.where(np.repeat([part == SHARED for part in parts], size), np.tile(prior, len(parts)), 0.0),
        spread=np.concatenate([spread_of(part) for part in parts]),
    )
    rows = replace(rows, at=np.zeros(design.shape[1]), slope=design)
    found = most_probable(rows, parts_prior, LOSS, rounds=REWEIGHTINGS, start=parts_prior.mean)

    def theta(key: Key) -> FloatArray:
        offsets = [offset[part] for part in parts_of(key) if part in offset]
        return np.asarray(sum((found[at : at + size] for at in offsets), np.zeros(size)))

    return theta


def refined(rows: Sequence[Row], start: ServingConstants, free: Sequence[str] = tuple(FITTED)) -> ServingConstants:
    """Constants of one server adapted to its own runs, however few.

    Args:
        rows: runs of one engine on one generation, with the scatter of a single server.
        start: the catalog's, which is also the prior.
        free: constants that may move.
    """
    spread = np.where([name in free for name in FITTED], OWN_SPREAD, FIXED_SPREAD)
    prior = Prior(mean=PARAMETERS.vector(start), spread=spread)

    def step(theta: FloatArray) -> FloatArray:
        linear, _ = linearised(rows, lambda _: theta)
        linear = replace(linear, weight=np.ones_like(linear.weight))
        found = most_probable(linear, prior, OWN_LOSS, rounds=REWEIGHTINGS, start=prior.mean)
        return limited(theta, found, MAX_MOVE)

    return PARAMETERS.replaced(start, gauss_newton(step, prior.mean, iterations=OWN_ITERATIONS))


def thinned_curves(rows: Sequence[Row]) -> list[Row]:
    """At most :data:`MOST_OF_CURVE` rows per concurrency curve, spread over its loads: the others add little."""
    curves: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        curves[row.curve].append(row)
    chosen = []
    for members in curves.values():
        members.sort(key=lambda row: row.prepared.run.workload.concurrency or 0)
        kept = np.unique(np.linspace(0, len(members) - 1, min(len(members), MOST_OF_CURVE)).round().astype(int))
        chosen += [members[index] for index in kept]
    return chosen


def linearised(rows: Sequence[Row], theta: Callable[[Key], FloatArray]) -> tuple[Linear, list[Row]]:
    """The metrics of the rows, linearised at the θ of their keys, and the row of each; not those that do not fit.

    As each key has its own θ, the point of linearisation is 0: residual = ln y − ln f + slope·θ ≈ slope·θ_key.
    """
    rows = thinned_curves(rows)
    curves = Counter(row.curve for row in rows)
    residuals, slopes, noises, weights = [], [], [], []
    owners: list[Row] = []
    for row in rows:
        at = theta(row.key)
        here, slope = row.linear(at)
        good = np.isfinite(here) & np.isfinite(slope).all(axis=1)
        residuals.append((row.log_measured - here + slope @ at)[good])
        slopes.append(slope[good])
        noises.append(row.noise[good])
        weights.append(np.full(int(good.sum()), 1.0 / curves[row.curve]))
        owners += [row] * int(good.sum())
    linear = Linear(
        at=np.zeros(len(FITTED)),
        residual=np.concatenate(residuals),
        slope=np.concatenate(slopes),
        noise=np.concatenate(noises),
        weight=np.concatenate(weights),
    )
    return linear, owners
