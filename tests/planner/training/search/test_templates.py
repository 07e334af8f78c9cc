"""The enumeration of candidates: against plain loops over every degree, and against the frameworks' own rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, LATENT, MOE, WINDOWED, problem_of
from degree_brute_force import every_legal_config

from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN
from meshplan.planner.training.problem.layers import split_layers_evenly
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.report import config_of
from meshplan.planner.training.search.templates import (
    legal_candidates,
    make_templates,
    pipeline_splits,
    template_candidates,
    tries_smaller_groups,
)
from meshplan.planner.training.search.variants import smaller_groups


def enumerated(problem: TrainingProblem, *, groups: bool = False) -> list[TrainingConfig]:
    """Everything that the search would price of the usual splits without its bound.

    Args:
        problem: the question.
        groups: with the smaller sharding groups that it tries where they may win.
    """
    templates, found = make_templates(problem), []
    for split in pipeline_splits(problem):
        rows = templates.between(1, problem.limits.max_devices / split.pipeline_parallel)
        batch = legal_candidates(problem, template_candidates(problem, templates, rows, split), Counter())
        parts = [batch]
        if groups and tries_smaller_groups(problem):
            whole = batch.take((batch.zero_stage > 0) & (batch.data_parallel > 1))
            parts.append(legal_candidates(problem, smaller_groups(whole), Counter()))
        found += [config_of(part, row, problem) for part in parts for row in range(len(part))]
    return found


def usual(problem: TrainingProblem) -> set[TrainingConfig]:
    """All legal configurations with usual layer splits, no block of recomputed layers, norms split if possible."""
    splits_norms = bool(problem.fixed.get("sequence_parallel", True))
    return {
        config
        for config in every_legal_config(problem, lambda layers, chunks: [split_layers_evenly(layers, chunks)])
        if config.activation_recompute != "block"
        and config.sequence_parallel == (config.tensor_parallel > 1 and splits_norms)
    }


def shards_over_all(config: TrainingConfig) -> bool:
    return config.zero_stage == 0 or config.data_parallel_shard == config.data_parallel


CASES: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"shape": DENSE, "num_devices": 6, "global_batch_size": 6}),
    ("experts", {"shape": MOE, "num_devices": 8, "global_batch_size": 4}),
    ("latent", {"shape": LATENT, "num_devices": 4, "global_batch_size": 6}),
    ("windows", {"shape": WINDOWED, "num_devices": 4, "global_batch_size": 4}),
    ("odd layers", {"shape": replace(DENSE, num_hidden_layers=7), "num_devices": 6, "global_batch_size": 4}),
    (
        "schedules that no run confirms",
        {
            "shape": replace(DENSE, num_hidden_layers=4),
            "num_devices": 4,
            "global_batch_size": 8,
            "limits": {"unvalidated_schedules": True},
        },
    ),
    ("odd sequence", {"shape": DENSE, "num_devices": 6, "global_batch_size": 6, "sequence_length": 99}),
    ("pinned", {"shape": MOE, "num_devices": 8, "global_batch_size": 4, "fixed": {"expert_parallel": 4}}),
    (
        "unsplit norms",
        {"shape": DENSE, "num_devices": 4, "global_batch_size": 4, "fixed": {"sequence_parallel": False}},
    ),
    ("HSDP", {"shape": DENSE, "num_devices": 8, "global_batch_size": 8, "fixed": {"data_parallel_shard": 4}}),
]


@pytest.mark.parametrize("rules", [ANY_FRAMEWORK, MEGATRON], ids=lambda rules: rules.name)
@pytest.mark.parametrize("question", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_enumerates_exactly_the_legal_configurations(question: dict[str, Any], rules: FrameworkRules) -> None:
    """Templates shard over all replicas, smaller groups follow: together they are every legal plan, each once."""
    problem = problem_of(**question, rules=rules)
    legal = usual(problem)
    whole, found = enumerated(problem), enumerated(problem, groups=True)
    assert len(found) == len(set(found)), "a candidate is enumerated twice"
    assert set(found) == legal
    if "data_parallel_shard" not in problem.fixed:
        assert set(whole) == {config for config in legal if shards_over_all(config)}
        assert set(whole) < set(found), "no smaller group is tried"


@pytest.mark.parametrize("question", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_every_candidate_keeps_the_rules_and_uses_its_devices(question: dict[str, Any]) -> None:
    problem = problem_of(**question, rules=MEGATRON)
    for config in enumerated(problem):
        assert not problem.rules.broken(problem.shape, config)
        assert config.world_size <= problem.limits.max_devices
        assert len(config.layers_per_chunk) == config.pipeline_parallel * config.virtual_pipeline_stages
        assert sum(config.layers_per_chunk) == problem.shape.num_hidden_layers
        assert all(
            getattr(config, name) == value for name, value in problem.fixed.items() if name != "sequence_parallel"
        )


def test_a_pin_that_nothing_satisfies_leaves_nothing() -> None:
    for name, value in (("tensor_parallel", 3), ("data_parallel", 5), ("pipeline_parallel", 7), ("expert_parallel", 3)):
        assert enumerated(problem_of(MOE, fixed={name: value})) == []


def test_illegal_values_are_listed() -> None:
    templates = make_templates(problem_of(DENSE, num_devices=8))
    (heads, keys) = templates.illegal.values()
    assert heads == ("tensor_parallel=3", "tensor_parallel=5", "tensor_parallel=6", "tensor_parallel=7")
    assert keys == ()


def test_templates_ascend_by_devices() -> None:
    templates = make_templates(problem_of(MOE, num_devices=16))
    devices = templates.stage_devices.tolist()
    assert devices == sorted(devices)
    window = templates.between(3, 7.5)
    assert set(devices[window]) == {4, 6} or set(devices[window]) == {4}
    assert all(count <= 2.999 or count > 7.5 for i, count in enumerate(devices) if not window.start <= i < window.stop)


# --- what the user pins ----------------------------------------------------------------------------------------------


def test_layers_dealt_by_the_user_are_the_only_split() -> None:
    fixed = {"layers_per_chunk": (1, 2, 1)}
    problem = problem_of(replace(DENSE, num_hidden_layers=4), num_devices=6, global_batch_size=6, fixed=fixed)
    splits = pipeline_splits(problem)
    assert {split.layers_per_chunk for split in splits} == {(1, 2, 1)}
    assert {split.pipeline_parallel for split in splits} == {3}


def test_layers_of_chunks_fit_every_number_of_stages_that_divides_them() -> None:
    fixed = {"layers_per_chunk": (2, 1, 1, 2)}
    splits = pipeline_splits(problem_of(replace(DENSE, num_hidden_layers=6), num_devices=4, fixed=fixed))
    assert {(split.pipeline_parallel, split.virtual_pipeline_stages) for split in splits} == {(2, 2), (4, 1)}


@pytest.mark.parametrize("schedule", ["v-half", "v-min", "dualpipe-v", "hanayo"])
def test_what_no_run_confirms_is_planned_only_where_it_is_asked_for(schedule: str) -> None:
    question = {"shape": replace(DENSE, num_hidden_layers=8), "num_devices": 4, "global_batch_size": 16}
    assert schedule not in {split.schedule for split in pipeline_splits(problem_of(**question))}
    asked = problem_of(**question, fixed={"pipeline_schedule": schedule})
    assert {split.schedule for split in pipeline_splits(asked)} == {schedule}
    assert all(config.num_microbatches >= 2 * config.pipeline_parallel for config in enumerated(asked)) or (
        schedule != "dualpipe-v"
    )


def test_the_search_may_be_allowed_what_no_run_confirms() -> None:
    question = {"shape": replace(DENSE, num_hidden_layers=8), "num_devices": 4, "global_batch_size": 16}
    allowed = {"limits": {"unvalidated_schedules": True}}
    usual = {split.schedule for split in pipeline_splits(problem_of(**question))}
    assert {split.schedule for split in pipeline_splits(problem_of(**question, **allowed))} == usual | {
        "v-half",
        "v-min",
        "dualpipe-v",
    }
    on_titan = problem_of(**question, **allowed, rules=TORCHTITAN)
    assert {split.schedule for split in pipeline_splits(on_titan)} == {"none", "1f1b", "interleaved", "dualpipe-v"}


def test_torchtitan_deals_layers_by_the_weights_of_the_ends() -> None:
    """126 layers on 8 stages (Llama 3.1 405B): TorchTitan's own default takes one from each end."""
    shape = replace(DENSE, slug="llama-3.1-405b", num_hidden_layers=126)
    problem = problem_of(shape, num_devices=8, global_batch_size=16, rules=TORCHTITAN, fixed={"pipeline_parallel": 8})
    plain = [split.layers_per_chunk for split in pipeline_splits(problem) if split.virtual_pipeline_stages == 1]
    assert plain[0] == (15, 16, 16, 16, 16, 16, 16, 15)
    assert (16, 16, 16, 16, 16, 16, 16, 14) in plain
    pinned = problem.with_fixed({"layers_per_chunk": (14, 16, 16, 16, 16, 16, 16, 16)})
    assert pipeline_splits(pinned) == []
