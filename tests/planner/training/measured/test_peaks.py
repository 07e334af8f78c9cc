"""A measured peak is compared only with a plan that could have been the run."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_rows import TRAINING_ROW

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.memory.reported import NO_RESERVE, Reserve
from meshplan.planner.training.measured.observations import ObservationReader, ObservedRun
from meshplan.planner.training.measured.validate import validate_run

GIB = 1024**3
CONSTANTS = Calibration(framework="any", architecture="any")


def run_of(catalog: Catalog, peak: float, **changes: Any) -> ObservedRun:
    row = copy.deepcopy(TRAINING_ROW)
    row["measured"]["peak_memory_bytes"] = peak
    for section, values in changes.items():
        row[section] = {**row[section], **values} if isinstance(values, dict) else values
    return ObservationReader(catalog).training_run(row, CONSTANTS)


def test_a_plausible_peak_is_compared(catalog: Catalog) -> None:
    run = run_of(catalog, 40 * GIB)
    assert run.measured["peak_memory_bytes"] == 40 * GIB
    assert run.peak_left_out == ""


def test_less_than_the_weights_of_a_rank_was_not_measured(catalog: Catalog) -> None:
    run = run_of(catalog, 0.001 * GIB)
    assert "peak_memory_bytes" not in run.measured
    validated = validate_run(run)
    assert "peak_memory_bytes" not in validated.error
    assert "weights" in validated.reason
    assert "iteration_s" in validated.error  # the time is compared all the same


@pytest.mark.parametrize("caveat", ["8-bit paged optimizer, step fused into the backward pass (recipe)", "CPU offload"])
def test_savers_that_no_plan_can_ask_for_are_named(catalog: Catalog, caveat: str) -> None:
    run = run_of(catalog, 40 * GIB, caveats=[caveat])
    assert "peak_memory_bytes" not in run.measured
    assert "in a way that plans do not" in validate_run(run).reason


def test_adapters_with_a_trained_vocabulary_hold_its_states(catalog: Catalog) -> None:
    """Embedding and LM head get gradients and Adam's states, and PEFT keeps the frozen originals beside them."""
    lora = {"rank": 8, "target_modules": ["q_proj"]}
    phase = {"phase": "lora"}
    adapters, whole = (
        run_of(catalog, 40 * GIB, model={"lora": entry}, workload=phase, parallelism={"zero_stage": 0})
        for entry in (lora, {**lora, "trained_fully": ["wte", "lm_head"]})
    )
    recipe = adapters.problem.calibration.recipe
    shape, config = adapters.problem.shape, adapters.config
    states = recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes
    ends = price(whole.problem, whole.config).stages
    plain = price(adapters.problem, adapters.config).stages
    for more, less, held in zip(ends, plain, (shape.embedding_parameters, shape.lm_head_parameters), strict=True):
        added = more.typical_bytes - less.typical_bytes
        assert added == pytest.approx(states * held / config.tensor_parallel)


@given(st.floats(0.0, 2e11), st.floats(0.0, 1.0), st.floats(1e9, 2e11))
def test_a_reserve_is_given_back_when_memory_runs_out(needed: float, share: float, memory: float) -> None:
    reserve = Reserve(typical=1.0, most=2.0, memory_bytes=memory)
    typical, most = (reserve.reported_bytes(needed, share * needed, most=most) for most in (False, True))
    assert needed <= typical <= most <= max(needed, memory)
    assert NO_RESERVE.reported_bytes(needed, share * needed, most=True) == needed


def test_a_reserve_is_reported_and_stops_no_plan(catalog: Catalog) -> None:
    """The peak of a source that pads to lengths of their own is more than what its run needs."""
    framework = {"name": "ms-swift (Transformers)"}
    lora = {"rank": 8, "target_modules": ["q_proj"]}
    run = run_of(catalog, 40 * GIB, framework=framework, model={"lora": lora}, workload={"phase": "lora"})
    row, priced = validate_run(run), price(run.problem, run.config)
    held = max(priced.stages, key=lambda stage: stage.typical_bytes).components
    work = held["activations"] + held["logits"]
    assert row.predicted["peak_memory_bytes"].value == pytest.approx(priced.typical_bytes + work)
    assert row.predicted["peak_memory_bytes"].high > priced.safe_bytes
    assert row.admitted == "safe bound"
    tight = replace(run.problem, limits=replace(run.problem.limits, memory_bytes=priced.safe_bytes))
    assert validate_run(replace(run, problem=tight)).admitted == "safe bound"


@pytest.mark.parametrize(
    ("targets", "on_mlp"),
    [(["c_attn"], False), (["query", "value"], False), (["query", "mlp", "head"], True), (["all linear"], True)],
)
def test_where_adapters_sit_is_read(catalog: Catalog, targets: list[str], on_mlp: bool) -> None:
    lora = {"rank": 8, "target_modules": targets}
    run = run_of(catalog, 40 * GIB, model={"lora": lora}, workload={"phase": "lora"})
    assert run.problem.workload.adapts_mlp is on_mlp
