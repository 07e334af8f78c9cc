"""Workers on whole nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.serving.problem.nodes import nodes_needed, place_workers

GROUPS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=4)


@given(groups=GROUPS, domain=st.sampled_from([1, 4, 6, 8]))
def test_no_device_is_taken_twice_and_no_small_worker_spans_nodes(groups: list[tuple[int, int]], domain: int) -> None:
    taken: set[int] = set()
    for (size, count), places in zip(groups, place_workers(groups, domain), strict=True):
        assert len(places) == count
        for place in places:
            start = place.node * domain + place.first
            devices = set(range(start, start + size))
            assert not devices & taken
            assert size > domain or (start + size - 1) // domain == place.node
            taken |= devices
    assert max(taken) // domain + 1 == nodes_needed(groups, domain)


@pytest.mark.parametrize(
    ("groups", "nodes"), [([(4, 1)], 1), ([(4, 5)], 3), ([(4, 1), (8, 1), (4, 1)], 2), ([(16, 2)], 4)]
)
def test_a_partly_used_node_is_a_node(groups: list[tuple[int, int]], nodes: int) -> None:
    assert nodes_needed(groups, 8) == nodes
