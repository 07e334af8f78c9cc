"""Rows of a steady window: gaps between tokens without the ramp before it and the tail after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun, predicted_metrics
from meshplan.planner.serving.simulation.metrics import summarize
from meshplan.planner.validation.machines import MachineReader, read_rows

ROWS = Path(__file__).parents[3] / "validation" / "serving-power.jsonl"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    """Llama-3.1-8B on one H100 with 256 requests running, of 2,048 that are all queued at the start."""
    reader = MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))
    row = next(row for row in read_rows(ROWS) if row["id"].endswith("Llama-3.1-8B-Instruct-h100-1gpu-b256"))
    return PreparedRun(served_run(row, reader))


def test_gaps_are_those_of_the_window(chat: PreparedRun) -> None:
    """256 prompts at once keep the first tokens apart; the window begins when all have theirs."""
    served = chat.served(ServingConstants())
    inside, whole = predicted_metrics(chat, served).latencies["itl"], summarize(served).latencies["itl"]
    assert 0 < inside.count < whole.count
    longest = max(float(worker.segments.last_step_s.max()) for worker in served.workers)
    assert inside.p99 < longest
    assert inside.p50 > whole.p50  # fewer requests run in the tail at the end
