"""Times of single operators of inference on one device: measured surfaces where there are, rooflines elsewhere.

Every method takes arrays that broadcast and returns seconds. What a device has no measurements for is priced by a
roofline whose efficiencies are the medians over the devices that have them; the evidence level says which it was.

- Matrix product m×k by k×n: :mod:`meshplan.catalogs.gemm_surfaces`; else t₀ + ((2·m·n·k/R)⁴ + (bytes/B)⁴)^¼.
- Decode attention reads the whole KV cache of its requests once; prefill attention multiplies attended pairs.
- Routed experts of one MoE layer: the weights of the distinct experts hit, E·(1 − (1 − k/E)^T) under even routing, are
  read once; their products run at the rate of a grouped GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.gemm_surfaces import gemm_surface
from meshplan.catalogs.hardware import Device, EvidenceLevel
from meshplan.planner.problems.quantization import BYTES_16_BIT, SCHEMES
from meshplan.planner.problems.serving import Role

FloatArray = NDArray[np.float64]

# Launch and tail of a kernel inside a replayed graph: median t₀ of the 16-bit GEMM surfaces (2.1 to 4.9 µs).
KERNEL_S = 2.5e-6
# Shares of the datasheet's rates that large products attain, medians over the shipped surfaces' devices.
GEMM_RATE_SHARE = 0.76
MEMORY_SHARE = 0.8
# FlashAttention-2/3 forward over the dense 16-bit peak (arXiv:2407.08608, figure 5: 0.55 to 0.75 at long sequences).
PREFILL_ATTENTION_SHARE = 0.5
# Grouped products over a plain product of the same shape (routing, padding to tiles).
GROUPED_SHARE = 0.7
# Dtypes to fall back on where the device lacks one.
_PEAK_CHAIN = {
    "fp4": ("fp4", "fp8", "bf16", "fp16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "int8": ("int8", "bf16", "fp16"),
}


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak for a dtype, or for what the device runs instead, FLOP/s."""
    chain = _PEAK_CHAIN.get(dtype, ("bf16", "fp16", "fp32"))
    return next(device.peak_flops_per_s[name] for name in chain if name in device.peak_flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Operator times of one device under one engine.

    Args:
        device: the accelerator.
        engine: whose kernels are priced where they differ: ``vllm``, ``sglang``, ``trtllm``.
    """

    device: Device
    engine: str

    # --- matrix products --------------------------------------------------------------------------------------------

    def gemm_level(self, scheme: str) -> EvidenceLevel:
        """How well a scheme's matrix products are known."""
        measured = gemm_surface(self.device.slug, SCHEMES[scheme].kernel)
        return EvidenceLevel.DATASHEET if measured is None else EvidenceLevel.FITTED

    def gemm_s(self, scheme: str, m: FloatArray, n: float, k: float) -> FloatArray:
        """m×k by k×n with weights in ``scheme``."""
        surface = gemm_surface(self.device.slug, SCHEMES[scheme].kernel)
        if surface is not None:
            return np.maximum.accumulate(surface.time_s(m, n, k))
        return self._roofline_s(scheme, flops=2.0 * m * n * k, weights=n * k, activations=m * k, outputs=m * n)

    def _roofline_s(
        self,
        scheme: str,
        *,
        flops: FloatArray,
        weights: FloatArray | float,
        activations: FloatArray,
        outputs: FloatArray,
    ) -> FloatArray:
        kind = SCHEMES[scheme]
        compute = flops / (GEMM_RATE_SHARE * peak_flops_per_s(self.device, kind.peak_dtype))
        moved = kind.weight_bytes * weights + kind.activation_bytes * activations + BYTES_16_BIT * outputs
        memory = moved / (MEMORY_SHARE * self.device.memory_bandwidth_bytes_per_s)
        return np.asarray(KERNEL_S + (compute**4 + memory**4) ** 0.25)

    def memory_op_s(self, moved_bytes: FloatArray, *, kernels: float) -> FloatArray:
        """Memory-bound work in a number of kernels."""
        return kernels * KERNEL_S + moved_bytes / (MEMORY_SHARE * self.device.memory_bandwidth_bytes_per_s)

    # --- attention --------------------------------------------------------------------------------------------------

    def decode_attention_s(
        self, num_seqs: FloatArray, context: FloatArray, *, heads: int, kv_heads: int, head_dim: int, kv_bytes: float
    ) -> FloatArray:
        """One layer's attention of ``num_seqs`` single tokens over ``context`` tokens each."""
        cache = num_seqs * context * kv_heads * 2.0 * head_dim * kv_bytes
        flops = 4.0 * num_seqs * context * heads * head_dim
        return self._attention_s(flops, cache)

    def latent_decode_attention_s(
        self, num_seqs: FloatArray, context: FloatArray, *, heads: int, width: int, rank: int, kv_bytes: float
    ) -> FloatArray:
        """The same over a latent cache of ``width`` elements a token, of which ``rank`` are the values."""
        cache = num_seqs * context * width * kv_bytes
        flops = 2.0 * num_seqs * context * heads * (width + rank)
        return self._attention_s(flops, cache)

    def prefill_attention_s(self, pairs: FloatArray, *, heads: int, query_dim: int, value_dim: int) -> FloatArray:
        """One layer's attention over ``pairs`` attended (query, key) pairs."""
        flops = 2.0 * pairs * heads * (query_dim + value_dim)
        return KERNEL_S + flops / (PREFILL_ATTENTION_SHARE * peak_flops_per_s(self.device, "bf16"))

    def _attention_s(self, flops: FloatArray, cache_bytes: FloatArray) -> FloatArray:
        memory = cache_bytes / (MEMORY_SHARE * self.device.memory_bandwidth_bytes_per_s)
        compute = flops / (PREFILL_ATTENTION_SHARE * peak_flops_per_s(self.device, "bf16"))
        return np.asarray(KERNEL_S + np.maximum(memory, compute))

    def attention_level(self, role: Role) -> EvidenceLevel:
        """How well attention is known in a role."""
        del role  # one roofline for all, so far
        return EvidenceLevel.DATASHEET

    # --- experts ----------------------------------------------------------------------------------------------------

    def experts_s(
        self,
        scheme: str,
        tokens: FloatArray,
        *,
        hidden: int,
        width: float,
        matrices: int,
        top_k: int,
        num_experts: int,
        local_experts: float,
    ) -> FloatArray:
        """Routed experts of one layer on one device; ``tokens`` are all that choose among ``num_experts``."""
        hit = local_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
        visits = tokens * top_k * local_experts / num_experts
        grouped = self._roofline_s(
            scheme,
            flops=2.0 * visits * matrices * hidden * width / GROUPED_SHARE,
            weights=hit * matrices * hidden * width,
            activations=visits * (hidden + width),
            outputs=visits * (hidden + (matrices - 1) * width),
        )
        return grouped + 3.0 * KERNEL_S  # routing, permutation, the second product


def distinct_experts(tokens: FloatArray, *, top_k: int, num_experts: int) -> FloatArray:
    """Expected number of distinct experts that ``tokens`` visit under even routing: E·(1 − (1 − k/E)^T).

    >>> distinct_experts(np.array([1.0, 1e6]), top_k=8, num_experts=256).round(3).tolist()
    [8.0, 256.0]
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
