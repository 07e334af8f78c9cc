"""Times of recurrences: the kernels that update the states of linear-attention and state-space layers.

A decode reads a sequence's state of one layer, multiplies it by its decay, adds the token's outer product and writes it
back; a prompt is computed in chunks. Both take a time in proportion to E = tokens × elements of the state that each of
them updates, after a start::

    t = t₀ + E/r

``recurrent_kernels.json`` holds t₀ and r by device, kind of layer, engine and phase, fitted to published kernel times
(:mod:`meshplan.profiler.shipped.fit_recurrent`). In a prompt r is below what the matrix units allow: chunks of one
sequence follow one another. The convolution before the recurrence is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.surfaces.files import Rows, SurfaceFile
from meshplan.catalogs.surfaces.grid import FloatArray

DECODE, PREFILL = "decode", "prefill"
# Share of the matrix units' peak that a chunked scan reaches where its kernel was not timed: Mamba-2's, by Triton, on
# H100: 12.6 million tokens/s of 128 heads of 64 × 128 in prompts of 8,192 (vLLM pull request 27299, "Original":
# granite-4.0-h-small), at 8.45 MFLOP a token as mamba2.py counts them.
SCAN_SHARE = 0.108
# FLOP/s that such a scan reaches at most. Chunks that follow one another gain less from a faster chip than its peak: on
# B200, GB200, B300 and GB300 timed prompts of gated and Kimi delta rules run 1.32 times as fast as on H100 and H200
# (recurrent_kernels.json: median of 20 ratios of three engines, 1.17 to 1.80), where the peak is 2.3 to 2.5 times as
# high. So much more than on an H100, 0.108 of 989 TFLOP/s.
MOST_SCAN_FLOPS_PER_S = 1.32 * 0.108 * 989e12
# Backward pass over forward pass of a gated delta rule: flash-linear-attention 0.5.1's Triton kernels, one sequence of
# 8,192 or 32,768 tokens, 8 to 32 value heads of 128, on H200 and GB200: 2.94 to 3.15, median of ten
# (github.com/QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt and _GB200.txt).
DELTA_BACKWARD_RATIO = 3.04
KERNELS = SurfaceFile("recurrent_kernels.json", key=("device", "kind", "framework", "phase"), listed="kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentKernel:
    """One recurrence on one device.

    Args:
        start_s: t₀, launch and tail.
        elements_per_s: r, state elements updated a second.
    """

    start_s: float
    elements_per_s: float

    def time_s(self, elements: FloatArray) -> FloatArray:
        """Seconds to update so many elements, each token's counted.

        >>> RecurrentKernel(start_s=1.0, elements_per_s=4.0).time_s(8.0)
        3.0
        """
        return self.start_s + elements / self.elements_per_s


def recurrent_kernel(device: str, kind: str, framework: str, phase: str) -> RecurrentKernel | None:
    """The kernel of a kind of layer in an engine; None where it was not measured."""
    return KERNELS.find(_kernel, device, kind, framework, phase)


def scan_flops_per_s(peak_flops_per_s: float) -> float:
    """FLOP/s of a chunked scan that multiplies matrices and was not timed, on a device of such a peak.

    >>> scan_flops_per_s(1e15) / 1e12, scan_flops_per_s(2.25e15) == MOST_SCAN_FLOPS_PER_S
    (108.0, True)
    """
    return min(SCAN_SHARE * peak_flops_per_s, MOST_SCAN_FLOPS_PER_S)


def _kernel(rows: Rows) -> RecurrentKernel:
    (row,) = rows
    return RecurrentKernel(start_s=row["start_s"], elements_per_s=row["elements_per_s"])
