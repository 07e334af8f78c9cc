"""Imbalance and capacity of experts: what they can be at most, what they cost, and who is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, LATENT, MOE, configured, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.emit.terms import write_all
from meshplan.planner.emit.training.megatron.terms import TERMS
from meshplan.planner.service import make_plan
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.explanation import assumptions
from meshplan.planner.training.problem.expert_load import arriving_load, leaving_load
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.search.objective import work_device_s
from meshplan.planner.training.unvalidated import unconfirmed

FEW = settings(max_examples=40, deadline=None)
EXPERTS = ("experts", "expert-parallel communication")
SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "mixtral-8x7b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
}


def routed(problem: TrainingProblem, **workload: Any) -> TrainingProblem:
    return replace(problem, workload=replace(problem.workload, **workload))


def at(problem: TrainingProblem, expert_parallel: int = 4, **choices: Any) -> Priced:
    return price(problem, configured(problem, data_parallel=8, expert_parallel=expert_parallel, **choices))


def asked(**workload: Any) -> dict[str, Any]:
    return {**SPEC, "workload": {**SPEC["workload"], **workload}}


@FEW
@given(imbalance=st.floats(1.0, 50.0), ranks=st.sampled_from((1, 2, 4, 8)))
def test_a_rank_gets_no_more_than_all_tokens_that_can_visit_it(imbalance: float, ranks: int) -> None:
    """Brute force: every token takes all the experts of one rank first; the rank's copies over the mean."""
    problem = routed(problem_of(MOE), expert_imbalance=imbalance)
    moe = MOE.moe
    assert moe is not None
    local = moe.num_experts // ranks
    tokens = 60
    busiest = sum(min(moe.num_experts_per_token, local) for _ in range(tokens))
    mean = tokens * moe.num_experts_per_token / ranks
    found = arriving_load(problem.workload, moe, np.array([ranks]))[0]
    assert found == pytest.approx(min(imbalance, busiest / mean))
    assert found >= 1.0


@FEW
@given(pair=st.tuples(st.floats(1.0, 4.0), st.floats(1.0, 4.0)), ranks=st.sampled_from((1, 2, 8)))
def test_more_imbalance_is_never_faster_nor_smaller(pair: tuple[float, float], ranks: int) -> None:
    low, high = (at(routed(problem_of(LATENT), expert_imbalance=value), ranks) for value in sorted(pair))
    assert low.step_s <= high.step_s
    for before, after in zip(low.stages, high.stages, strict=True):
        assert before.safe_bytes <= after.safe_bytes
    if ranks == 1:
        assert low.step_s == high.step_s


def test_only_the_experts_feel_it() -> None:
    balanced, skewed = (at(routed(problem_of(MOE), expert_imbalance=value)) for value in (1.0, 2.0))
    changed = {name for name, value in balanced.breakdown_s.items() if value != skewed.breakdown_s[name]}
    assert set(EXPERTS) <= changed
    assert "attention" not in changed
    assert "matrix products" not in changed
    volume = skewed.breakdown_s[EXPERTS[1]] / balanced.breakdown_s[EXPERTS[1]]
    assert 1.5 < volume <= 2.0  # latency does not double
    components = (balanced.worst_stage.components, skewed.worst_stage.components)
    assert {name for name in components[0] if components[0][name] != components[1][name]} == {"activations"}


def test_dropping_makes_work_by_capacity_whatever_the_routing() -> None:
    problem = routed(problem_of(MOE), drops_tokens=True)
    one, half, more = (at(routed(problem, expert_capacity_factor=value)) for value in (1.0, 0.5, 1.5))
    assert half.step_s < one.step_s < more.step_s
    assert half.safe_bytes < one.safe_bytes < more.safe_bytes
    moe = MOE.moe
    assert moe is not None
    for ranks in (1, 8):
        load = arriving_load(routed(problem, expert_capacity_factor=1.5).workload, moe, np.array([ranks]))
        assert load.tolist() == [1.5]
    assert leaving_load(problem_of(MOE).workload) == 1.0
    # With a factor of 1 the rows are those of balanced routing; only the host's wait for their number is gone.
    dropless = at(problem_of(MOE))
    alike = set(one.breakdown_s) - {"kernel-launch overhead", "pipeline bubble", "data-parallel communication"}
    assert {name: one.breakdown_s[name] for name in alike} == {name: dropless.breakdown_s[name] for name in alike}


@pytest.mark.parametrize(
    "workload",
    [
        {"expert_imbalance": 3.0},
        {"drops_tokens": True, "expert_capacity_factor": 0.25},
        {"drops_tokens": True, "expert_capacity_factor": 2.0},
    ],
    ids=str,
)
def test_no_plan_beats_the_bound(workload: dict[str, Any]) -> None:
    problem = routed(problem_of(MOE), **workload)
    least = work_device_s(problem.shape, problem.machine, problem.workload, problem.calibration)
    _, search = search_degrees(problem)
    assert search.best
    for scored in search.best:
        assert scored.step_s >= least / scored.config.world_size
        assert scored.config.expert_capacity_factor == problem.workload.capacity_factor


def test_imbalance_is_said_and_widens_the_interval() -> None:
    problem = routed(problem_of(MOE), expert_imbalance=2.0)
    priced = at(problem)
    (entry,) = unconfirmed(problem, priced)
    expected = sum(priced.breakdown_s[name] for name in EXPERTS) / priced.step_s / 2
    assert entry.share == pytest.approx(expected)
    assert unconfirmed(problem_of(MOE), at(problem_of(MOE))) == ()


@pytest.mark.parametrize("target", ["torchtitan", "deepspeed", "accelerate"])
def test_other_frameworks_have_no_word_for_capacity(target: str) -> None:
    problem = routed(problem_of(MOE), drops_tokens=True)
    names = {rule.name for rule in FRAMEWORKS[target].broken(MOE, configured(problem, expert_capacity_factor=1.0))}
    assert f"{target}_has_no_expert_capacity" in names
    assert not {rule.name for rule in FRAMEWORKS[target].broken(MOE, configured(problem))} & {
        f"{target}_has_no_expert_capacity"
    }


def test_megatron_gets_the_capacity_of_experts_with_padding(catalog: Catalog) -> None:
    plan = make_plan(asked(expert_capacity_factor=1.25), catalog)
    assert plan.config["expert_capacity_factor"] == 1.25
    config = configured(routed(problem_of(MOE), drops_tokens=True), expert_capacity_factor=1.25)
    words = write_all(TERMS, config, MOE)
    assert words["--moe-expert-capacity-factor"] == "1.25"
    assert "--moe-pad-expert-input-to-capacity" in words
    assert "--moe-expert-capacity-factor" not in write_all(TERMS, configured(problem_of(MOE)), MOE)


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ({}, "balanced experts (assumed"),
        ({"expert_imbalance": 1.5}, "up to 1.5 times the mean (the spec says so)"),
        ({"drops_tokens": True}, "1 times the mean, padded (assumed"),
        ({"expert_capacity_factor": 1.25}, "1.25 times the mean, padded (the spec says so)"),
    ],
)
def test_the_explanation_says_which_was_assumed(catalog: Catalog, workload: dict[str, Any], words: str) -> None:
    # Pinned degrees: the words matter here, not the search.
    question = {**asked(**workload), "fixed": {"tensor_parallel": 1, "pipeline_parallel": 2, "expert_parallel": 8}}
    assert words in " ".join(assumptions(make_plan(question, catalog)))


@pytest.mark.parametrize(
    ("model", "workload", "words"),
    [
        ("mixtral-8x7b", {"expert_imbalance": 0.9}, "must be at least 1"),
        ("mixtral-8x7b", {"expert_imbalance": float("inf")}, "workload.expert_imbalance"),
        ("mixtral-8x7b", {"expert_capacity_factor": 0}, "must be above 0"),
        ("mixtral-8x7b", {"drops_tokens": False, "expert_capacity_factor": 1.0}, "drops tokens"),
        ("mixtral-8x7b", {"drops_tokens": True, "expert_imbalance": 2}, "says nothing where tokens are dropped"),
        ("llama-3.1-8b", {"drops_tokens": True}, "a dense model has no experts"),
        ("llama-3.1-8b", {"expert_imbalance": 1.2}, "a dense model has no experts"),
    ],
)
def test_what_makes_no_sense_is_refused(catalog: Catalog, model: str, workload: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make_plan({**asked(**workload), "model": model}, catalog)


def test_a_dense_model_does_not_care() -> None:
    assert at(routed(problem_of(DENSE), expert_imbalance=3.0), 1).step_s == at(problem_of(DENSE), 1).step_s
