"""Interleaved 1F1B with unlike chunks against an event simulation, written here, that knows nothing of slots."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.pipeline.closed_forms import CLOSED_FORMS, staged_pipeline_s
from meshplan.planner.training.pipeline.unlike_chunks import unlike_chunks_s

# Chunk times, [v, p], in units of a layer.
Times = np.ndarray


def simulated_s(forward: Times, backward: Times, m: int) -> float:
    """Every stage takes its passes in Megatron's order, each as soon as it is there (Narayanan 2021, Figure 4)."""
    v, p = forward.shape
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    queues = []
    for stage in range(p):
        there = [("F", row * p + stage, i) for group in groups for row in range(v) for i in group]
        back = [("B", row * p + stage, i) for group in groups for row in reversed(range(v)) for i in group]
        warm_up, turns = there[: 2 * (p - 1 - stage) + (v - 1) * p], there[2 * (p - 1 - stage) + (v - 1) * p :]
        pairs = itertools.zip_longest(turns, back)
        queues.append([*warm_up, *(one for pair in pairs for one in pair if one is not None)])
    ended: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * p
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, chunk, i = queue[0]
                previous = (kind, chunk - 1, i) if kind == "F" else (kind, chunk + 1, i)
                if previous[1] == p * v:
                    previous = ("F", chunk, i)
                if previous[1] >= 0 and previous not in ended:
                    break
                passes = forward if kind == "F" else backward
                clock[stage] = max(clock[stage], ended.get(previous, 0.0)) + passes[chunk // p, stage]
                ended[queue.pop(0)] = clock[stage]
    return max(clock)


@st.composite
def pipelines(draw: st.DrawFn, most_groups: int) -> tuple[Times, Times, int]:
    """Forward and backward times of each chunk, and micro-batches in whole groups."""
    p, v = draw(st.integers(2, 6)), draw(st.integers(2, 4))
    sizes = st.lists(st.integers(1, 3), min_size=p * v, max_size=p * v)
    forward = np.array(draw(sizes), dtype=float).reshape(v, p)
    ratio = draw(st.sampled_from([1.0, 2.0, 3.0]))
    return forward, ratio * forward, p * draw(st.integers(1, most_groups))


@settings(max_examples=40, deadline=None)
@given(pipelines(most_groups=4))
def test_slots_are_the_event_simulation(case: tuple[Times, Times, int]) -> None:
    forward, backward, m = case
    found = unlike_chunks_s(forward[..., None], backward[..., None], np.array([m]))
    assert np.isclose(found[0], simulated_s(forward, backward, m), rtol=1e-12)


@settings(max_examples=15, deadline=None)
@given(pipelines(most_groups=1), st.integers(5, 12))
def test_further_groups_add_what_the_last_one_did(case: tuple[Times, Times, int], groups: int) -> None:
    forward, backward, p = case[0], case[1], case[0].shape[1]
    found = unlike_chunks_s(forward[..., None], backward[..., None], np.array([groups * p]))
    assert np.isclose(found[0], simulated_s(forward, backward, groups * p), rtol=1e-2)


@settings(max_examples=15, deadline=None)
@given(pipelines(most_groups=1), st.integers(5, 9), st.data())
def test_the_bound_of_shorter_chunks_bounds_longer_ones(
    case: tuple[Times, Times, int], groups: int, data: st.DataObject
) -> None:
    forward, backward, m = case[0][..., None], case[1][..., None], np.array([groups * case[0].shape[1]])
    flat = st.lists(st.integers(0, 3), min_size=forward.size, max_size=forward.size)
    more = np.array(data.draw(flat), dtype=float).reshape(forward.shape)
    bound = unlike_chunks_s(forward, backward, m, least=True)
    assert bound <= unlike_chunks_s(forward, backward, m) * (1.0 + 1e-12)
    assert bound <= unlike_chunks_s(forward + more, backward + more, m) * (1.0 + 1e-12)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.integers(2, 4), st.integers(1, 6))
def test_alike_chunks_take_what_the_closed_form_says(stages: list[int], v: int, groups: int) -> None:
    p = len(stages)
    chunks = np.broadcast_to(np.array(stages, dtype=float)[:, None], (v, p, 1))
    found = unlike_chunks_s(chunks, 2.0 * chunks, m := np.array([groups * p]))
    closed = staged_pipeline_s(
        "interleaved", virtual_pipeline_stages=v, num_microbatches=m, stages_s=3.0 * chunks.sum(axis=0)
    )
    assert np.isclose(found, closed, rtol=CLOSED_FORMS["interleaved"].error)


def test_alternating_chunks_take_a_fifth_longer_than_their_sum() -> None:
    p, m = 8, 32
    chunks = np.array([[2.0, 1.0] * (p // 2), [1.0, 2.0] * (p // 2)])
    closed = staged_pipeline_s(
        "interleaved", virtual_pipeline_stages=2, num_microbatches=np.array([m]), stages_s=np.full((p, 1), 9.0)
    )
    found = unlike_chunks_s(chunks[..., None], 2.0 * chunks[..., None], np.array([m]))
    assert np.isclose(found[0] / closed[0], 1.21, atol=0.005)


def test_of_two_groups_one_may_wait() -> None:
    """Found at random: what the fourth group adds is not what the others do, so that the last two are averaged."""
    forward = np.array([[1.0, 1.0, 3.0, 2.0], [3.0, 3.0, 2.0, 3.0]])
    found = unlike_chunks_s(forward[..., None], 3.0 * forward[..., None], np.array([20]))
    assert np.isclose(found[0], simulated_s(forward, 3.0 * forward, 20), rtol=5e-3)
