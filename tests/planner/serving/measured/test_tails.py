"""Tails that a row prints are predicted, with intervals: held to the simulated requests themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_serving import PLANTED, prepared

from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.validate import validated_run
from meshplan.planner.serving.resolve import ANY, ANY_ENGINE
from meshplan.planner.validation.machines import MachineReader

TAILS = {"p90": 0.90, "p95": 0.95, "p99": 0.99}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    """A run whose row prints every tail (as 1 s)."""
    reader = MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))
    (made,) = prepared(reader, (16,), "a")
    printed = [f"{metric}_{tail}_s" for metric in ("ttft", "tpot", "itl", "latency") for tail in TAILS]
    return PreparedRun(replace(made.run, measured=dict.fromkeys((*printed, "itl_median_s"), 1.0)))


def test_tails_are_those_of_the_simulated_requests(run: PreparedRun) -> None:
    served, values = run.served(PLANTED), run.predicted(PLANTED)
    first, whole = served.first_token_s - served.arrival_s, served.finish_s - served.arrival_s
    per_token = (whole - first) / (served.output_length - 1)
    for tail, share in TAILS.items():
        assert values[f"ttft_{tail}_s"] == pytest.approx(np.quantile(first, share))
        assert values[f"latency_{tail}_s"] == pytest.approx(np.quantile(whole, share))
        assert values[f"tpot_{tail}_s"] == pytest.approx(np.quantile(per_token, share))
    # A request's mean gap is a mean of gaps, so that gaps have the longer tail.
    assert values["itl_median_s"] <= values["itl_p90_s"] <= values["itl_p99_s"]


def test_tails_have_the_interval_of_their_latency(run: PreparedRun) -> None:
    widths = {"ttft": 0.6, "tpot": 0.2, "throughput": 0.4}
    row = validated_run(run, ServingCalibration(engine=ANY_ENGINE, architecture=ANY, error_p90=widths))
    for metric, width in {"ttft": 0.6, "tpot": 0.2, "itl": 0.2, "latency": 0.4}.items():
        around = row.predicted[f"{metric}_p99_s"]
        assert around.high / around.value == pytest.approx(np.exp(width))
        assert around.value / around.low == pytest.approx(np.exp(width))
