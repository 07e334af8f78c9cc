"""The precisions of matrix products that a spec may ask for, and which hardware has them.

fp8 scales a tensor or a row; the others scale blocks: mxfp8 32 elements with one 8-bit exponent (OCP Microscaling
Formats 1.0), nvfp4 16 elements of 4 bits with one fp8 scale (NVIDIA Transformer Engine, NVFP4BlockScaling).
Both need block-scaled tensor cores, so a peak for fp8 or fp4 alone does not make a device fit.
"""

from __future__ import annotations

from meshplan.catalogs.hardware import Device

PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
# Generations whose tensor cores scale blocks, as Transformer Engine asks for them: compute capability 10.0 and up.
_BLOCK_SCALED_GENERATIONS = frozenset({"blackwell"})
# Of these, compute capability 12.0: Transformer Engine refuses MXFP8 there, and its NVFP4 recipe is made for 10.0
# (transformer_engine/pytorch/quantization.py, MXFP8 support check; NVIDIA/Megatron-LM issue 4175).
_COMPUTE_CAPABILITY_12 = frozenset({"rtx-pro-6000"})
# The peak that a block-scaled format runs at.
_UNITS = {"mxfp8": "fp8", "nvfp4": "fp4"}
# What a layer's cached low-precision copies of a weight take, bytes a parameter: one for the forward product, one
# transposed for the input gradient, elements and block scales (1 + 1/32, 1/2 + 1/16). Assumed: kept from the first
# micro-batch of a step to the last beside the 16-bit weight, as Transformer Engine does without fp8 or fp4 parameters.
_WEIGHT_COPIES = 2.0
WEIGHT_COPY_BYTES = {"mxfp8": _WEIGHT_COPIES * (1 + 1 / 32), "nvfp4": _WEIGHT_COPIES * (1 / 2 + 1 / 16)}


def missing_units(device: Device, precision: str) -> str | None:
    """Why ``device`` cannot multiply in ``precision``; None where it can."""
    peaks = device.peak_flops_per_s
    offered = ", ".join(sorted(peaks))
    if precision not in _UNITS:
        return None if precision in peaks else f"{device.name} has no {precision} units (it has {offered})"
    if device.architecture not in _BLOCK_SCALED_GENERATIONS or _UNITS[precision] not in peaks:
        generations = ", ".join(sorted(_BLOCK_SCALED_GENERATIONS))
        return (
            f"{precision} needs block-scaled tensor cores ({generations}); {device.name} is {device.architecture} "
            f"and has {offered}"
        )
    if device.slug in _COMPUTE_CAPABILITY_12:
        return f"Transformer Engine has no {precision} training for compute capability 12.0 ({device.name}): use fp8"
    return None
