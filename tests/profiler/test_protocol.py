"""Timing: medians that outliers do not move, warnings for what is odd, with clocks of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.errors import ProfileError
from meshplan.profiler.protocol import Clock, Protocol, as_rate, measure, summarize


class FakeTime:
    """A clock that the operation itself advances."""

    def __init__(self, durations_s: Iterator[float], *, jump_s: float = 0.0) -> None:
        self.durations_s, self.now_s, self.jump_s, self.calls = durations_s, 0.0, jump_s, 0

    def operation(self) -> None:
        self.calls += 1
        self.now_s += next(self.durations_s)

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now_s, wall=lambda: self.now_s + (self.jump_s if self.calls > 5 else 0.0))


def test_a_steady_operation_is_done_after_the_least_repeats() -> None:
    fake = FakeTime(repeat(0.01))
    timing = measure(fake.operation, Protocol(warmup=2, min_repeats=5), clock=fake.clock())
    assert timing.spread.value == pytest.approx(0.01)
    assert timing.spread.n == 5
    assert timing.warnings == ()


def test_short_operations_are_repeated_until_the_timer_sees_them() -> None:
    fake = FakeTime(repeat(1e-6))
    timing = measure(fake.operation, Protocol(), clock=fake.clock())
    assert timing.spread.value == pytest.approx(1e-6)
    assert fake.calls > 5 * 1000


def test_the_budget_ends_a_noisy_measurement() -> None:
    fake = FakeTime(iter([0.1, 0.2] * 1000))
    timing = measure(fake.operation, Protocol(budget_s=2.0, max_repeats=1000), clock=fake.clock())
    assert timing.spread.n < 30


def test_synchronize_is_timed() -> None:
    fake = FakeTime(repeat(0.0))

    def wait() -> None:
        fake.now_s += 0.02

    timing = measure(fake.operation, Protocol(), synchronize=wait, clock=fake.clock())
    assert timing.spread.value == pytest.approx(0.02)


def test_a_clock_jump_is_reported_and_harmless() -> None:
    fake = FakeTime(repeat(0.01), jump_s=3600.0)
    timing = measure(fake.operation, Protocol(), clock=fake.clock())
    assert timing.spread.value == pytest.approx(0.01)
    assert timing.warnings == ("the wall clock jumped by 3600 s during the measurement",)


def test_a_clock_that_goes_back_is_refused() -> None:
    with pytest.raises(ProfileError, match="monotonic clock"):
        summarize([0.1, -0.1, 0.1])


def test_outliers_are_counted_and_do_not_move_the_median() -> None:
    timing = summarize([1.0, 1.01, 0.99, 1.0, 1.02, 9.0])
    assert timing.spread.value == pytest.approx(1.005)
    assert timing.warnings[0].startswith("1 of 6 repeats are outliers")


def test_throttling_is_a_trend_not_noise() -> None:
    falling = [1.0 + 0.02 * step for step in range(30)]
    assert any("throttling" in warning for warning in summarize(falling).warnings)
    noisy = list(chain.from_iterable(repeat([1.0, 1.3, 0.9], 10)))
    assert not any("throttling" in warning for warning in summarize(noisy).warnings)


def test_contention_is_more_than_one_preemption_a_repeat() -> None:
    assert summarize([1.0] * 10, num_preemptions=10).warnings == ()
    assert summarize([1.0] * 10, num_preemptions=11).warnings[0].startswith("contention: preempted 11 times")


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshplan.profiler.protocol.involuntary_switches", lambda: 0)


@given(st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=60))
def test_the_spread_holds_the_median(times: list[float]) -> None:
    spread = summarize(times).spread
    assert min(times) <= spread.low * (1 + 1e-12)
    assert spread.low <= spread.value <= spread.high
    rate = as_rate(summarize(times), 10.0)
    assert rate.low <= rate.value <= rate.high


@pytest.mark.parametrize("call", [lambda: summarize([0.0]), lambda: summarize([float("nan")])])
def test_times_that_are_none(call: Callable[[], object]) -> None:
    with pytest.raises(ProfileError):
        call()
