"""The degree search: against brute force, its bound, its limits, its behaviour when cut short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, LATENT, MOE, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SolverError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Progress, Status
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search import frontier
from meshplan.planner.training.search.bounds.memory_bounds import MemoryBounds
from meshplan.planner.training.search.degrees import search_degrees


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


def test_a_block_of_whole_chunks_spares_the_layers_that_predict_further_tokens() -> None:
    """Full recompute repeats them, a block does not: where memory has room for that, pinning the block is no gain."""
    shape = replace(MOE, num_nextn_predict_layers=1)
    question: dict[str, Any] = {"num_devices": 4, "global_batch_size": 64, "sequence_length": 4096, "rules": MEGATRON}
    base: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline_stages": 1, "layers_per_chunk": (2, 2)}
    base |= {"tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1, "micro_batch_size": 8}
    longest = {"activation_recompute": "block", "recompute_num_layers": 2}
    least, _ = search_degrees(problem_of(shape, **question, fixed={**base, **longest}))
    assert least.assignment is not None
    limits = {"memory_bytes": least.assignment.safe_bytes * (1.0 + 1e-9)}
    pins: list[dict[str, Any]] = [{}, longest, {"activation_recompute": "full"}]
    free, block, full = (
        search_degrees(problem_of(shape, **question, fixed={**base, **pin}, limits=limits))[0] for pin in pins
    )
    assert free.objective is not None
    assert block.objective is not None
    assert full.objective is not None
    assert free.objective <= block.objective < full.objective


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
        problem = problem_of(DENSE, num_devices=4, global_batch_size=4, objective=objective)
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
    fixed = {"zero_stage": 1}
    problem = problem_of(DENSE, num_devices=16, global_batch_size=16, rules=MEGATRON, fixed=fixed)
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
    monkeypatch.setattr(frontier, "LEAST_ROWS", 1)
    monkeypatch.setattr(MemoryBounds, "least_s", lambda _, split, rows: np.zeros(len(rows)))
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
    monkeypatch.setattr(frontier, "CHUNK_ROWS", 7)
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
    """Objective of the best plan found; infinite where nothing fits."""
    solution, _ = search_degrees(problem, keep=1)
    return float("inf") if solution.objective is None else solution.objective


def bound(problem: TrainingProblem) -> float:
    """What no plan can beat; infinite where nothing fits."""
    solution, _ = search_degrees(problem, keep=1)
    return float("inf") if solution.bound is None else solution.bound


@settings(max_examples=8, deadline=None)
@given(problem=small_problems(), factor=st.floats(1.0, 4.0))
def test_more_memory_is_never_worse(problem: TrainingProblem, factor: float) -> None:
    roomy = replace(problem, limits=replace(problem.limits, memory_bytes=factor * problem.limits.memory_bytes))
    assert bound(roomy) <= value(problem)


@settings(max_examples=8, deadline=None)
@given(problem=small_problems(), more=st.integers(1, 8))
def test_more_devices_are_never_worse(problem: TrainingProblem, more: int) -> None:
    devices = problem.limits.max_devices + more
    larger = replace(
        problem,
        limits=replace(problem.limits, max_devices=devices),
        machine=replace(problem.machine, num_devices=devices),
    )
    assert bound(larger) <= value(problem)


@settings(max_examples=8, deadline=None)
@given(
    problem=small_problems(),
    limit=st.sampled_from(("host_memory_bytes", "max_usd_per_hour", "max_usd_per_run", "max_step_s")),
    amount=st.floats(0.05, 1.0),
)
def test_a_limit_is_never_better(problem: TrainingProblem, limit: str, amount: float) -> None:
    scale = {"host_memory_bytes": 20e9, "max_usd_per_hour": 20.0, "max_usd_per_run": 30.0, "max_step_s": 0.1}[limit]
    limited = replace(problem, limits=replace(problem.limits, **{limit: amount * scale}))
    assert value(limited) >= bound(problem)


@pytest.mark.parametrize("least", [1, 5, 8])
def test_the_fewest_devices_are_a_limit(least: int) -> None:
    problem = problem_of(objective=TrainingObjective.USD_PER_RUN, limits={"min_devices": least})
    everything, _ = search_degrees(problem_of(objective=TrainingObjective.USD_PER_RUN), keep=100)
    solution, search = search_degrees(problem, keep=100)
    assert solution.assignment is not None
    assert everything.assignment is not None
    assert min(scored.config.world_size for scored in search.best) >= least
    assert (solution.objective == everything.objective) == (everything.assignment.config.world_size >= least)


def test_full_recompute_of_what_no_block_recomputes_is_not_ruled_out() -> None:
    """The last stage holds the head and the layer that predicts further tokens: whole beside the logits is too much."""
    problem = problem_of(
        replace(MOE, num_nextn_predict_layers=1),
        num_devices=8,
        global_batch_size=6,
        sequence_length=1024,
        rules=MEGATRON,
        objective=TrainingObjective.NUM_DEVICES,
        limits={"memory_bytes": 7.5e9},
    )
    pinned, _ = search_degrees(problem.with_fixed({"activation_recompute": "full", "micro_batch_size": 2}))
    assert pinned.objective is not None
    assert bound(problem) <= pinned.objective


@pytest.mark.parametrize("objective", list(TrainingObjective))
@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "experts"])
def test_what_is_too_slow_is_refused_by_its_bound_and_the_nearest_is_the_fastest(
    shape: ModelShape, objective: TrainingObjective
) -> None:
    """Under a limit that nothing keeps every candidate was priced: two minutes of a question on 256 devices."""
    question: dict[str, Any] = {"num_devices": 8, "global_batch_size": 16, "rules": MEGATRON}
    fastest, _ = search_degrees(problem_of(shape, **question))
    assert fastest.assignment is not None
    longest_s = 0.5 * fastest.assignment.step_s
    refused, search = search_degrees(
        problem_of(shape, **question, objective=objective, limits={"max_step_s": longest_s})
    )
    assert refused.status is Status.INFEASIBLE
    excess_s, _ = search.report.nearest_miss["step time"]
    assert excess_s + longest_s == pytest.approx(fastest.assignment.step_s)
    assert search.report.priced < search.report.considered
    kept, _ = search_degrees(
        problem_of(shape, **question, objective=objective, limits={"max_step_s": 1.001 * fastest.assignment.step_s})
    )
    assert kept.assignment is not None
