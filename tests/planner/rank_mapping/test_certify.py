"""The second opinion on a mapping agrees with what is true and speaks against what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.certificate import AGREES, DISAGREES
from meshplan.planner.core.kinds import Question
from meshplan.planner.rank_mapping.service import certify, plan


def question(stages: int, pipelines: int, seed: int) -> Question:
    nodes = stages * pipelines
    bandwidth = 25e9 * np.random.default_rng(seed).uniform(0.5, 1.5, (nodes, nodes))
    document: dict[str, Any] = {
        "kind": "rank-mapping",
        "num_nodes": nodes,
        "pipeline_parallel": stages,
        "data_parallel_nodes": pipelines,
        "pipeline_message_bytes": 4e7,
        "data_parallel_message_bytes": 1e9,
        "num_microbatches_exposed": 8,
        "bandwidth_bytes_per_s": bandwidth.tolist(),
    }
    nothing: Catalog = None  # type: ignore[assignment]  # a stand-alone question looks nothing up
    return Question(document=document, catalog=nothing, base=Path())


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 3), (3, 2), (2, 2)])
def test_cp_sat_agrees_with_the_optimum(shape: tuple[int, int]) -> None:
    asked = question(*shape, seed=sum(shape))
    certificate = certify(asked, plan(asked))
    assert certificate.covers == "the whole question"
    assert certificate.outcome == AGREES


def test_a_bound_too_high_and_a_wrong_time_are_found() -> None:
    asked = question(2, 3, seed=1)
    made = plan(asked)
    best = made.solution["objective"]
    lie = replace(made, solution={**made.solution, "bound": 1.01 * best})
    checks = {check.what: check for check in certify(asked, lie).checks}
    bound = checks["no mapping is faster than, s"]
    assert not bound.agrees
    assert isinstance(bound.found, float)
    assert best * (1 - 1e-6) <= bound.found < 1.01 * best
    shorter = replace(made, solution={**made.solution, "objective": 0.99 * best})
    assert certify(asked, shorter).outcome == DISAGREES
