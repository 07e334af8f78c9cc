"""``meshplan validate --requests``: the picture, its table in every format, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from command_line import Command
from measured_rows import SERVING_ROW

from meshplan.cli.reports.measured.requests import MOST_DRAWN, requests_svg
from meshplan.planner.serving.measured.requests import ComparedRun, PairedLatency

SVG = "{http://www.w3.org/2000/svg}"
NUM = 24


def paired(metric: str, num: int) -> PairedLatency:
    measured = np.linspace(0.1, 3.0, num)
    return PairedLatency(
        metric=metric, request=np.arange(num), measured=measured, predicted=measured * 1.2, half_width=0.5
    )


def run_of(num: int, name: str = "run") -> ComparedRun:
    waits = np.linspace(0.0, 2.0, num)
    return ComparedRun(
        id=name,
        arrival_s=np.arange(num) / 7,
        latencies=tuple(paired(metric, num) for metric in ("ttft_s", "tpot_s", "latency_s")),
        queueing_s=(waits, waits + 0.1),
    )


def drawn(*runs: ComparedRun) -> ElementTree.Element:
    return ElementTree.fromstring(requests_svg(runs))


def num_points(root: ElementTree.Element) -> int:
    return len(list(root.iter(f"{SVG}circle")))


def said(root: ElementTree.Element) -> str:
    return " ".join(text.text or "" for text in root.iter(f"{SVG}text"))


def test_every_panel_has_a_point_for_each_request() -> None:
    root = drawn(run_of(17))
    assert num_points(root) == 17 * (3 + 2)
    assert "run: 17 requests" in said(root)
    assert len(list(root.iter(f"{SVG}path"))) == 3  # intervals


def test_long_runs_are_thinned_out_and_say_so() -> None:
    assert num_points(drawn(run_of(MOST_DRAWN))) == MOST_DRAWN * 5
    root = drawn(run_of(3 * MOST_DRAWN + 1))
    assert num_points(root) == MOST_DRAWN * 5
    assert f"at most {MOST_DRAWN:,} of {3 * MOST_DRAWN + 1:,} requests in each panel" in said(root)


def test_each_run_has_a_row_of_panels_and_those_alone_that_were_recorded() -> None:
    one = drawn(run_of(5))
    both = drawn(run_of(5, "a"), replace(run_of(5, "b"), latencies=(), queueing_s=None), run_of(5, "c"))
    assert num_points(both) == 2 * num_points(one)
    assert float(both.get("height", "0")) > 2 * float(one.get("height", "0"))
    without = drawn(replace(run_of(5), queueing_s=None))
    assert float(without.get("width", "0")) < float(one.get("width", "0"))


def test_names_are_escaped_and_the_picture_says_what_it_shows() -> None:
    root = drawn(run_of(4, "<script>&\"'"))
    assert not list(root.iter(f"{SVG}script"))
    assert "<script>&\"': 4 requests" in said(root)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Measured and predicted, request by request"
    assert "time to first token of 4 requests: median error 20.0%, 100% within the interval" in str(
        root.findtext(f"{SVG}desc")
    )


def test_requests_that_never_wait_are_drawn() -> None:
    idle = replace(run_of(1), queueing_s=(np.zeros(1), np.zeros(1)))
    assert num_points(drawn(idle)) == 5


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A row and the trace that its load generator wrote as JSON lines, one request a line."""
    lines = [
        {
            "arrival_s": i / 8,
            "input_length": 40,
            "output_length": 8,
            "scheduled_s": i / 8 + 0.001,
            "first_token_s": i / 8 + 0.02,
            "finished_s": i / 8 + 0.1,
        }
        for i in range(NUM)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return rows_file(tmp_path, trace="chat.jsonl", request_rate_per_s=None)


def rows_file(folder: Path, **workload: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({**SERVING_ROW, "workload": {**SERVING_ROW["workload"], **workload}}))
    return path


def test_a_recording_of_a_load_generator_becomes_a_picture_and_a_table(
    recorded: Path, meshplan: Command, tmp_path: Path
) -> None:
    picture = tmp_path / "requests.svg"
    outcome = meshplan("validate", recorded, "--traces", tmp_path, "--requests", picture)
    assert outcome.code == 0, outcome.err
    assert "1 of 1 observations answered" in outcome.out
    table = outcome.out.partition("Request by request")[2]
    assert [name in table for name in ("ttft_s", "tpot_s", "latency_s")] == [True] * 3
    assert num_points(ElementTree.fromstring(picture.read_text())) == NUM * 5
    again = meshplan("validate", recorded, "--traces", tmp_path, "--requests", picture)
    assert (again.code, "--force" in again.err) == (6, True)


def test_every_format_says_the_same(recorded: Path, meshplan: Command, tmp_path: Path) -> None:
    def answer(form: str) -> str:
        arguments = ("--traces", tmp_path, "--requests", tmp_path / "requests.svg", "--force", "--format", form)
        outcome = meshplan("validate", recorded, *arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out

    document = json.loads(answer("json"))
    rows = document["requests"]
    assert [(row["id"], row["metric"], row["n"]) for row in rows] == [
        ("served-1", name, NUM) for name in ("ttft_s", "tpot_s", "latency_s")
    ]
    assert rows[0]["measured_median_s"] == pytest.approx(0.02)
    assert len(document["rows"]) == 1
    table = list(csv.DictReader(io.StringIO(answer("csv"))))
    assert [float(row["mape"]) for row in table] == [row["mape"] for row in rows]
    assert "requests:" in answer("yaml")
    assert "| served-1 | ttft_s | 24 |" in answer("markdown").replace("\\", "")


@pytest.mark.parametrize(
    ("workload", "named"),
    [
        ({"trace": "bare.csv"}, "needs first_token_s and finished_s"),
        ({"arrival": "poisson"}, "workload.arrival 'trace'"),
        ({"request_rate_per_s": 80.0}, "the recording's own request_rate_per_s or none"),
        ({"trace": "elsewhere.csv"}, "served-1: the trace 'elsewhere' is not at hand (--traces DIR)"),
    ],
)
def test_without_a_recorded_server_it_says_what_is_needed(
    workload: dict[str, Any], named: str, recorded: Path, meshplan: Command, tmp_path: Path
) -> None:
    (tmp_path / "bare.csv").write_text("arrival_s,input_length,output_length\n0,40,8\n1,40,8\n")
    rows_file(tmp_path, **{"trace": "chat.jsonl", "request_rate_per_s": 8.0, **workload})
    refused = meshplan("validate", recorded, "--traces", tmp_path, "--requests", tmp_path / "requests.svg")
    assert (refused.code, refused.out) == (2, "")
    assert named in " ".join(refused.err.split())
    assert not (tmp_path / "requests.svg").exists()


def test_a_recording_out_of_order_is_refused_with_its_line(recorded: Path, meshplan: Command, tmp_path: Path) -> None:
    trace = tmp_path / "chat.jsonl"
    trace.write_text(trace.read_text().replace('"finished_s": 0.1', '"finished_s": 0.01'))
    refused = meshplan("validate", recorded, "--traces", tmp_path, "--requests", tmp_path / "requests.svg")
    assert refused.code == 2
    assert "line 1: finished_s is 0.01, before first_token_s, 0.02" in " ".join(refused.err.split())


def test_it_is_not_asked_of_adapted_constants(recorded: Path, meshplan: Command, tmp_path: Path) -> None:
    arguments = ("--traces", tmp_path, "--requests", tmp_path / "requests.svg", "--from-points", "1")
    refused = meshplan("validate", recorded, *arguments)
    assert refused.code == 2
    assert "give it without --from-points" in " ".join(refused.err.split())
