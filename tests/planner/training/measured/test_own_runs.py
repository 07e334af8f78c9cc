"""A user's own training runs: what is measured is predicted, and intervals shrink as runs agree."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_training import LARGE, errors, planted, runs_of

from meshplan.catalogs.constants.training import Calibration, MemoryConstants, TimeConstants
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.own_runs import own_width, refine

SHIPPED = replace(
    planted(TimeConstants()),
    error_p90={"dense": 0.3, "adapters": 0.4, "experts": 0.5},
    cluster_error_p90={"dense": 0.25, "adapters": 0.3, "experts": 0.4},
)
RUNS = runs_of(shapes=(LARGE,))
AS_SHIPPED = runs_of(TimeConstants(), shapes=(LARGE,))


def adapted(runs: list[ObservedRun]) -> Calibration:
    (made,) = refine(runs, lambda *_: SHIPPED, source="mine", date="2026-01-01").calibrations
    return made


def repeats(run: ObservedRun, count: int, factor: float) -> list[ObservedRun]:
    measured = {"iteration_s": run.measured["iteration_s"] * factor}
    return [replace(run, id=f"{run.id}#{number}", group=run.id, measured=measured) for number in range(count)]


@pytest.mark.parametrize(("place", "factor"), [(0, 0.9), (15, 1.3)])
def test_a_plan_that_ran_often_is_predicted_as_it_ran(place: int, factor: float) -> None:
    """The more repeats, the nearer."""
    off = []
    for count in (1, 5, 40):
        runs = repeats(RUNS[place], count, factor)
        off.append(abs(float(errors(runs[:1], adapted(runs))[0])))
    start = abs(float(errors(repeats(RUNS[place], 1, factor), SHIPPED)[0]))
    assert off[0] < start
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.25 * start


def test_consistent_runs_of_a_model_shrink_its_interval_step_by_step() -> None:
    """A cluster where everything takes a tenth longer than expected."""
    widths = [SHIPPED.error_p90["dense"]]
    for count in (1, 2, 4, 8):
        runs = [repeats(run, 1, 1.1)[0] for run in AS_SHIPPED[::2][:count]]
        widths.append(adapted(runs).for_model(LARGE.slug).error_p90["dense"])
    assert all(later < earlier for earlier, later in itertools.pairwise(widths))
    assert widths[-1] < 0.7 * widths[0]


def test_repeats_of_one_plan_say_nothing_of_how_others_differ() -> None:
    once, often = (adapted(repeats(RUNS[0], count, 1.0)) for count in (1, 8))
    assert once.for_model(LARGE.slug).error_p90 == often.for_model(LARGE.slug).error_p90


def test_another_model_and_another_kind_of_work_gain_less() -> None:
    own = adapted(AS_SHIPPED[:3])
    same, other = own.for_model(LARGE.slug).error_p90, own.for_model("another-model").error_p90
    assert same["dense"] < other["dense"] < SHIPPED.error_p90["dense"]
    assert same["experts"] == other["experts"] == SHIPPED.error_p90["experts"]
    assert own.start_error_p90 == SHIPPED.error_p90


def test_runs_that_disagree_keep_the_interval_wide() -> None:
    steady = AS_SHIPPED[::3][:6]
    scattered = [
        replace(run, measured={"iteration_s": run.measured["iteration_s"] * (1.6 if place % 2 else 0.6)})
        for place, run in enumerate(steady)
    ]
    calm, wild = (adapted(runs).for_model(LARGE.slug).error_p90["dense"] for runs in (steady, scattered))
    assert wild > 1.5 * calm


def test_peaks_alone_adapt_the_memory_and_leave_the_times() -> None:
    loose = replace(SHIPPED, memory=MemoryConstants(safe_factor=3.6))
    run = replace(RUNS[0], measured={"peak_memory_bytes": 3e10})
    (made,) = refine([run], lambda *_: loose, source="mine", date="2026-01-01").calibrations
    assert made.time == loose.time
    assert made.error_p90 == loose.error_p90
    assert made.memory.safe_factor < 3.6
    assert (made.memory_basis, made.date) == ("1 own peak", "2026-01-01")


@given(
    unknown=st.floats(0.01, 1.0),
    share=st.floats(0.1, 2.0),
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 50), max_size=4),
    model=st.sampled_from("abcde"),
)
@settings(max_examples=200)
def test_more_runs_never_widen_an_interval(unknown: float, share: float, counts: dict[str, int], model: str) -> None:
    """Neither a further plan of a known model nor one of a new model."""
    width = own_width(unknown, share * unknown, counts, model)
    assert 0.0 < width <= unknown * (1.0 + 1e-12)
    for name in "abcde":
        more = own_width(unknown, share * unknown, {**counts, name: counts.get(name, 0) + 1}, model)
        assert more <= width * (1.0 + 1e-9)
    assert math.isfinite(width)
