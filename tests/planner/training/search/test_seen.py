"""What a search has seen is left out by the next one, which answers as if it had looked itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from core_cases import DENSE, MOE, problem_of

from meshplan.planner.training.alternatives import well_known
from meshplan.planner.training.search.degrees import DegreeSearch, search_degrees
from meshplan.planner.training.search.seen import Seen
from meshplan.planner.training.search.templates import pipeline_splits


@pytest.mark.parametrize("keep", [1, 24])
@pytest.mark.parametrize("shape", [DENSE, MOE], ids=lambda shape: shape.slug)
def test_a_part_of_the_space_has_the_same_best_with_less_work(shape: Any, keep: int) -> None:
    """A search that keeps one plan rules out what its parts want, so that they must look again."""
    problem = problem_of(shape, num_devices=8)
    _, whole = search_degrees(problem, keep=keep)
    anew = again = 0
    for choices in well_known(problem).values():
        pinned = problem.with_fixed(choices)
        space = whole.space.pinned(pinned, choices)
        _, alone = search_degrees(pinned, keep=1, space=space, usual_splits=True)
        seen = whole.incumbents.seen.part(space.splits, choices)
        _, search = search_degrees(pinned, keep=1, space=space, usual_splits=True, seen=seen)
        assert search.best == alone.best
        anew, again = anew + alone.report.priced, again + search.report.priced
    assert again < 0.9 * anew


def test_the_same_question_asked_again_is_answered_without_a_price() -> None:
    problem = problem_of(DENSE, num_devices=8)
    first = DegreeSearch(problem, keep=3, usual_splits=True)
    first.run()
    seen = first.incumbents.seen.part(first.space.splits)
    second = DegreeSearch(problem, keep=3, space=first.space, usual_splits=True, seen=seen)
    second.run()
    assert second.best == first.best
    assert (first.report.priced > 0, second.report.priced) == (True, 0)


def test_what_is_left_out_of_a_part_is_what_was_seen_of_the_whole() -> None:
    """Templates keep their names in a part of the space, though their rows are others there."""
    problem = problem_of(DENSE, num_devices=4)
    _, whole = search_degrees(problem)
    pinned, space = problem.with_fixed({"context_parallel": 1}), whole.space
    part = space.pinned(pinned, {"context_parallel": 1})
    seen = Seen()
    seen.batches += whole.incumbents.seen.part(part.splits, {"context_parallel": 1, "tensor_parallel": 1}).batches[:1]
    for split in space.splits:
        seen.visited(split, np.flatnonzero(space.templates.columns["tensor_parallel"] == 2), math.inf)
    _, search = search_degrees(pinned, keep=10_000, space=part, usual_splits=True, seen=seen)
    _, alone = search_degrees(pinned, keep=10_000, space=part, usual_splits=True)
    assert any(one.config.tensor_parallel == 2 for one in alone.best)
    others = {one.config for one in alone.best if one.config.tensor_parallel != 2}
    assert {one.config for one in search.best} == others


def test_a_template_is_seen_as_far_as_the_visit_that_ruled_its_others_out() -> None:
    split, other, *_ = pipeline_splits(problem_of(DENSE, num_devices=2))
    seen, rows = Seen(), np.arange(6)
    seen.visited(split, np.array([4, 1]), 2.0)
    seen.visited(split, np.array([3]), 5.0)
    for limit, expected in ((1.0, [1, 3, 4]), (2.0, [1, 3, 4]), (2.5, [3]), (6.0, [])):
        assert np.flatnonzero(seen.up_to(split, rows, limit)).tolist() == expected
    assert not seen.up_to(other, rows, 0.0).any()
