"""Recompute that ends where the backward pass has what it needs, and experts that have no others beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, HYBRID, LATENT, MOE, configured, problem_of
from training_constants import with_time

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import Phase, TrainingProblem


def part_s(problem: TrainingProblem, part: str, **choices: object) -> float:
    return price(problem, configured(problem, **choices)).breakdown_s[part]


def recompute_s(shape: ModelShape, mode: str, *, only_needed: bool, adapts_mlp: bool | None = None) -> float:
    problem = problem_of(shape, phase=Phase.PRETRAINING if adapts_mlp is None else Phase.LORA)
    recipe = replace(problem.calibration.recipe, recomputes_only_needed=only_needed)
    workload = replace(problem.workload, adapts_mlp=bool(adapts_mlp))
    problem = replace(problem, workload=workload, calibration=replace(problem.calibration, recipe=recipe))
    return part_s(problem, "recompute", activation_recompute=mode, data_parallel=8)


def test_the_last_product_of_a_layer_is_not_computed_again() -> None:
    """Of products that take as long as their FLOPs, a gated MLP's last one is a third of the MLP."""
    whole, needed = (recompute_s(DENSE, "full", only_needed=flag) for flag in (False, True))
    wider = replace(DENSE, intermediate_size=2 * DENSE.intermediate_size)
    whole_of_wider, needed_of_wider = (recompute_s(wider, "full", only_needed=flag) for flag in (False, True))
    assert (needed_of_wider - needed) / (whole_of_wider - whole) == pytest.approx(2.0 / 3.0, abs=0.1)


@pytest.mark.parametrize("shape", [DENSE, MOE, LATENT, HYBRID])
def test_it_never_takes_longer_and_leaves_other_recompute_as_it_is(shape: ModelShape) -> None:
    assert 0.0 < recompute_s(shape, "full", only_needed=True) < recompute_s(shape, "full", only_needed=False)
    for mode in ("none", "selective"):
        assert recompute_s(shape, mode, only_needed=True) == recompute_s(shape, mode, only_needed=False)


def test_an_adapter_of_the_last_matrix_needs_all_before_it() -> None:
    kept, left = (recompute_s(DENSE, "full", only_needed=True, adapts_mlp=adapts) for adapts in (True, False))
    assert kept == pytest.approx(recompute_s(DENSE, "full", only_needed=False, adapts_mlp=True))
    assert left < recompute_s(DENSE, "full", only_needed=False, adapts_mlp=False)


def test_a_single_expert_of_a_device_is_no_group() -> None:
    """What grouped products lose, an MLP of the same size does not; two experts lose it."""
    assert MOE.moe is not None
    seconds = []
    for lost in (1.0, 0.5):
        problem = problem_of(MOE, num_devices=MOE.moe.num_experts)
        problem = replace(problem, calibration=with_time(problem.calibration, expert_gemm_efficiency=lost))
        degrees = {"data_parallel": MOE.moe.num_experts}
        seconds.append(
            [part_s(problem, "experts", expert_parallel=MOE.moe.num_experts // local, **degrees) for local in (1, 2)]
        )
    (alone, together), (alone_slow, together_slow) = seconds
    assert alone == alone_slow
    assert together < together_slow
