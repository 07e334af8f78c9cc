"""Layers of each stage: the dynamic programme held against every possible split."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from core_cases import DENSE
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.estimator.flops import forward_flops_per_token
from meshplan.planner.training.search.layer_partition import (
    WORTHWHILE,
    LayerLoads,
    balance_arithmetic,
    partition_layers,
)


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


def stage_sums(values: list[float], split: tuple[int, ...], first: float, last: float) -> list[float]:
    sums, start = [], 0
    for count in split:
        sums.append(sum(values[start : start + count]))
        start += count
    sums[0] += first
    sums[-1] += last
    return sums


whole = st.integers(1, 6).map(float)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seconds=st.lists(whole, min_size=2, max_size=9))
def test_no_split_is_better(data: st.DataObject, seconds: list[float]) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    first, last = data.draw(whole), data.draw(whole)
    found = partition_layers(LayerLoads(layer_s=seconds, first_s=first, last_s=last), stages)
    assert found is not None
    assert sum(found) == len(seconds)

    def key(split: tuple[int, ...]) -> tuple[float, float]:
        sums = stage_sums(seconds, split, first, last)
        return max(sums), sum(value**2 for value in sums)

    assert key(found) == min(key(split) for split in every_split(len(seconds), stages))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seconds=st.lists(whole, min_size=2, max_size=7))
def test_no_split_within_memory_is_better(data: st.DataObject, seconds: list[float]) -> None:
    count = len(seconds)
    stages = data.draw(st.integers(1, count))
    states, kept = (data.draw(st.lists(whole, min_size=count, max_size=count)) for _ in range(2))
    flying = [float(stages - i) for i in range(stages)]
    limit = data.draw(st.integers(5, 80).map(float))
    loads = LayerLoads(
        layer_s=seconds, last_s=1.0, state_bytes=states, activation_bytes=kept, first_bytes=2.0, last_bytes=3.0
    )

    def fits(split: tuple[int, ...]) -> bool:
        held = stage_sums(states, split, 2.0, 3.0)
        activations = stage_sums(kept, split, 0.0, 0.0)
        return all(w + n * a <= limit for w, n, a in zip(held, flying, activations, strict=True))

    fitting = [split for split in every_split(count, stages) if fits(split)]
    found = partition_layers(loads, stages, in_flight=flying, memory_bytes=limit)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert fits(found)
    assert max(stage_sums(seconds, found, 0.0, 1.0)) == min(
        max(stage_sums(seconds, split, 0.0, 1.0)) for split in fitting
    )


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert partition_layers(LayerLoads(layer_s=[1.0] * 32, last_s=4.0), 4) == (9, 9, 9, 5)


def test_memory_takes_layers_off_the_first_stage() -> None:
    loads = LayerLoads(layer_s=[1.0] * 8, state_bytes=[1.0] * 8, activation_bytes=[1.0] * 8)
    assert partition_layers(loads, 2, in_flight=(2.0, 1.0), memory_bytes=10.0) == (3, 5)
    assert partition_layers(loads, 2, in_flight=(2.0, 1.0), memory_bytes=6.0) is None


def test_a_small_head_leaves_the_even_split_alone() -> None:
    shape = replace(DENSE, num_hidden_layers=24, vocab_size=1)
    assert balance_arithmetic(shape, 4096, (6, 6, 6, 6)) is None


def test_the_last_stage_of_a_large_vocabulary_holds_fewer_layers() -> None:
    shape = replace(DENSE, num_hidden_layers=24, vocab_size=40 * DENSE.vocab_size)
    split = balance_arithmetic(shape, 4096, (6, 6, 6, 6))
    assert split is not None
    assert sum(split) == 24
    assert split[-1] < min(split[:-1])


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(2, 10), vocab=st.integers(1, 2_000_000), data=st.data())
def test_another_split_is_offered_exactly_where_one_is_worth_it(layers: int, vocab: int, data: st.DataObject) -> None:
    shape = replace(DENSE, num_hidden_layers=layers, vocab_size=vocab)
    usual = data.draw(st.sampled_from([s for p in range(2, layers + 1) for s in every_split(layers, p)]))
    flops = forward_flops_per_token(shape, 4096)
    layer = (flops.matrix + flops.attention) / layers

    def slowest(split: tuple[int, ...]) -> float:
        return max(stage_sums([layer] * layers, split, 0.0, flops.head))

    best = min(slowest(split) for split in every_split(layers, len(usual)))
    found = balance_arithmetic(shape, 4096, usual)
    if found is not None:
        assert slowest(found) == pytest.approx(best)
        assert best <= slowest(usual) * (1.0 - WORTHWHILE) * (1 + 1e-9)
    else:
        assert best >= slowest(usual) * (1.0 - WORTHWHILE) * (1 - 1e-9)
