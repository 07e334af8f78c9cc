"""Recordings that measured rows replayed: which file a row means, and at what rate its requests come."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from measured_rows import SERVING_ROW

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.workloads import recorded_traces
from meshplan.planner.serving.problem.requests import ServingWorkload
from meshplan.planner.serving.simulation.arrivals import make_requests
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


NUM = 101
ANSWERED = f"{HEAD},first_token_s,finished_s\n" + "".join(
    f"{i / 8},40,8,{i / 8 + 0.1},{i / 8 + 0.5}\n" for i in range(NUM)
)
PLAIN = f"{HEAD}\n" + "".join(f"{i / 8},40,8\n" for i in range(NUM))


def replayed(content: str, folder: Path, reader: MachineReader, **workload: Any) -> ServingWorkload:
    """The load of a row whose recording comes at 8 requests a second."""
    (folder / "chat.csv").write_text(content)
    asked = row(**workload)
    return served_run(asked, reader, recorded_traces([asked], folder)).workload


@pytest.mark.parametrize(
    "stated", [{"request_rate_per_s": 8.4}, {"request_rate_per_s": 8}, {"request_rate_per_s": None}]
)
def test_a_recording_of_the_run_itself_is_replayed_as_it_came(
    stated: dict[str, Any], reader: MachineReader, tmp_path: Path
) -> None:
    """A load generator that draws gaps is told 8.4 requests a second and sends 8: the measured times are those of 8."""
    workload = replayed(ANSWERED, tmp_path, reader, **stated)
    assert make_requests(workload).arrival_s.tolist() == [i / 8 for i in range(NUM)]
    assert workload.trace is not None
    assert workload.trace.answered is not None


@pytest.mark.parametrize("changed", [{"request_rate_per_s": 16.0}, {"arrival": "poisson", "request_rate_per_s": 8.0}])
def test_another_run_of_a_recording_has_other_times(
    changed: dict[str, Any], reader: MachineReader, tmp_path: Path
) -> None:
    workload = replayed(ANSWERED, tmp_path, reader, **changed)
    assert make_requests(workload).arrival_s[-1] == pytest.approx((NUM - 1) / changed["request_rate_per_s"])
    assert workload.trace is not None
    assert workload.trace.answered is None


def test_requests_alone_are_replayed_at_the_rate_that_the_row_states(reader: MachineReader, tmp_path: Path) -> None:
    assert make_requests(replayed(PLAIN, tmp_path, reader, request_rate_per_s=8.4)).arrival_s[-1] < (NUM - 1) / 8
    with pytest.raises(UnsupportedError, match="request_rate_per_s must be a number above 0"):
        replayed(PLAIN, tmp_path, reader, request_rate_per_s=None)


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.jsonl.gz"])
def test_recordings_may_be_json_lines(name: str, tmp_path: Path) -> None:
    line = b'{"arrival_s": 0, "input_length": 9, "output_length": 2, "finished_s": 1.5}\n'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    for trace in ("chat", name):
        (found,) = recorded_traces([row(trace=trace)], tmp_path).values()
        assert found.answered is not None
        assert found.input_length.tolist() == [9]
