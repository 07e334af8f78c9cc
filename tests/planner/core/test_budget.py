"""The budget of a question: a clock that the test turns, memory that it states, signals that it sends to itself."""

from __future__ import annotations

import signal
import time

import pytest

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core import budget as budgets
from meshplan.planner.core.budget import INTERRUPTED, Budget, OutOfBudgetError, resident_bytes, spent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_runs_out_and_stays_out() -> None:
    clock = Clock()
    budget = Budget(5.0, None, clock=clock)
    assert budget.left_s() == 5.0
    budget.check()
    clock.now += 5.0
    assert budget.stopped == "time limit of 5 s"
    with pytest.raises(OutOfBudgetError, match="time limit of 5 s"):
        budget.check()
    clock.now -= 5.0
    assert budget.left_s() == 0.0


def test_what_was_spent_before_counts() -> None:
    assert Budget(5.0, None, elapsed_s=4.0, clock=Clock()).left_s() == 1.0


def test_no_limits_never_stop() -> None:
    clock = Clock()
    budget = Budget(None, None, clock=clock)
    clock.now += 1e9
    assert budget.left_s() is None
    assert not budget.stopped


def test_memory_runs_out() -> None:
    budget = Budget(memory_limit_bytes=2 * 1024**3, resident=lambda: 3 * 1024**3)
    assert budget.stopped == "memory limit of 2.0 GiB"
    with pytest.raises(SolverError, match=r"no plan found within the memory limit of 2\.0 GiB: allow more"):
        budget.nothing_found("plan")


def test_memory_that_the_process_held_before_is_no_part_of_the_question() -> None:
    now = [3 * 1024**3]
    clock = Clock()
    budget = Budget(None, 2 * 1024**3, held_bytes=now[0], resident=lambda: now[0], clock=clock)
    assert not budget.stopped
    now[0] += 2 * 1024**3 + 1
    clock.now += 1.0
    assert budget.stopped == "memory limit of 2.0 GiB"


def test_what_was_found_stays_when_the_budget_ends() -> None:
    found = []
    budget = Budget(0.0, None)
    with budget.keeping():
        found.append(1)
        budget.check()
        found.append(2)
    assert found == [1]


def test_an_interrupt_stays_known() -> None:
    budget = Budget()
    with budget.keeping():
        raise KeyboardInterrupt
    assert budget.stopped == INTERRUPTED
    assert budget.left_s() == 0.0
    with pytest.raises(KeyboardInterrupt, match="no plan was found yet"):
        budget.nothing_found("plan")


def test_ctrl_c_is_heard_at_the_next_look() -> None:
    budget, rounds = Budget(), 0
    before = signal.getsignal(signal.SIGINT)
    with budget.listening(), budget.keeping():
        signal.raise_signal(signal.SIGINT)
        rounds += 1
        budget.check()
        rounds += 1
    assert (rounds, budget.stopped) == (1, INTERRUPTED)
    assert signal.getsignal(signal.SIGINT) is before


def test_work_that_does_not_look_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "PATIENCE_S", 0.01)
    budget = Budget()
    with budget.listening(), budget.keeping():
        signal.raise_signal(signal.SIGINT)
        time.sleep(30.0)
        raise AssertionError("never heard")
    assert budget.stopped == INTERRUPTED


def test_a_second_ctrl_c_ends_it() -> None:
    def press_twice() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    budget = Budget()
    with budget.listening(), pytest.raises(KeyboardInterrupt):
        press_twice()


def test_the_process_knows_what_it_spent() -> None:
    first = spent()
    sum(range(100_000))
    assert 0.0 < first.wall_s <= spent().wall_s
    assert 0.0 < first.cpu_s <= spent().cpu_s
    assert resident_bytes() > 1024**2
