"""Bytes and seconds of a change of placement, by hand and against plain counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_referee import referee_moves
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.locality.moves import MigrationCost, migration_cost
from meshplan.planner.expert_placement.search.solve import answer, solve


def cost(placement: Any, current: Any, **other: Any) -> MigrationCost:
    options = {
        "num_experts": 4,
        "num_devices": 4,
        "devices_per_node": 2,
        "expert_bytes": 100.0,
        "link_bandwidth_bytes_per_s": 50.0,
        "network_bandwidth_bytes_per_s": 10.0,
    }
    return migration_cost(np.array(placement), np.array(current), **{**options, **other})


def test_inside_the_node_over_the_link_and_across_over_the_network() -> None:
    swapped_inside = cost([[1, 0, 2, 3]], [[0, 1, 2, 3]])
    assert (swapped_inside.moved_bytes, swapped_inside.across_nodes_bytes, swapped_inside.seconds) == (200, 0, 2.0)
    swapped_across = cost([[2, 1, 0, 3]], [[0, 1, 2, 3]])
    assert (swapped_across.moved_bytes, swapped_across.across_nodes_bytes, swapped_across.seconds) == (200, 200, 10.0)
    assert cost([[0, 1, 2, 3]], [[0, 1, 2, 3]]).seconds == 0.0
    assert cost([[1, 0, 2, 3]], [[0, 1, 2, 3]], link_bandwidth_bytes_per_s=None).seconds is None


def test_a_holder_beside_is_preferred_and_senders_take_turns() -> None:
    """Expert 0 lies on devices 0 and 2; device 1 takes it from 0 (2 s), not over the network (10 s)."""
    assert cost([[0, 0, 0, 3]], [[0, 1, 0, 3]], num_experts=4).seconds == 2.0
    # Experts 0 and 1 lie on both devices of the first node, each of the second node's devices needs both: one each.
    shared = cost([[0, 1, 0, 1, 0, 1, 0, 1]], [[0, 1, 0, 1, 2, 3, 2, 3]])
    assert shared.moved_experts == 4
    assert shared.seconds == pytest.approx(2 * 100 / 10.0)


def test_an_expert_that_nobody_holds_comes_from_the_checkpoint() -> None:
    mended = cost([[0, 1, 2, 3]], [[0, 0, 2, 3]])
    assert (mended.moved_experts, mended.from_checkpoint, mended.seconds) == (1, 1, 0.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_counts_agree_with_the_referee_and_no_schedule_beats_the_bound(seed: int, layers: int, per_node: int) -> None:
    rng = np.random.default_rng(seed)
    before, after = (np.stack([rng.permutation(8) for _ in range(layers)]) for _ in range(2))
    found = cost(after, before, num_experts=8, devices_per_node=per_node)
    assert found.moved_experts == referee_moves(after.tolist(), before, 4)
    assert found.moved_bytes == 100.0 * found.moved_experts
    assert found.seconds is not None
    assert found.bound_s is not None
    assert found.bound_s <= found.seconds <= found.moved_bytes / 10.0
    assert 0 <= found.across_nodes_bytes <= found.moved_bytes


def test_an_instance_with_sizes_and_links_is_answered_in_seconds() -> None:
    document = {
        "num_layers": 1,
        "num_experts": 4,
        "num_devices": 2,
        "objective": "migrate",
        "load": [[4, 3, 2, 1]],
        "current": [[0, 1, 2, 3]],
        "expert_bytes": 1000,
        "link_bandwidth_bytes_per_s": 100,
    }
    problem = ExpertPlacementProblem.from_document(document, Path())
    found = answer(problem, solve(problem))
    assert found["balancedness"] == pytest.approx(1.0)
    assert (found["moved_experts"], found["moved_bytes"], found["migration_s"]) == (2, 2000.0, 10.0)
