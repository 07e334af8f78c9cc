"""Replicas on units: the fewest units by trying every unit for every replica, and places that do not overlap."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.milp import Program, solve_program
from meshplan.planner.gpu_allocation.nodes.packing import fills_without_gap, lay_out, places

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def fewest_units(sizes: list[int], devices: int) -> int:
    """Whole units for those that are larger; the others each on every open unit in turn, or on a new one."""

    @cache
    def fewest(left: tuple[int, ...], room: tuple[int, ...]) -> int:
        if not left:
            return 0
        size, rest = left[0], left[1:]
        choices = [1 + fewest(rest, tuple(sorted((*room, devices - size))))]
        for place, free in enumerate(room):
            if free >= size:
                choices.append(fewest(rest, tuple(sorted((*room[:place], free - size, *room[place + 1 :])))))
        return min(choices)

    own = sum(-(-size // devices) for size in sizes if size > devices)
    return own + fewest(tuple(sorted((size for size in sizes if size <= devices), reverse=True)), ())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes=SIZES, devices=st.integers(1, 8))
def test_the_program_rents_the_fewest_units(sizes: list[int], devices: int) -> None:
    program = Program()
    units = program.column("units", 0, 100, cost=1.0, whole=True)
    kinds = sorted(set(sizes))
    columns = [program.column(f"of {size}", sizes.count(size), sizes.count(size), whole=True) for size in kinds]
    lay_out(program, "made", units, list(zip(columns, kinds, strict=True)), devices)
    assert round(solve_program(program).objective) == fewest_units(sizes, devices)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes=SIZES, devices=st.integers(1, 8))
def test_places_do_not_overlap_and_take_the_fewest_units(sizes: list[int], devices: int) -> None:
    fewest = fewest_units(sizes, devices)
    taken: set[tuple[int, int]] = set()
    for size, place in zip(sizes, places(sizes, devices, fewest), strict=True):
        if size < devices:
            mine = {(place.unit, place.device + device) for device in range(size)}
            assert place.device + size <= devices
        else:  # units of its own
            mine = {(place.unit + unit, device) for unit in range(-(-size // devices)) for device in range(devices)}
        assert not mine & taken
        taken |= mine
    assert max(unit for unit, _ in taken) < fewest
    with pytest.raises(SolverError, match="are rented"):
        places(sizes, devices, fewest - 1)


def test_largest_first_is_not_always_enough() -> None:
    """Largest first puts 5, 5, 4 on the first unit of 15, which leaves a gap; 5, 4, 3, 3 twice has none."""
    sizes = [5, 5, 4, 4, 3, 3, 3, 3]
    assert fewest_units(sizes, 15) == 2
    assert {place.unit for place in places(sizes, 15, 2)} == {0, 1}


@pytest.mark.parametrize(
    ("sizes", "devices", "gapless"),
    [([1, 2, 4, 8], 8, True), ([3], 4, False), ([2, 3], 6, False), ([16, 1], 8, True), ([6], 4, False), ([4], 4, True)],
)
def test_which_sizes_leave_gaps(sizes: list[int], devices: int, gapless: bool) -> None:
    assert fills_without_gap(sizes, devices) is gapless
