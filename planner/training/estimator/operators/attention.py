"""Fused attention on a device: the time of a layer's scores and weighted values, by the kernels of a library.

A token's query meets c keys on the mean, each a multiply-add of w elements in the scores and of w in the values; with
tiles computed whole it is c + 150 keys (:data:`~meshplan.catalogs.constants.attention_kernels.TILE_KEYS`)::

    forward = 4·T·(c + 150)·w/t / (peak·f·η)         backward = 2.5 × the FLOPs of that, at peak·b·η

T tokens on the device, t tensor-parallel ranks, f and b the shares of the dense 16-bit peak that the library's kernels
reach alone on this generation, η the calibrated ``attention_kernel_efficiency``.

*Windows as masks* (``masks_windows`` of a recipe). transformers hands PyTorch's attention a mask wherever a window is
no longer than the sequence (5.17, masking_utils.py, ``_ignore_causal_mask_sdpa``: only ``kv_length <
local_attention_size`` may leave it out), and no flash kernel takes one (its docstring there; PyTorch's documents of
scaled_dot_product_attention). The memory-efficient kernel that is left multiplies the whole square of s keys, and
reads of the mask one element a score, for every head and pass::

    forward = 4·T·s·a·d/t / (peak·f·η) + 2·T·s·a/t / memory rate

The call makes the additive mask from the boolean one, and its backward pass keeps it: 2·m·s² bytes a layer and
micro-batch of m sequences (PyTorch, transformers/attention.cpp, ``convert_boolean_attn_mask``; derivatives.yaml,
``_scaled_dot_product_efficient_attention``, saves ``attn_bias``).
"""

from __future__ import annotations

from meshplan.catalogs.constants.attention_kernels import AttentionKernel, attention_kernel
from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.operators.products import Cost, attention_peak_flops_per_s
from meshplan.planner.training.problem.problem import TrainingWorkload

# Backward over forward FLOPs of fused attention: five products against two (arXiv:2205.14135, algorithm 4).
FLASH_BACKWARD_RATIO = 2.5
# Whose kernels take a mask, in PyTorch.
MASKED_LIBRARY = "memory-efficient"


def window_is_mask(recipe: FrameworkRecipe, window: int | None, sequence_length: int) -> bool:
    """Whether attention within a window gets it as a mask, and so multiplies all keys."""
    return recipe.masks_windows and window is not None and window <= sequence_length


def kernel_of(
    shape: ModelShape, device: Device, calibration: Calibration, *, is_masked: bool = False
) -> AttentionKernel:
    """The kernel that a framework's library has for this device and the model's heads."""
    library = MASKED_LIBRARY if is_masked else calibration.recipe.attention_library
    return attention_kernel(library, device.architecture).of_heads(shape.head_dim)


def fused_attention(
    flops: FloatArray,
    shape: ModelShape,
    device: Device,
    workload: TrainingWorkload,
    calibration: Calibration,
    *,
    is_masked: bool = False,
) -> Cost:
    """Forward and backward of fused attention.

    Args:
        flops: of its forward pass, whole tiles included.
        shape: the model.
        device: the accelerator.
        workload: its precision.
        calibration: the framework's library, and what a step leaves of a kernel's rate.
        is_masked: by the kernel that takes a mask.
    """
    kernel = kernel_of(shape, device, calibration, is_masked=is_masked)
    rate = attention_peak_flops_per_s(device, workload) * calibration.time.attention_kernel_efficiency
    return Cost(
        forward_s=flops / (rate * kernel.forward_share),
        backward_s=FLASH_BACKWARD_RATIO * flops / (rate * kernel.backward_share),
    )


def forward_time_share(shape: ModelShape, device: Device, calibration: Calibration) -> float:
    """Forward share of the time of fused attention: what full recompute repeats of it."""
    kernel = kernel_of(shape, device, calibration)
    return 1.0 / (1.0 + FLASH_BACKWARD_RATIO * kernel.forward_share / kernel.backward_share)
