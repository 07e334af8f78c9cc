"""No plan exists: what is said to bind must bind, and what is said to help must help, and no more than needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.units import Dimension, parse_quantity
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Progress
from meshplan.planner.service import make_plan
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.infeasible import explain_infeasible, has_plan
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.plan import config_from_document
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingLimits, TrainingObjective, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees


def explained(problem: TrainingProblem) -> dict[str, Any]:
    solution, search = search_degrees(problem)
    assert solution.assignment is None
    return explain_infeasible(problem, search.report)


def fits(problem: TrainingProblem, **limits: Any) -> bool:
    """Whether there is any plan: the search ends with the first one."""
    budget = Budget()

    def stop(progress: Progress) -> None:
        if progress.incumbent is not None:
            budget.interrupt()

    changed = replace(problem, limits=replace(problem.limits, **limits))
    solution, _ = search_degrees(changed, keep=1, budget=budget, on_progress=stop)
    return solution.assignment is not None


def on_devices(problem: TrainingProblem, devices: int) -> bool:
    larger = replace(problem, machine=replace(problem.machine, num_devices=devices))
    return fits(larger, max_devices=devices)


def change(answer: dict[str, Any], constraint: str) -> str:
    (found,) = (item["change"] for item in answer["least_change"] if item["constraint"] == constraint)
    return str(found)


DEEP = replace(DENSE, num_hidden_layers=40)


@pytest.mark.parametrize("memory_bytes", [7e9, 11e9])
def test_memory_binds_and_more_nodes_lift_it(memory_bytes: float) -> None:
    problem = problem_of(DEEP, num_devices=2, global_batch_size=48, limits={"memory_bytes": memory_bytes})
    problem = replace(problem, machine=replace(problem.machine, domain_size=2, devices_per_host=2))
    answer = explained(problem)
    assert answer["binding_constraint"].startswith("device memory")
    needed = int(change(answer, "max_devices").split()[0])
    assert on_devices(problem, needed)
    assert not on_devices(problem, needed - 2), "one node less would do"


def test_the_nearest_miss_misses_by_what_it_says() -> None:
    problem = problem_of(DEEP, num_devices=2, limits={"memory_bytes": 7e9})
    miss = explained(problem)["nearest_miss"]
    config = config_from_document(miss["config"])
    assert miss["limit"] == "device memory"
    assert miss["excess"] == pytest.approx(price(problem, config).safe_bytes - 7e9)
    assert not fits(problem, memory_bytes=7e9 + 0.999 * miss["excess"])
    assert fits(problem, memory_bytes=7e9 + 1.001 * miss["excess"])


def amount(text: str) -> float:
    return float(re.sub(r"[^0-9.]", "", text.split(maxsplit=1)[0]))


@pytest.mark.parametrize("objective", TrainingObjective, ids=lambda objective: objective.value)
def test_the_least_change_of_an_hourly_budget_is_the_least(objective: TrainingObjective) -> None:
    """A throughput plan would use all 8 devices; what the budget must allow is the fewest that fit."""
    problem = problem_of(DENSE, num_devices=8, objective=objective, limits={"max_usd_per_hour": 1.0})
    needed = amount(change(explained(problem), "max_usd_per_hour"))
    assert needed == 2.5
    assert fits(problem, max_usd_per_hour=needed)
    assert not fits(problem, max_usd_per_hour=needed - 0.01)


@pytest.mark.parametrize("objective", TrainingObjective, ids=lambda objective: objective.value)
def test_the_least_change_of_a_budget_is_the_least(objective: TrainingObjective) -> None:
    problem = problem_of(DENSE, num_devices=8, objective=objective, limits={"max_usd_per_run": 1.0})
    answer = explained(problem)
    needed = amount(change(answer, "max_usd_per_run"))
    assert answer["binding_constraint"] == "max_usd_per_run: at most $1.00 for the run"
    assert fits(problem, max_usd_per_run=needed)
    assert not fits(problem, max_usd_per_run=0.99 * needed)


@pytest.mark.parametrize("objective", TrainingObjective, ids=lambda objective: objective.value)
def test_the_least_change_of_a_step_time_is_the_least(objective: TrainingObjective) -> None:
    problem = problem_of(DENSE, num_devices=8, objective=objective, limits={"max_step_s": 1e-3})
    best, _ = search_degrees(
        replace(problem, limits=replace(problem.limits, max_step_s=None), objective=TrainingObjective.THROUGHPUT)
    )
    assert best.assignment is not None
    text = change(explained(problem), "max_step_time")
    assert text.split()[1] == "ms"
    assert amount(text) / 1e3 == pytest.approx(best.assignment.step_s, rel=0.01)
    assert fits(problem, max_step_s=amount(text) / 1e3), "the text rounds below what is needed"


@pytest.mark.parametrize("objective", TrainingObjective)
def test_a_limit_on_time_holds_to_the_last_digit_whatever_is_asked_for(objective: TrainingObjective) -> None:
    """Under it the fastest plan of the usual splits is looked for, and what is slower is never priced."""
    problem = problem_of(num_devices=4, global_batch_size=8, objective=objective)
    fastest, _ = search_degrees(replace(problem, objective=TrainingObjective.THROUGHPUT), usual_splits=True)
    assert fastest.objective is not None
    for factor, expected in ((1.0, True), (1.0 - 1e-9, False)):
        limits = replace(problem.limits, max_step_s=factor * fastest.objective)
        assert has_plan(replace(problem, limits=limits)) is expected


def test_host_memory_binds() -> None:
    problem = problem_of(DENSE, num_devices=8, limits={"host_memory_bytes": 1e9})
    answer = explained(problem)
    assert answer["binding_constraint"] == "host memory: 953.7 MiB on each host"
    assert answer["tried"] == ["host_memory lifted", "up to 128 devices", "states in host memory"]
    assert answer["nearest_miss"]["limit"] == "host memory"
    assert fits(problem, host_memory_bytes=1e9 + 1.001 * answer["nearest_miss"]["excess"])


def test_smaller_gradients_are_offered_where_they_are_enough() -> None:
    """The least memory of any plan with 16-bit gradients, which is too little for one with fp32."""
    pins = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "zero_stage": 1, "micro_batch_size": 1}
    question = problem_of(
        DENSE, num_devices=2, global_batch_size=4, rules=MEGATRON, fixed={**pins, "activation_recompute": "full"}
    )
    small = question.with_fixed({**question.fixed, "gradient_precision": "bf16"})
    found, _ = search_degrees(small)
    assert found.assignment is not None
    tight = replace(question, limits=replace(question.limits, memory_bytes=found.assignment.safe_bytes))
    report = explained(tight)
    assert "gradients in 16 bits" in report["tried"]
    assert "gradient_precision" in [change["constraint"] for change in report["least_change"]]
    tighter = replace(tight, limits=replace(tight.limits, memory_bytes=found.assignment.safe_bytes * 0.9))
    assert "gradient_precision" not in [change["constraint"] for change in explained(tighter)["least_change"]]


def test_two_limits_that_bind_together_blame_the_last() -> None:
    """Lifting either alone does not help, so neither is a least change."""
    problem = problem_of(DENSE, num_devices=8, limits={"max_step_s": 1e-3, "max_usd_per_hour": 1.0})
    answer = explained(problem)
    assert answer["least_change"] == []
    assert answer["binding_constraint"]


def test_rules_bind_where_no_limit_does() -> None:
    problem = problem_of(MOE, num_devices=8, rules=MEGATRON, fixed={"tensor_parallel": 2, "sequence_parallel": False})
    answer = explained(problem)
    assert answer["binding_constraint"].startswith("legality: a mixture of experts")
    assert answer["nearest_miss"] is None
    assert change(answer, "fixed.tensor_parallel") == "without fixed.tensor_parallel: 2"
    assert change(answer, "fixed.sequence_parallel") == "without fixed.sequence_parallel: False"
    for pin in ("tensor_parallel", "sequence_parallel"):
        rest = {name: value for name, value in problem.fixed.items() if name != pin}
        assert fits(problem.with_fixed(rest))


def test_pins_that_need_more_devices() -> None:
    problem = problem_of(DENSE, num_devices=4, global_batch_size=16, fixed={"data_parallel": 16})
    problem = replace(problem, machine=replace(problem.machine, domain_size=2, devices_per_host=2))
    answer = explained(problem)
    assert answer["binding_constraint"] == "no legal combination of degrees within 4 devices"
    assert change(answer, "max_devices") == "16 devices of this type instead of 4"


def test_a_hopeless_question_ends() -> None:
    problem = problem_of(DENSE, num_devices=2, limits={"memory_bytes": 1e9})
    assert explained(problem)["least_change"] == []
    assert isinstance(problem.limits, TrainingLimits)


def test_a_limit_on_the_run_is_answered_in_the_time_of_the_run() -> None:
    """The step that follows from it is nothing that the user said."""
    limits = {"max_step_s": 0.02, "max_run_s": 60.0}
    fixed = {"zero_stage": 1, "tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1}
    question = {"num_devices": 2, "global_batch_size": 4, "rules": MEGATRON, "limits": limits, "fixed": fixed}
    answer = explained(problem_of(DENSE, **question))
    said = "max_run_time: at most 60.00 s, interruptions included (20.0 ms a step)"
    assert answer["binding_constraint"] == said
    assert change(answer, "max_run_time").endswith("for the run")


def test_a_run_of_years_is_named_in_days_that_a_spec_reads() -> None:
    """A thousand days are printed with a separator, which no quantity takes: "no plan" ended as an error."""
    limits = {"max_step_s": 1e-6, "max_run_s": 60.0}
    fixed = {"zero_stage": 1, "tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1}
    question = {"num_devices": 2, "global_batch_size": 4, "rules": MEGATRON, "limits": limits, "fixed": fixed}
    answer = explained(replace(problem_of(DENSE, **question), num_training_tokens=1e14))
    run_s = parse_quantity(change(answer, "max_run_time").removesuffix(" for the run"), Dimension.S)
    assert run_s > 1000 * 86400.0


def test_a_run_that_never_ends_costs_no_amount_that_would_do(catalog: Catalog) -> None:
    """Interruptions keep it from getting anywhere: what it costs is no number, and ended as a bug."""
    spec = {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-a100-80gb", "count": 1}]},
        "workload": {"sequence_length": 4096, "global_batch_size": 64, "num_training_tokens": 1e10},
        "objective": "num_devices",
        "constraints": {"max_usd_per_hour": 0.001},
        "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1},
        "run": {"counted": {"interruptions": 1e6, "node_days": 1}},
    }
    made = make_plan(spec, catalog)
    assert made.solution["status"] == "infeasible"
    assert change(dict(made.solution), "max_usd_per_hour").endswith("an hour")


def test_splits_of_the_layers_are_no_bug_where_nothing_fits_the_host(catalog: Catalog) -> None:
    """Without a plan there is no step that a split must beat, and a look at all of them divided infinity."""
    spec = {
        "kind": "training",
        "model": "qwen3-0.6b",
        "cluster": {"nodes": [{"type": "dgx-b200", "count": 1}]},
        "workload": {"sequence_length": 4096, "global_batch_size": 1, "num_training_tokens": 1e10, "precision": "fp16"},
        "objective": "usd_per_run",
        "constraints": {"offload": ["optimizer", "parameters", "activations"], "host_memory": "1 GiB"},
    }
    made = make_plan(spec, catalog)
    assert made.solution["status"] == "infeasible"
    assert str(made.solution["binding_constraint"]).startswith("host memory")


def test_without_a_network_a_plan_stays_inside_one_node() -> None:
    problem = problem_of(DENSE, num_devices=32, global_batch_size=32)
    alone = replace(problem, machine=replace(problem.machine, scale_out_bytes_per_s=0.0))
    one_node = problem_of(DENSE, num_devices=8, global_batch_size=32)
    solution, search = search_degrees(alone)
    expected, _ = search_degrees(one_node)
    assert solution.assignment is not None
    assert solution.assignment.config.world_size <= 8
    assert solution.objective == pytest.approx(expected.objective)
    assert "say cluster.links.inter_node" in "".join(search.report.illegal)


def test_a_missing_network_binds_and_is_named_with_its_cure() -> None:
    problem = problem_of(DEEP, num_devices=32, global_batch_size=48, limits={"memory_bytes": 8e9})
    problem = replace(problem, machine=replace(problem.machine, domain_size=2, devices_per_host=2))
    alone = replace(problem, machine=replace(problem.machine, scale_out_bytes_per_s=0.0))
    assert fits(problem)
    answer = explained(alone)
    assert answer["binding_constraint"].startswith("network: no network is described between nodes of 2 ×")
    assert "cluster.links.inter_node" in change(answer, "network")


def test_pins_that_need_a_network_are_refused_with_words() -> None:
    problem = problem_of(DENSE, num_devices=32, global_batch_size=32, fixed={"data_parallel": 16})
    assert fixed_config(problem).world_size == 16
    alone = replace(problem, machine=replace(problem.machine, scale_out_bytes_per_s=0.0))
    with pytest.raises(SpecError, match=r"need 16 devices, there are 8; no network is described between nodes"):
        fixed_config(alone)


def test_a_framework_that_does_not_know_the_model_is_exchanged(catalog: Catalog) -> None:
    """TorchTitan has no Gemma: "up to 256 devices" was all that was tried."""
    asked = {
        "kind": "training",
        "model": "gemma-3-27b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
        "workload": {"sequence_length": 4096, "global_batch_size": 128},
        "constraints": {"target": "torchtitan"},
    }
    solution = make_plan(asked, catalog).solution
    assert solution["status"] == "infeasible"
    target = next(one["change"] for one in solution["least_change"] if one["change"].startswith("constraints.target: "))
    assert make_plan({**asked, "constraints": {"target": target.split()[-1]}}, catalog).config
