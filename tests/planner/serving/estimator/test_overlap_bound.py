"""The bound of devices whose resources overlap wholly: closed forms, and no plan above it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asked_worker import question, worker_of

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import make_plan
from meshplan.planner.serving.estimator.bounds.overlap_bound import overlap_bound, resource_seconds


def test_a_large_batch_is_bound_by_two_flops_a_parameter_and_token(catalog: Catalog) -> None:
    """NanoFlow's closed form for Llama-2-70B on eight A100: peak/(2·parameters) = 2,261 tokens/s for each device."""
    kind = worker_of(catalog, "llama-2-70b", "dgx-a100-80gb", 8)
    found = overlap_bound(kind.worker, most_running=256.0, num_running=256.0, requests_per_s=1.0)
    tokens_per_s = found.requests_per_s * 1024 / 8
    assert found.resource == "compute"
    assert tokens_per_s == pytest.approx(312e12 / (2.0 * 69e9), rel=0.03)


def test_one_request_is_bound_by_reading_the_weights(catalog: Catalog) -> None:
    kind = worker_of(catalog, "llama-3.1-8b", "dgx-h100", 1)
    seconds = {name: float(each[0]) for name, each in resource_seconds(kind.worker, np.array([1.0])).items()}
    weights = 2.0 * (8.03e9 - 128256 * 4096) / 3.35e12  # the embedding is looked up, not read
    assert max(seconds, key=seconds.__getitem__) == "device memory"
    assert seconds["device memory"] == pytest.approx(511 * weights, rel=0.03)
    assert seconds["links"] == seconds["host"] == 0.0


def test_more_running_requests_never_lower_the_bound(catalog: Catalog) -> None:
    kind = worker_of(catalog, "mixtral-8x7b", "dgx-h100", 2)
    seconds = resource_seconds(kind.worker, np.array([1.0, 2.0, 8.0, 64.0, 256.0]))
    longest = np.max(list(seconds.values()), axis=0)
    assert np.all(np.diff(longest) <= 1e-12)


@pytest.mark.parametrize("load", [{"request_rate_per_s": 2.0}, {"concurrency": 64}, {}])
def test_no_plan_is_above_its_bound_and_the_factors_make_the_share(catalog: Catalog, load: dict[str, Any]) -> None:
    plan = make_plan(question("llama-3.1-8b", "dgx-h100", 1, **load), catalog)
    assert plan.answer is not None
    (row,) = plan.answer["overlap"]
    assert 0.0 < row["share"] < 1.0
    assert row["share"] == pytest.approx(row["batch_share"] * row["order_share"] * row["rest_share"])
    assert max(row["batch_share"], row["order_share"]) <= 1.0 + 1e-9
