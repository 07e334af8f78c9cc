"""Matrix products on a device: the rate that each precision runs at, and the time of one product by its size.

(m, n, k): ((2·⌈m⌉·⌈n⌉·(k + k₀)/(R·η))⁴ + (bytes/B)⁴)^¼ with m, n rounded up to the tile; R, B, k₀ from the device's
:class:`GemmCurve`, η the calibrated efficiency.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.constants.training import Constant
from meshplan.catalogs.hardware import Device
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.problem.problem import TrainingWorkload

# Tile of the GEMM kernels in m and n (CUTLASS default on tensor cores).
GEMM_TILE = 128
BYTES_32_BIT = 4.0
LOW_PRECISION = frozenset({"fp8", "mxfp8", "nvfp4", "int8"})
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "mxfp8": 1.03, "nvfp4": 0.56}
# The peak that a precision's matrix products run at. fp32 training runs as TF32 where the device has it: NVIDIA's
# PyTorch containers switch it on.
PEAK_DTYPE = {"mxfp8": "fp8", "nvfp4": "fp4", "fp32": "tf32"}
# Without a measured curve: median over the devices with one of rate / dense peak (bf16 on A100, H100, H200, B200,
# GB200, L40S: 0.88 0.82 0.82 0.70 0.67 0.59), and of the saturation length.
DEFAULT_RATE_FRACTION = 0.76
DEFAULT_INNER_SATURATION = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Rate of matrix products on a device, by size.

    Args:
        rate_flops_per_s: rate of a large product, FLOP/s.
        bandwidth_bytes_per_s: rate at which operands are read and written, bytes/s.
        inner_saturation: k₀, inner dimension whose arithmetic takes as long as the start of the kernel.
        is_fitted: fitted to measured products, else derived from the datasheet.
    """

    rate_flops_per_s: float
    bandwidth_bytes_per_s: float
    inner_saturation: float
    is_fitted: bool


def gemm_curve(device: Device, precision: str) -> GemmCurve:
    """The device's curve for a precision: fitted where the catalog has one, else from the datasheet.

    A device without the precision (fp8 on A100) computes it at its 16-bit rate.
    """
    dtype = PEAK_DTYPE.get(precision, precision)
    for name in (precision, dtype):
        if name in device.gemm_curves:
            rate, bandwidth, saturation = device.gemm_curves[name]
            return GemmCurve(
                rate_flops_per_s=rate, bandwidth_bytes_per_s=bandwidth, inner_saturation=saturation, is_fitted=True
            )
    return GemmCurve(
        rate_flops_per_s=DEFAULT_RATE_FRACTION * peak_flops_per_s(device, precision),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        inner_saturation=DEFAULT_INNER_SATURATION,
        is_fitted=False,
    )


def peak_flops_per_s(device: Device, precision: str) -> float:
    """Dense peak for a precision, or for the nearest one that the device supports, FLOP/s."""
    peaks = device.peak_flops_per_s
    dtype = PEAK_DTYPE.get(precision, precision)
    chain = {
        "fp4": ("fp4", "fp8", "bf16", "fp16"),
        "fp8": ("fp8", "bf16", "fp16"),
        "bf16": ("bf16", "fp16", "fp32"),
        "fp16": ("fp16", "bf16", "fp32"),
        "tf32": ("tf32", "fp32", "bf16", "fp16"),
    }.get(dtype, (dtype, "bf16", "fp16"))
    return next(peaks[name] for name in chain if name in peaks)


def activation_bytes(workload: TrainingWorkload) -> float:
    """Bytes of one element of the activations: 16 bits, or 32 in fp32 training."""
    return BYTES_32_BIT if workload.precision == "fp32" else BYTES_16_BIT


def attention_peak_flops_per_s(device: Device, workload: TrainingWorkload) -> float:
    """Peak that attention efficiencies refer to, FLOP/s: fp32 in fp32 training, else 16 bits."""
    return peak_flops_per_s(device, "fp32" if workload.precision == "fp32" else "bf16")


def gemm_s(
    curve: GemmCurve, m: FloatArray, n: FloatArray, k: FloatArray, *, efficiency: Constant, element_bytes: float
) -> FloatArray:
    """Seconds of one matrix product m×k by k×n, with the tile and memory terms of the module docstring."""
    rows, columns = np.ceil(m / GEMM_TILE) * GEMM_TILE, np.ceil(n / GEMM_TILE) * GEMM_TILE
    compute = 2.0 * rows * columns * (k + curve.inner_saturation) / (curve.rate_flops_per_s * efficiency)
    # Products of narrow formats write 16 bits, those of 32 bits write 32.
    written_bytes = max(element_bytes, BYTES_16_BIT)
    moved = (element_bytes * (m * k + k * n) + written_bytes * m * n) / curve.bandwidth_bytes_per_s
    compute, moved = compute * compute, moved * moved  # NumPy takes six times as long for a fourth power
    return np.sqrt(np.sqrt(compute * compute + moved * moved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Forward and backward time of some work on one micro-batch, s, [n] each."""

    forward_s: FloatArray
    backward_s: FloatArray

    def __add__(self, other: Cost) -> Cost:
        return Cost(forward_s=self.forward_s + other.forward_s, backward_s=self.backward_s + other.backward_s)

    def scaled(self, factor: Constant) -> Cost:
        """The same work ``factor`` times."""
        return Cost(forward_s=self.forward_s * factor, backward_s=self.backward_s * factor)

    @property
    def total_s(self) -> FloatArray:
        """Forward and backward."""
        return self.forward_s + self.backward_s
