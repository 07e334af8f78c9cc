"""Two slots a device: the fold is the best pairing, and the search over counts finds what enumeration finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from expert_referee import eplb_balance, run
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.expert_placement.search.balance.pairing import fold, folded_times, search_counts
from meshplan.planner.expert_placement.search.balance.replicas import greedy_counts


def pairings(pieces: list[float]) -> Iterator[list[tuple[float, float]]]:
    if not pieces:
        yield []
        return
    first, rest = pieces[0], pieces[1:]
    for index, partner in enumerate(rest):
        for others in pairings(rest[:index] + rest[index + 1 :]):
            yield [(first, partner), *others]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.integers(0, 2**16))
def test_no_pairing_is_less_busy_than_the_fold(load: list[int], seed: int) -> None:
    counts = np.ones((1, 4), dtype=np.int64)
    rng = np.random.default_rng(seed)
    np.add.at(counts[0], rng.integers(4, size=4), 1)
    pieces = [value / count for value, count in zip(load, counts[0].tolist(), strict=True) for _ in range(count)]
    best = min(max(a + b for a, b in pairing) for pairing in pairings(pieces))
    assert folded_times(np.array([load], dtype=float), counts).max() == pytest.approx(best)


def test_copies_in_the_middle_of_the_order_are_parted() -> None:
    """Two experts of 10 in three copies each, one of 1 and one of 2: the middle four pieces are 10/3 all."""
    slots = fold(np.array([[10.0, 10.0, 1.0, 2.0]]), np.array([[3, 3, 1, 1]]))[0]
    assert sorted(slots.ravel().tolist()) == [0, 0, 0, 1, 1, 1, 2, 3]
    assert all(a != b for a, b in slots.tolist())


def counts_of_size(experts: int, spare: int) -> Iterator[list[int]]:
    if experts == 1:
        yield [1 + spare]
        return
    for mine in range(spare + 1):
        for rest in counts_of_size(experts - 1, spare - mine):
            yield [1 + mine, *rest]


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_counts_of_a_small_layer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0, 0.8, (1, 7))
    every = [counts for counts in counts_of_size(7, 5) if max(counts) <= 6]
    best = folded_times(np.repeat(load, len(every), axis=0), np.array(every)).max(axis=1).min()
    share = load / load.sum() * 6
    found, _ = search_counts(share, greedy_counts(share, 5, 6), np.zeros(1), 1e9, rng)
    assert folded_times(load, found).max() == pytest.approx(best)


def document(experts: int, redundant: int, devices: int) -> dict[str, Any]:
    load = np.random.default_rng(1).lognormal(0, 0.6, (4, experts)) * 1000
    return {
        "num_layers": 4,
        "num_experts": experts,
        "num_devices": devices,
        "num_redundant_experts": redundant,
        "load": load.tolist(),
    }


def test_without_copies_the_fold_is_proven() -> None:
    assert run(document(64, 0, 32))["status"] == "optimal"


def test_two_slots_a_device_beat_eplb_by_far() -> None:
    instance = document(80, 16, 48)
    assert run(instance)["balancedness"] > eplb_balance(instance["load"], 16, 48) + 0.01
