"""The degree search: against brute force, its bound, its limits, its behaviour when cut short."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, LATENT, MOE, machine_with, problem_of
from degree_brute_force import blocks_of, brute_force, objective_of, price_all
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Progress, Status
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.problem.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem
from meshplan.planner.training.search import degrees as degree_search
from meshplan.planner.training.search.degrees import search_degrees

QUESTIONS: dict[str, dict[str, Any]] = {
    "dense": {"shape": DENSE, "num_devices": 8, "global_batch_size": 4},
    "Megatron": {"shape": DENSE, "num_devices": 12, "global_batch_size": 6, "rules": MEGATRON},
    "experts": {"shape": MOE, "num_devices": 4, "global_batch_size": 4, "rules": MEGATRON},
    "latent": {"shape": LATENT, "num_devices": 4, "global_batch_size": 2, "precision": "fp8"},
    "pinned": {"shape": DENSE, "num_devices": 8, "global_batch_size": 8, "fixed": {"pipeline_parallel": 2}},
}
# question → limits that rule out its fastest plan
LIMITS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in QUESTIONS),
    ("dense", {"memory_bytes": 6.5e9}),
    ("experts", {"memory_bytes": 8e9}),
    ("dense", {"max_usd_per_hour": 12.5}),
    ("dense", {"max_usd_per_run": 12.0}),
    ("dense", {"host_memory_bytes": 6.0e9}),
    ("dense", {"max_usd_per_hour": 17.5, "max_step_s": 0.0215}),
    ("pinned", {"memory_bytes": 7.3e9}),
]
# Prices depend on the question alone: they are taken once for all limits and objectives, by one worker of the suite.
ALL = [
    pytest.param(name, limits, objective, marks=pytest.mark.xdist_group(f"degrees {name}"))
    for name, limits in LIMITS
    for objective in TrainingObjective
]


@cache
def everything(name: str) -> list[tuple[TrainingConfig, Priced]]:
    return price_all(problem_of(**QUESTIONS[name]))


@cache
def priced_once(name: str, config: TrainingConfig) -> Priced:
    return price(problem_of(**QUESTIONS[name]), config)


def best_first(name: str, problem: TrainingProblem) -> list[tuple[tuple[float, float], TrainingConfig]]:
    return brute_force(problem, everything(name), lambda _, config: priced_once(name, config))


def named(case: object) -> str:
    return case.value if isinstance(case, TrainingObjective) else str(case)


@pytest.mark.parametrize(("name", "limits", "objective"), ALL, ids=named)
def test_agrees_with_brute_force(name: str, limits: dict[str, float], objective: TrainingObjective) -> None:
    problem = problem_of(**QUESTIONS[name], limits=limits, objective=objective)
    best = best_first(name, problem)
    solution, search = search_degrees(problem)
    assert solution.assignment is not None
    assert solution.status is Status.OPTIMAL
    assert solution.gap == 0.0
    for scored, (expected, _) in zip(search.best, best, strict=False):
        assert objective_of(problem, scored.config, scored.step_s) == pytest.approx(expected, rel=1e-8)
        assert price(problem, scored.config).step_s == pytest.approx(scored.step_s, rel=1e-12)
        assert search.objective.bound(np.array([scored.config.world_size]))[0] <= scored.objective
    assert len(search.best) == min(search.keep, len(best))
    assert search.report.considered == search.report.priced + search.report.ruled_out
    assert len(everything(name)) <= search.report.considered, "the search lost sight of candidates"


@pytest.mark.parametrize(
    ("name", "limits"),
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"degrees {case[0]}")) for case in LIMITS if case[1]],
    ids=str,
)
def test_the_limits_bind(name: str, limits: dict[str, float]) -> None:
    """A limit that leaves the optimum alone tests nothing."""
    free, bound = problem_of(**QUESTIONS[name]), problem_of(**QUESTIONS[name], limits=limits)
    assert best_first(name, free)[0][0] < best_first(name, bound)[0][0]


@pytest.mark.xdist_group("degrees pinned")
@pytest.mark.parametrize("memory_bytes", [6.2e9, 6.4e9, 6.6e9, 6.8e9])
def test_no_number_of_recomputed_layers_is_better_than_the_one_that_is_priced(memory_bytes: float) -> None:
    """The search prices the least block that fits; brute force prices all of them."""
    limits = {"memory_bytes": memory_bytes}
    problem = problem_of(**QUESTIONS["pinned"], limits=limits)
    plain = everything("pinned")
    every_block = [
        pair
        for config, _ in plain
        if config.activation_recompute == "none"
        for pair in blocks_of(problem, config, lambda _, block: priced_once("pinned", block))
    ]
    fitting = [priced.step_s for _, priced in [*plain, *every_block] if priced.safe_bytes <= memory_bytes]
    solution, _ = search_degrees(problem)
    assert solution.objective == pytest.approx(min(fitting), rel=1e-9)


def test_a_block_of_layers_is_taken_where_it_is_the_fastest_that_fits() -> None:
    base = {"pipeline_parallel": 1, "tensor_parallel": 1, "context_parallel": 1, "micro_batch_size": 2}
    question: dict[str, Any] = {"num_devices": 4, "global_batch_size": 8, "rules": MEGATRON}
    free, _ = search_degrees(problem_of(DENSE, **question, fixed=base))
    assert free.assignment is not None
    limits = {"memory_bytes": free.assignment.safe_bytes - 0.3e9}
    solution, _ = search_degrees(problem_of(DENSE, **question, fixed=base, limits=limits))
    assert solution.assignment is not None
    config = solution.assignment.config
    assert config.activation_recompute == "block"
    assert 1 <= config.recompute_num_layers < DENSE.num_hidden_layers
    whole, _ = search_degrees(
        problem_of(DENSE, **question, fixed={**base, "activation_recompute": "full"}, limits=limits)
    )
    assert solution.objective is not None
    assert whole.objective is not None
    assert solution.objective < whole.objective


@pytest.mark.parametrize(
    ("asked", "found"), [({}, 1), ({"recompute_num_layers": 2}, 2), ({"recompute_num_layers": 9}, 3)]
)
def test_a_pinned_block_is_taken_as_asked(asked: dict[str, int], found: int) -> None:
    """Memory is plenty: one layer unless more are asked for, at most a whole chunk."""
    fixed = {"activation_recompute": "block", "pipeline_parallel": 2, "virtual_pipeline_stages": 1, **asked}
    solution, _ = search_degrees(problem_of(DENSE, num_devices=4, global_batch_size=4, fixed=fixed))
    assert solution.assignment is not None
    assert solution.assignment.config.activation_recompute == "block"
    assert solution.assignment.config.recompute_num_layers == found


@pytest.mark.parametrize("keep", [1, 3, 24])
def test_the_answer_does_not_depend_on_how_many_are_kept(keep: int) -> None:
    for objective in TrainingObjective:
        problem = problem_of(DENSE, num_devices=8, global_batch_size=8, objective=objective)
        solution, _ = search_degrees(problem, keep=keep)
        reference, _ = search_degrees(problem)
        assert solution.assignment == reference.assignment


def test_among_equals_the_simplest_is_taken() -> None:
    """On one device ZeRO and selective recompute (with fused attention) change nothing: neither is proposed."""
    for keep in (1, 24):
        solution, _ = search_degrees(problem_of(DENSE, num_devices=1, global_batch_size=4), keep=keep)
        assert solution.assignment is not None
        assert solution.assignment.config.zero_stage == 0
        assert solution.assignment.config.activation_recompute == "none"


def test_fewest_devices_then_fastest_however_long_a_step_takes() -> None:
    """The second criterion must not drown in the first: steps of hours on thousands of devices."""
    devices = 16_384
    problem = problem_of(
        DENSE,
        num_devices=devices,
        global_batch_size=devices,
        machine=machine_with(devices, device=replace(machine_with(1).device, peak_flops_per_s={"bf16": 5e9})),
        objective=TrainingObjective.NUM_DEVICES,
        fixed={"data_parallel": 2048, "tensor_parallel": 8, "pipeline_parallel": 1, "context_parallel": 1},
    )
    solution, search = search_degrees(problem)
    assert solution.assignment is not None
    assert solution.assignment.step_s > 500.0
    assert solution.assignment.step_s == pytest.approx(min(scored.step_s for scored in search.best), rel=1e-9)


# --- bound ---


def test_the_bound_saves_work_and_loses_nothing() -> None:
    problem = problem_of(DENSE, num_devices=64, global_batch_size=64)
    solution, search = search_degrees(problem, keep=1)
    complete, without = search_degrees(problem, keep=10**6)
    assert without.report.ruled_out == 0
    assert 0 < search.report.ruled_out < search.report.considered
    assert solution.assignment == complete.assignment


# --- cut short ---


@pytest.mark.parametrize("objective", TrainingObjective, ids=lambda objective: objective.value)
def test_a_time_limit_leaves_a_valid_bound_and_gap(objective: TrainingObjective) -> None:
    problem = problem_of(DENSE, num_devices=16, global_batch_size=16, objective=objective)
    optimum, _ = search_degrees(problem)
    cut, _ = search_degrees(problem, budget=Budget(0.0))
    assert cut.objective is not None
    assert cut.bound is not None
    assert optimum.objective is not None
    assert cut.bound <= optimum.objective <= cut.objective
    assert cut.gap == pytest.approx((cut.objective - cut.bound) / cut.objective)
    assert cut.status is Status.FEASIBLE or cut.objective == pytest.approx(optimum.objective)


def test_a_time_limit_never_claims_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first splits of a large model do not fit; that says nothing of those which were not visited."""
    monkeypatch.setattr(degree_search, "LEAST_ROWS", 1)
    one_replica = {"tensor_parallel": 1, "data_parallel": 1, "context_parallel": 1}
    deep = replace(DENSE, num_hidden_layers=48)
    problem = problem_of(deep, num_devices=8, limits={"memory_bytes": 14e9}, fixed=one_replica)
    solution, _ = search_degrees(problem)
    assert solution.assignment is not None
    assert solution.assignment.config.pipeline_parallel > 1
    with pytest.raises(SolverError, match="time limit"):
        search_degrees(problem, budget=Budget(0.0))


def test_ctrl_c_keeps_the_incumbent_and_its_gap() -> None:
    problem = problem_of(DENSE, num_devices=16, global_batch_size=16)
    optimum, _ = search_degrees(problem)

    def interrupt(progress: Progress) -> None:
        if progress.incumbent is not None:
            raise KeyboardInterrupt

    cut, search = search_degrees(problem, on_progress=interrupt)
    assert cut.assignment == search.best[0]
    assert cut.bound is not None
    assert optimum.objective is not None
    assert cut.objective is not None
    assert cut.bound <= optimum.objective <= cut.objective


def test_ctrl_c_before_the_first_incumbent_is_not_an_answer() -> None:
    problem = problem_of(DENSE, limits={"memory_bytes": 1.0})

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_degrees(problem, on_progress=interrupt)


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(MOE, num_devices=4, global_batch_size=4)
    reference, whole = search_degrees(problem)
    monkeypatch.setattr(degree_search, "CHUNK_ROWS", 7)
    solution, pieces = search_degrees(problem)
    assert solution.assignment == reference.assignment
    assert [scored.config for scored in pieces.best] == [scored.config for scored in whole.best]
    assert pieces.report.considered == pieces.report.priced + pieces.report.ruled_out


def test_the_same_question_gives_the_same_answer() -> None:
    for objective in TrainingObjective:
        problem = problem_of(MOE, num_devices=8, objective=objective)
        first, search = search_degrees(problem)
        second, again = search_degrees(problem)
        assert first.assignment == second.assignment
        assert search.best == again.best
        assert search.report == again.report


def test_nothing_fits_is_proven_and_names_the_nearest() -> None:
    problem = problem_of(DENSE, num_devices=2, limits={"memory_bytes": 5e9})
    solution, search = search_degrees(problem)
    assert solution.status is Status.INFEASIBLE
    assert (solution.objective, solution.bound, solution.gap) == (None, None, None)
    excess, config = search.report.nearest_miss["device memory"]
    assert price(problem, config).safe_bytes == pytest.approx(5e9 + excess)


# --- limits ---


def test_a_price_that_is_no_binary_number_admits_whole_nodes() -> None:
    """3 nodes at 98.32 USD/h cost 294.96 USD/h: as floating-point numbers the quotient may fall below 24 devices."""
    for nodes, cents in ((1, 9832), (3, 1021), (3, 1441), (3, 2169), (7, 1049)):
        price_per_node = cents / 100
        problem = problem_of(
            DENSE,
            num_devices=8 * nodes,
            global_batch_size=8 * nodes,
            machine=machine_with(8 * nodes, usd_per_hour_per_device=price_per_node / 8),
            limits={"max_usd_per_hour": nodes * cents / 100},
            fixed={"data_parallel": 8 * nodes, "tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1},
        )
        solution, _ = search_degrees(problem, keep=1)
        assert solution.assignment is not None, (nodes, price_per_node)


@st.composite
def small_problems(draw: st.DrawFn) -> TrainingProblem:
    return problem_of(
        draw(st.sampled_from((DENSE, MOE, LATENT))),
        num_devices=draw(st.sampled_from((2, 4, 6, 8))),
        global_batch_size=draw(st.sampled_from((4, 6, 8))),
        sequence_length=draw(st.sampled_from((512, 2048))),
        objective=draw(st.sampled_from(TrainingObjective)),
        rules=draw(st.sampled_from((MEGATRON, problem_of().rules))),
        limits={"memory_bytes": draw(st.sampled_from((6.2e9, 6.5e9, 8e9, 10e9, 80e9)))},
    )


def value(problem: TrainingProblem) -> float:
    """Optimum of a problem; infinite where nothing fits."""
    solution, _ = search_degrees(problem, keep=1)
    return float("inf") if solution.objective is None else solution.objective


@settings(max_examples=25, deadline=None)
@given(problem=small_problems(), factor=st.floats(1.0, 4.0))
def test_more_memory_is_never_worse(problem: TrainingProblem, factor: float) -> None:
    roomy = replace(problem, limits=replace(problem.limits, memory_bytes=factor * problem.limits.memory_bytes))
    assert value(roomy) <= value(problem)


@settings(max_examples=25, deadline=None)
@given(problem=small_problems(), more=st.integers(1, 8))
def test_more_devices_are_never_worse(problem: TrainingProblem, more: int) -> None:
    devices = problem.limits.max_devices + more
    larger = replace(
        problem,
        limits=replace(problem.limits, max_devices=devices),
        machine=replace(problem.machine, num_devices=devices),
    )
    assert value(larger) <= value(problem)


@settings(max_examples=25, deadline=None)
@given(
    problem=small_problems(),
    limit=st.sampled_from(("host_memory_bytes", "max_usd_per_hour", "max_usd_per_run", "max_step_s")),
    amount=st.floats(0.05, 1.0),
)
def test_a_limit_is_never_better(problem: TrainingProblem, limit: str, amount: float) -> None:
    scale = {"host_memory_bytes": 20e9, "max_usd_per_hour": 20.0, "max_usd_per_run": 30.0, "max_step_s": 0.1}[limit]
    limited = replace(problem, limits=replace(problem.limits, **{limit: amount * scale}))
    assert value(limited) >= value(problem)


@pytest.mark.parametrize("least", [1, 5, 8])
def test_the_fewest_devices_are_a_limit(least: int) -> None:
    problem = problem_of(objective=TrainingObjective.USD_PER_RUN, limits={"min_devices": least})
    everything, _ = search_degrees(problem_of(objective=TrainingObjective.USD_PER_RUN), keep=10_000)
    solution, search = search_degrees(problem, keep=10_000)
    assert solution.assignment is not None
    assert everything.assignment is not None
    assert min(scored.config.world_size for scored in search.best) >= least
    assert (solution.objective == everything.objective) == (everything.assignment.config.world_size >= least)
