"""Fitting serving constants: planted ones come back from runs that the simulator made, and one point helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from planted_serving import PLANTED, prepared

from meshplan.catalogs.constants.checks import calibration_problems
from meshplan.catalogs.constants.serving import OwnLoad, ServingCalibration, ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.iteration import LAUNCHES
from meshplan.planner.serving.measured import calibrate
from meshplan.planner.serving.measured.calibrate import calibrate_serving, refine_serving
from meshplan.planner.serving.measured.fit import rows as rows_of_the_fit
from meshplan.planner.serving.measured.fit.parts import FITTED, PARAMETERS
from meshplan.planner.serving.measured.fit.rows import NOISE, Row
from meshplan.planner.serving.measured.fit.solution import solve
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.resolve import ANY, ANY_ENGINE
from meshplan.planner.validation.fitting import Linear
from meshplan.planner.validation.held_out import Key
from meshplan.planner.validation.machines import MachineReader

ITERATION = ("decode_factor", "prefill_factor", "host_step_s", "host_s_per_seq", "launch_s_per_layer")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> MachineReader:
    return MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))


def a_row(constants: str, *, hides_host: bool = False) -> Row:
    return cast("Row", SimpleNamespace(key=(constants, "hopper"), hides_host=hides_host))


def errors(runs: Sequence[PreparedRun], constants: ServingConstants, metric: str) -> list[float]:
    return [abs(run.predicted(constants)[metric] / run.run.measured[metric] - 1.0) for run in runs]


def test_vector_and_constants_are_inverse() -> None:
    assert PARAMETERS.replaced(ServingConstants(), PARAMETERS.vector(PLANTED)) == PLANTED
    assert set(FITTED) == set(ServingConstants.__dataclass_fields__)


def test_a_release_that_nobody_measured_is_expected_to_be_like_its_engines_others() -> None:
    """Two releases of TensorRT-LLM wait three times as long for their host as vLLM: so does the third, in part."""
    seen = {"trtllm-2023": 3.0, "trtllm-2024": 3.0, "vllm": 1.0, "vllm-v0": 1.0}
    host = list(FITTED).index("host_step_s")
    linear = Linear(
        at=np.zeros(len(FITTED)),
        residual=np.log([1e-3 * times for times in seen.values()]),
        slope=np.tile(np.eye(len(FITTED))[host], (len(seen), 1)),
        noise=np.full(len(seen), 0.05),
        weight=np.ones(len(seen)),
    )
    owners = [a_row(name) for name in seen]
    theta = solve(linear, owners, PARAMETERS.vector(ServingConstants()))
    waits = {name: float(np.exp(theta((name, "hopper"))[host])) for name in ("trtllm", "sglang", "vllm")}
    assert 1.1e-3 < waits["vllm"] * 1.1 < waits["sglang"] < waits["trtllm"] < 3e-3


def test_a_core_written_anew_says_nothing_of_the_host_before_it_but_both_launch_alike() -> None:
    """vLLM of 2023 and 0.6 took three times as long for host and launches: today's takes after their launches alone."""
    names = list(FITTED)
    host, launch = names.index("host_step_s"), names.index("launch_s_per_layer")
    prior = PARAMETERS.vector(ServingConstants())
    seen = [(name, constant) for name in ("vllm-2023", "vllm-v0") for constant in (host, launch)]
    linear = Linear(
        at=np.zeros(len(FITTED)),
        residual=np.array([prior[constant] + np.log(3.0) for _, constant in seen]),
        slope=np.array([np.eye(len(FITTED))[constant] for _, constant in seen]),
        noise=np.full(len(seen), 0.05),
        weight=np.ones(len(seen)),
    )
    owners = [a_row(name) for name, _ in seen]
    theta = solve(linear, owners, prior)
    today, another = (theta((name, "hopper")) for name in ("vllm", "sglang"))
    assert today[host] == pytest.approx(another[host], abs=1e-6)
    assert today[launch] > another[launch] + 0.05


def test_iterations_prepared_ahead_are_documented_and_no_published_run_moves_them() -> None:
    """Whatever waits thrice as long for its first token does not prepare three iterations ahead."""
    steps = list(FITTED).index("first_token_steps")
    linear = Linear(
        at=np.zeros(len(FITTED)),
        residual=np.log([3.0, 3.0]),
        slope=np.tile(np.eye(len(FITTED))[steps], (2, 1)),
        noise=np.full(2, 0.05),
        weight=np.ones(2),
    )
    owners = [a_row(name) for name in ("vllm", "sglang")]
    theta = solve(linear, owners, PARAMETERS.vector(ServingConstants()))
    for name in ("vllm", "sglang", "trtllm"):
        assert np.exp(theta((name, "hopper"))[steps]) == pytest.approx(1.0, abs=1e-6)


def test_a_hidden_host_is_told_by_runs_that_show_it() -> None:
    """Runs that take a twentieth longer than predicted say so of a host that they show, not of a hidden one."""
    host = list(FITTED).index("host_step_s")
    prior = PARAMETERS.vector(ServingConstants())

    def host_of(*, hides: bool) -> float:
        slope = 0.3 * np.tile(np.eye(len(FITTED))[host], (40, 1))
        linear = Linear(
            at=np.zeros(len(FITTED)),
            residual=slope @ prior + np.r_[np.zeros(20), np.full(20, np.log(1.05))],
            slope=slope,
            noise=np.full(40, 0.05),
            weight=np.ones(40),
        )
        owners = [a_row("vllm") for _ in range(20)] + [a_row("vllm", hides_host=hides) for _ in range(20)]
        return float(np.exp(solve(linear, owners, prior)(("vllm", "hopper"))[host] - prior[host]))

    assert host_of(hides=False) > 1.05
    assert host_of(hides=True) == pytest.approx(1.0, rel=1e-6)


def test_a_servers_first_requests_tell_nothing_of_its_first_tokens(reader: MachineReader) -> None:
    """Without warm-ups a mean holds what is compiled first; tokens come later. It is judged all the same."""
    cold = [PreparedRun(replace(run.run, warms_up=False)) for run in prepared(reader, (1, 4, 16), "a")]
    rows, theta = [Row(run, NOISE) for run in cold], PARAMETERS.vector(PLANTED)
    linear, owners = rows_of_the_fit.linearised(rows, lambda _: theta)
    assert len(linear.residual) == len(owners) == 3
    assert {item.metric for row in rows for item in row.held_out(theta)} == {"ttft_s", "tpot_s"}
    own, _ = rows_of_the_fit.linearised([Row(run, NOISE, is_own=True) for run in cold], lambda _: theta)
    assert len(own.residual) == 6


def test_launches_that_a_model_lacks_are_not_simulated(reader: MachineReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Derivatives by them are none, and every one that is left out is a simulation less."""
    (run,) = prepared(reader, (4,), "a")
    row, asked, whole = Row(run, NOISE), [], PreparedRun.predicted
    monkeypatch.setattr(PreparedRun, "predicted", lambda *of: asked.append(1) or whole(*of))
    _, slope = row.linear(PARAMETERS.vector(PLANTED))
    lacks = [name for name in LAUNCHES if not LAUNCHES[name](run.run.shape)]
    assert lacks
    assert len(asked) == 1 + len(FITTED) - len(lacks)
    assert not slope[:, [list(FITTED).index(name) for name in lacks]].any()


def test_planted_constants_predict_what_they_made(reader: MachineReader) -> None:
    """Of few runs shrinkage keeps some of the way back: eighteen, at three lengths and many loads, are enough."""
    runs = prepared(reader, (1, 4, 16), "a") + prepared(reader, (2, 8, 128), "b")
    for length in (32, 512):
        runs += prepared(reader, (1, 4, 16), "a", output_length=length)
        runs += prepared(reader, (2, 8, 128), "b", output_length=length)
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


def test_the_last_linearisation_is_by_secants(reader: MachineReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a closed loop's first tokens is told by slopes over a range; folds are solved on these, too."""
    found: list[bool] = []

    def linearised(
        rows: Sequence[Row], theta: Callable[[Key], FloatArray], *, is_secant: bool = False
    ) -> tuple[Linear, list[Row]]:
        found.append(is_secant)
        return rows_of_the_fit.linearised(rows, theta, is_secant=is_secant)

    monkeypatch.setattr(calibrate, "linearised", linearised)
    calibrate_serving(prepared(reader, (4,), "a"), source="planted", date="2026-11-21")
    assert found == [False] * calibrate.ITERATIONS + [True] * calibrate.SECANTS
    assert found[-1]


def test_static_batches_pass_no_front_end(reader: MachineReader) -> None:
    """They are handed to the engine by a script: no time outside of it explains them, nor do they tell that time."""
    (loop,) = prepared(reader, (8,), "a")
    batch, at_a_rate = (
        PreparedRun(replace(loop.run, workload=replace(loop.run.workload, arrival=arrival, request_rate_per_s=5.0)))
        for arrival in (Arrival.STATIC_BATCH, Arrival.POISSON)
    )
    slow = replace(PLANTED, first_token_offset_s=PLANTED.first_token_offset_s + 1.0)
    assert batch.predicted(slow)["ttft_s"] == batch.predicted(PLANTED)["ttft_s"]
    assert at_a_rate.predicted(slow)["ttft_s"] == pytest.approx(at_a_rate.predicted(PLANTED)["ttft_s"] + 1.0)
    _, slope = Row(batch, NOISE).linear(PARAMETERS.vector(PLANTED))
    assert not slope[:, list(FITTED).index("first_token_offset_s")].any()


def test_a_slope_is_the_trend_and_not_the_hair_on_which_requests_fall_into_step(
    reader: MachineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First tokens that jump by 4 % within 10 % of an offset and rise by a tenth of it over all."""
    (run,) = prepared(reader, (8,), "a")
    row, offset, trend, hair = Row(run, NOISE), list(FITTED).index("first_token_offset_s"), 0.1, 0.02

    def in_step(theta: FloatArray) -> FloatArray:
        return np.array([trend * theta[offset] + hair * np.sin(30.0 * theta[offset]), 0.0])

    monkeypatch.setattr(row, "log_predicted", in_step)
    for milliseconds in np.linspace(5.0, 15.0, 41):
        at = PARAMETERS.vector(replace(PLANTED, first_token_offset_s=1e-3 * milliseconds))
        _, slope = row.linear(at, is_secant=True)
        assert slope[0, offset] == pytest.approx(trend, abs=0.07)


def test_one_point_of_a_curve_helps_the_rest(reader: MachineReader) -> None:
    point, rest = prepared(reader, (8,), "a"), prepared(reader, (1, 4, 32), "b")
    shipped = ServingCalibration(engine=ANY_ENGINE, architecture=ANY)
    result = refine_serving(point, lambda *_: shipped, source="mine", date="2026-11-21")
    (made,) = result.calibrations
    near = made.for_load(rest[0].own_load).constants
    for metric in ("ttft_s", "tpot_s"):
        assert np.mean(errors(rest, near, metric)) < np.mean(errors(rest, ServingConstants(), metric))
    assert made.source.startswith("mine; starting from")
    assert made.error_p90 == shipped.error_p90


def test_a_server_that_is_slower_in_everything_is_so_at_every_load(reader: MachineReader) -> None:
    """Whatever its iterations wait for: one point knows four fifths of it for the loads at both ends, too."""
    slower = replace(PLANTED, **{name: 1.25 * getattr(PLANTED, name) for name in ITERATION})
    runs = []
    for run in prepared(reader, (1, 8, 128), "a"):
        values = run.predicted(slower)
        runs.append(PreparedRun(replace(run.run, measured={name: values[name] for name in run.run.measured})))
    start = ServingCalibration(engine=ANY_ENGINE, architecture=ANY, constants=PLANTED)
    (made,) = refine_serving(runs[1:2], lambda *_: start, source="mine", date="2026-11-26").calibrations
    near = made.for_load(runs[0].own_load).constants
    assert min(errors(runs, PLANTED, "tpot_s")) > 0.15
    assert max(errors(runs, near, "tpot_s")) < 0.04


def test_a_run_says_most_of_its_own_load_and_least_of_other_models(reader: MachineReader) -> None:
    """And ten of one model together hardly more of another model than one, though far more of their own."""
    start = ServingCalibration(engine=ANY_ENGINE, architecture=ANY)
    one, ten = prepared(reader, (8,), "a"), prepared(reader, (1, 2, 4, 6, 8, 10, 12, 16, 24, 32), "a")
    load = one[0].own_load
    moved = []
    for runs in (one, ten):
        (made,) = refine_serving(runs, lambda *_: start, source="mine", date="2026-11-26").calibrations
        assert ServingCalibration.from_document(made.to_document()) == made
        loads = (load, OwnLoad(load.model, (1, 1)), OwnLoad("another", load.lengths))
        sets = [made.for_load(each).constants for each in loads]
        moved.append([one[0].predicted(each)["tpot_s"] / one[0].predicted(start.constants)["tpot_s"] for each in sets])
    own, lengths, model = moved[0]
    assert 1.0 < model < 1.0 + 0.5 * (own - 1.0)
    assert model < lengths < own
    assert moved[1][2] - 1.0 < 1.5 * (model - 1.0)


def test_a_set_whose_constants_of_a_model_are_none_is_refused() -> None:
    made = ServingCalibration(engine="vllm", architecture="hopper", model_constants={"qwen3-32b": PLANTED})
    assert not list(calibration_problems("vllm", "hopper", made.to_document()))
    for broken in ({"qwen3-32b": {"decode_factor": -1.0}}, ["qwen3-32b"]):
        document = {**made.to_document(), "model_constants": broken}
        (problem,) = calibration_problems("vllm", "hopper", document)
        assert "model_constants" in problem


def test_fixed_constants_stay_and_layouts_are_left_out_whole(reader: MachineReader) -> None:
    """Of one layout nothing is left when it is held out: its errors are those of the catalog's constants."""
    runs = prepared(reader, (1, 4, 16), "a")
    shipped = ServingCalibration(engine=ANY_ENGINE, architecture=ANY)
    free = ("decode_factor", "first_token_offset_s")
    result = refine_serving(runs, lambda *_: shipped, source="mine", hold_out="layout", free=free)
    (made,) = result.calibrations
    near = made.for_load(runs[0].own_load).constants
    for name in FITTED:
        moved = getattr(near, name) != pytest.approx(getattr(ServingConstants(), name), rel=1e-3)
        assert moved == (name in free)
    for item in result.held_out:
        run = next(run for run in runs if run.run.id == item.id)
        alone = run.predicted(shipped.constants)[item.metric] / run.run.measured[item.metric] - 1.0
        assert item.error == pytest.approx(alone)
