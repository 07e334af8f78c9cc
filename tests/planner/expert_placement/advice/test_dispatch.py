"""Fewer devices for each token: planted cliques are found, the floor of balance holds, counting is by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from expert_referee import referee_balance

from meshplan.planner.expert_placement.advice.dispatch import fewer_visits, together


def visits(tokens: list[list[int]], row: list[int], num_devices: int) -> float:
    """Mean distinct devices of one layer without copies, by plain loops."""
    per_device = len(row) // num_devices
    return sum(len({row.index(expert) // per_device for expert in token}) for token in tokens) / len(tokens)


def test_pairs_are_counted() -> None:
    counts = together(np.array([[0, 1], [1, 0], [2, -1]]), 3)
    assert counts.tolist() == [[0, 2, 0], [2, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_experts_of_the_same_tokens_come_together(seed: int) -> None:
    """Tokens stay within one of four hidden groups; equal popularity, so the groups can be placed at no cost."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(16).reshape(4, 4)
    tokens = np.stack([rng.permutation(groups[index % 4])[:2] for index in range(400)])
    load = np.bincount(tokens.ravel(), minlength=16).astype(float)[None]
    start = np.arange(16)[None]
    found = fewer_visits(start, tokens[None], load, np.ones(4), 0.8)
    assert sorted(found[0].tolist()) == list(range(16))
    assert visits(tokens.tolist(), start[0].tolist(), 4) > 1.5
    assert visits(tokens.tolist(), found[0].tolist(), 4) < 1.25
    assert referee_balance(load, found.tolist(), 4, [1.0] * 4) >= 0.8


@pytest.mark.parametrize("seed", range(5))
def test_small_layers_come_near_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.choice(6, size=2, replace=False, p=rng.dirichlet(np.ones(6))) for _ in range(60)])
    load = np.bincount(tokens.ravel(), minlength=6).astype(float)[None] + 1.0
    found = fewer_visits(np.arange(6)[None], tokens[None], load, np.ones(2), 0.7)[0].tolist()
    start_balance = referee_balance(load, [list(range(6))], 2, [1.0, 1.0])
    floor = min(0.7, start_balance)
    rows = [list(row) for row in permutations(range(6)) if referee_balance(load, [list(row)], 2, [1.0, 1.0]) >= floor]
    best = min(visits(tokens.tolist(), row, 2) for row in rows)
    assert referee_balance(load, [found], 2, [1.0, 1.0]) >= floor - 1e-9
    assert visits(tokens.tolist(), found, 2) <= best + 0.15


def test_copies_never_meet_and_balance_holds() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(8, size=(1, 300, 2))
    load = np.bincount(tokens.ravel(), minlength=8).astype(float)[None]
    start = np.array([[0, 1, 2, 0, 3, 4, 1, 5, 6, 2, 7, 3]])
    found = fewer_visits(start, tokens, load, np.ones(4), 0.7)
    assert sorted(found[0].tolist()) == sorted(start[0].tolist())
    assert all(len(set(device)) == 3 for device in found.reshape(4, 3).tolist())
    floor = min(0.7, referee_balance(load, start.tolist(), 4, [1.0] * 4))
    assert referee_balance(load, found.tolist(), 4, [1.0] * 4) >= floor - 1e-9
