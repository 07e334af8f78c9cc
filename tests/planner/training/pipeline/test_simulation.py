"""The event simulation, held against the bubbles and peaks that the schedules' papers state."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.pipeline.list_scheduling import v_shaped
from meshplan.planner.training.pipeline.lookup import V_UNITS, pipeline_order
from meshplan.planner.training.pipeline.orders import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Op,
    PipelineOrder,
    one_forward_one_backward,
    zigzag,
)
from meshplan.planner.training.pipeline.simulation import ChunkTimes, Simulated, simulate

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-1p": 1,
    "zb-2p": 1,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
    "hanayo": 4,
    "dualpipe": 1,
}


def run(order: PipelineOrder, *, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0) -> Simulated:
    """Alike chunks; the times are those of a whole stage."""
    chunks, share = len(order.stage_of_chunk), order.chunk_share
    forwards, gradients, rest = ([seconds * share] * chunks for seconds in (forward, inputs, weights))
    return simulate(order, ChunkTimes(forward_s=forwards, input_gradient_s=gradients, weight_gradient_s=rest))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (6, 6), (8, 24)])
def test_every_micro_batch_runs_every_pass_once_and_in_order(schedule: str, p: int, m: int) -> None:
    m = max(m, 2 * p) if schedule == "dualpipe-v" else m
    order = pipeline_order(schedule, p, SCHEDULES[schedule], m)
    result = run(order)
    ends = {span.op: span.end_s for spans in result.stages for span in spans}
    starts = {span.op: span.start_s for spans in result.stages for span in spans}
    kinds = (FORWARD, BACKWARD, WEIGHT) if order.splits_backward else (FORWARD, BACKWARD)
    wanted = {
        Op(kind, chunk, j) for j in range(m) for chunk in order.paths[order.path_of_microbatch[j]] for kind in kinds
    }
    counts = Counter(op for ops in order.stages for op in ops) + Counter(
        op._replace(kind=WEIGHT) for op in order.whole if order.splits_backward
    )
    assert set(counts) == wanted
    assert set(counts.values()) == {1}
    for j in range(m):
        path = order.paths[order.path_of_microbatch[j]]
        for here, there in itertools.pairwise(path):
            assert starts[Op(FORWARD, there, j)] >= ends[Op(FORWARD, here, j)]
            assert starts[Op(BACKWARD, here, j)] >= ends[Op(BACKWARD, there, j)]
        for chunk in path:
            assert starts[Op(BACKWARD, chunk, j)] >= ends[Op(FORWARD, chunk, j)]
    for spans in result.stages:
        for before, after in itertools.pairwise(spans):
            assert after.start_s >= before.end_s
    assert min(result.idle_s) >= -1e-9


@pytest.mark.parametrize("p", [2, 4, 8])
def test_bubbles_that_the_papers_state(p: int) -> None:
    m, forward, inputs, weights = 4 * p, 1.0, 1.1, 0.8
    whole = forward + inputs + weights

    def bubble(schedule: str, v: int = 1, *, flushed: bool = True) -> float:
        result = run(pipeline_order(schedule, p, v, m), forward=forward, inputs=inputs, weights=weights)
        return (result.flushed_s if flushed else result.unflushed_s) - m * whole

    # arXiv:2104.04473, §2.1 and §2.2: (p − 1)(t_f + t_b), divided by v when interleaved.
    assert bubble("gpipe") == pytest.approx((p - 1) * whole)
    assert bubble("1f1b") == pytest.approx((p - 1) * whole)
    assert bubble("interleaved", 2) == pytest.approx((p - 1) * whole / 2)
    assert bubble("interleaved", 4) == pytest.approx((p - 1) * whole / 4)
    # arXiv:2401.10241, Table 1: ZB-H1 (p − 1)(T_F + T_B − T_W), ZB-H2 (p − 1)(T_F + T_B − 2·T_W).
    assert bubble("zb-h1") == pytest.approx((p - 1) * (forward + inputs - weights))
    assert bubble("zb-2p", flushed=False) == pytest.approx((p - 1) * (forward + inputs - 2 * weights), abs=0.1)


@pytest.mark.parametrize("p", [4, 8])
def test_dualpipe_has_the_bubble_of_its_report(p: int) -> None:
    # arXiv:2412.19437, Table 2: (p/2 − 1)(F&B + B − 3W), B the whole backward, here F&B = F + B.
    result = run(pipeline_order("dualpipe", p, 1, 4 * p))
    assert result.flushed_s - 4 * p * 3.0 <= (p / 2 - 1) * (3.0 + 2.0 - 3.0) + 1e-9
    assert max(result.peak_in_flight) == p + 1


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [16, 17, 40])
def test_dualpipe_v_has_the_bubble_and_the_memory_of_its_readme(p: int, m: int) -> None:
    """github.com/deepseek-ai/DualPipe with PP = 2p: (PP/2 − 1)(F&B + B − 3W), PP + 1 activations of half a stage."""
    result = run(pipeline_order("dualpipe-v", p, 2, m))
    pair, whole, weights = 3.0 / 2, 2.0 / 2, 1.0 / 2
    assert result.flushed_s - m * 3.0 == pytest.approx((p - 1) * (pair + whole - 3 * weights))
    assert result.peak_in_flight == ((2 * p + 1) / 2,) * p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_v_has_no_bubble_where_passes_are_alike(p: int) -> None:
    """arXiv:2405.15362, Table 1: none, in the memory of p micro-batches."""
    result = run(pipeline_order("zb-v", p, 2, 4 * p))
    assert result.unflushed_s == pytest.approx(4 * p * 3.0)
    assert result.peak_in_flight == (float(p),) * p


def test_zero_bubble_without_a_bubble() -> None:
    result = run(pipeline_order("zb-2p", 8, 1, 32))
    assert result.unflushed_s == pytest.approx(32 * 3.0)
    assert result.flushed_s == pytest.approx(32 * 3.0 + 7 * 1.0)  # the staircase in which the stages start


@pytest.mark.parametrize("p", [2, 4, 8])
def test_peaks_that_the_papers_state(p: int) -> None:
    m = 4 * p

    def peak(schedule: str, v: int = 1) -> tuple[float, ...]:
        return pipeline_order_peak(schedule, p, v, m)

    assert peak("gpipe") == (float(m),) * p
    assert peak("1f1b") == tuple(float(p - i) for i in range(p))
    assert max(peak("interleaved", 2)) == pytest.approx(p * (1 + (p - 1) / (2 * p)))  # arXiv:2205.05198, §4.1
    assert peak("zb-h1") == (float(p),) * p
    assert max(peak("zb-1p")) == p
    assert max(peak("zb-2p")) == 2 * p - 1
    assert max(peak("zb-v", 2)) <= p
    # arXiv:2405.15362, Table 1: a half and a third of 1F1B's, and a constant.
    assert max(peak("v-half", 2)) <= p / 2 + 1
    assert max(peak("v-min", 2)) <= p / 3 + 1.5
    assert max(peak("hanayo", 2)) <= p


def pipeline_order_peak(schedule: str, p: int, v: int, m: int) -> tuple[float, ...]:
    return run(pipeline_order(schedule, p, v, m)).peak_in_flight


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_longer_passes_and_messages_never_make_a_step_shorter(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v"]))
    order = pipeline_order(schedule, 4, SCHEDULES[schedule], 8)
    chunks = len(order.stage_of_chunk)
    seconds = st.lists(st.floats(0.1, 2.0), min_size=chunks, max_size=chunks)
    forward, inputs, weights = (data.draw(seconds) for _ in range(3))
    message = data.draw(st.floats(0.0, 1.0))
    times = ChunkTimes(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights, message_s=message)
    longer = list(forward)
    longer[data.draw(st.integers(0, chunks - 1))] += data.draw(st.floats(0.0, 1.0))
    base = simulate(order, times)
    more = ChunkTimes(forward_s=longer, input_gradient_s=inputs, weight_gradient_s=weights, message_s=message)
    none = ChunkTimes(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights)
    assert simulate(order, more).flushed_s >= base.flushed_s - 1e-9
    assert simulate(order, none).flushed_s <= base.flushed_s + 1e-9


def test_a_message_costs_each_hop_once_when_there_is_one_micro_batch() -> None:
    order = one_forward_one_backward(4, 1)
    times = ChunkTimes(forward_s=[1.0] * 4, input_gradient_s=[1.0] * 4, weight_gradient_s=[1.0] * 4, message_s=0.25)
    assert simulate(order, times).flushed_s == pytest.approx(4 * 3.0 + 6 * 0.25)


def test_an_order_that_waits_for_itself_is_refused() -> None:
    stages = ((Op(BACKWARD, 0, 0), Op(FORWARD, 0, 0)),)
    order = PipelineOrder(
        stages=stages, stage_of_chunk=(0,), paths=((0,),), path_of_microbatch=(0,), splits_backward=False
    )
    with pytest.raises(ValueError, match="waits for itself"):
        run(order)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        pipeline_order("interleaved", 4, 2, 6)
    with pytest.raises(ValueError, match="7 micro-batches for 4 stages of two chunks; it needs 8 or more"):
        pipeline_order("dualpipe-v", 4, 2, 7)
    with pytest.raises(ValueError, match="no pipeline schedule 'chimera'"):
        pipeline_order("chimera", 4, 1, 8)
    with pytest.raises(ValueError, match="let no micro-batch through"):
        v_shaped(4, 8, lambda stage, turn: 0, 0.0)


def test_v_shapes_put_the_head_beside_the_embedding() -> None:
    assert zigzag(4, 2) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert set(V_UNITS) < set(SCHEDULES)
