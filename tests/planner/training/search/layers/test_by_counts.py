"""The fewest recomputed layers of a stage against every way to lay its layers on its chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.planner.training.search.layers.by_counts import fewest_repeated

MOST = 7


@pytest.mark.parametrize("fewest", [(1, 1, 1), (0, 1, 1), (1, 1, 0), (0, 0, 1), (1,), (0, 1)])
@pytest.mark.parametrize("again", range(5))
def test_no_way_repeats_fewer(fewest: tuple[int, ...], again: int) -> None:
    counts, nowhere = np.arange(MOST + 1), np.zeros((1, len(fewest)), dtype=bool)
    (found,) = fewest_repeated(np.array([fewest]), counts, again, nowhere).tolist()
    for count in range(sum(fewest), MOST + 1):
        ways = [sizes for sizes in itertools.product(range(MOST + 1), repeat=len(fewest)) if sum(sizes) == count]
        ways = [sizes for sizes in ways if all(size >= least for size, least in zip(sizes, fewest, strict=True))]
        assert found[count] == min(sum(min(size, again) for size in sizes) for sizes in ways), count


@pytest.mark.parametrize("leading", range(4))
@pytest.mark.parametrize("again", range(5))
def test_layers_of_another_kind_may_be_recomputed_in_their_place(leading: int, again: int) -> None:
    fewest, leads = np.array([[0, 1, 1]]), np.array([[True, False, False]])
    (found,) = fewest_repeated(fewest, np.arange(MOST + 1), again, leads).tolist()
    for sizes in itertools.product(range(4), range(1, 4), range(1, 4)):
        if sum(sizes) <= MOST:
            own = min(sizes[0], max(again - leading, 0)) + sum(min(size, again) for size in sizes[1:])
            assert found[sum(sizes)] <= own, sizes
