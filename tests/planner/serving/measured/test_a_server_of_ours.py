"""A vLLM server that ran on an H100 from the files of a plan, under five loads; no constant has seen it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gpu_runs import observations

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.summary import ValidatedRow


@pytest.fixture(scope="module")
def rows(catalog: Catalog) -> Sequence[ValidatedRow]:
    return validate_rows(observations("serving"), catalog).rows


def test_the_server_printed_the_cache_that_was_planned(rows: Sequence[ValidatedRow]) -> None:
    """463,712 tokens of KV cache under ``--gpu-memory-utilization 0.92``."""
    assert len(rows) == 5
    for row in rows:
        assert row.predicted["kv_blocks"].value == pytest.approx(row.measured["kv_blocks"], rel=0.002), row.id


@pytest.mark.parametrize("metric", ["ttft_s", "power_w"])
def test_first_tokens_and_watts_lie_within_their_intervals(rows: Sequence[ValidatedRow], metric: str) -> None:
    for row in rows:
        predicted = row.predicted[metric]
        assert predicted.low <= row.measured[metric] <= predicted.high, row.id
