"""Ranks and nodes that a token reaches: every choice of a small router, limits, and what dispatchers send."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.training.estimator.exchange.token_copies import TokenCopies

GROUPS = st.integers(1, 16).flatmap(lambda groups: st.tuples(st.just(groups), st.integers(1, groups)))
PLACES = st.floats(1.0, 512.0)


def reached(places: float, experts: float, groups: int, chosen: int) -> float:
    copies = TokenCopies(experts_per_token=experts, num_groups=groups, groups_per_token=chosen)
    return float(copies.places_reached(np.array([places]))[0])


@pytest.mark.parametrize(
    ("experts", "groups", "chosen", "visited", "places"),
    [
        (8, 4, 2, 2, 4),
        (8, 4, 2, 3, 2),
        (8, 4, 3, 2, 8),
        (6, 3, 2, 2, 1),
        (6, 6, 3, 3, 2),
        (6, 2, 2, 3, 3),
        (8, 8, 3, 2, 2),
    ],
)
def test_every_choice_of_a_small_router(experts: int, groups: int, chosen: int, visited: int, places: int) -> None:
    """The mean over all groups and all draws from them; routers draw distinct experts, which reach no fewer places."""
    each, held = experts // groups, experts // places
    drawn, distinct = [], []
    for some in combinations(range(groups), chosen):
        within = [expert for expert in range(experts) if expert // each in some]
        drawn += [len({expert // held for expert in draw}) for draw in product(within, repeat=visited)]
        distinct += [len({expert // held for expert in draw}) for draw in combinations(within, visited)]
    assert reached(places, visited, groups, chosen) == pytest.approx(np.mean(drawn))
    assert np.mean(drawn) <= np.mean(distinct) * (1 + 1e-12)


def test_places_that_hold_a_part_of_a_group_beside_whole_ones() -> None:
    """Four groups on 8/3 places: the one that is counted holds one group and the first half of the next."""
    draws = [draw for some in combinations(range(4), 2) for draw in product(product(some, (0, 1)), repeat=2)]
    hits = [any(group == 0 or (group == 1 and half == 0) for group, half in draw) for draw in draws]
    assert reached(8 / 3, 2, 4, 2) == pytest.approx(8 / 3 * np.mean(hits))


@given(routed=GROUPS, experts=st.floats(1.0, 64.0), places=PLACES)
def test_a_tighter_limit_never_reaches_more(routed: tuple[int, int], experts: float, places: float) -> None:
    groups, chosen = routed
    limited = reached(places, experts, groups, chosen)
    assert 1.0 - 1e-9 <= limited <= min(places, experts) * (1 + 1e-12)
    assert limited <= reached(places, experts, groups, min(chosen + 1, groups)) * (1 + 1e-12)
    assert limited <= reached(places, experts + 1.0, groups, chosen) * (1 + 1e-12)
    if places == groups:
        assert limited <= chosen


@given(groups=st.integers(1, 16), experts=st.floats(1.0, 64.0), places=PLACES)
def test_groups_that_are_all_allowed_limit_nothing(groups: int, experts: float, places: float) -> None:
    assert reached(places, experts, groups, groups) == reached(places, experts, 1, 1)
    copies = TokenCopies(experts_per_token=experts)
    assert copies.share_sent(np.array(places)) == places * (1.0 - (1.0 - 1.0 / places) ** experts) / experts


@pytest.mark.parametrize(
    ("experts", "visited", "places"), [(256, 8, 64), (384, 8, 64), (32, 4, 8), (24, 6, 24), (12, 8, 3)]
)
def test_a_gate_that_deals_experts_out_in_turn(experts: int, visited: int, places: int) -> None:
    held = experts // places
    runs = [[expert % experts for expert in range(visited * i, visited * (i + 1))] for i in range(experts)]
    touched = np.mean([len({expert // held for expert in run}) for run in runs])
    copies = TokenCopies(experts_per_token=float(visited), dealt_experts=experts)
    assert copies.places_reached(np.array(float(places))) == pytest.approx(touched)
