"""The least work of a training step: what the degree search rules candidates out with."""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.training.estimator.compute import LOW_PRECISION, attention_peak_flops_per_s, gemm_curve
from meshplan.planner.training.estimator.expert_load import leaving_load
from meshplan.planner.training.estimator.flops import forward_flops_per_token
from meshplan.planner.training.problem.problem import TrainingWorkload

# Keeps the bound below the model: FLOPs count biases and routers, whose products the layer times leave out.
BOUND_SLACK = 0.99


def work_device_s(
    shape: ModelShape,
    machine: Machine,
    workload: TrainingWorkload,
    calibration: Calibration,
    *,
    recompute_full: bool = False,
) -> float:
    """Device-seconds that no plan can avoid: every step takes at least this over its number of devices.

    The matrix products and fused attention of one step at the full rates that the estimator knows, without tile
    padding, memory traffic, communication or bubble.

    Args:
        shape: the model.
        machine: the device's rates.
        workload: tokens, precision, phase.
        calibration: efficiencies.
        recompute_full: with the forward pass of the layers a second time.
    """
    constants = calibration.time
    low = workload.precision in LOW_PRECISION
    wide = "bf16" if low else workload.precision
    factor = constants.low_precision_efficiency if low else 1.0
    rate = gemm_curve(machine.device, workload.precision).rate_flops_per_s * constants.gemm_efficiency * factor
    head_rate = gemm_curve(machine.device, wide).rate_flops_per_s * constants.gemm_efficiency
    flops = forward_flops_per_token(shape, workload.sequence_length)
    experts_rate = rate * float(np.max(constants.expert_gemm_efficiency))
    experts = flops.experts * leaving_load(workload)
    layers = (flops.matrix - flops.experts) / rate + experts / experts_rate
    attention = 0.0
    if calibration.recipe.flash_attention:
        peak = attention_peak_flops_per_s(machine.device, workload)
        attention = flops.attention / (peak * float(np.max(constants.attention_efficiency)))
    passes = 2.0 if workload.phase.has_adapters else 3.0
    again = 1.0 if recompute_full else 0.0
    per_token = (passes + again) * layers + passes * flops.head / max(rate, head_rate) + (3.0 + again) * attention
    return float(BOUND_SLACK * workload.tokens_per_step * per_token)
