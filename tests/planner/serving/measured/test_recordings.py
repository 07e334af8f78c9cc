"""Recordings that measured rows replayed: which file a row means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measured_rows import SERVING_ROW

from meshplan.planner.serving.measured.workloads import recorded_traces

HEAD = "arrival_s,input_length,output_length"


def row(**workload: Any) -> dict[str, Any]:
    return {**SERVING_ROW, "workload": {**SERVING_ROW["workload"], **workload}}


@pytest.mark.parametrize("trace", ["chat", "chat.csv", "chat.csv.gz"])
def test_the_file_of_the_very_name_comes_before_files_that_have_it_in_theirs(trace: str, tmp_path: Path) -> None:
    (tmp_path / "a-chat-of-others.csv").write_text(f"{HEAD}\n0,7,1\n")
    (tmp_path / "chat.csv").write_text(f"{HEAD}\n0,100,1\n")
    (found,) = recorded_traces([row(trace=trace)], tmp_path).values()
    assert found.input_length.tolist() == [100]
