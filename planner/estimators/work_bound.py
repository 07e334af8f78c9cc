"""The least work of a training step: what the degree search rules candidates out with."""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.calibration import Calibration
from meshplan.catalogs.model_shapes import ModelShape
from meshplan.planner.estimators.compute import LOW_PRECISION, attention_peak_flops_per_s, gemm_curve
from meshplan.planner.estimators.flops import forward_flops_per_token
from meshplan.planner.problems.machine import Machine
from meshplan.planner.problems.training import Phase, TrainingWorkload

# Keeps the bound below the model: FLOPs count biases and routers, whose products the layer times leave out.
BOUND_SLACK = 0.99


def work_device_s(shape: ModelShape, machine: Machine, workload: TrainingWorkload, calibration: Calibration) -> float:
    """Device-seconds that no plan can avoid: every step takes at least this over its number of devices.

    The matrix products and fused attention of one step at the full rates that the estimator knows, without tile
    padding, memory traffic, recompute, communication or bubble.
    """
    constants = calibration.time
    curve = gemm_curve(machine.device, workload.precision)
    low = constants.low_precision_efficiency if workload.precision in LOW_PRECISION else 1.0
    rate = curve.rate_flops_per_s * constants.gemm_efficiency * low
    wide = "bf16" if workload.precision in LOW_PRECISION else workload.precision
    head_rate = gemm_curve(machine.device, wide).rate_flops_per_s * constants.gemm_efficiency
    passes = 2.0 if workload.phase is Phase.LORA else 3.0
    factor = max(1.0, float(np.max(constants.expert_gemm_efficiency)))
    flops = forward_flops_per_token(shape, workload.sequence_length)
    attention_rate = attention_peak_flops_per_s(machine.device, workload) * constants.attention_efficiency
    per_token = passes * (flops.matrix / (rate * factor) + flops.head / max(rate, head_rate))
    if calibration.recipe.flash_attention:
        per_token += 3.0 * flops.attention / attention_rate
    return float(BOUND_SLACK * workload.tokens_per_step * per_token)
