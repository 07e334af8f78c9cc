"""What templates must recompute at least, against every candidate of theirs that stays within memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.search.bounds.memory_bounds import MemoryBounds
from meshplan.planner.training.search.layers.least_recompute import least_recompute_s
from meshplan.planner.training.search.memory_savers import with_blocks
from meshplan.planner.training.search.space import Space
from meshplan.planner.training.search.templates import legal_candidates, template_candidates

QUESTIONS: dict[str, dict[str, Any]] = {
    "dense": {"shape": DENSE, "limits": {"memory_bytes": 7.2e9, "unvalidated_schedules": True}},
    "experts": {"shape": MOE, "limits": {"memory_bytes": 6.6e9}},
    "no blocks": {"shape": DENSE, "limits": {"memory_bytes": 6.2e9}, "fixed": {"activation_recompute": "full"}},
    "no ZeRO": {"shape": DENSE, "limits": {"memory_bytes": 7e9}, "fixed": {"zero_stage": 0}},
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_whoever_fits_recomputes_as_much(name: str) -> None:
    """Under every usual split: what fits has a finite R, and its step is no shorter than the bound with it."""
    problem = problem_of(**QUESTIONS[name], num_devices=8, global_batch_size=8, rules=MEGATRON)
    space = Space.of(problem)
    set_aside = fitting = tight = 0
    for split in space.splits:
        window = space.templates.between(1, problem.limits.max_devices / split.pipeline_parallel)
        rows = np.arange(window.start, window.stop)
        again_s = space.memory.least_s(split, rows)
        fits_somehow = np.isfinite(again_s)
        set_aside += int(np.count_nonzero(~fits_somehow))
        least_s = space.bounds.least_s(split, rows, again_s=np.where(fits_somehow, again_s, 0.0), other_layers=True)
        made = legal_candidates(problem, template_candidates(problem, space.templates, rows, split), Counter())
        if not len(made):
            continue
        memory = MemoryModel(
            shape=problem.shape, workload=problem.workload, candidates=made, calibration=problem.calibration
        )
        for batch in (made, with_blocks(problem, memory, memory.stages())):
            if not len(batch):
                continue
            estimate = estimate_training(problem.shape, problem.machine, problem.workload, batch, problem.calibration)
            fits = estimate.safe_bytes <= problem.limits.memory_bytes
            own = space.bounds.rows_of(batch) - window.start
            assert fits_somehow[own[fits]].all()
            assert (least_s[own[fits]] <= estimate.step_s[fits]).all()
            fitting += int(np.count_nonzero(fits))
            tight += int(np.count_nonzero(again_s[own[fits]] > 0.0))
    assert set_aside > 0
    assert fitting > 0
    assert tight > 0 or name != "dense"


def test_tables_are_those_of_every_number_of_stages() -> None:
    """R by tables of three stages is R of the programme with the memory of the stages themselves."""
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8, rules=MEGATRON, limits={"memory_bytes": 6.2e9})
    space = Space.of(problem)
    rows = np.arange(len(space.templates))
    for split in space.splits:
        if split.pipeline_parallel == 1 or split.schedule != "1f1b":
            continue
        leaders = space.memory.leaders(1, rows, split)
        assert set(leaders.recompute.tolist()) == {int(Recompute.NONE)}
        alone_s = least_recompute_s(problem, leaders, space.bounds.again_s(rows))
        np.testing.assert_allclose(space.memory.least_s(split, rows), alone_s, rtol=1e-6)


def test_nothing_is_said_where_parameters_may_be_gathered() -> None:
    problem = problem_of(DENSE, num_devices=8, global_batch_size=8, limits={"memory_bytes": 1e9})
    space = Space.of(problem)
    for split in space.splits:
        assert not space.memory.least_s(split, np.arange(len(space.templates))).any()
    more = replace(problem, search_over=frozenset({"context_parallel_style"}), rules=MEGATRON)
    assert not MemoryBounds(more, space.templates.columns, space.bounds).least_s(space.splits[-1], np.arange(3)).any()
