"""What is left open where the splits up to the limit are too many to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, problem_of

from meshplan.planner.training.search.layers import open_splits
from meshplan.planner.training.search.layers.chunk_tree import Closed
from meshplan.planner.training.search.layers.open_splits import OpenSplits
from meshplan.planner.training.search.layers.uneven import UnevenSplits
from meshplan.planner.training.search.objective import Objective
from meshplan.planner.training.search.templates import make_templates, pipeline_splits, template_candidates

LONGER = replace(DENSE, slug="longer", num_hidden_layers=7)
Tell = Callable[[UnevenSplits, float, float], float]


def bound_of(monkeypatch: pytest.MonkeyPatch, best: float, tell: Tell) -> float:
    """Bound of one candidate on three stages of two chunks, of which nothing is priced, with such a look."""
    problem = problem_of(LONGER, num_devices=3, global_batch_size=9)
    split = next(one for one in pipeline_splits(problem) if one.virtual_pipeline_stages == 2)
    batch = template_candidates(problem, make_templates(problem), np.array([0]), split).take(np.array([0]))
    monkeypatch.setattr(open_splits, "every_split_s", lambda *_: None)
    monkeypatch.setattr(open_splits, "closed", lambda *_: Closed([], -np.inf))
    monkeypatch.setattr(open_splits, "least_by_counts_s", tell)
    found = OpenSplits(problem, Objective(problem))
    found.note(batch, best)
    found.close(lambda: best, lambda asked: asked, lambda _: None)
    return found.bound


@pytest.mark.parametrize(("part", "reached"), [(0.9, 0.5), (0.3, 0.25), (0.2, 0.125)])
def test_a_bound_on_part_of_the_way_is_one(monkeypatch: pytest.MonkeyPatch, part: float, reached: float) -> None:
    known = bound_of(monkeypatch, 1e3, lambda *_: -np.inf)
    asked: list[float] = []

    def tell(_: UnevenSplits, most_s: float, __: float) -> float:
        asked.append(most_s)
        return most_s if most_s <= known + part * (asked[0] - known) else -np.inf

    found = bound_of(monkeypatch, 1e3, tell)
    assert found == pytest.approx(known + reached * (asked[0] - known))
    assert len(asked) == 1 - np.log2(reached)


def test_what_is_told_at_once_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def tell(_: UnevenSplits, most_s: float, __: float) -> float:
        asked.append(most_s)
        return 0.9 * most_s

    assert bound_of(monkeypatch, 1e3, tell) == pytest.approx(0.9 * asked[0])
    assert len(asked) == 1
