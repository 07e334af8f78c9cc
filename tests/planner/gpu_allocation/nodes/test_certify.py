"""The second opinion on an allocation agrees with what is true and speaks against what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.certificate import AGREES, DISAGREES
from meshplan.planner.core.kinds import Question
from meshplan.planner.gpu_allocation.service import certify, plan

INSTANCE: dict[str, Any] = {
    "kind": "gpu-allocation",
    "gpu_types": [{"name": "small", "usd_per_hour": 0.7}, {"name": "large", "usd_per_hour": 3.7}],
    "buckets": [
        {"input_tokens": [0, 100], "output_tokens": [0, 100]},
        {"input_tokens": [100, 900], "output_tokens": [0, 9]},
    ],
    "request_rate_per_s": [7.0, 3.0],
    "max_request_rate_per_s": {"small": [2.0, 0.3], "large": [6.0, 4.0]},
}


def asked(**changes: Any) -> Question:
    nothing: Catalog = None  # type: ignore[assignment]  # a stand-alone question looks nothing up
    return Question(document={**INSTANCE, **changes}, catalog=nothing, base=Path())


@pytest.mark.parametrize("changes", [{}, {"max_utilization": 0.8}, {"min_spare_replicas": 1}])
def test_cbc_agrees_with_the_cheapest_fleet(changes: dict[str, Any]) -> None:
    question = asked(**changes)
    certificate = certify(question, plan(question))
    assert certificate.covers == "the whole question"
    assert certificate.outcome == AGREES


def test_cbc_agrees_that_no_fleet_carries_the_load() -> None:
    question = asked(gpu_types=[{"name": name, "usd_per_hour": 1.0, "max_count": 1} for name in ("small", "large")])
    made = plan(question)
    assert made.solution["status"] == "infeasible"
    assert certify(question, made).outcome == AGREES


def test_what_is_wrong_is_found() -> None:
    question = asked()
    made = plan(question)
    bound = replace(made, solution={**made.solution, "bound": 1.1 * made.solution["objective"]})
    fewer = {**made.answer, "counts": {name: count - 1 for name, count in made.answer["counts"].items() if count}}
    fewer["counts"] = {**dict.fromkeys(("small", "large"), 0), **fewer["counts"]}
    assert certify(question, bound).outcome == DISAGREES
    assert certify(question, replace(made, answer=fewer)).outcome == DISAGREES
    assert (
        certify(question, replace(made, answer={}, solution={**made.solution, "status": "infeasible"})).outcome
        == DISAGREES
    )
