"""Recordings that measured rows replayed: which file a row means, and at what rate its requests come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measured_rows import SERVING_ROW

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.workloads import recorded_traces
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader

HEAD = "arrival_s,input_length,output_length"


def row(**workload: Any) -> dict[str, Any]:
    return {**SERVING_ROW, "workload": {**SERVING_ROW["workload"], **workload}}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> MachineReader:
    return MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))


@pytest.mark.parametrize("trace", ["chat", "chat.csv", "chat.csv.gz"])
def test_the_file_of_the_very_name_comes_before_files_that_have_it_in_theirs(trace: str, tmp_path: Path) -> None:
    (tmp_path / "a-chat-of-others.csv").write_text(f"{HEAD}\n0,7,1\n")
    (tmp_path / "chat.csv").write_text(f"{HEAD}\n0,100,1\n")
    (found,) = recorded_traces([row(trace=trace)], tmp_path).values()
    assert found.input_length.tolist() == [100]


@pytest.mark.parametrize("lines", ["5,10,2\n", "5,10,2\n5,20,2\n"])
def test_a_recording_whose_requests_come_at_once_has_no_rate_and_says_so(
    lines: str, reader: MachineReader, tmp_path: Path
) -> None:
    (tmp_path / "chat.csv").write_text(f"{HEAD}\n{lines}")
    asked = row()
    with pytest.raises(UnsupportedError, match="all arrive at once"):
        served_run(asked, reader, recorded_traces([asked], tmp_path))
