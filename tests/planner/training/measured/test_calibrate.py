"""Fitting time constants: planted ones come back from runs that the estimator made, and few runs help."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_training import LARGE, PLANTED, errors, planted, runs_of

from meshplan.catalogs.constants.training import Basis, TimeConstants
from meshplan.planner.training.measured.calibrate import calibrate
from meshplan.planner.training.measured.constants_fit import FITTED, PARAMETERS, Row
from meshplan.planner.training.measured.own_runs import refine


def test_the_units_of_the_fit_go_there_and_back() -> None:
    back = PARAMETERS.replaced(TimeConstants(), PARAMETERS.vector(PLANTED))
    for name in FITTED:
        assert getattr(back, name) == pytest.approx(float(getattr(PLANTED, name)), rel=1e-3), name


def test_planted_constants_come_back() -> None:
    """Within 8 % where the runs can see them (the prior pulls them a little); predictions within 1 % (median).

    Memory-bound operators within 15 %: host time joins device time smoothly, so that part of what they take looks like
    it, and expert constants stay close to the global ones on purpose (``TIGHT``).
    """
    runs = runs_of()
    made = calibrate(runs, source="planted", date="2026-01-01")
    everything, *_, local = made.calibrations
    assert (everything.framework, local.framework, local.architecture) == ("any", "megatron", "hopper")
    assert local.num_runs == len(runs)
    for name in (
        "gemm_efficiency",
        "attention_kernel_efficiency",
        "step_overhead_s",
        "host_s_per_layer",
    ):
        assert getattr(local.time, name) == pytest.approx(float(getattr(PLANTED, name)), rel=0.08), name
    assert local.time.memory_op_efficiency == pytest.approx(float(PLANTED.memory_op_efficiency), rel=0.15)
    assert np.median(np.abs(errors(runs, local))) < 0.015  # held close to what all frameworks share
    # Every second run is enough to adapt to; the others are predicted by what these taught.
    (own,) = refine(runs[::2], lambda *_: local, source="planted", date="2026-01-01").calibrations
    assert np.median(np.abs(errors(runs, own))) < 0.01
    assert np.max(np.abs(errors(runs, own))) < 0.06
    literature = np.quantile(np.abs(errors(runs, planted(TimeConstants()))), 0.9)
    held_out = np.abs([item.error for item in made.folds["group"]])  # whole sequence lengths and models are left out
    assert np.median(held_out) < 0.03
    assert np.quantile(held_out, 0.9) < 0.5 * literature
    assert {item.id for item in made.held_out} == {run.id for run in runs}


def test_noise_shows_in_the_held_out_error() -> None:
    runs = runs_of(noise=0.05)
    (*_, local) = calibrate(runs, source="noisy", date="2026-01-01").calibrations
    assert 0.04 < local.cluster_error_p90["dense"] < 0.2
    assert np.median(np.abs(errors(runs, local))) < 0.06
    assert local.time.gemm_efficiency == pytest.approx(0.75, rel=0.1)


def test_what_no_run_can_see_stays_at_the_literature() -> None:
    dense = runs_of(shapes=(LARGE,))
    (*_, local) = calibrate(dense, source="dense only", date="2026-01-01").calibrations
    for name in (
        "expert_gemm_efficiency",
        "expert_parallel_overlap",
        "host_s_per_moe_layer",
        "low_precision_efficiency",
    ):
        assert getattr(local.time, name) == pytest.approx(float(getattr(TimeConstants(), name)), rel=0.01), name


def test_a_framework_never_seen_is_judged_by_the_others() -> None:
    slow = replace(PLANTED, gemm_efficiency=0.4, memory_op_efficiency=0.3)
    # Two frameworks whose documented layouts of a step are almost alike, so that they differ by their constants.
    runs = runs_of(shapes=(LARGE,))[::2] + runs_of(slow, framework="nemo-mlperf", shapes=(LARGE,))[::2]
    made = calibrate(runs, source="two", date="2026-01-01")
    unseen = made.folds["framework"]
    assert {item.key[0] for item in unseen} == {"megatron", "nemo-mlperf"}
    assert {item.evidence for item in unseen} <= {Basis.RELATED, Basis.ANY}
    for calibration in made.calibrations:
        assert calibration.error_p90["dense"] > 0.1
        assert calibration.cluster_error_p90["dense"] < calibration.error_p90["dense"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_few_runs_of_ones_own_improve_the_rest(count: int) -> None:
    runs = runs_of()
    shipped = planted(TimeConstants())
    (own,) = refine(
        runs[:: len(runs) // count][:count], lambda *_: shipped, source="mine", date="2026-01-01"
    ).calibrations
    before, after = (np.median(np.abs(errors(runs, calibration))) for calibration in (shipped, own))
    assert after < before * (0.9 if count == 1 else 0.65)
    assert own.num_runs == count
    assert own.basis == Basis.CLUSTER
    assert own.model_error_p90["dense"][LARGE.slug] < own.error_p90["dense"]
    if count == 1:  # three that were left out in turn were farther off than expected: theirs widens all
        assert own.error_p90 == shipped.error_p90
    assert "starting from" in own.source


def test_refining_keeps_what_is_not_fitted() -> None:
    """Constants that no run is asked about are the catalog's, not the literature's."""
    shipped = planted(replace(TimeConstants(), optimizer_efficiency=0.33, context_parallel_overlap=0.11))
    runs = runs_of(shipped.time, shapes=(LARGE,))[:6]
    (own,) = refine(runs, lambda *_: shipped, source="mine", date="2026-01-01").calibrations
    assert own.time.optimizer_efficiency == 0.33
    assert own.time.context_parallel_overlap == 0.11
    assert np.max(np.abs(errors(runs, own))) < 0.01


def test_constants_at_the_ends_of_their_range_can_be_refined() -> None:
    """A fit prints 0.99996 as 1: the next one must not divide by zero."""
    shipped = planted(replace(TimeConstants(), tensor_parallel_overlap=1.0, expert_parallel_overlap=0.0))
    (own,) = refine(runs_of(shapes=(LARGE,))[:3], lambda *_: shipped, source="mine", date="2026-01-01").calibrations
    assert all(np.isfinite(getattr(own.time, name)) for name in FITTED)


def test_runs_without_a_step_time_fit_nothing() -> None:
    (run, *_) = runs_of()
    made = refine([replace(run, measured={})], lambda *_: planted(PLANTED), source="", date="2026-01-01")
    assert made.calibrations == ()


def test_many_constants_at_once_are_each_alone() -> None:
    """A fit prices one run under all perturbed constants in one call; uneven stages must not mix them up."""
    runs = runs_of(shapes=(LARGE,))
    run = next(run for run in runs if run.config.pipeline_parallel > 1)
    split = (run.problem.shape.num_hidden_layers - 1, 1)
    row = Row(replace(run, config=replace(run.config, layers_per_chunk=split)))
    thetas = PARAMETERS.vector(PLANTED) + np.linspace(-0.3, 0.3, 5)[:, None]
    together = row.log_predicted(thetas)
    alone = [float(row.log_predicted(theta[None])[0]) for theta in thetas]
    assert together == pytest.approx(alone)


def test_a_group_left_out_in_first_order_is_a_group_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick way to leave one of many groups out predicts it as fitting everything again without it does."""
    runs = [replace(run, group=run.id) for run in runs_of(noise=0.05, shapes=(LARGE,))[::2]]
    quick = {item.id: item.error for item in calibrate(runs, source="", date="2026-01-01").folds["group"]}
    monkeypatch.setattr("meshplan.planner.training.measured.unseen.FAR", 0.0)
    exact = {item.id: item.error for item in calibrate(runs, source="", date="2026-01-01").folds["group"]}
    assert max(abs(quick[name] - exact[name]) for name in exact) < 0.03
    assert np.mean([abs(quick[name] - exact[name]) for name in exact]) < 0.005
