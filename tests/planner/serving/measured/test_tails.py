"""Tails that a row prints are predicted, with intervals: held to the simulated requests themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_serving import PLANTED, prepared

from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.evidence import Evidence, half_width, with_coverage
from meshplan.planner.serving.measured.fit.parts import PARAMETERS
from meshplan.planner.serving.measured.fit.rows import NOISE, Row
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.validate import validated_run
from meshplan.planner.serving.resolve import ANY, ANY_ENGINE
from meshplan.planner.validation.held_out import HeldOut
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


def test_tails_have_the_interval_that_plans_give_their_latency(run: PreparedRun) -> None:
    widths = {"ttft": 0.6, "tpot": 0.2, "throughput": 0.4}
    row = validated_run(run, ServingCalibration(engine=ANY_ENGINE, architecture=ANY, error_p90=widths))
    for metric, width in {"ttft": 0.6, "tpot": 0.2, "itl": 0.2, "latency": 0.2}.items():
        around = row.predicted[f"{metric}_p99_s"]
        assert around.high / around.value == pytest.approx(np.exp(width))
        assert around.value / around.low == pytest.approx(np.exp(width))


def test_tails_are_judged_though_nothing_is_fitted_to_them(run: PreparedRun) -> None:
    row = Row(PreparedRun(replace(run.run, measured={"tpot_s": 1.0, "ttft_p99_s": 2.0, "latency_p90_s": 3.0})), NOISE)
    assert row.metrics == ["tpot_s"]
    values = row.prepared.predicted(PLANTED)
    judged = {item.metric: item.error for item in row.held_out(PARAMETERS.vector(PLANTED))}
    measured = row.prepared.run.measured
    assert judged == {name: pytest.approx(values[name] / measured[name] - 1.0) for name in measured}


def test_tails_are_covered_by_their_latency_and_do_not_set_its_interval() -> None:
    def error(metric: str, source: str, size: float) -> HeldOut:
        key = ("vllm", "hopper")
        return HeldOut(id="", group=source, key=key, metric=metric, error=size, evidence=Evidence.SERVER)

    means = [error("ttft_s", source, 0.1) for source in "acdef"]
    tails = [error("ttft_p99_s", source, 0.9) for source in "acdef"]
    width, _ = half_width("ttft", ("vllm", "hopper"), Evidence.SERVER, {"source": [*means, *tails]})
    assert width == half_width("ttft", ("vllm", "hopper"), Evidence.SERVER, {"source": means})[0]
    judged = [error("ttft_p99_s", "b", float(np.expm1(0.99 * width))), error("ttft_p99_s", "b", np.expm1(1.01 * width))]
    assert [item.is_covered for item in with_coverage(judged, {"source": [*means, *tails]})] == [True, False]
