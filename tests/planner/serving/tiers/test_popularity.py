"""Which experts are hit and kept, against enumeration."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from meshplan.planner.serving.tiers.popularity import Popularity, even, from_loads, kept_by_knapsack, regret, zipf

SMALL = Popularity(chances=np.array([[0.9, 0.6, 0.3, 0.2], [0.8, 0.8, 0.3, 0.1]]), source="made up", is_known=True)


def enumerated_hits(chances: np.ndarray, tokens: int, kept: set[int]) -> tuple[float, float]:
    """Expected distinct experts that are not kept and are hit, and the probability of any, by all outcomes."""
    hits = any_hit = 0.0
    for outcome in product([0, 1], repeat=len(chances) * tokens):
        chosen = np.array(outcome).reshape(tokens, len(chances))
        probability = float(np.where(chosen == 1, chances, 1.0 - chances).prod())
        missed = [e for e in range(len(chances)) if e not in kept and chosen[:, e].any()]
        hits += probability * len(missed)
        any_hit += probability * bool(missed)
    return hits, any_hit


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_hits_are_those_of_all_outcomes(kept: int, tokens: int) -> None:
    expected = [enumerated_hits(layer, tokens, set(range(kept))) for layer in SMALL.chances]
    one = np.array([float(tokens)])
    assert SMALL.on_host(kept).hits(one)[0] == pytest.approx(np.mean([hits for hits, _ in expected]))
    assert SMALL.on_host(kept).any_hit(one)[0] == pytest.approx(np.mean([some for _, some in expected]))


def test_any_experts_miss_in_proportion() -> None:
    mean = np.mean(
        [
            enumerated_hits(layer, 1, set(kept))[0]
            for layer in SMALL.chances
            for kept in combinations(range(SMALL.num_experts), 2)
        ]
    )
    assert SMALL.on_host(2, by_popularity=False).hits(np.array([1.0]))[0] == pytest.approx(mean)


def test_the_knapsack_is_the_best_of_all_sets_and_attains_its_bound() -> None:
    every = [(layer, expert) for layer in range(2) for expert in range(4)]
    for room in range(9):
        gains = 1.0 - (1.0 - SMALL.chances) ** 2
        best = min(gains.sum() - sum(gains[one] for one in kept) for kept in combinations(every, room))
        layers, left, bound = kept_by_knapsack(SMALL, room, tokens=2.0)
        assert sum(layers) == room
        assert left == pytest.approx(best)
        assert bound == pytest.approx(left)


def test_even_layers_lose_what_the_knapsack_gains() -> None:
    assert regret(SMALL, 2) >= 0.0
    assert regret(even(8, 2), 3) == pytest.approx(0.0)


def test_popular_experts_first_spares_the_host_most() -> None:
    skewed, one = zipf(64, 8, 0.8), np.array([1.0, 16.0])
    for kept in (4, 32, 60):
        any_kept = skewed.on_host(kept, by_popularity=False)
        assert np.all(skewed.on_host(kept).hits(one) <= any_kept.hits(one) + 1e-12)
        fewer, more = (skewed.on_host(number).hits(one) for number in (kept, kept + 1))
        assert np.all(more < fewer)


def test_shares_become_chances_of_a_token() -> None:
    popularity = from_loads(np.array([[0.1, 0.4, 0.3, 0.2]]), 2, "counts")
    assert popularity.chances.tolist() == [[0.8, 0.6, 0.4, 0.2]]
    assert popularity.on_host(0).copies == pytest.approx(2.0)
    assert popularity.is_known
    assert not even(4, 2).is_known
