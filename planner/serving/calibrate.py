"""Fitting the serving constants to measured runs, and saying how well they carry over.

*Notation.* Run i has measured metrics y_im (time to first token, time per token, latency or throughput) and predictions
f_im(θ); θ are the logarithms of :class:`~meshplan.catalogs.serving_calibration.ServingConstants`.

*Model.* The constants of engine e on generation a are a sum, θ_ea = μ + α_e + β_a + γ_ea: what all share, what the
engine does everywhere, what the generation does under every engine, and the rest. Each part has a normal prior, μ about
the literature and the others about 0, so that an engine that was never seen on a generation still has constants, and
few runs move what they can see only.

*Objective.* Σ_i w_i Σ_m ρ((ln f_im(θ) − ln y_im)/σ_m) + Σ_j (part_j/s_j)², ρ Cauchy's loss ln(1 + x²), which lets go of
runs that no constants explain (a front end that is its own bottleneck, a flag that the source does not tell), started
from Huber's; w_i = 1/(runs of i's concurrency curve), so that long curves do not outvote short ones.

*Method.* Gauss–Newton: every run is simulated with each constant moved, then all parts are solved for at once.

*Error.* Leave one (model, device) group out: all parts are solved for without it and its runs simulated anew. That
error, not the error of the fit, becomes the interval.
"""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.serving_calibration import ServingCalibration, ServingConstants
from meshplan.planner.serving.prediction import FITTED_METRICS, PreparedRun

FloatArray = NDArray[np.float64]

# name → prior standard deviation in the logarithm: how far an engine may be from the literature. What passes before an
# engine starts on a request depends on flags and front ends more than on anything that could be known beforehand.
FITTED: Mapping[str, float] = {
    "decode_factor": 0.1,
    "prefill_factor": 0.3,
    "host_step_s": 0.5,
    "host_s_per_seq": 0.5,
    "launch_s_per_layer": 0.5,
    "first_token_steps": 2.0,
    "first_token_offset_s": 3.0,
}
SPREAD = np.array(list(FITTED.values()))
# Spread of each part of the model over that of μ. These, the spreads and the loss were chosen among a few dozen by the
# held-out error, which is flat around them: neighbours are within one point.
ENGINE_SHARE, GENERATION_SHARE, REST_SHARE = 0.5, 0.2, 0.3
# The same by constant: engines differ in host time far more than in what their kernels take; a generation of devices
# has little to do with host time, and nothing with the way to the engine.
OF_ENGINE = np.array([1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0])
OF_GENERATION = np.array([1.0, 1.0, 0.5, 0.5, 0.5, 0.2, 0.2])
# Scatter of a metric that no constant explains, in the logarithm: another release of the same engine moves both
# latencies by about 15 %, and the time to first token three times as much from run to run as the time per token.
NOISE = {"ttft_s": 0.2, "tpot_s": 0.08, "latency_s": 0.08, "output_tokens_per_s": 0.08}
# The same within one server's own runs, for fits to a user's measurements.
OWN_NOISE = {"ttft_s": 0.05, "tpot_s": 0.02, "latency_s": 0.02, "output_tokens_per_s": 0.02}
HUBER, CAUCHY = 1.5, 1.0  # in units of NOISE
STEP = 0.1  # by which constants are moved for derivatives, in the logarithm
ITERATIONS, OWN_ITERATIONS = 3, 2
MOST_OF_CURVE = 3
REWEIGHTINGS = 24
MAX_MOVE = 1.0
LEAST = 1e-9
FEWEST_FOR_P90 = 8
# What intervals are given for → the metric whose error they take.
INTERVALS = {"ttft": ("ttft_s",), "tpot": ("tpot_s",), "throughput": ("output_tokens_per_s", "latency_s")}
ANY_ENGINE, ANY = "any-engine", "any"

Key = tuple[str, str]
Part = tuple[str, str]  # what is shared: ("", ""), (engine, ""), ("", generation) or (engine, generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One metric of a run, predicted by constants fitted without the run's group.

    Args:
        id: of the run.
        group: left out.
        key: engine and generation.
        metric: name.
        error: predicted / measured − 1.
    """

    id: str
    group: str
    key: Key
    metric: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The result of a calibration.

    Args:
        calibrations: the global set first, then engines on any generation, then on those that were seen.
        held_out: every metric of every run, predicted without its group.
    """

    calibrations: tuple[ServingCalibration, ...]
    held_out: tuple[HeldOut, ...]


def theta_of(constants: ServingConstants) -> FloatArray:
    """Constants as a vector in fit units."""
    return np.array([np.log(max(float(getattr(constants, name)), LEAST)) for name in FITTED])


def constants_of(theta: FloatArray) -> ServingConstants:
    """A vector in fit units as constants, rounded to what the fit can tell."""
    return ServingConstants(**{name: float(f"{np.exp(theta[i]):.4g}") for i, name in enumerate(FITTED)})


class Row:
    """One run with what it is fitted to.

    Args:
        prepared: the run.
        noise: metric → scatter that no constant explains.
    """

    def __init__(self, prepared: PreparedRun, noise: Mapping[str, float]) -> None:
        run = prepared.run
        self.prepared, self.key, self.group = prepared, prepared.key, run.group
        self.metrics = [name for name in FITTED_METRICS[run.workload.arrival] if run.measured.get(name)]
        if "latency_s" in self.metrics:  # of the rest of its request: counts it twice
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

    def log_predicted(self, theta: FloatArray) -> FloatArray:
        """Ln f at θ; NaN where the run does not fit the device."""
        values = self.prepared.predicted(constants_of(theta))
        return np.array([np.log(values[name]) if name in values else np.nan for name in self.metrics])

    def linear(self, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Ln f [M] and its derivatives [M, constants] at θ."""
        here = self.log_predicted(theta)
        slope = np.zeros((len(here), len(theta)))
        for j, name in enumerate(FITTED):
            if name == "first_token_offset_s":  # it is added to what the engine takes
                added = np.array([metric in ("ttft_s", "latency_s") for metric in self.metrics])
                slope[:, j] = np.where(added, np.exp(theta[j] - here), 0.0)
                continue
            moved = theta.copy()
            moved[j] += STEP
            slope[:, j] = (self.log_predicted(moved) - here) / STEP
        return here, slope


# --- the solver -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """All runs' metrics, linear in the constants of their keys: target ≈ slope·θ_key.

    Args:
        target: [n] ln y − ln f + slope·θ.
        slope: [n, constants].
        scale: [n] noise of each metric.
        weight: [n] of each metric.
        key: [n] of each metric.
        group: [n] of each metric.
    """

    target: FloatArray
    slope: FloatArray
    scale: FloatArray
    weight: FloatArray
    key: Sequence[Key]
    group: Sequence[str]


def parts_of(key: Key) -> tuple[Part, ...]:
    """What the constants of a key are the sum of."""
    engine, generation = key
    return tuple(dict.fromkeys([("", ""), (engine, ""), ("", generation), key]))


def solve(linear: Linear, keep: NDArray[np.bool_], prior: FloatArray) -> Callable[[Key], FloatArray]:
    """The most probable parts for the metrics in ``keep``, as a function from keys to θ.

    Args:
        linear: the runs.
        keep: [n] which count.
        prior: μ's.
    """
    chosen = [int(place) for place in np.flatnonzero(keep)]
    parts = sorted({part for i in chosen for part in parts_of(linear.key[i])} | {("", "")})
    place = {part: i for i, part in enumerate(parts)}
    size = len(SPREAD)
    design = np.zeros((len(chosen), len(parts) * size))
    for row, i in enumerate(chosen):
        for part in parts_of(linear.key[i]):
            at = place[part] * size
            design[row, at : at + size] = linear.slope[i]
    precision = np.concatenate([1.0 / (_share(part) * SPREAD) ** 2 for part in parts])
    centre = np.where(np.repeat([part == ("", "") for part in parts], size), np.tile(prior, len(parts)), 0.0)
    target, scale, weight = linear.target[chosen], linear.scale[chosen], linear.weight[chosen]
    found = centre.copy()
    for step in range(REWEIGHTINGS):
        residual = np.abs(target - design @ found) / scale
        huber, cauchy = 1.0 / np.maximum(1.0, residual / HUBER), 1.0 / (1.0 + (residual / CAUCHY) ** 2)
        use = weight * (huber if step < REWEIGHTINGS // 2 else cauchy) / scale**2
        normal = (design * use[:, None]).T @ design + np.diag(precision)
        found = np.linalg.solve(normal, (design * use[:, None]).T @ target + precision * centre)

    def theta(key: Key) -> FloatArray:
        places = [place[part] * size for part in parts_of(key) if part in place]
        return np.asarray(sum((found[at : at + size] for at in places), np.zeros(size)))

    return theta


def _share(part: Part) -> FloatArray:
    engine, generation = part
    if not engine and not generation:
        return np.ones_like(SPREAD)
    if not generation:
        return ENGINE_SHARE * OF_ENGINE
    return GENERATION_SHARE * OF_GENERATION if not engine else np.full_like(SPREAD, REST_SHARE)


def few_of_each_curve(rows: Sequence[Row]) -> list[Row]:
    """At most :data:`MOST_OF_CURVE` rows of each curve, spread over its load: a fit learns little from the others."""
    curves: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        curves[row.curve].append(row)
    chosen = []
    for members in curves.values():
        members.sort(key=lambda row: row.prepared.run.workload.concurrency or 0)
        places = np.unique(np.linspace(0, len(members) - 1, min(len(members), MOST_OF_CURVE)).round().astype(int))
        chosen += [members[place] for place in places]
    return chosen


def linearised(rows: Sequence[Row], theta: Callable[[Key], FloatArray]) -> Linear:
    """Every row at its key's θ; rows that do not fit their device are left out."""
    rows = few_of_each_curve(rows)
    curves = Counter(row.curve for row in rows)
    targets, slopes, scales, weights, keys, groups = [], [], [], [], [], []
    for row in rows:
        at = theta(row.key)
        here, slope = row.linear(at)
        good = np.isfinite(here) & np.isfinite(slope).all(axis=1)
        targets.append((row.log_measured - here + slope @ at)[good])
        slopes.append(slope[good])
        scales.append(row.noise[good])
        weights.append(np.full(int(good.sum()), 1.0 / curves[row.curve]))
        keys += [row.key] * int(good.sum())
        groups += [row.group] * int(good.sum())
    return Linear(
        target=np.concatenate(targets),
        slope=np.concatenate(slopes),
        scale=np.concatenate(scales),
        weight=np.concatenate(weights),
        key=keys,
        group=groups,
    )


# --- published runs -------------------------------------------------------------------------------------------------


def calibrate_serving(
    runs: Iterable[PreparedRun],
    *,
    source: str,
    date: str | None = None,
    start: Callable[[Key], ServingConstants] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Calibrated:
    """Fit all sets and their held-out errors.

    Args:
        runs: measured serving runs.
        source: what they are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
        start: where the iteration begins: other constants than the literature's.
        say: told what is being done: a fit simulates every run some twenty times.
    """
    rows = [row for row in (Row(run, NOISE) for run in runs) if row.metrics]
    prior = theta_of(ServingConstants())
    theta = _always(prior) if start is None else _started(start)
    for step in range(ITERATIONS):
        say(f"fit {step + 1} of {ITERATIONS}: {len(rows)} runs")
        linear = linearised(rows, theta)
        solved = solve(linear, np.ones(len(linear.target), dtype=bool), prior)
        theta = _damped(theta, solved)
    say("held out")
    held_out = _held_out(rows, linear, theta, prior)
    return Calibrated(
        calibrations=_sets(rows, theta, held_out, source=source, date=date or _today()), held_out=tuple(held_out)
    )


def _always(theta: FloatArray) -> Callable[[Key], FloatArray]:
    return lambda _: theta


def _started(start: Callable[[Key], ServingConstants]) -> Callable[[Key], FloatArray]:
    return lambda key: theta_of(start(key))


def _damped(old: Callable[[Key], FloatArray], new: Callable[[Key], FloatArray]) -> Callable[[Key], FloatArray]:
    return lambda key: old(key) + np.clip(new(key) - old(key), -MAX_MOVE, MAX_MOVE)


def _held_out(
    rows: Sequence[Row], linear: Linear, theta: Callable[[Key], FloatArray], prior: FloatArray
) -> list[HeldOut]:
    """Each group predicted by constants solved for without it; its runs are simulated, not linear."""
    groups = np.array(linear.group)
    found = []
    for group in sorted({row.group for row in rows}):
        without = _damped(theta, solve(linear, groups != group, prior))
        for row in rows:
            if row.group == group:
                errors = np.exp(row.log_predicted(without(row.key)) - row.log_measured) - 1.0
                found += [
                    HeldOut(id=row.prepared.run.id, group=group, key=row.key, metric=name, error=float(error))
                    for name, error in zip(row.metrics, errors, strict=True)
                    if np.isfinite(error)
                ]
    return found


def _sets(
    rows: Sequence[Row], theta: Callable[[Key], FloatArray], held_out: Sequence[HeldOut], *, source: str, date: str
) -> tuple[ServingCalibration, ...]:
    seen = Counter(row.key for row in rows)
    engines = sorted({engine for engine, _ in seen})
    generations = sorted({generation for _, generation in seen})
    every = [(engine, generation) for engine in engines for generation in generations]
    keys = [("", ""), *((engine, "") for engine in engines), *every]

    def made(key: Key) -> ServingCalibration:
        engine, generation = key
        of_engine = [item for item in held_out if not engine or item.key[0] == engine]
        own = [item for item in of_engine if not generation or item.key[1] == generation]
        return ServingCalibration(
            engine=engine or ANY_ENGINE,
            architecture=generation or ANY,
            constants=constants_of(theta(key)),
            error_p90={name: _p90(metrics, own, of_engine, held_out) for name, metrics in INTERVALS.items()},
            num_runs=sum(count for (e, g), count in seen.items() if engine in ("", e) and generation in ("", g)),
            source=source,
            date=date,
        )

    return tuple(made(key) for key in keys)


def _p90(metrics: Sequence[str], *samples: Sequence[HeldOut]) -> float:
    """90th percentile of |ln(predicted/measured)| in the first sample with enough runs; each group counts alike."""
    for sample in samples:
        errors = [abs(np.log1p(max(item.error, -0.999))) for item in sample if item.metric in metrics]
        if len(errors) >= FEWEST_FOR_P90:
            return round(float(np.quantile(errors, 0.9)), 4)
    return 1.0


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


# --- a user's own runs ----------------------------------------------------------------------------------------------


def refined(rows: Sequence[Row], start: ServingConstants) -> ServingConstants:
    """Constants of one server adapted to its own runs, however few: one measured point moves what it can see.

    Args:
        rows: runs of one engine on one generation, with the scatter of a single server.
        start: the catalog's, which is also the prior.
    """
    prior = theta_of(start)
    theta = prior
    for _ in range(OWN_ITERATIONS):
        linear = linearised(rows, _always(theta))
        move: FloatArray = theta
        for _ in range(REWEIGHTINGS):
            residual = np.abs(linear.target - linear.slope @ move) / linear.scale
            use = 1.0 / np.maximum(1.0, residual / HUBER) / linear.scale**2
            normal = (linear.slope * use[:, None]).T @ linear.slope + np.diag(1.0 / OWN_SPREAD**2)
            weighed = (linear.slope * use[:, None]).T @ linear.target + prior / OWN_SPREAD**2
            move = np.asarray(np.linalg.solve(normal, weighed), dtype=np.float64)
        theta = theta + np.clip(move - theta, -MAX_MOVE, MAX_MOVE)
    return constants_of(theta)


# Spread of one server's constants about those of its engine and generation: a single point does not tell steps and
# offset before the first token apart, and the way to a server is less its own than what it waits for.
OWN_SPREAD = np.array([0.15, 0.3, 0.8, 0.8, 0.8, 1.0, 0.3])


def refine_serving(
    runs: Iterable[PreparedRun],
    shipped: Callable[[str, str], ServingCalibration],
    *,
    source: str,
    date: str | None = None,
) -> Calibrated:
    """Adapt the catalog's constants to a user's own runs; held out: every run in turn.

    Args:
        runs: measured serving runs of the user.
        shipped: (engine, generation) → the catalog's set.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
    """
    sets: dict[Key, list[Row]] = defaultdict(list)
    for run in runs:
        row = Row(run, OWN_NOISE)
        if row.metrics:
            sets[row.key].append(row)
    made, held_out = [], []
    for key, members in sorted(sets.items()):
        prior = shipped(*key)
        own = []
        for row in members:
            others = [other for other in members if other is not row]
            constants = refined(others, prior.constants) if others else prior.constants
            errors = np.exp(row.log_predicted(theta_of(constants)) - row.log_measured) - 1.0
            own += [
                HeldOut(id=row.prepared.run.id, group=row.group, key=key, metric=name, error=float(error))
                for name, error in zip(row.metrics, errors, strict=True)
                if np.isfinite(error)
            ]
        held_out += own
        p90 = {
            name: _p90(metrics, own) if len(own) >= FEWEST_FOR_P90 else prior.error_p90[name]
            for name, metrics in INTERVALS.items()
        }
        made.append(
            replace(
                prior,
                engine=key[0],
                architecture=key[1],
                constants=refined(members, prior.constants),
                error_p90=p90,
                num_runs=len(members),
                source=f"{source}; starting from: {prior.source}",
                date=date or _today(),
            )
        )
    return Calibrated(calibrations=tuple(made), held_out=tuple(held_out))
