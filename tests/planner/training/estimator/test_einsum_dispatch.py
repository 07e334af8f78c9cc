"""Experts whose tokens masks deal out: FLOP of the einsums counted by their letters, and nothing grouped or sorted."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from core_cases import MOE, configured, problem_of

from meshplan.catalogs.constants.training import Calibration, TimeConstants
from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.training.estimator.compute import ComputeModel
from meshplan.planner.training.estimator.operators.einsum_dispatch import BACKWARD_BYTES, FORWARD_BYTES, einsum_dispatch
from meshplan.planner.training.estimator.operators.products import gemm_curve
from meshplan.planner.training.estimator.priced import candidates_of

GROUP = 1024
# What the products of the two einsums have as inner and outer letters: forward, then gradients.
FORWARD = ("GSEC,GSM->EGCM", "GSEC,GECM->GSM")
BACKWARD = ("GSEC,EGCM->GSM", "GSEC,GSM->GECM", "GSM,GECM->GSEC")


def experts() -> MixtureOfExperts:
    assert MOE.moe is not None
    return MOE.moe


def model(group_size: int = GROUP, **constants: float) -> ComputeModel:
    """A device whose memory is so fast that only FLOP are left, unless its constants say otherwise."""
    time = TimeConstants(**{"gemm_efficiency": 1.0, "memory_op_efficiency": 1e9, **constants})
    problem = problem_of(MOE)
    problem = replace(problem, calibration=Calibration(framework="any", architecture="any", time=time))
    workload = replace(problem.workload, practice=replace(problem.workload.practice, expert_group_size=group_size))
    return ComputeModel(
        shape=problem.shape,
        device=problem.machine.device,
        workload=workload,
        candidates=candidates_of(problem, configured(problem)),
        calibration=problem.calibration,
    )


def flop(einsum: str, tokens: float) -> float:
    """Multiply-adds of a product are those of all letters that it has, each twice."""
    moe = experts()
    capacity = moe.num_experts_per_token * GROUP / moe.num_experts
    sizes = {"G": tokens / GROUP, "S": GROUP, "E": moe.num_experts, "C": capacity, "M": MOE.hidden_size}
    return 2.0 * prod(sizes[letter] for letter in set(einsum) & set(sizes))


def test_products_take_the_flop_of_their_letters_and_masks_pass_through_memory() -> None:
    made = model()
    tokens = np.array([8.0 * GROUP])
    cost = einsum_dispatch(made, experts(), tokens, GROUP)
    curve = gemm_curve(made.device, made.workload.precision)
    least_s, started = 1.0 / curve.rate_flops_per_s, 1.0 + curve.inner_saturation / MOE.hidden_size
    for found, einsums in ((cost.forward_s, FORWARD), (cost.backward_s, BACKWARD)):
        counted_s = sum(flop(einsum, float(tokens[0])) for einsum in einsums) * least_s
        assert counted_s <= float(found[0]) <= counted_s * started * 1.1
    slow = einsum_dispatch(model(memory_op_efficiency=1e-6), experts(), tokens, GROUP)
    assert float(slow.backward_s[0] / slow.forward_s[0]) == pytest.approx(BACKWARD_BYTES / FORWARD_BYTES, rel=1e-2)


def test_experts_that_masks_deal_out_are_neither_grouped_nor_launched_one_by_one() -> None:
    def experts_s(group_size: int, **constants: float) -> float:
        return float(model(group_size, **constants).experts(experts()).total_s[0])

    for constants in ({"expert_gemm_efficiency": 0.1}, {"expert_product_s": 1.0}):
        assert experts_s(GROUP, **constants) == experts_s(GROUP)
        assert experts_s(0, **constants) > experts_s(0)
    assert experts_s(2 * GROUP) > experts_s(GROUP)
