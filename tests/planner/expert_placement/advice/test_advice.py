from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.expert_placement.advice.advice import (
    covisits,
    distinct_devices_per_token,
    redundancy_curve,
    regrets,
    sampled_balance,
    share_nodes_by_trace,
)
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem


def problem(**other: object) -> ExpertPlacementProblem:
    load = np.random.default_rng(0).lognormal(0, 1, (3, 16)) * 1000
    shape = {"num_layers": 3, "num_experts": 16, "num_devices": 8, "top_k": 2, "load": load}
    return ExpertPlacementProblem.from_document(shape | other, Path())


def test_more_slots_balance_better_and_cost_memory() -> None:
    points = redundancy_curve(problem(), [0, 3, 8, 16], bytes_per_expert=1e6)
    assert [point.num_redundant_experts for point in points] == [0, 8, 16]  # 19 slots do not divide by 8
    assert [point.balancedness for point in points] == sorted(point.balancedness for point in points)
    assert points[0].extra_bytes_per_device == 0
    assert points[1].extra_bytes_per_device == pytest.approx(3e6)
    assert points[2].expert_time_ratio < points[1].expert_time_ratio < points[0].expert_time_ratio == 1.0


def test_sampling_noise_costs_balance_and_fades_with_the_batch() -> None:
    placement = np.tile(np.arange(16), (3, 1))
    small, large = (
        sampled_balance(problem(load=np.ones((3, 16))), placement, tokens_per_batch=tokens) for tokens in (64, 65536)
    )
    assert small.at_the_mean_load == pytest.approx(1.0)
    assert small.low <= small.mean <= small.high < 0.9
    assert large.mean > 0.97


def test_sampling_noise_agrees_with_the_binomial() -> None:
    """Two devices with one of two equally popular experts each: E[max] of n fair coins is n/2 + √(n / 2π)."""
    tokens = 10_000
    pair = ExpertPlacementProblem.from_document(
        {"num_layers": 50, "num_experts": 2, "num_devices": 2, "load": np.ones((50, 2))}, Path()
    )
    sampled = sampled_balance(pair, np.tile([0, 1], (50, 1)), tokens_per_batch=tokens)
    assert 1 - sampled.mean == pytest.approx(2 / np.sqrt(2 * np.pi * tokens), rel=0.03)


def test_distinct_devices_by_hand() -> None:
    """Experts 0 1 | 2 3: a token of experts 0 and 1 visits one device, one of 0 and 2 visits two."""
    placement = np.array([[0, 1, 2, 3]])
    tokens = np.array([[[0, 1], [0, 2], [3, -1]]])
    visits = distinct_devices_per_token(tokens, placement, num_experts=4, num_devices=2)
    assert visits.tolist() == [pytest.approx(4 / 3)]
    nodes = distinct_devices_per_token(tokens, placement, num_experts=4, num_devices=2, devices_per_group=2)
    assert nodes.tolist() == [1.0]
    with pytest.raises(SpecError, match="ids below 4"):
        distinct_devices_per_token(np.array([[[4]]]), placement, num_experts=4, num_devices=2)


def test_tokens_spread_over_copies() -> None:
    """Expert 0 has a copy on both devices; every other token uses the one beside expert 1."""
    placement = np.array([[0, 1, 0, 2]])
    tokens = np.array([[[0, 1]] * 4])
    assert distinct_devices_per_token(tokens, placement, num_experts=3, num_devices=2).tolist() == [1.5]


def test_devices_that_the_same_tokens_visit_share_a_node() -> None:
    """Tokens use experts 0 and 6 (devices 0 and 3) or 2 and 4 (devices 1 and 2): two nodes each, one after renaming."""
    placement = np.tile(np.arange(8), (2, 1))
    tokens = np.array([[[0, 6], [2, 4]] * 5] * 2)
    shape = {"num_experts": 8, "num_devices": 4}
    together = covisits(tokens, placement, **shape)
    assert together[0].tolist() == [[5, 0, 0, 5], [0, 5, 5, 0], [0, 5, 5, 0], [5, 0, 0, 5]]
    before = distinct_devices_per_token(tokens, placement, **shape, devices_per_group=2)
    renamed = share_nodes_by_trace(tokens, placement, **shape, devices_per_node=2)
    after = distinct_devices_per_token(tokens, renamed, **shape, devices_per_group=2)
    assert (before.tolist(), after.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    for old, new in zip(placement, renamed, strict=True):
        assert sorted(map(tuple, old.reshape(4, 2).tolist())) == sorted(map(tuple, new.reshape(4, 2).tolist()))


def test_regret_is_what_a_scenario_gives_up() -> None:
    """Two experts a device: {0, 1} {2, 3} is perfect for the first case, {0, 2} {1, 3} for the second."""
    cases = [[[3, 1, 2, 2]], [[3, 2, 1, 2]]]
    shape = {"num_layers": 1, "num_experts": 4, "num_devices": 2, "objective": "robust", "scenarios": cases}
    both = ExpertPlacementProblem.from_document(shape | {"scenario_names": ["prefill", "decode"]}, Path())
    first, second = regrets(both, np.array([[0, 1, 2, 3]]))
    assert (first.name, first.balancedness, first.alone, first.regret) == ("prefill", 1.0, 1.0, 0.0)
    assert (second.name, second.balancedness, second.alone) == ("decode", pytest.approx(4 / 5), 1.0)
    assert second.regret == pytest.approx(1 / 5)
    assert regrets(problem(), np.tile(np.arange(16), (3, 1))) == []
