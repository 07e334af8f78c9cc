"""Encoder–decoders: each stack costs what it costs alone, FLOPs agree with a count by hand, more is never cheaper."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_cases import DENSE, configured, problem_of
from degree_brute_force import brute_force, price_all

from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.estimator.flops import model_flops_per_step
from meshplan.planner.training.estimator.layer_time import LayerModel
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.priced import Priced, candidates_of, price
from meshplan.planner.training.problem.encoder_decoder import whole_stacks
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees

COUNTS = Path(__file__).parents[3] / "catalogs" / "models" / "encoder_decoder_counts.json"
T5 = shape_from_config(json.loads(COUNTS.read_text(encoding="utf-8"))["models"]["t5-base"]["config"], slug="t5-base")
READ, WRITTEN = 512, 128
STACK = replace(DENSE, norms_per_layer=2)
BOTH = replace(STACK, norms_per_layer=3, encoder=replace(STACK, bidirectional=True, vocab_size=0))


def asked(shape: ModelShape, read: int = READ, written: int | None = WRITTEN, **fields: Any) -> TrainingProblem:
    problem = problem_of(shape, sequence_length=read, **fields)
    return replace(problem, workload=replace(problem.workload, decoder_sequence_length=written))


def priced(shape: ModelShape, read: int = READ, written: int | None = WRITTEN, **degrees: object) -> Priced:
    problem = asked(shape, read, written)
    return price(problem, configured(problem, **{"tensor_parallel": 2, "sequence_parallel": False, **degrees}))


def deeper(shape: ModelShape) -> ModelShape:
    return replace(shape, num_hidden_layers=2 * shape.num_hidden_layers)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_of_the_encoder_cost_what_they_cost_alone(recompute: str) -> None:
    """Twice the encoder's layers add what twice the layers of a model that reads both ways add, part by part."""
    assert BOTH.encoder is not None
    alone = replace(STACK, bidirectional=True)
    choices = {"activation_recompute": recompute}
    more, less = priced(replace(BOTH, encoder=deeper(BOTH.encoder)), **choices), priced(BOTH, **choices)
    longer, shorter = (priced(shape, READ, None, **choices) for shape in (deeper(alone), alone))
    for part, seconds in less.breakdown_s.items():
        added, expected = more.breakdown_s[part] - seconds, longer.breakdown_s[part] - shorter.breakdown_s[part]
        if part != "data-parallel communication":  # hidden behind the whole backward pass
            assert added == pytest.approx(expected, rel=1e-9, abs=1e-12), part
    for name in ("weights", "optimizer", "activations"):
        added = more.worst_stage.components[name] - less.worst_stage.components[name]
        expected = longer.worst_stage.components[name] - shorter.worst_stage.components[name]
        assert added == pytest.approx(expected, rel=1e-9), name


def test_decoder_layers_without_their_second_attention_are_plain_ones_bit_for_bit() -> None:
    found = []
    for problem in (asked(BOTH), asked(STACK, WRITTEN, None)):
        batch = candidates_of(problem, configured(problem, tensor_parallel=2))
        common: dict[str, Any] = {"shape": problem.shape, "workload": problem.workload, "candidates": batch}
        common["calibration"] = problem.calibration
        compute = ComputeModel(**common, device=problem.machine.device)
        links = CommunicationModel(
            machine=problem.machine, calibration=problem.calibration, world_size=batch.world_size
        )
        kind = replace(batch.split.kinds[-1], has_cross_attention=False)
        times = LayerModel(**common, compute=compute, links=links).times(kind)
        found.append((times.total_s, MemoryModel(**common).layer_bytes(kind), compute.head().total_s))
    assert found[0] == found[1]


def test_flops_of_t5_by_hand() -> None:
    """T5-base, 512 and 114 tokens: 6 a parameter and token of what each token passes, 12 a·d a pair of tokens."""
    h, f, layers, vocab, read, written = 768, 3072, 12, 32128, 512, 114
    encoder = layers * (4 * h * h + 2 * h * f) * read
    decoder = layers * (4 * h * h + 2 * h * f + 2 * h * h) * written + layers * 2 * h * h * read
    pairs = layers * (read * read + written * written / 2 + written * read)
    flops = 6.0 * (encoder + decoder + vocab * h * written) + 12.0 * h * pairs
    assert model_flops_per_step(T5, read, 8, decoder_length=written) == pytest.approx(8 * flops, rel=1e-6)


def test_more_to_read_or_to_write_never_costs_less() -> None:
    lengths = [(READ, WRITTEN), (2 * READ, WRITTEN), (2 * READ, 2 * WRITTEN), (4 * READ, 2 * WRITTEN)]
    found = [priced(BOTH, read, written) for read, written in lengths]
    for less, more in itertools.pairwise(found):
        assert more.step_s > less.step_s
        assert more.worst_stage.components["activations"] > less.worst_stage.components["activations"]
        assert more.worst_stage.components["weights"] == less.worst_stage.components["weights"]


def test_parameters_of_one_rank_are_the_models() -> None:
    """All but norms outside the layers, which no count of a stage has."""
    problem = asked(BOTH)
    one = price(problem, configured(problem, zero_stage=0))
    outside = 2 * BOTH.norm_parameters
    weights = problem.calibration.recipe.weight_bytes * (BOTH.num_parameters - outside)
    assert one.worst_stage.components["weights"] == pytest.approx(weights, rel=1e-9)


def test_the_search_finds_the_best_of_all() -> None:
    problem = asked(
        BOTH, num_devices=4, global_batch_size=4, rules=whole_stacks(ANY_FRAMEWORK), fixed={"pipeline_parallel": 1}
    )
    best = brute_force(problem, price_all(problem))[0]
    found, _ = search_degrees(problem)
    assert found.objective == pytest.approx(best[0], rel=1e-9)
    assert found.assignment is not None
    assert found.assignment.config.context_parallel == 1
