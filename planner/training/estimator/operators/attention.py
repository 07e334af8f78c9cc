"""Fused attention on a device: the time of a layer's scores and weighted values, by the kernels of a library.

A token's query meets c keys on the mean, each a multiply-add of w elements in the scores and of w in the values; with
tiles computed whole it is c + 150 keys (:data:`~meshplan.catalogs.constants.attention_kernels.TILE_KEYS`)::

    forward = 4·T·(c + 150)·w/t / (peak·f·η)         backward = 2.5 × the FLOPs of that, at peak·b·η

T tokens on the device, t tensor-parallel ranks, f and b the shares of the dense 16-bit peak that the library's kernels
reach alone on this generation, η the calibrated ``attention_kernel_efficiency``.
"""

from __future__ import annotations

from meshplan.catalogs.constants.attention_kernels import AttentionKernel, attention_kernel
from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.operators.products import Cost, attention_peak_flops_per_s
from meshplan.planner.training.problem.problem import TrainingWorkload

# Backward over forward FLOPs of fused attention: five products against two (arXiv:2205.14135, algorithm 4).
FLASH_BACKWARD_RATIO = 2.5


def kernel_of(shape: ModelShape, device: Device, calibration: Calibration) -> AttentionKernel:
    """The kernel that a framework's library has for this device and the model's heads."""
    kernel = attention_kernel(calibration.recipe.attention_library, device.architecture)
    return kernel.of_heads(shape.head_dim)


def fused_attention(
    flops: FloatArray, shape: ModelShape, device: Device, workload: TrainingWorkload, calibration: Calibration
) -> Cost:
    """Forward and backward of fused attention.

    Args:
        flops: of its forward pass, whole tiles included.
        shape: the model.
        device: the accelerator.
        workload: its precision.
        calibration: the framework's library, and what a step leaves of a kernel's rate.
    """
    kernel = kernel_of(shape, device, calibration)
    rate = attention_peak_flops_per_s(device, workload) * calibration.time.attention_kernel_efficiency
    return Cost(
        forward_s=flops / (rate * kernel.forward_share),
        backward_s=FLASH_BACKWARD_RATIO * flops / (rate * kernel.backward_share),
    )


def forward_time_share(shape: ModelShape, device: Device, calibration: Calibration) -> float:
    """Forward share of the time of fused attention: what full recompute repeats of it."""
    kernel = kernel_of(shape, device, calibration)
    return 1.0 / (1.0 + FLASH_BACKWARD_RATIO * kernel.forward_share / kernel.backward_share)
