"""When a run ends: its mean, an interval, and the probability of a date.

Three things spread the end of a run: chance (which interruptions fall where), what is not known of the failure rate,
and what is not known of the step time.

Chance. The wall time of a run with training time W is a sum over cycles of mean length E[C] and mean progress E[P]; its
variance follows from renewal-reward theory (Asmussen, Applied Probability and Queues, 2003, ch. VI),

    Var ≈ W/E[P] · Var(C − P E[C]/E[P])

with C = X + D: training for X (exponential), and D until a stretch of R seconds without an interruption has passed,
Var D = (e^{2x} − 1 − 2x e^x)/λ², x = λR. Waiting for nodes adds the variance of exponential waits of mean M/(S + 1).

What interruptions add to a run that nothing interrupts is lognormal with that mean and variance: it is never negative,
skewed where few cycles decide, and normal where many do. A run that makes no progress never ends.

Knowledge. Rate and step time are lognormal between the ends of their 90 % intervals, independent; the probability is
the mean over a product of quadrature points. A rate is not narrowed by a plan: the interval τ stays the planned one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import INTERVAL_ENDS
from meshplan.planner.goodput.conditions import Checkpoints, Interruptions
from meshplan.planner.goodput.run import LEAST_RATIO, RunSetting
from meshplan.planner.goodput.spares import MOST_TABLED, SpareWorth, erlang_b, waiting_share

# Quadrature points of rate and of step time: equal shares of their distributions, at the middle of each.
_POINTS = 31
# Quadrature points of one stretch of training.
_STRETCHES = 4001
_NORMAL = NormalDist()
_erfc = np.frompyfunc(math.erfc, 1, 1)
# Standard deviations beyond which a share is 0 or 1 in double precision.
_NEVER, _SURE = -39.0, 8.5
# Interruptions add at least this share of a run, and their variance is at most so many squared means: no division by 0.
_LEAST_ADDED, _MOST_SPREAD = 1e-9, 1e12
# Halvings of a bracket: to 18 digits.
_HALVINGS = 60
# Its exponential is a double, and so is the square of that, which is in variances.
_MOST_EXPONENT = 300.0
# Standard deviations from the middle to the end of a 90 % interval.
_TO_THE_END = _NORMAL.inv_cdf(INTERVAL_ENDS[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Wall time of a run, seconds.

    Args:
        mean_s: expected.
        low_s: one run in twenty is shorter.
        high_s: one in twenty is longer.
        by_date: probability to have ended at the date asked for; None where none was asked for.
        ratio_low: effective training time ratio at the upper end of the failure rate's interval.
        ratio_high: at its lower end.
    """

    mean_s: float
    low_s: float
    high_s: float
    by_date: float | None
    ratio_low: float
    ratio_high: float


def spread_of_chance(setting: RunSetting, devices: int, training_s: float, *, rate: float, interval_s: float) -> float:
    """Standard deviation of the wall time by chance alone, seconds.

    Args:
        setting: the run.
        devices: of the job.
        training_s: W, seconds of undisturbed training.
        rate: interruptions per node and day.
        interval_s: τ.
    """
    stops, costs = setting.stops(devices, rate=rate), setting.checkpoints(devices)
    if stops.per_s <= 0.0:
        return 0.0
    return math.sqrt(max(0.0, _variance(stops, costs, training_s * setting.slowdown, interval_s)))


def _variance(stops: Interruptions, costs: Checkpoints, training_s: float, interval_s: float) -> float:
    rate, period = stops.per_s, interval_s + costs.block_s
    # Middles of equal shares of the exponential distribution.
    shares = (np.arange(_STRETCHES) + 0.5) / _STRETCHES
    stretch = -np.log1p(-shares) / rate
    progress = interval_s * np.maximum(0.0, np.floor((stretch - costs.durable_s) / period))
    x = min(rate * stops.restart_s, _MOST_EXPONENT)
    restart_mean = math.expm1(x) / rate
    restart_variance = (math.exp(2.0 * x) - 1.0 - 2.0 * x * math.exp(x)) / rate**2
    wait = _wait(stops)
    cycle = stretch + restart_mean + wait.mean
    gained = float(progress.mean())
    if gained <= 0.0:
        return math.inf
    scatter = float(np.var(cycle - progress * cycle.mean() / gained)) + restart_variance + wait.variance
    return training_s / gained * scatter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    mean: float
    variance: float


def _wait(stops: Interruptions) -> _Wait:
    """What one interruption, and those of its restarts, wait for nodes: mean and variance."""
    load = stops.per_s * stops.broken_share * stops.repair_s
    if load <= 0.0:
        return _Wait(mean=0.0, variance=0.0)
    # Interruptions from one stretch of training to the next: 1 + those that fall into restarts.
    count = math.exp(min(stops.per_s * stops.restart_s, _MOST_EXPONENT))
    chance = count * stops.broken_share * erlang_b(stops.spares, load)
    length = stops.repair_s / (stops.spares + 1)
    return _Wait(mean=chance * length, variance=max(0.0, 2.0 * chance - chance**2) * length**2)


@lru_cache(maxsize=16)  # a plan's metrics and its section on the run tell the same ending
def ending(setting: RunSetting, devices: int, training_s: float, *, spread: float) -> Ending:
    """When the run ends.

    Args:
        setting: the run.
        devices: of the job, spares left out.
        training_s: W, seconds of undisturbed training.
        spread: the 90 % interval of the step time is W/spread to W·spread.
    """
    interval = setting.interval(devices)
    points = np.array([_NORMAL.inv_cdf((place + 0.5) / _POINTS) for place in range(_POINTS)])
    rates = setting.rate.per_node_day * np.exp(points * _log_width(setting) / _TO_THE_END)
    steps = training_s * np.exp(points * math.log(spread) / _TO_THE_END)
    ratios = np.array([setting.ratio(devices, rate=rate, interval_s=interval) for rate in rates])
    chances = np.array(
        [spread_of_chance(setting, devices, training_s, rate=rate, interval_s=interval) for rate in rates]
    )
    chances[ratios <= LEAST_RATIO] = math.inf  # no progress: such a run never ends
    ratios = np.maximum(ratios, LEAST_RATIO)
    means = steps[None, :] / ratios[:, None]
    deviations = np.maximum(chances[:, None], 1e-9 * means)
    ratio = max(setting.ratio(devices), LEAST_RATIO)

    costs = setting.checkpoints(devices)
    undisturbed = steps * setting.slowdown * (1.0 + costs.block_s / interval)

    def share_by(when: float) -> float:
        return float(np.mean(_ended_by(when, undisturbed, means, deviations)))

    bracket = float(means.min()) * 0.5, float(means.max()) * 2.0
    low_s, high_s = (_quantile(share_by, share, *bracket) for share in INTERVAL_ENDS)
    return Ending(
        mean_s=training_s / ratio,
        low_s=low_s,
        high_s=high_s,
        by_date=None if setting.finish_by_s is None else share_by(setting.finish_by_s),
        ratio_low=setting.ratio(devices, rate=setting.rate.high, interval_s=interval),
        ratio_high=setting.ratio(devices, rate=setting.rate.low, interval_s=interval),
    )


def _log_width(setting: RunSetting) -> float:
    """Half the width of the failure rate's 90 % interval, as a logarithm; unlike halves count by their mean."""
    return 0.5 * math.log(setting.rate.high / setting.rate.low) if setting.rate.low > 0.0 else 0.0


def _ended_by(when: float, undisturbed: FloatArray, means: FloatArray, deviations: FloatArray) -> FloatArray:
    """Shares of runs that have ended, from the seconds of one that nothing interrupts, their mean and deviation."""
    added = np.maximum(means - undisturbed, _LEAST_ADDED * means)
    left = np.maximum(when - undisturbed, 0.0)
    with np.errstate(over="ignore", divide="ignore"):
        width = np.sqrt(np.log1p(np.minimum((deviations / added) ** 2, _MOST_SPREAD)))
        shares = _normal_cdf((np.log(left / added) + 0.5 * width**2) / width)
    return np.where(np.isfinite(deviations), shares, 0.0)


def _normal_cdf(values: FloatArray) -> FloatArray:
    """Φ of each value, of any shape; far from 0 it is 0 or 1 to the last digit, and nothing is worked out."""
    shares = (values > 0.0).astype(float)
    near = (values > _NEVER) & (values < _SURE)
    shares[near] = 0.5 * np.asarray(_erfc(-values[near] / math.sqrt(2.0)), dtype=float)
    return shares


def _quantile(share_by: Callable[[float], float], share: float, low: float, high: float) -> float:
    """The time by which that share of runs has ended; by bisection."""
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share_by(middle) < share else (low, middle)
    return 0.5 * (low + high)


def spare_table(setting: RunSetting, devices: int, training_s: float) -> tuple[SpareWorth, ...]:
    """What each spare saves, from none on, until the last one saves less than an hour.

    Args:
        setting: the run.
        devices: of the job, spares left out.
        training_s: W, seconds of undisturbed training.
    """
    stops, interval = setting.stops(devices), setting.interval(devices)
    running = setting.ratio(devices, interval_s=interval) / max(1.0 - waiting_share(stops), LEAST_RATIO)
    rows: list[SpareWorth] = []
    before = 0.0
    for spares in range(MOST_TABLED + 1):
        waits = waiting_share(stops, spares)
        takes_s = training_s / max(running * (1.0 - waits), LEAST_RATIO)
        saved = None if not rows else (before - takes_s) / SECONDS_PER_HOUR
        rows.append(SpareWorth(spares=spares, waiting_share=waits, hours_saved=saved))
        before = takes_s
        if saved is not None and saved < 1.0 and spares > setting.spares:
            break
    return tuple(rows)
