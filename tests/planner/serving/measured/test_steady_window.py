"""Rows of a steady window: rates without the ramp before it and the tail after it, gaps between tokens with both."""

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


def test_rates_are_those_of_the_window_and_gaps_those_of_the_run(chat: PreparedRun) -> None:
    """The publisher pools the gaps of all answers: ramp, where first tokens come late, and tail, where few run."""
    served = chat.served(ServingConstants())
    of_row, of_run = predicted_metrics(chat, served), summarize(served)
    assert of_row.latencies == of_run.latencies
    assert of_row.output_tokens_per_s > 1.02 * of_run.output_tokens_per_s
    assert of_row.output_tokens_per_s_per_device == of_row.output_tokens_per_s
