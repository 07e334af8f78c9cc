"""A rank table is honoured by torchrun's node ranks, or refused; never dropped."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.hosts import host_placements, refuse_named_hosts


@st.composite
def contiguous_tables(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Hosts in any order, each with its devices in any order."""
    hosts = draw(st.permutations(range(draw(st.integers(1, 6)))))
    return tuple(
        (host, device) for host in hosts for device in draw(st.permutations(range(8)))[: draw(st.integers(1, 8))]
    )


@given(contiguous_tables())
def test_torchruns_ranks_are_those_of_the_table(table: tuple[tuple[int, int], ...]) -> None:
    placements = host_placements(table, (), target="megatron")
    # torchrun: rank = processes on hosts of lower node rank + local rank
    seen = []
    for placement in sorted(placements, key=lambda placement: placement.node_rank):
        assert placement.first_rank == len(seen)
        seen += [(placement.host, device) for device in placement.devices]
    assert tuple(seen) == table


@given(contiguous_tables(), st.data())
def test_scattered_tables_are_refused(table: tuple[tuple[int, int], ...], data: st.DataObject) -> None:
    shuffled = tuple(data.draw(st.permutations(table)))
    hosts = [host for host, _ in shuffled]
    changes = sum(1 for before, after in pairwise(hosts) if before != after)
    if changes == len(set(hosts)) - 1:
        assert host_placements(shuffled, (), target="megatron")
    else:
        with pytest.raises(CannotExpressError, match=r"returns to a host.*Nearest it can"):
            host_placements(shuffled, (), target="megatron")


def test_names_go_to_host_numbers_not_to_node_ranks() -> None:
    placements = host_placements(((1, 0), (0, 0)), ("zero", "one"), target="megatron")
    assert [(place.node_rank, place.hostname) for place in placements] == [(0, "one"), (1, "zero")]


def test_device_used_twice() -> None:
    with pytest.raises(EmitError, match="device 3 of host 0 more than once"):
        host_placements(((0, 3), (0, 3)), (), target="megatron")


def test_too_few_names() -> None:
    with pytest.raises(EmitError, match="uses host 2, but only 2 host names"):
        host_placements(((0, 0), (1, 0), (2, 0)), ("a", "b"), target="megatron")


@pytest.mark.parametrize("nodes", [[1, 0], [0, 2]])
def test_a_target_that_takes_any_host_refuses_a_mapping(nodes: list[int]) -> None:
    refuse_named_hosts((), None, target="trainjob")
    refuse_named_hosts((), {"nodes": [0, 1, 2]}, target="trainjob")
    with pytest.raises(CannotExpressError, match="a rank mapping: the first ranks belong on node"):
        refuse_named_hosts((), {"nodes": nodes}, target="trainjob")
