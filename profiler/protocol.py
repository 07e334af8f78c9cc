"""How one operation is timed: warm-up, repeats until the spread is small, median, spread, and what looked odd.

- The operation runs :attr:`Protocol.warmup` times unmeasured (first calls allocate, compile, and raise the clocks).
- One *repeat* is as many calls in a row as take at least :data:`MIN_REPEAT_S`, so that the timer's resolution and, on
  a GPU, the synchronisation at the end do not count; its time is divided by the calls.
- Repeats go on until their median is known to :attr:`Protocol.target_spread`, the time budget is spent, or
  :attr:`Protocol.max_repeats` is reached. The value is the median, the spread the 10th to 90th percentile.
- *Outlier*: farther from the median than five robust standard deviations (1.4826 × the median absolute deviation).
  It stays in the count (a median does not mind) and is reported.
- *Throttling*: the last third of the repeats is slower than the first by more than 10 %, and slowing down is the
  trend (Kendall's τ > 0.5): clocks fell while we measured, so the value is not what a long run will see.
- *Contention*: the system took the processor away more than once a repeat on average; other programs ran, so the value
  is pessimistic. Multi-threaded libraries suffer most: all threads wait for the one that is not running.
- *Clock jump*: wall clock and monotonic clock disagree by more than a second; times are unharmed (they use the
  monotonic clock), the date of the measurement is not.

Data is random, never zeros: zeros flip fewer transistors, so a GPU under a power limit runs them faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshplan.catalogs.errors import ProfileError
from meshplan.catalogs.measurements.types import Spread
from meshplan.profiler.environment import involuntary_switches

MIN_REPEAT_S = 1e-3
MAX_CALLS_PER_REPEAT = 10_000
OUTLIER_DEVIATIONS = 5.0
# For a normal distribution: standard deviation over median absolute deviation.
MAD_TO_STANDARD_DEVIATION = 1.4826
# Timers and schedulers disturb by this much in any case: closer repeats are never called outliers.
OUTLIER_FLOOR = 0.05
THROTTLED_SLOWDOWN = 1.10
THROTTLED_TREND = 0.5
MIN_REPEATS_FOR_OUTLIERS = 5
MIN_REPEATS_FOR_TREND = 9
CLOCK_JUMP_S = 1.0
LOW_QUANTILE, HIGH_QUANTILE = 0.10, 0.90


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How thoroughly to measure.

    Args:
        warmup: unmeasured calls.
        min_repeats: at least so many repeats, whatever they cost.
        max_repeats: at most so many.
        budget_s: no new repeat starts after this many seconds.
        target_spread: stop when the standard error of the median falls below this fraction of it.
        seed: for the random data.
    """

    warmup: int = 2
    min_repeats: int = 5
    max_repeats: int = 50
    budget_s: float = 0.6
    target_spread: float = 0.01
    seed: int = 0

    def document(self) -> dict[str, Any]:
        """What is stored with the measurements."""
        return asdict(self) | {
            "value": "median of the repeats",
            "spread": "10th to 90th percentile of the repeats",
            "data": "uniform random in [-1, 1), never zeros",
            "outlier": f"beyond {OUTLIER_DEVIATIONS:g} robust standard deviations",
            "throttling": f"last third of the repeats slower by {THROTTLED_SLOWDOWN - 1:.0%} with a rising trend",
        }


QUICK = Protocol(warmup=1, min_repeats=3, max_repeats=10, budget_s=0.12, target_spread=0.05)
FULL = Protocol()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of one call.

    Args:
        spread: median, 10th and 90th percentile, number of repeats, seconds.
        warnings: what was odd.
    """

    spread: Spread
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from; tests put their own in.

    Args:
        monotonic: seconds that never go back.
        wall: seconds since 1970.
    """

    monotonic: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time


def measure(
    operation: Callable[[], object],
    protocol: Protocol,
    *,
    synchronize: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> Timing:
    """Time one operation.

    Args:
        operation: is called many times with nothing in between.
        protocol: how thoroughly.
        synchronize: waits for what the operation started on a device.
        clock: where time comes from.

    Raises:
        ProfileError: the timer does not advance.
    """
    clock = clock or Clock()
    for _ in range(protocol.warmup):
        operation()
    synchronize()
    wall, start, switches = clock.wall(), clock.monotonic(), involuntary_switches()
    calls = _calls_per_repeat(operation, synchronize, clock)
    times: list[float] = []
    while len(times) < protocol.max_repeats:
        begin = clock.monotonic()
        for _ in range(calls):
            operation()
        synchronize()
        times.append((clock.monotonic() - begin) / calls)
        if len(times) < protocol.min_repeats:
            continue
        if clock.monotonic() - start > protocol.budget_s or _is_settled(times, protocol.target_spread):
            break
    jump = abs((clock.wall() - wall) - (clock.monotonic() - start))
    return summarize(times, clock_jump_s=jump, num_preemptions=involuntary_switches() - switches)


def summarize(times: Sequence[float], *, clock_jump_s: float = 0.0, num_preemptions: int = 0) -> Timing:
    """Median, spread and warnings of repeated times, in the order in which they were measured.

    Args:
        times: seconds.
        clock_jump_s: by which wall clock and monotonic clock disagree.
        num_preemptions: how often another program got the processor meanwhile.

    Raises:
        ProfileError: a time is not positive.
    """
    array = np.asarray(times, dtype=float)
    if not np.isfinite(array).all() or array.min() <= 0.0:
        raise ProfileError(
            f"the timer gave {array.min():g} s for an operation; it is too coarse or went back: "
            "measure on a machine with a working monotonic clock"
        )
    median = float(np.median(array))
    low, high = (float(value) for value in np.quantile(array, (LOW_QUANTILE, HIGH_QUANTILE)))
    warnings = (
        _outlier_warning(array),
        _throttling_warning(array),
        _contention_warning(num_preemptions, len(array)),
        _jump_warning(clock_jump_s),
    )
    # Interpolated quantiles of few values may pass the median by a rounding error.
    spread = Spread(value=median, low=min(low, median), high=max(high, median), n=len(array))
    return Timing(spread=spread, warnings=tuple(text for text in warnings if text))


def as_rate(timing: Timing, work: float) -> Spread:
    """Work per second from the time of the work: the ends of the spread are swapped.

    >>> as_rate(Timing(spread=Spread(value=2.0, low=1.0, high=4.0, n=3), warnings=()), 8.0)
    Spread(value=4.0, low=2.0, high=8.0, n=3)
    """
    time_s = timing.spread
    return Spread(value=work / time_s.value, low=work / time_s.high, high=work / time_s.low, n=time_s.n)


def _calls_per_repeat(operation: Callable[[], object], synchronize: Callable[[], None], clock: Clock) -> int:
    calls = 1
    while calls < MAX_CALLS_PER_REPEAT:
        begin = clock.monotonic()
        for _ in range(calls):
            operation()
        synchronize()
        elapsed = clock.monotonic() - begin
        if elapsed >= MIN_REPEAT_S:
            return calls
        # At least double, at most tenfold: one disturbed trial must not decide.
        wanted = 1.2 * calls * MIN_REPEAT_S / max(elapsed, 1e-9)
        calls = min(MAX_CALLS_PER_REPEAT, max(2 * calls, min(10 * calls, int(wanted))))
    return calls


def _is_settled(times: Sequence[float], target: float) -> bool:
    """Standard error of the median, 1.25 σ/√n for normal noise, against the target."""
    array = np.asarray(times)
    return bool(1.25 * _deviation(array) / np.sqrt(len(array)) < target * np.median(array))


def _deviation(times: np.ndarray) -> float:
    return MAD_TO_STANDARD_DEVIATION * float(np.median(np.abs(times - np.median(times))))


def _outlier_warning(times: np.ndarray) -> str | None:
    if len(times) < MIN_REPEATS_FOR_OUTLIERS:
        return None
    median = float(np.median(times))
    limit = max(OUTLIER_DEVIATIONS * _deviation(times), OUTLIER_FLOOR * median)
    count = int((np.abs(times - median) > limit).sum())
    if not count:
        return None
    ends = f"{times.min() / median:.2f} to {times.max() / median:.2f} × the median"
    return f"{count} of {len(times)} repeats are outliers (all: {ends})"


def _throttling_warning(times: np.ndarray) -> str | None:
    if len(times) < MIN_REPEATS_FOR_TREND:
        return None
    third = len(times) // 3
    slowdown = float(np.median(times[-third:]) / np.median(times[:third]))
    if slowdown <= THROTTLED_SLOWDOWN or _kendall(times) <= THROTTLED_TREND:
        return None
    return f"throttling: the last third of {len(times)} repeats took {slowdown:.2f} × the first"


def _kendall(times: np.ndarray) -> float:
    """Kendall's τ of the times against their order, −1 … 1."""
    later, earlier = np.triu_indices(len(times), 1)[::-1]
    return float(np.sign(times[later] - times[earlier]).mean())


def _contention_warning(num_preemptions: int, num_repeats: int) -> str | None:
    if num_preemptions <= num_repeats:
        return None
    return f"contention: preempted {num_preemptions} times in {num_repeats} repeats; measure on an idle machine"


def _jump_warning(jump_s: float) -> str | None:
    return f"the wall clock jumped by {jump_s:.0f} s during the measurement" if jump_s > CLOCK_JUMP_S else None
