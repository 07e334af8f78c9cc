"""Choices that the search varies when it is asked to: against brute force, pinned, and left alone otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, WINDOWED, machine_with, problem_of
from degree_brute_force import brute_force, objective_of, price_all

from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees

STYLE = ("context_parallel_style",)
# Long sequences and one to a replica: splitting them is the only way to use the devices.
LONG: dict[str, Any] = {"num_devices": 8, "global_batch_size": 1, "sequence_length": 65536}
ONE_STAGE = {"pipeline_parallel": 1}
QUESTIONS: dict[str, dict[str, Any]] = {
    "any framework": {"shape": DENSE, **LONG},
    "Megatron": {"shape": DENSE, **LONG, "rules": MEGATRON},
    "windows": {"shape": WINDOWED, **LONG, "rules": MEGATRON},
    "small domains": {"shape": DENSE, **LONG, "machine": machine_with(8, domain_size=4, devices_per_host=4)},
}


def undominated(plans: list[tuple[float, TrainingConfig]]) -> list[tuple[float, TrainingConfig]]:
    """Without plans of which another one does the same and more: norms that are not split, recompute not needed."""
    feasible = {config for _, config in plans}

    def is_needed(config: TrainingConfig) -> bool:
        left = config.recompute_num_layers - 1
        if left < 0:
            return True
        return (
            replace(config, recompute_num_layers=left, activation_recompute="block" if left else "none") not in feasible
        )

    return [
        (objective, config)
        for objective, config in plans
        if config.sequence_parallel == (config.tensor_parallel > 1) and is_needed(config)
    ]


@pytest.mark.parametrize("name", QUESTIONS)
def test_styles_agree_with_brute_force(name: str) -> None:
    asked = {**QUESTIONS[name], "limits": {"memory_bytes": 30e9}, "fixed": ONE_STAGE}
    problem = problem_of(**asked, search_over=STYLE)
    best = undominated(brute_force(problem, price_all(problem)))
    solution, search = search_degrees(problem)
    assert (solution.assignment is None) == (not best)
    assert len(search.best) == min(search.incumbents.keep, len(best))
    for scored, (expected, _) in zip(search.best, best, strict=False):
        assert objective_of(problem, scored.config, scored.step_s) == pytest.approx(expected, rel=1e-8)
    assert search.report.considered == search.report.priced + search.report.ruled_out


def best_of(problem: TrainingProblem) -> tuple[str, int, float]:
    solution, _ = search_degrees(problem)
    assert solution.assignment is not None
    config = solution.assignment.config
    return config.context_parallel_style, config.context_parallel, solution.assignment.step_s


def test_nothing_but_the_ring_unless_it_is_asked_for() -> None:
    _, search = search_degrees(problem_of(**QUESTIONS["any framework"], fixed=ONE_STAGE), keep=10_000)
    assert {scored.config.context_parallel_style for scored in search.best} == {"ring"}


def test_windows_are_split_where_heads_are_exchanged() -> None:
    """Sliding windows refuse the ring on Megatron: without another style no sequence is split."""
    fixed = {"tensor_parallel": 1, "pipeline_parallel": 1}
    _, alone, slow = best_of(problem_of(**QUESTIONS["windows"], fixed=fixed))
    style, split, fast = best_of(problem_of(**QUESTIONS["windows"], fixed=fixed, search_over=STYLE))
    assert alone == 1
    assert split > 1
    assert style in {"all-to-all", "all-gather"}
    assert fast < slow / 2


@pytest.mark.parametrize("style", ["ring", "ring-plain", "all-gather", "all-to-all", "all-to-all+ring"])
def test_a_pinned_style_counts_where_sequences_are_split(style: str) -> None:
    problem = problem_of(**QUESTIONS["any framework"], fixed={**ONE_STAGE, "context_parallel_style": style})
    _, search = search_degrees(problem, keep=10_000)
    pairs = {(scored.config.context_parallel > 1, scored.config.context_parallel_style) for scored in search.best}
    assert pairs == {(False, "ring"), (True, style)}
    heads = {scored.config.context_parallel_heads for scored in search.best if scored.config.context_parallel == 8}
    assert heads == ({2, 4} if style == "all-to-all+ring" else {1})


def test_pinned_heads_may_cross_the_network() -> None:
    fixed = {"context_parallel_style": "all-to-all+ring", "context_parallel_heads": 4, "context_parallel": 8}
    machine = machine_with(8, domain_size=2, devices_per_host=2)
    _, search = search_degrees(problem_of(**{**QUESTIONS["any framework"], "machine": machine}, fixed=fixed))
    assert {scored.config.context_parallel_heads for scored in search.best} == {4}
