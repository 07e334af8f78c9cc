"""Embedding and LM head split over all pipeline stages: what is saved, what it costs, and who may ask for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, configured, problem_of

from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.catalogs.errors import SpecError
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.priced import Priced, candidates_of, price
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.training.simulated import simulated_step_s

LAYERS = replace(DENSE, num_hidden_layers=8)
LARGE_VOCABULARY = replace(LAYERS, vocab_size=16 * DENSE.vocab_size)


def both(problem: TrainingProblem, **choices: int) -> tuple[TrainingConfig, TrainingConfig]:
    """The configuration with and without."""
    plain = configured(problem, **choices)
    return replace(plain, vocabulary_parallel=True), plain


def parameters(problem: TrainingProblem, config: TrainingConfig) -> list[float]:
    """Dense parameters of one rank of every stage."""
    batch = candidates_of(problem, config)
    memory = MemoryModel(
        shape=problem.shape, workload=problem.workload, candidates=batch, calibration=problem.calibration
    )
    classes, states = batch.split.classes, memory.states
    return [float(states.dense_parameters(classes[index])[0]) for index in batch.split.class_of_stage]


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_lies_on_one_stage_and_all_stages_hold_as_many(tied: bool) -> None:
    shape = replace(LARGE_VOCABULARY, tie_word_embeddings=tied)
    problem = problem_of(shape, num_devices=4, global_batch_size=16)
    split, plain = both(problem, pipeline_parallel=4)
    held = parameters(problem, split)
    assert max(held) == pytest.approx(min(held))
    # Tied weights are needed at both ends of a plain pipeline: the last stage has a copy of them.
    copies = shape.vocab_size * shape.hidden_size if tied else 0
    assert sum(held) == pytest.approx(sum(parameters(problem, plain)) - copies)


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_a_large_vocabulary_no_longer_rules_the_step(schedule: str) -> None:
    problem = problem_of(LARGE_VOCABULARY, num_devices=4, global_batch_size=32)
    split, plain = both(problem, pipeline_parallel=4, virtual_pipeline_stages=2 if schedule == "v-half" else 1)
    split, plain = (replace(config, pipeline_schedule=schedule) for config in (split, plain))
    assert price(problem, split).step_s < price(problem, plain).step_s


def test_a_small_vocabulary_is_not_worth_the_barrier() -> None:
    problem = problem_of(replace(LAYERS, vocab_size=64), num_devices=4, global_batch_size=32)
    split, plain = both(problem, pipeline_parallel=4)
    assert price(problem, split).step_s > price(problem, plain).step_s


def test_the_gain_is_what_the_paper_finds() -> None:
    """arXiv:2411.05288, abstract: 5 to 51 % more throughput than a plain pipeline, for vocabularies up to 256 Ki."""
    for vocabulary in (64 * 1024, 128 * 1024):
        shape = replace(seed_model_shape("llama-3.1-8b"), vocab_size=vocabulary)
        problem = problem_of(shape, num_devices=8, global_batch_size=128, sequence_length=2048)
        split, plain = both(problem, pipeline_parallel=8)
        gain = price(problem, plain).step_s / price(problem, split).step_s - 1.0
        assert 0.05 <= gain <= 0.51


def first_activations(priced: Priced) -> float:
    return priced.stages[0].components["activations"]


def test_one_barrier_keeps_one_micro_batch_more() -> None:
    """arXiv:2411.05288, Figure 10b: Algorithm 2 holds p + 1 micro-batches where 1F1B holds p."""
    problem = problem_of(LAYERS, num_devices=4, global_batch_size=32)
    split, plain = both(problem, pipeline_parallel=4)
    ratio = first_activations(price(problem, split)) / first_activations(price(problem, plain))
    assert ratio == pytest.approx(5 / 4)


def test_logits_are_split_too() -> None:
    problem = problem_of(LARGE_VOCABULARY, num_devices=4, global_batch_size=32)
    split, plain = (price(problem, config) for config in both(problem, pipeline_parallel=4))
    whole = plain.stages[-1].components["logits"]
    assert [stage.components["logits"] for stage in split.stages] == pytest.approx([whole / 4] * len(split.stages))
    assert sum(stage.num_stages for stage in split.stages) == 4


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("v-half", 2)])
def test_the_simulation_agrees(schedule: str, chunks: int) -> None:
    problem = problem_of(LARGE_VOCABULARY, num_devices=4, global_batch_size=32)
    split, _ = both(problem, pipeline_parallel=4, virtual_pipeline_stages=chunks)
    split = replace(split, pipeline_schedule=schedule)
    assert simulated_step_s(problem, split) == pytest.approx(price(problem, split).step_s, rel=0.02)


def test_the_breakdown_sums_to_the_step_and_names_the_barriers() -> None:
    problem = problem_of(LARGE_VOCABULARY, num_devices=4, global_batch_size=32)
    split, plain = (price(problem, config) for config in both(problem, pipeline_parallel=4))
    assert split.breakdown_s["vocabulary barriers"] > 0.0
    assert sum(split.breakdown_s.values()) == pytest.approx(split.step_s)
    assert "vocabulary barriers" not in plain.breakdown_s
    assert "vocabulary_parallel" not in plain.config.choices


@pytest.mark.parametrize("name", sorted(set(FRAMEWORKS) - {"any"}))
def test_no_framework_has_it(name: str) -> None:
    problem = problem_of(LAYERS, num_devices=4, global_batch_size=32)
    split, plain = both(problem, pipeline_parallel=4)
    rules = FRAMEWORKS[name]
    more = {rule.name for rule in rules.broken(LAYERS, split)} - {rule.name for rule in rules.broken(LAYERS, plain)}
    assert more == {f"{name}_has_no_vocabulary_parallel"}


def test_it_needs_stages_and_an_order_that_is_known() -> None:
    for fixed in ({"pipeline_parallel": 1}, {"pipeline_parallel": 2, "pipeline_schedule": "gpipe"}):
        with pytest.raises(SpecError, match="needs pipeline_schedule 1f1b or v-half"):
            fixed_config(problem_of(LAYERS, fixed={**fixed, "vocabulary_parallel": True}))
    with pytest.raises(SpecError, match="megatron does not have it"):
        fixed_config(problem_of(LAYERS, rules=MEGATRON, fixed={"pipeline_parallel": 2, "vocabulary_parallel": True}))
