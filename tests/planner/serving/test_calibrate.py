"""Fitting serving constants: planted ones come back from runs that the simulator made, and one point helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.repository import Catalog
from meshplan.catalogs.serving_calibration import ServingCalibration, ServingConstants
from meshplan.planner.observations import ObservationReader, read_rows
from meshplan.planner.serving.calibrate import ANY, ANY_ENGINE, calibrate_serving, refine_serving
from meshplan.planner.serving.constants_fit import FITTED, constants_of, parts_of, theta_of
from meshplan.planner.serving.observations import served_run
from meshplan.planner.serving.prediction import PreparedRun

ROWS = Path(__file__).parents[2] / "validation" / "serving-observations.jsonl"
PLANTED = ServingConstants(
    decode_factor=1.15,
    prefill_factor=0.9,
    host_step_s=2e-3,
    host_s_per_seq=2e-5,
    launch_s_per_layer=0.5e-3,
    first_token_steps=3.0,
    first_token_offset_s=40e-3,
)


def prepared(
    reader: ObservationReader, concurrencies: Sequence[int], group: str, *, output_length: int = 128
) -> list[PreparedRun]:
    """Runs of one closed loop at several concurrencies, measured as the simulator says under the planted constants."""
    row = next(row for row in read_rows(ROWS) if row["workload"].get("concurrency") and "disagg" not in row["group"])
    run = served_run(row, reader)
    found = []
    for count in concurrencies:
        workload = replace(run.workload, concurrency=count, num_requests=4 * count, output_length=output_length)
        made = PreparedRun(replace(run, id=f"{group}-{count}", group=group, workload=workload, derived={}))
        values = made.predicted(PLANTED)
        found.append(PreparedRun(replace(made.run, measured={name: values[name] for name in ("ttft_s", "tpot_s")})))
    return found


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ObservationReader:
    return ObservationReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))


def errors(runs: Sequence[PreparedRun], constants: ServingConstants, metric: str) -> list[float]:
    return [abs(run.predicted(constants)[metric] / run.run.measured[metric] - 1.0) for run in runs]


def test_vector_and_constants_are_inverse() -> None:
    assert constants_of(theta_of(PLANTED)) == PLANTED
    assert set(FITTED) == set(ServingConstants.__dataclass_fields__)


def test_parts_of_a_key_name_each_share_once() -> None:
    assert parts_of(("vllm", "hopper")) == (("", ""), ("vllm", ""), ("", "hopper"), ("vllm", "hopper"))
    assert parts_of(("", "")) == (("", ""),)


def test_planted_constants_predict_what_they_made(reader: ObservationReader) -> None:
    """Of few runs shrinkage keeps some of the way back: eighteen, at three lengths of answers, are enough."""
    runs = prepared(reader, (1, 4, 16), "a") + prepared(reader, (2, 8, 32), "b")
    for length in (32, 512):
        runs += prepared(reader, (1, 4, 16), "a", output_length=length)
        runs += prepared(reader, (2, 8, 32), "b", output_length=length)
    result = calibrate_serving(runs, source="planted", date="2026-11-21")
    names = [(item.engine, item.architecture) for item in result.calibrations]
    assert names[0] == (ANY_ENGINE, ANY)
    local = next(item for item in result.calibrations if (item.engine, item.architecture) == runs[0].key)
    for metric, bound in (("ttft_s", 0.06), ("tpot_s", 0.02)):
        before = np.mean(errors(runs, ServingConstants(), metric))
        after = np.mean(errors(runs, local.constants, metric))
        assert after < min(bound, 0.5 * before)
    assert {(item.group, item.metric) for item in result.held_out} == {
        (group, metric) for group in "ab" for metric in ("ttft_s", "tpot_s")
    }
    assert local.num_runs == 18


def test_one_point_of_a_curve_helps_the_rest(reader: ObservationReader) -> None:
    point, rest = prepared(reader, (8,), "a"), prepared(reader, (1, 4, 32), "b")
    shipped = ServingCalibration(engine=ANY_ENGINE, architecture=ANY)
    result = refine_serving(point, lambda *_: shipped, source="mine", date="2026-11-21")
    (made,) = result.calibrations
    for metric in ("ttft_s", "tpot_s"):
        assert np.mean(errors(rest, made.constants, metric)) < np.mean(errors(rest, ServingConstants(), metric))
    assert made.source.startswith("mine; starting from")
    assert made.error_p90 == shipped.error_p90
