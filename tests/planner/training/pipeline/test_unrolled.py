"""The closed forms of the pipeline, held against the simulation of every operation over random stage times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshplan.planner.training.pipeline.closed_forms import (
    CLOSED_FORMS,
    in_flight,
    least_bubble,
    pipeline_s,
    staged_pipeline_s,
)
from meshplan.planner.training.pipeline.lookup import UNFLUSHED, nominal_times, pipeline_order, weight_gradient_share
from meshplan.planner.training.pipeline.orders import ZIGZAG
from meshplan.planner.training.pipeline.simulation import ChunkTimes, peak_in_flight, simulate
from meshplan.planner.training.pipeline.unrolled import MOST_STAGES, ROUNDS, ChunkColumns, rounds_of, unrolled_s

FEW = settings(max_examples=80, deadline=None)


def simulated_s(schedule: str, stages: list[float], v: int, m: int, forward: float) -> float:
    weight = weight_gradient_share(schedule, forward)
    parts = (forward, 1.0 - forward - weight, weight)
    order = pipeline_order(schedule, len(stages), v, m, nominal=nominal_times(schedule, forward))
    chunk = [stages[stage] * order.chunk_share for stage in order.stage_of_chunk]
    forwards, inputs, weights = ([share * seconds for seconds in chunk] for share in parts)
    result = simulate(order, ChunkTimes(forward_s=forwards, input_gradient_s=inputs, weight_gradient_s=weights))
    return result.unflushed_s if schedule in UNFLUSHED else result.flushed_s


def textbook_s(schedule: str, stages: list[float], m: int) -> float:
    """The form that knows only the slowest stage and the sum."""
    return pipeline_s(
        schedule,
        pipeline_parallel=len(stages),
        virtual_pipeline_stages=1,
        num_microbatches=np.array([m]),
        slowest_stage_s=np.array([max(stages)]),
        sum_of_stages_s=np.array([sum(stages)]),
    )[0]


def closed_s(schedule: str, stages: list[float], v: int, m: int, forward: float) -> float:
    seconds = staged_pipeline_s(
        schedule,
        virtual_pipeline_stages=v,
        num_microbatches=np.array([m]),
        stages_s=np.array(stages)[:, None],
        forward_share=forward,
    )
    return float(seconds[0])


stage_times = st.lists(st.floats(0.5, 1.5), min_size=2, max_size=10)
forward_shares = st.sampled_from([1 / 4, 1 / 3, 1 / 2])


@FEW
@given(stages=stage_times, m=st.integers(1, 40), forward=forward_shares, schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_gpipe_and_1f1b_are_exact(stages: list[float], m: int, forward: float, schedule: str) -> None:
    expected = simulated_s(schedule, stages, 1, m, forward)
    assert closed_s(schedule, stages, 1, m, forward) == pytest.approx(expected, rel=1e-9)


@FEW
@given(stages=stage_times, v=st.integers(2, 4), rounds=st.integers(1, 4), forward=forward_shares)
def test_interleaved_is_a_lower_bound(stages: list[float], v: int, rounds: int, forward: float) -> None:
    m = rounds * len(stages)
    closed, simulated = (seconds("interleaved", stages, v, m, forward) for seconds in (closed_s, simulated_s))
    assert closed <= simulated * (1.0 + 1e-9)


def test_interleaved_is_furthest_from_the_simulation_where_climbing_found_it() -> None:
    stages = [1.5, 0.5, 0.6953, 0.5, 0.5162, 0.5, 0.562, 0.5, 0.5, 0.5, 0.5181, 1.089, 1.2979]
    closed, simulated = (seconds("interleaved", stages, 2, 26, 0.25) for seconds in (closed_s, simulated_s))
    assert 1.0 - closed / simulated == pytest.approx(CLOSED_FORMS["interleaved"].error, abs=1e-3)


def test_interleaved_is_within_one_percent_of_the_simulation_nearly_always() -> None:
    random = np.random.default_rng(0)
    errors = []
    for _ in range(200):
        p, v, rounds = int(random.integers(2, 10)), int(random.integers(2, 5)), int(random.integers(1, 5))
        stages = [float(t) for t in random.uniform(0.5, 1.5, p)]
        expected = simulated_s("interleaved", stages, v, rounds * p, 1 / 3)
        errors.append(abs(closed_s("interleaved", stages, v, rounds * p, 1 / 3) / expected - 1.0))
    assert np.mean(errors) < 0.001
    assert np.mean(np.array(errors) > 0.01) < 0.05


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe", "zb-h1", "zb-1p"])
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4, 8])
def test_stages_that_are_alike_agree_within_one_percent(schedule: str, p: int, rounds: int) -> None:
    v = 2 if schedule == "interleaved" else 1
    stages, m = [1.0] * p, rounds * p
    assert closed_s(schedule, stages, v, m, 1 / 3) == pytest.approx(
        simulated_s(schedule, stages, v, m, 1 / 3), rel=0.01
    )


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_2p_has_no_bubble_where_a_third_is_weight_gradients(p: int) -> None:
    order = pipeline_order("zb-2p", p, 1, 4 * p)
    thirds = [1 / 3] * p
    result = simulate(order, ChunkTimes(forward_s=thirds, input_gradient_s=thirds, weight_gradient_s=thirds))
    assert closed_s("zb-2p", [1.0] * p, 1, 4 * p, 1 / 3) == pytest.approx(result.unflushed_s)


@FEW
@example(stages=[1.458, 1.01, 0.7, 1.427], m=25, forward=0.5)
@given(stages=stage_times, m=st.integers(1, 40), forward=forward_shares)
def test_zb_h1_is_never_below_the_simulation_and_within_one_percent(
    stages: list[float], m: int, forward: float
) -> None:
    """Exact but where another stage is nearly as slow as the slowest: it may dominate later."""
    stages[0] += 0.01  # never alike
    expected = simulated_s("zb-h1", stages, 1, m, forward)
    if m > rounds_of("zb-h1") * len(stages):
        expected = min(expected, textbook_s("zb-h1", stages, m))
    assert expected * (1.0 - 1e-9) <= closed_s("zb-h1", stages, 1, m, forward) <= expected * 1.01


# Schedule → chunks per stage: schedules that are always unrolled.
RUN = {"zb-1p": 1, "zb-2p": 1, "zb-v": 2, "dualpipe-v": 2, "v-half": 2, "v-min": 2, "hanayo": 2}


@pytest.mark.parametrize("schedule", RUN)
@settings(max_examples=12, deadline=None)
@given(stages=st.lists(st.floats(0.5, 1.5), min_size=2, max_size=7), more=st.integers(0, 25), forward=forward_shares)
def test_unrolled_schedules_are_within_one_percent_of_the_simulation(
    schedule: str, stages: list[float], more: int, forward: float
) -> None:
    stages[0] += 0.01  # never alike: ZB-1p's and ZB-2p's closed forms are for those
    m = more + (2 * len(stages) if schedule == "dualpipe-v" else 1)
    expected = simulated_s(schedule, stages, RUN[schedule], m, forward)
    assert closed_s(schedule, stages, RUN[schedule], m, forward) == pytest.approx(
        expected, rel=CLOSED_FORMS[schedule].error
    )


@pytest.mark.parametrize(("schedule", "v"), [*RUN.items(), ("hanayo", 4)])
def test_very_many_micro_batches_are_told_from_few(schedule: str, v: int) -> None:
    random = np.random.default_rng(11)
    for p, m in ((3, 150), (5, 170)):
        stages = [float(t) for t in random.uniform(0.5, 1.5, p)]
        expected = simulated_s(schedule, stages, v, m, 1 / 3)
        assert closed_s(schedule, stages, v, m, 1 / 3) == pytest.approx(expected, rel=CLOSED_FORMS[schedule].error)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-1p"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_micro_batches_than_stages_are_unrolled(schedule: str, m: int) -> None:
    for stages in ([1.0] * 5, [1.0, 1.4, 0.7, 1.2, 0.9]):
        assert closed_s(schedule, stages, 1, m, 1 / 3) == pytest.approx(simulated_s(schedule, stages, 1, m, 1 / 3))


def test_many_unlike_stages_keep_the_upper_bound() -> None:
    random = np.random.default_rng(2)
    stages = [float(t) for t in random.uniform(0.5, 1.5, MOST_STAGES + 1)]
    m = 2 * len(stages)
    assert closed_s("zb-h1", stages, 1, m, 1 / 3) >= simulated_s("zb-h1", stages, 1, m, 1 / 3)


def test_the_steady_state_of_zb_h1_adds_the_slowest_stage() -> None:
    """Running ROUNDS · p micro-batches tells all of them."""
    random = np.random.default_rng(3)
    for p in (2, 5, 8):
        stages = random.uniform(0.3, 2.0, (p, 1))
        times = ChunkColumns(
            forward_s=stages / 3, input_gradient_s=0.35 * stages, weight_gradient_s=(2 / 3 - 0.35) * stages
        )
        few, many = (
            unrolled_s("zb-h1", p, 1, times, np.array([m]), (1 / 3, 0.35, 2 / 3 - 0.35))[0]
            for m in (ROUNDS * p, ROUNDS * p + 7)
        )
        assert many - few == pytest.approx(7 * stages.max())


@given(stages=stage_times, m=st.integers(1, 40), forward=forward_shares)
def test_1f1b_is_never_slower_than_the_textbook_and_never_faster_than_its_slowest_stage(
    stages: list[float], m: int, forward: float
) -> None:
    textbook = textbook_s("1f1b", stages, m)
    seconds = closed_s("1f1b", stages, 1, m, forward)
    assert max(m * max(stages), sum(stages)) * (1 - 1e-9) <= seconds <= textbook * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(
    stages=st.lists(st.floats(0.2, 2.0), min_size=2, max_size=10),
    rounds=st.integers(1, 6),
    v=st.integers(1, 4),
    forward=st.sampled_from([1 / 4, 1 / 3]),
    schedule=st.sampled_from([name for name in CLOSED_FORMS if name not in ("none", "v-half", "v-min", "hanayo")]),
)
def test_no_stage_times_are_faster_than_the_least_bubble_allows(
    stages: list[float], rounds: int, v: int, forward: float, schedule: str
) -> None:
    p, m = len(stages), rounds * len(stages)
    v = max(v, 2) if schedule == "interleaved" else 2 if schedule in ZIGZAG else 1
    m = max(m, 2 * p) if schedule == "dualpipe-v" else m
    left = least_bubble(schedule, pipeline_parallel=p, virtual_pipeline_stages=v)
    assert closed_s(schedule, stages, v, m, forward) >= np.mean(stages) * (m + left * (p - 1)) * (1 - 1e-9)


def test_a_slow_last_stage_is_the_textbook_formula() -> None:
    stages = [1.0, 1.0, 1.0, 1.4]  # the LM head
    assert closed_s("1f1b", stages, 1, 16, 1 / 3) == pytest.approx(16 * 1.4 + 3 * 1.0)


def test_a_slow_first_stage_hides_most_of_the_bubble() -> None:
    stages = [1.4, 1.0, 1.0, 1.0]
    # 16 · 1.4 + (3 − 3 · 1.4/3) + (3 − 3 · 2.8/3), where the textbook says 16 · 1.4 + 3.
    assert closed_s("1f1b", stages, 1, 16, 1 / 3) == pytest.approx(16 * 1.4 + 1.6 + 0.2)


def test_a_batch_is_priced_as_its_members_are() -> None:
    random = np.random.default_rng(1)
    stages, m = random.uniform(0.5, 1.5, (6, 50)), random.integers(1, 20, 50) * 6
    for schedule, v in (("1f1b", 1), ("interleaved", 3), ("zb-2p", 1)):
        whole = staged_pipeline_s(schedule, virtual_pipeline_stages=v, num_microbatches=m, stages_s=stages)
        single = [closed_s(schedule, list(stages[:, i]), v, int(m[i]), 1 / 3) for i in range(50)]
        assert whole == pytest.approx(single)


@pytest.mark.parametrize("schedule", [name for name in CLOSED_FORMS if name != "none"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 12), (8, 8), (8, 32)])
def test_what_is_said_to_be_in_flight_is_what_the_order_holds(schedule: str, p: int, m: int) -> None:
    v = 2 if schedule == "interleaved" or schedule in ZIGZAG else 1
    m = max(m, 2 * p) if schedule == "dualpipe-v" else m
    peaks = peak_in_flight(pipeline_order(schedule, p, v, m))
    said = [
        float(
            in_flight(
                schedule,
                pipeline_parallel=p,
                virtual_pipeline_stages=v,
                stage=stage,
                num_microbatches=np.array([m]),
            )[0]
        )
        for stage in range(p)
    ]
    if schedule in ("zb-v", "v-half", "v-min", "hanayo"):  # searched within these limits
        assert all(peak <= limit for peak, limit in zip(peaks, said, strict=True))
    else:
        assert peaks == pytest.approx(said)
