"""Pipelines whose micro-batches differ, against an event simulation of their own and the one of equal micro-batches."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest

from meshplan.planner.lengths.distribution import table_of
from meshplan.planner.lengths.packing import PackedDocuments
from meshplan.planner.training.pipeline.closed_forms import FORWARD_SHARE
from meshplan.planner.training.pipeline.lookup import UNFLUSHED, nominal_times, pipeline_order, weight_gradient_share
from meshplan.planner.training.pipeline.simulation import ChunkTimes, simulate
from meshplan.planner.training.pipeline.uneven import uneven_pipeline_units
from meshplan.planner.training.pipeline.waiting import (
    SHARES,
    Layout,
    drawn_sizes,
    least_waiting_s,
    waiting_s,
    waiting_units,
)


def _events_1f1b(p: int, sizes: list[float]) -> float:
    """1F1B by events: stages are processes that pop their next operation when its input has arrived."""
    m = len(sizes)
    todo = []
    for stage in range(p):
        ahead = min(p - 1 - stage, m)
        ops = [("F", j) for j in range(ahead)]
        for j in range(m - ahead):
            ops += [("F", ahead + j), ("B", j)]
        todo.append(ops + [("B", j) for j in range(m - ahead, m)])
    arrived = {(0, "F", j) for j in range(m)}
    busy = [False] * p
    events: list[tuple[float, int, int, str, int]] = []
    count, now = itertools.count(), 0.0

    def start() -> None:
        for stage in range(p):
            if not busy[stage] and todo[stage] and (stage, *todo[stage][0]) in arrived:
                kind, j = todo[stage].pop(0)
                lasts = sizes[j] * (FORWARD_SHARE if kind == "F" else 1.0 - FORWARD_SHARE)
                busy[stage] = True
                heapq.heappush(events, (now + lasts, next(count), stage, kind, j))

    start()
    while events:
        now, _, stage, kind, j = heapq.heappop(events)
        busy[stage] = False
        if kind == "F":
            arrived.add((stage + 1, "F", j) if stage + 1 < p else (stage, "B", j))
        elif stage:
            arrived.add((stage - 1, "B", j))
        start()
    return now


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (4, 13), (8, 5)])
def test_it_agrees_with_an_event_simulation(p: int, m: int) -> None:
    sizes = np.random.default_rng(p * m).lognormal(0.0, 0.7, (5, m))
    expected = [_events_1f1b(p, row.tolist()) for row in sizes]
    assert uneven_pipeline_units("1f1b", p, 1, sizes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_equal_micro_batches_take_what_they_always_took(schedule: str, v: int) -> None:
    p, m = 4, 8
    share = weight_gradient_share(schedule, FORWARD_SHARE)
    chunks = 4 * v
    order = pipeline_order(schedule, p, v, m, nominal=nominal_times(schedule, FORWARD_SHARE))
    times = ChunkTimes(
        forward_s=[FORWARD_SHARE / v] * chunks,
        input_gradient_s=[(1 - FORWARD_SHARE - share) / v] * chunks,
        weight_gradient_s=[share / v] * chunks,
    )
    run = simulate(order, times)
    expected = run.unflushed_s if schedule in UNFLUSHED else run.flushed_s
    assert uneven_pipeline_units(schedule, p, v, np.ones((1, m)))[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_longer_micro_batch_is_never_faster(schedule: str) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0.0, 0.5, (1, 8))
    longer = np.repeat(sizes, 8, axis=0) + np.eye(8) * 0.7
    v = 2 if schedule == "interleaved" else 1
    before = uneven_pipeline_units(schedule, 4, v, sizes)[0]
    assert np.all(uneven_pipeline_units(schedule, 4, v, longer) >= before - 1e-12)


def test_interleaving_takes_any_number_of_micro_batches() -> None:
    few, some, many = (uneven_pipeline_units("interleaved", 4, 2, np.ones((1, m)))[0] for m in (4, 6, 8))
    assert few < some < many


def test_micro_batches_in_order_of_size_wait_little() -> None:
    sizes = np.random.default_rng(0).lognormal(0.0, 0.5, (20, 32))
    mixed = uneven_pipeline_units("1f1b", 4, 1, sizes).mean()
    assert uneven_pipeline_units("1f1b", 4, 1, np.sort(sizes, axis=1)).mean() < 0.9 * mixed


DOCUMENTS = PackedDocuments(table=table_of([500] * 80 + [3000] * 19 + [30_000]), sequence_length=32_768)
WINDOWS = ((None, 32),)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("none", 1, 1, 8, 4, 1),
        Layout("1f1b", 4, 1, 2, 8, 1),
        Layout("1f1b", 2, 1, 4, 32, 2),
        Layout("interleaved", 4, 2, 1, 32, 1),
        Layout("zb-h1", 4, 1, 1, 36, 1),
    ],
)
def test_waiting_is_the_mean_of_simulated_steps(layout: Layout) -> None:
    sizes = drawn_sizes(DOCUMENTS, WINDOWS, layout)
    m, p, v = layout.num_microbatches, layout.pipeline_parallel, layout.virtual_pipeline_stages
    even = uneven_pipeline_units(layout.schedule, p, v, np.ones((1, m)))[0]
    for share, found in zip(SHARES, waiting_units(DOCUMENTS, WINDOWS, layout), strict=True):
        rows = 1.0 - share + share * sizes.reshape(-1, m)
        ranks = uneven_pipeline_units(layout.schedule, p, v, rows).reshape(sizes.shape[:2])
        exact = ranks.max(axis=1).mean() - even
        assert found == pytest.approx(exact, abs=0.005 * even)


def test_waiting_rises_with_attention_and_is_never_below_its_bound() -> None:
    layouts = [Layout("1f1b", 4, 1, 2, 8, 1)] * 6
    shares = np.array([0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
    found = waiting_s(DOCUMENTS, WINDOWS, layouts, shares, np.ones(6))
    assert found[0] == 0.0
    assert np.all(np.diff(found) > 0)
    assert np.all(least_waiting_s(DOCUMENTS, WINDOWS, layouts, shares) <= found + 1e-12)


def test_equal_sequences_do_not_wait() -> None:
    documents = PackedDocuments(table=table_of([4096]), sequence_length=4096)
    assert set(waiting_units(documents, WINDOWS, Layout("1f1b", 4, 1, 4, 8, 1))) == {0.0}
