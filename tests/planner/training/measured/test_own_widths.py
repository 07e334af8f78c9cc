"""What own runs leave of an interval: less for more runs and for what shares more with them, as normal parts do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.measured.own_widths import MODEL_SHARE, PLAN_SHARE, WAY_SHARE, own_width

CELLS = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))
PLANS = st.dictionaries(CELLS, st.integers(1, 50), max_size=5)


@given(unknown=st.floats(0.01, 1.0), plans=PLANS, asked=CELLS, more=CELLS)
@settings(max_examples=200)
def test_a_further_run_never_widens_an_interval(
    unknown: float, plans: dict[tuple[str, str], int], asked: tuple[str, str], more: tuple[str, str]
) -> None:
    width = own_width(unknown, plans, *asked)
    assert 0.0 < width <= unknown * (1.0 + 1e-12)
    assert own_width(unknown, {**plans, more: plans.get(more, 0) + 1}, *asked) <= width * (1.0 + 1e-9)


@given(runs=st.integers(1, 30))
def test_what_shares_more_is_known_better(runs: int) -> None:
    plans = {("a", "x"): runs}
    both, model, way, none = (own_width(0.3, plans, *asked) for asked in itertools.product("ab", "xy"))
    assert both < model < way < none == 0.3


@pytest.mark.parametrize("asked", [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")])
def test_it_is_what_is_left_of_normal_parts_that_were_drawn(asked: tuple[str, str]) -> None:
    """Plans one by one, their parts drawn: the variance of the asked one beside its best linear prediction."""
    plans = {("a", "x"): 3, ("b", "x"): 1, ("b", "y"): 2}
    ran = [cell for cell, count in plans.items() for _ in range(count)]
    random, draws = np.random.default_rng(5), 200_000
    models, ways = ({name: random.normal(size=draws) for name in names} for names in ("abc", "xyz"))
    drawn = np.array(
        [
            np.sqrt(MODEL_SHARE) * models[model]
            + np.sqrt(WAY_SHARE) * ways[way]
            + np.sqrt(PLAN_SHARE) * random.normal(size=draws)
            for model, way in [asked, *ran]
        ]
    )
    weights, *_ = np.linalg.lstsq(drawn[1:].T, drawn[0])
    left = float(np.std(drawn[0] - weights @ drawn[1:]))
    assert own_width(0.2, plans, *asked) == pytest.approx(0.2 * left, rel=0.01)
