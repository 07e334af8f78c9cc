"""Predicted beside measured request by request: pairs, errors against values by hand, and runs that are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured_rows import SERVING_ROW

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.requests import ComparedRun, PairedLatency, compared_run, compared_runs
from meshplan.planner.serving.measured.validate import half_width
from meshplan.planner.serving.measured.workloads import recorded_traces
from meshplan.planner.serving.problem.requests import Answered
from meshplan.planner.serving.resolve import serving_calibration
from meshplan.planner.validation.machines import MachineReader

LINES = "".join(f"{i / 8},40,{1 if i == 2 else 8}\n" for i in range(20))
HEAD = "arrival_s,input_length,output_length\n"


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))


@pytest.fixture
def prepared(catalog: Catalog, tmp_path: Path) -> PreparedRun:
    """A run of 20 requests, the third of one token, whose recording says nothing of the answers."""
    (tmp_path / "chat.csv").write_text(HEAD + LINES)
    return PreparedRun(served_run(SERVING_ROW, MachineReader(catalog), recorded_traces([SERVING_ROW], tmp_path)))


def answered(prepared: PreparedRun, said: Answered) -> PreparedRun:
    workload = prepared.run.workload
    assert workload.trace is not None
    trace = replace(workload.trace, answered=said)
    return PreparedRun(replace(prepared.run, workload=replace(workload, trace=trace)))


def compared(prepared: PreparedRun, said: Answered, catalog: Catalog) -> ComparedRun | None:
    calibration = serving_calibration(catalog, *prepared.key)
    return compared_run(answered(prepared, said), calibration)


@pytest.fixture
def exact(prepared: PreparedRun, catalog: Catalog) -> Answered:
    """What the server would have said if the prediction were true."""
    constants = serving_calibration(catalog, *prepared.key).for_load(prepared.own_load).constants
    served = prepared.served(constants)
    assert isinstance(constants, ServingConstants)
    arrival_s = served.arrival_s
    return Answered(
        queued_s=arrival_s,
        scheduled_s=served.admitted_s,
        first_token_s=served.first_token_s,
        finished_s=served.finish_s,
    )


def test_errors_of_pairs_are_those_by_hand() -> None:
    latency = PairedLatency(
        metric="ttft_s",
        request=np.array([0, 1, 2, 3]),
        measured=np.array([1.0, 2.0, 4.0, 10.0]),
        predicted=np.array([1.1, 1.0, 4.4, 30.0]),  # +10 %, -50 %, +10 %, +200 %
        half_width=math.log(1.5),
    )
    found = latency.summary("run")
    assert (found.group, found.metric, found.n) == ("run", "ttft_s", 4)
    assert found.median_ape == pytest.approx(0.3)
    assert found.mape == pytest.approx(0.675)
    assert found.signed_median == pytest.approx(0.1)
    assert found.interval_coverage == 0.5
    assert found.spearman == pytest.approx(0.8)  # ranks 1 2 3 4 and 2 1 3 4: 1 − 6·2/(4·15)


def test_a_server_as_predicted_has_no_error_in_any_request(
    prepared: PreparedRun, exact: Answered, catalog: Catalog
) -> None:
    run = compared(prepared, exact, catalog)
    assert run is not None
    assert [(item.metric, item.n) for item in run.summaries] == [("ttft_s", 20), ("tpot_s", 19), ("latency_s", 20)]
    for found in run.summaries:
        assert found.mape < 1e-9
        assert found.interval_coverage == 1.0
    assert run.queueing_s is not None
    assert np.allclose(*run.queueing_s)
    assert run.arrival_s.tolist() == [i / 8 for i in range(20)]
    tpot = run.latencies[1]
    assert 2 not in tpot.request  # one token has no time to the next
    calibration = serving_calibration(catalog, *prepared.key).for_load(prepared.own_load)
    assert [item.half_width for item in run.latencies] == [
        half_width(calibration, prepared.run, name) for name in ("ttft_s", "tpot_s", "latency_s")
    ]


def test_each_request_is_held_against_its_own_prediction(
    prepared: PreparedRun, exact: Answered, catalog: Catalog
) -> None:
    assert exact.first_token_s is not None
    late = exact.first_token_s.copy()
    late[7] += 1.0
    run = compared(prepared, replace(exact, first_token_s=late, finished_s=None), catalog)
    assert run is not None
    (ttft,) = run.latencies
    assert np.flatnonzero(np.abs(ttft.predicted - ttft.measured) > 1e-9).tolist() == [7]
    assert ttft.measured[7] == pytest.approx(ttft.predicted[7] + 1.0)


def test_requests_before_those_that_the_row_measures_are_left_out(
    prepared: PreparedRun, exact: Answered, catalog: Catalog
) -> None:
    run = compared(PreparedRun(replace(prepared.run, num_before=5)), exact, catalog)
    assert run is not None
    assert run.latencies[0].request.tolist() == list(range(5, 20))
    assert run.arrival_s.tolist() == [i / 8 for i in range(15)]
    assert run.queueing_s is not None
    assert [len(waits) for waits in run.queueing_s] == [15, 15]
    assert all(item.mape < 1e-9 for item in run.summaries)


def without(*names: str) -> Callable[[Answered], Answered]:
    return lambda said: replace(said, **dict.fromkeys(names))


@pytest.mark.parametrize(
    ("less", "metrics", "queueing"),
    [
        (without("queued_s"), ["ttft_s", "tpot_s", "latency_s"], True),
        (without("queued_s", "scheduled_s"), ["ttft_s", "tpot_s", "latency_s"], False),
        (without("finished_s", "scheduled_s"), ["ttft_s"], False),
        (without("first_token_s"), ["latency_s"], True),
        (without("first_token_s", "finished_s"), [], True),
    ],
)
def test_what_a_recording_leaves_out_is_not_compared(
    less: Callable[[Answered], Answered],
    metrics: list[str],
    queueing: bool,
    prepared: PreparedRun,
    exact: Answered,
    catalog: Catalog,
) -> None:
    run = compared(prepared, less(exact), catalog)
    assert run is not None
    assert [item.metric for item in run.latencies] == metrics
    assert (run.queueing_s is not None) == queueing
    assert all(item.mape < 1e-9 for item in run.summaries)


def test_a_recording_without_answers_is_no_comparison(prepared: PreparedRun, exact: Answered, catalog: Catalog) -> None:
    assert compared(prepared, without("scheduled_s", "first_token_s", "finished_s")(exact), catalog) is None
    assert compared_run(prepared, serving_calibration(catalog, *prepared.key)) is None


def test_latencies_of_no_measured_length_have_no_relative_error(
    prepared: PreparedRun, exact: Answered, catalog: Catalog
) -> None:
    assert exact.first_token_s is not None
    assert exact.queued_s is not None
    first = exact.first_token_s.copy()
    first[3] = exact.queued_s[3]
    run = compared(prepared, replace(exact, first_token_s=first), catalog)
    assert run is not None
    assert run.latencies[0].request.tolist() == [i for i in range(20) if i != 3]


def test_of_many_rows_those_with_measured_times_are_compared(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "chat.csv").write_text(HEAD.replace("\n", ",finished_s\n") + LINES.replace("\n", ",9\n"))
    (tmp_path / "bare.csv").write_text(HEAD + LINES)

    def row(name: str, trace: str, **changed: Any) -> dict[str, Any]:
        return {**SERVING_ROW, "id": name, "workload": {**SERVING_ROW["workload"], "trace": trace}, **changed}

    rows = [
        row("a", "chat.csv"),
        row("b", "bare.csv"),
        row("c", "missing.csv"),
        row("d", "chat", framework={"name": "no engine"}),
        row("e", "chat", task="training"),
        row("f", "chat"),
    ]
    assert [run.id for run in compared_runs(rows, catalog, tmp_path)] == ["a", "f"]
    assert compared_runs(rows, catalog, None) == []
