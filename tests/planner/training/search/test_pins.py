"""A pin never improves: no choice, pinned to any value, beats the bound of the free question."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, LATENT, MOE, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.training.problem.choices import CHOICES, PINNABLE, SEARCHABLE
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.search.joint import search_plans

# Choices that make another question of it: the search never takes them unasked.
SETTLED = {"vocabulary_parallel", "optimizer_offload", "parameter_offload", "activation_offload"}
NUMBERS = (1, 2, 3, 4, 6, 8)
# Values of the choices that are no plain numbers, switches or names.
SPLITS = ((1, 2, 2, 1), (0, 3, 3, 0), (2, 2, 2), (4, 2), (3, 3), (1, 1, 1, 1, 1, 1))


@st.composite
def pins(draw: st.DrawFn) -> tuple[str, Any]:
    choice = draw(st.sampled_from([one for one in PINNABLE if one.per != "question" and one.name not in SETTLED]))
    if choice.kind is tuple:
        return choice.name, draw(st.sampled_from(SPLITS))
    if choice.values:
        return choice.name, draw(st.sampled_from(choice.values))
    if choice.kind is bool:
        return choice.name, draw(st.booleans())
    least, most = choice.least, choice.most or max(NUMBERS)
    return choice.name, draw(st.sampled_from([value for value in (0, *NUMBERS) if least <= value <= most]))


@st.composite
def questions(draw: st.DrawFn) -> TrainingProblem:
    rules = draw(st.sampled_from((MEGATRON, ANY_FRAMEWORK, TORCHTITAN)))
    shape = draw(st.sampled_from((DENSE, MOE, LATENT)))
    return problem_of(
        replace(shape, slug="llama-3.1-8b") if rules is TORCHTITAN else shape,  # it knows no model but its own
        num_devices=draw(st.sampled_from((2, 4, 6, 8))),
        global_batch_size=draw(st.sampled_from((4, 6, 8))),
        sequence_length=draw(st.sampled_from((512, 2048))),
        rules=rules,
        limits={
            "memory_bytes": draw(st.sampled_from((6.5e9, 8e9, 80e9))),
            "unvalidated_schedules": True,
        },
        search_over=SEARCHABLE,
        objective=draw(st.sampled_from(TrainingObjective)),
    )


def asked(problem: TrainingProblem) -> tuple[float, float]:
    """Objective and stated bound; infinite where nothing fits."""
    solution = search_plans(problem).solution
    if solution.objective is None or solution.gap is None:
        return math.inf, math.inf
    return solution.objective, solution.objective * (1.0 - solution.gap)


@settings(max_examples=6, deadline=None)
@given(problem=questions(), pin=pins())
def test_a_pin_never_improves(problem: TrainingProblem, pin: tuple[str, Any]) -> None:
    name, value = pin
    objective, _ = asked(problem.with_fixed({name: value}))
    if math.isfinite(objective):
        assert objective >= asked(problem)[1] * (1.0 - 1e-9), (name, value)


def test_every_choice_is_pinned_or_has_a_reason_not_to_be() -> None:
    """The test above reaches all rows of the table but those that make another question of it."""
    settled = {choice.name for choice in CHOICES if choice.per == "question" or choice.section != "fixed"}
    assert {choice.name for choice in PINNABLE} >= SETTLED
    assert settled & SETTLED == set()


@pytest.mark.parametrize("shard", [2, 4, 8, 16, 32])
def test_no_size_of_sharding_group_beats_the_free_question(shard: int) -> None:
    """Between a node and the whole a group may be the fastest: collectives of more ranks start later."""
    question: dict[str, Any] = {"shape": DENSE, "num_devices": 64, "global_batch_size": 64, "rules": MEGATRON}
    degrees = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "zero_stage": 3}
    _, bound = asked(problem_of(**question, fixed=degrees))
    pinned, _ = asked(problem_of(**question, fixed={**degrees, "data_parallel_shard": shard}))
    assert pinned >= bound * (1.0 - 1e-9)
