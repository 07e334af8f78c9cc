"""Bounds of templates and leaders of memory, against the price of every candidate that they speak for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, HYBRID, LATENT, MOE, machine_with, problem_of

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.bounds.alike_layers import alike_layers
from meshplan.planner.training.search.memory_savers import leaders
from meshplan.planner.training.search.space import Space
from meshplan.planner.training.search.templates import template_candidates
from meshplan.planner.training.search.variants import variants

QUESTIONS: dict[str, dict[str, Any]] = {
    "dense": {"shape": DENSE, "num_devices": 16, "global_batch_size": 16},
    "experts": {"shape": MOE, "num_devices": 16, "global_batch_size": 8},
    "latent": {"shape": LATENT, "num_devices": 8, "global_batch_size": 12},
    "over nodes of two": {
        "shape": MOE,
        "num_devices": 8,
        "global_batch_size": 8,
        "machine": machine_with(8, domain_size=2),
    },
    "blocks, attention and MLP ahead": {
        "shape": replace(HYBRID, num_nextn_predict_layers=1),
        "num_devices": 8,
        "global_batch_size": 8,
    },
    "several ways to split sequences": {
        "shape": DENSE,
        "num_devices": 8,
        "global_batch_size": 4,
        "search_over": frozenset({"context_parallel_style"}),
    },
}


def everything(name: str) -> tuple[TrainingProblem, Space]:
    problem = problem_of(**QUESTIONS[name])
    return problem, Space.of(problem)


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_candidate_beats_the_bound_of_its_template(name: str) -> None:
    problem, space = everything(name)
    tightest = np.inf
    for split in space.splits:
        window = space.templates.between(1, problem.limits.max_devices / split.pipeline_parallel)
        rows = np.arange(window.start, window.stop)
        cells = np.repeat(rows, space.templates.num_variants[rows])
        batch = template_candidates(problem, space.templates, rows, split)
        assert len(batch) == len(cells)
        for variant in variants(problem, batch):
            steps = estimate_training(problem.shape, problem.machine, problem.workload, variant, problem.calibration)
            if len(variant) != len(batch):
                continue
            least = space.bounds.least_s(split, cells)
            assert (least <= steps.step_s).all()
            whole = variant.recompute == Recompute.FULL
            assert (space.bounds.least_s(split, cells, Recompute.FULL)[whole] <= steps.step_s[whole]).all()
            tightest = min(tightest, float(np.min(steps.step_s / least)))
    assert tightest < 1.5, "the bound is far from every candidate"


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_candidate_beats_the_bound_of_what_it_recomputes(name: str) -> None:
    problem, space = everything(name)
    tightest = dict.fromkeys(Recompute, np.inf)
    for split in space.splits:
        window = space.templates.between(1, problem.limits.max_devices / split.pipeline_parallel)
        everyone = template_candidates(problem, space.templates, window, split)
        if not len(everyone):
            continue
        plain = everyone.take(everyone.recompute == Recompute.NONE)
        batches = [everyone]
        for number in range(1, max(split.layers_per_chunk)):
            blocks = np.full(len(plain), int(Recompute.BLOCK))
            batches.append(replace(plain, recompute=blocks, recompute_num_layers=np.full(len(plain), number)))
        for batch in batches:
            step_s = estimate_training(
                problem.shape, problem.machine, problem.workload, batch, problem.calibration
            ).step_s
            least_s = space.bounds.of_candidates_s(batch)
            assert (least_s <= step_s).all()
            for mode in Recompute:
                rows = batch.recompute == mode
                tightest[mode] = min(tightest[mode], float(np.min((step_s / least_s)[rows], initial=np.inf)))
    for mode in (Recompute.NONE, Recompute.FULL, Recompute.BLOCK):
        assert tightest[mode] < 1.5, f"the bound is far from every candidate with {mode.name}"


@pytest.mark.parametrize("name", ["dense", "experts", "latent", "over nodes of two"])
def test_no_candidate_needs_less_memory_than_its_leader(name: str) -> None:
    problem, space = everything(name)
    led = 0
    for split in space.splits:
        window = space.templates.between(1, problem.limits.max_devices / split.pipeline_parallel)
        batch = template_candidates(problem, space.templates, window, split)
        found = leaders(problem, batch)
        assert found is not None
        rows, group = found
        memory = MemoryModel(
            shape=problem.shape, workload=problem.workload, candidates=batch, calibration=problem.calibration
        )
        safe = np.maximum.reduce([stage.safe_bytes for stage in memory.stages()])
        least = np.append(safe[rows], 0.0)[group]
        assert (least <= safe * (1.0 + 1e-12)).all()
        led += int(np.count_nonzero(group < len(rows)))
    assert led > 0


def test_the_pinned_part_of_a_space_is_the_space_of_the_pinned_question() -> None:
    problem, space = everything("experts")
    for pins in ({"tensor_parallel": 2}, {"expert_parallel": 1}, {"pipeline_parallel": 2}, {"zero_stage": 1}):
        pinned = problem.with_fixed(pins)
        part, alone = space.pinned(pinned, pins), Space.of(pinned)
        assert part.splits == alone.splits
        assert part.templates.num_variants.tolist() == alone.templates.num_variants.tolist()
        for name, column in alone.templates.columns.items():
            assert part.templates.columns[name].tolist() == column.tolist()


@pytest.mark.parametrize("domain_size", [2, 3, 8])
@pytest.mark.parametrize("shape", [DENSE, MOE])
def test_one_layer_stands_for_those_that_take_the_same(shape: ModelShape, domain_size: int) -> None:
    """To the last bit, also where groups lie unevenly on nodes; and it stands for more than itself."""
    problem = problem_of(shape, num_devices=24, global_batch_size=48, machine=machine_with(24, domain_size=domain_size))
    space = Space.of(problem)
    rows = np.arange(len(space.templates))
    first, which = alike_layers(problem, space.templates.columns)
    assert len(first) < len(rows)
    for mode in (Recompute.NONE, Recompute.BLOCK):
        each = space.bounds._priced(rows, mode)
        assert (each[:, first][:, which] == each).all()
        assert (space.bounds._table(mode, rows) == each).all()
