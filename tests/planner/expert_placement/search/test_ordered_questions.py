"""Questions whose best placements must be ordered: no answer beats the bound of a looser question."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from expert_referee import run
from hypothesis import given, settings
from hypothesis import strategies as st


def instance(rng: np.random.Generator, **changes: Any) -> dict[str, Any]:
    layers, devices = int(rng.integers(1, 4)), int(rng.choice([2, 4]))
    experts = devices * int(rng.integers(2, 4))
    return {
        "kind": "expert-placement",
        "num_layers": layers,
        "num_experts": experts,
        "num_devices": devices,
        "objective": "balance",
        "load": rng.integers(1, 100, (layers, experts)).tolist(),
        **changes,
    }


def never_better(tighter: dict[str, Any], looser: dict[str, Any], key: str = "balancedness", sign: int = 1) -> None:
    """The tighter question's answer stays within the looser one's bound, and its optimum where that is proven."""
    found, free = run(tighter), run(looser)
    assert sign * (found[key] - free["bound"]) <= 1e-9
    if free["status"] == "optimal":
        assert sign * (found[key] - free[key]) <= 1e-9


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_order_of_layers_and_experts_changes_no_proven_balance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng)
    load = np.array(given_["load"])
    shuffled = {**given_, "load": load[rng.permutation(len(load))][:, rng.permutation(load.shape[1])].tolist()}
    first, second = run(given_), run(shuffled)
    assert first["status"] == second["status"] == "optimal"
    assert first["balancedness"] == pytest.approx(second["balancedness"], rel=1e-9)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_fewer_moves_never_balance_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng, objective="migrate")
    given_["current"] = [rng.permutation(given_["num_experts"]).tolist() for _ in range(given_["num_layers"])]
    budget = int(rng.integers(0, 2 * given_["num_experts"]))
    never_better({**given_, "max_moved_experts": budget}, {**given_, "max_moved_experts": budget + 4})
    never_better({**given_, "max_moved_experts": budget}, {**given_, "objective": "balance"})


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_scenario_more_never_balances_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng)
    cases = [given_["load"], rng.integers(1, 100, np.shape(given_["load"])).tolist()]
    robust = {key: value for key, value in given_.items() if key != "load"} | {"objective": "robust"}
    never_better({**robust, "scenarios": cases}, {**robust, "scenarios": cases[:1]})


def test_copies_that_must_be_made_may_balance_worse() -> None:
    # Copies lie on different devices: two experts are halved, whatever that does to the others.
    loads, devices = [70, 77, 36, 67, 69, 92], 2
    question = {
        "kind": "expert-placement",
        "num_layers": 1,
        "num_experts": len(loads),
        "num_devices": devices,
        "objective": "balance",
        "load": [loads],
    }
    without, copied = run(question), run({**question, "num_redundant_experts": devices})
    busiest = []
    for first, second in itertools.combinations(range(len(loads)), 2):
        halves, rest = (loads[first] + loads[second]) / 2.0, set(range(len(loads))) - {first, second}
        for own in itertools.combinations(rest, 2):
            alone = halves + sum(loads[expert] for expert in own)
            busiest.append(max(alone, sum(loads) - alone))
    assert copied["status"] == "optimal"
    assert copied["balancedness"] == pytest.approx(sum(loads) / devices / min(busiest), rel=1e-12)
    assert copied["balancedness"] < without["balancedness"]


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_higher_floor_of_balance_never_saves_traffic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = instance(rng, num_layers=3)
    given_["load"] = rng.integers(1, 100, (3, given_["num_experts"])).tolist()
    shape = (2, given_["num_experts"], given_["num_experts"])
    floor = 0.9 * run(given_)["balancedness"]
    traffic = {**given_, "objective": "balance+affinity", "transitions": rng.integers(0, 50, shape).tolist()}
    higher, lower = {**traffic, "min_balancedness": floor}, {**traffic, "min_balancedness": 0.5 * floor}
    never_better(higher, lower, key="cross_device_fraction", sign=-1)
