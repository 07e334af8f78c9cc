"""A user's own training runs: what is measured is predicted, and intervals shrink as runs agree."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from planted_training import LARGE, errors, planted, runs_of

from meshplan.catalogs.constants.checks import calibration_problems
from meshplan.catalogs.constants.training import Calibration, MemoryConstants, TimeConstants
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.constants_fit import NOISE, Row
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.own_runs import refine, row_noise
from meshplan.planner.training.problem.ways import way_of

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


def test_less_is_known_of_another_model_another_way_and_another_kind_of_work() -> None:
    """Nothing where nothing is shared."""
    own = adapted(AS_SHIPPED[:1])
    way = way_of(AS_SHIPPED[0].problem.workload, AS_SHIPPED[0].config)
    same, other = own.for_model(LARGE.slug), own.for_model("another-model")
    unknown = SHIPPED.error_p90
    widths = [known.half_width("dense", each) for known in (same, other) for each in (way, "another way")]
    assert widths[0] < widths[1] < widths[2] < widths[3] == unknown["dense"]
    assert {known.half_width("experts", way) for known in (same, other)} == {unknown["experts"]}
    assert own.start_error_p90 == unknown


def test_another_model_moves_less_than_the_one_that_ran() -> None:
    """Its own part of the error is unknown; runs of both models tell it."""
    slow = [replace(run, measured={"iteration_s": run.measured["iteration_s"] * 1.2}) for run in AS_SHIPPED[:4]]
    own = adapted(slow)
    theirs, others = (
        [price(replace(run.problem, calibration=used), run.config).step_s for run in slow]
        for used in (own.for_model(LARGE.slug), own.for_model("another-model"))
    )
    started = [run.measured["iteration_s"] / 1.2 for run in slow]
    assert all(first < other < same for first, other, same in zip(started, others, theirs, strict=True))


def test_repeats_of_one_model_do_not_drown_what_another_says() -> None:
    rows = [Row(run, SHIPPED.time) for run in repeats(RUNS[0], 8, 1.0)]
    single, many = (row_noise("another-model", rows[:count], SHIPPED) for count in (1, 8))
    assert many[0] > single[0] > row_noise(LARGE.slug, rows[:1], SHIPPED)[0]
    assert sum(1.0 / many**2) < 1.01 / (single[0] ** 2 - NOISE**2)  # their mean tells no more than one without noise


def test_what_was_learned_of_a_model_is_stored_and_read_back() -> None:
    own = adapted(AS_SHIPPED[:2])
    assert set(own.model_time) == {LARGE.slug}
    again = Calibration.from_document(own.to_document())
    assert again.for_model(LARGE.slug) == own.for_model(LARGE.slug) == own.for_model(LARGE.slug).for_model(LARGE.slug)
    assert list(calibration_problems(own.framework, own.architecture, own.to_document())) == []
    broken = {**own.to_document(), "model_time": {LARGE.slug: {"gemm_efficiency": -1.0}}}
    assert any(LARGE.slug in problem for problem in calibration_problems(own.framework, own.architecture, broken))
    for ways in ([], {"dense": []}, {"dense": {"": {"a way": -1.0}}}, {"sparse": {}}):
        found = calibration_problems(own.framework, own.architecture, {**own.to_document(), "way_error_p90": ways})
        assert any(problem.startswith("way_error_p90") for problem in found), ways


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
