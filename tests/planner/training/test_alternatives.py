"""Why not something else: each other choice at its best, never better than the chosen plan, with a true reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, configured, problem_of

from meshplan.planner.training.alternatives import alternatives, instead, well_known, why_slower, with_deepep
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.degrees import DegreeSearch, search_degrees


def answered(problem: TrainingProblem) -> tuple[Priced, float]:
    """The chosen plan and the bound of all plans."""
    solution, _ = search_degrees(problem)
    assert solution.assignment is not None
    assert solution.bound is not None
    return price(problem, solution.assignment.config), solution.bound


def chosen_of(problem: TrainingProblem) -> Priced:
    chosen, _ = answered(problem)
    return chosen


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=lambda shape: shape.slug)
def test_every_alternative_has_its_choice_and_beats_no_bound(shape: Any) -> None:
    """Better than the chosen plan by no more than its gap."""
    problem = problem_of(shape, num_devices=16)
    chosen, bound = answered(problem)
    found = alternatives(problem, chosen)
    assert found
    for other in found:
        assert any(getattr(chosen.config, key) != value for key, value in other.choices.items())
        assert other.reason
        if other.priced is not None:
            assert all(getattr(other.priced.config, key) == value for key, value in other.choices.items())
            assert other.priced.step_s >= bound * (1.0 - 1e-6)
            assert other.priced.safe_bytes <= problem.limits.memory_bytes


@pytest.mark.parametrize("keep", [1, 24])
@pytest.mark.parametrize("shape", [DENSE, MOE], ids=lambda shape: shape.slug)
def test_what_the_search_of_the_answer_has_seen_changes_no_alternative(shape: Any, keep: int) -> None:
    problem = problem_of(shape, num_devices=8)
    solution, search = search_degrees(problem, keep=keep)
    assert solution.assignment is not None
    chosen = price(problem, solution.assignment.config)
    found = alternatives(problem, chosen, search=search)
    assert found == alternatives(problem, chosen)


def test_nor_what_one_that_does_not_fit_lacks() -> None:
    problem = problem_of(MOE, num_devices=4, limits={"memory_bytes": 7.6e9})
    solution, search = search_degrees(problem)
    assert solution.assignment is not None
    chosen = price(problem, solution.assignment.config)
    found = alternatives(problem, chosen, search=search)
    assert any(other.reason.startswith("does not fit") for other in found)
    assert found == alternatives(problem, chosen)


def test_an_alternative_is_the_best_plan_that_has_the_choice() -> None:
    problem = problem_of(DENSE, num_devices=16)
    choices = {"pipeline_parallel": 2, "tensor_parallel": 2}
    other = instead(problem, chosen_of(problem), choices, search=DegreeSearch(problem))
    best, _ = search_degrees(replace(problem, fixed={"pipeline_parallel": 2, "tensor_parallel": 2}))
    assert other.priced is not None
    assert best.assignment is not None
    assert other.priced.step_s == pytest.approx(best.assignment.step_s)
    assert other.name == "pipeline_parallel=2, tensor_parallel=2"


def test_what_the_user_pinned_is_not_questioned() -> None:
    problem = problem_of(DENSE, num_devices=8, fixed={"tensor_parallel": 2})
    names = {other.name for other in alternatives(problem, chosen_of(problem))}
    assert not any("tensor" in name or "FSDP" in name for name in names)


def test_experts_are_asked_about_in_mixtures_only() -> None:
    assert not any("expert" in name for name in well_known(problem_of(DENSE)))
    assert sum("expert" in name for name in well_known(problem_of(MOE))) == 2


def test_an_alternative_that_does_not_fit_says_by_how_much() -> None:
    problem = problem_of(replace(DENSE, num_hidden_layers=24), num_devices=8, limits={"memory_bytes": 12e9})
    other = instead(problem, None, {"zero_stage": 0, "data_parallel": 8}, search=DegreeSearch(problem))
    assert other.priced is None
    assert other.reason.startswith("does not fit: ")
    assert "limit 11.2 GiB" in other.reason


def test_an_illegal_alternative_says_so() -> None:
    problem = problem_of(DENSE)
    assert "not legal" in instead(problem, None, {"tensor_parallel": 3}, search=DegreeSearch(problem)).reason
    problem = problem_of(DENSE, num_devices=8)
    other = instead(problem, None, {"data_parallel": 16}, search=DegreeSearch(problem))
    assert (other.priced, other.reason) == (None, "not legal for this model, batch and cluster")


def test_a_reason_names_what_changed_most() -> None:
    problem = problem_of(DENSE, num_devices=8, sequence_length=8192)
    plain = price(problem, configured(problem, data_parallel=8))
    recomputed = price(problem, configured(problem, data_parallel=8, activation_recompute="full"))
    reason = why_slower(plain, recomputed)
    assert reason.startswith(f"{recomputed.step_s / plain.step_s - 1:+.1%} step time: recompute +")
    fewer = price(problem, configured(problem, data_parallel=4))
    assert "on 4 fewer devices" in why_slower(plain, fewer)
    assert "on 4 more devices" in why_slower(fewer, plain)


def test_by_another_objective_the_chosen_plan_may_be_slower() -> None:
    problem = problem_of(DENSE, num_devices=8, objective=TrainingObjective.NUM_DEVICES)
    chosen = chosen_of(problem)
    assert chosen.config.world_size == 1
    for other in alternatives(problem, chosen):
        if other.priced is not None:
            assert other.priced.config.world_size >= 1


def on(problem: TrainingProblem, *, architecture: str, link: str) -> TrainingProblem:
    """The same question on another generation of devices, joined by another kind of link inside a node."""
    device = replace(problem.machine.device, architecture=architecture)
    return replace(problem, machine=replace(problem.machine, device=device, scale_up_technology=link))


def test_deepep_is_told_of_the_same_plan_where_it_runs() -> None:
    problem = on(problem_of(MOE, rules=MEGATRON), architecture="hopper", link="nvlink")
    chosen = price(problem, configured(problem, data_parallel=8, expert_parallel=8))
    (other,) = with_deepep(problem, chosen)
    assert other.priced is not None
    assert other.priced.config == replace(chosen.config, expert_dispatcher="deepep")
    asked = problem.with_fixed({"expert_dispatcher": "deepep"})
    assert other.priced.step_s == price(asked, other.priced.config).step_s != chosen.step_s
    assert "DeepEP is installed" in other.reason
    assert with_deepep(asked, other.priced) == []
    for elsewhere in (
        on(problem, architecture="ampere", link="nvlink"),
        on(problem, architecture="hopper", link="pcie"),
        replace(problem, rules=TORCHTITAN),
        replace(problem, fixed={"expert_dispatcher": "alltoall"}),
        replace(problem, limits=replace(problem.limits, memory_bytes=1e9)),
    ):
        assert with_deepep(elsewhere, chosen) == [], elsewhere
    whole = price(problem, configured(problem, data_parallel=8))
    assert with_deepep(problem, whole) == []
