"""Times of single inference operators on one device: measured surfaces where they exist, rooflines elsewhere.

Every method takes arrays that broadcast and returns seconds. A device that was not measured itself uses the surfaces of
one with the same chip, rescaled to its own memory bandwidth. Where there is no surface, a roofline is used whose
efficiencies are medians over the measured devices. Factors from the user's own device profile
(:mod:`meshplan.catalogs.surfaces.operator_scales`) multiply both. The evidence level says which was used.

- Matrix product m×k by k×n: :mod:`meshplan.catalogs.surfaces.gemm`; else t₀ + ((2·m·n·k/R)⁴ + (bytes/B)⁴)^¼.
- Attention: :mod:`meshplan.catalogs.surfaces.attention` and :mod:`~meshplan.catalogs.surfaces.latent_attention`; else
  decode reads the whole KV cache of its requests once, prefill multiplies attended pairs.
- Routed experts of one MoE layer: :mod:`meshplan.catalogs.surfaces.experts`; else the weights of the distinct experts
  hit, E·(1 − (1 − k/E)^T) under even routing, are read once; their products run at the rate of a grouped GEMM.
- Recurrences of linear attention: :mod:`meshplan.catalogs.surfaces.recurrent`; else as the mixers say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from meshplan.catalogs.efficiency import (
    ATTENTION_CLASSES,
    GEMM_CLASS,
    GEMM_RATE_SHARE,
    KERNEL_S,
    MEMORY_CLASS,
    MEMORY_SHARE,
    PREFILL_ATTENTION_SHARE,
    scale_of,
)
from meshplan.catalogs.hardware import Device, EvidenceLevel
from meshplan.catalogs.surfaces.attention import attention_surface
from meshplan.catalogs.surfaces.experts import (
    GATED_PRODUCTS,
    PLAIN_PRODUCTS,
    ExpertShape,
    distinct_experts,
    expert_surface,
    load_of_fullest,
)
from meshplan.catalogs.surfaces.files import FRAMEWORKS
from meshplan.catalogs.surfaces.gemm import gemm_surface
from meshplan.catalogs.surfaces.latent_attention import latent_attention_surface
from meshplan.catalogs.surfaces.recurrent import DECODE, RecurrentKernel, recurrent_kernel
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.quantization import SCHEMES

PREFILL_CLASS, DECODE_CLASS = ATTENTION_CLASSES

# Launch time of a quantised product, including the kernel that quantises its input. The surfaces of fp8 and nvfp4 were
# timed with unfused quantisation (t₀ 10 to 15 µs on Hopper and Blackwell); engines fuse it into the norm before.
QUANTIZED_KERNEL_S = 5e-6
# Rate of grouped products relative to a plain product of the same shape (routing, padding to tiles).
GROUPED_SHARE = 0.7
# Dtypes to fall back on where the device lacks one.
_PEAK_CHAIN = {
    "fp4": ("fp4", "fp8", "bf16", "fp16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "int8": ("int8", "bf16", "fp16"),
}
# Device → a device with the same chip whose kernels were measured, and its memory bandwidth (devices.yaml).
_SAME_CHIP = {
    "a100-sxm-40gb": ("a100-sxm-80gb", 2039e9),
    "a100-pcie-80gb": ("a100-sxm-80gb", 2039e9),
    "a800-sxm-80gb": ("a100-sxm-80gb", 2039e9),
    "h100-sxm-96gb": ("h100-sxm-80gb", 3350e9),
    "h100-pcie-80gb": ("h100-sxm-80gb", 3350e9),
    "h100-nvl-94gb": ("h100-sxm-80gb", 3350e9),
    "gh200": ("h200-sxm-141gb", 4800e9),
}
_KV_DTYPE = {2.0: "bf16", 1.0: "fp8"}
# Scheme → names of its fused MoE kernels; the first that was measured on a device is used.
_EXPERT_KERNELS = {
    "bf16": ("bfloat16",),
    "fp16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
    "mxfp8": ("fp8", "fp8_block"),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "w4a16": ("int4_wo",),
}
# Batch sizes, in tokens, up to which engines use their decode kernels and from which their prefill kernels.
FEW_TOKENS, MANY_TOKENS = 256.0, 2048.0
# Power-law exponent of the expert load under real routing, on the most loaded device; the mildest that was measured.
ROUTING_SKEW = 1.01


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak for a dtype, or for the one that the device uses in its place, FLOP/s."""
    chain = _PEAK_CHAIN.get(dtype, ("bf16", "fp16", "fp32"))
    return next(device.peak_flops_per_s[name] for name in chain if name in device.peak_flops_per_s)


def gemm_class(scheme: str) -> str:
    """Class of a scheme's products among the scales of a device: by the format of the multiplication."""
    dtype = SCHEMES[scheme].peak_dtype
    return f"{GEMM_CLASS}.{'nvfp4' if dtype == 'fp4' else dtype}"


def measured_as(device: Device) -> str:
    """Slug of the device whose measured times are used for this one."""
    return _SAME_CHIP.get(device.slug, (device.slug, 0.0))[0]


BLOCK_KERNEL = "fp8_block"  # surface of products whose weights are scaled in blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Operator times of one device under one engine.

    Args:
        device: the accelerator.
        engine: whose kernels are priced where they differ: ``vllm``, ``sglang``, ``trtllm``.
        expert_kernels: name of the surfaces of fused experts that were timed with the engine's release itself; empty:
            where there are none, the fastest for few tokens, the engine's newest for many.
        block_flops_per_s: at which products with weights in fp8 blocks are multiplied once their operands are read, at
            most.
    """

    device: Device
    engine: str
    expert_kernels: str = ""
    block_flops_per_s: float = math.inf

    def _own(self, name: str) -> float:
        """Measured over predicted time of a class of operators on this device; 1 where nothing was measured."""
        return scale_of(self.device.operator_scales, name)

    def _level(self, name: str, *, is_fitted: bool) -> EvidenceLevel:
        if name in self.device.operator_scales:
            return EvidenceLevel.MEASURED
        return EvidenceLevel.FITTED if is_fitted else EvidenceLevel.DATASHEET

    def _rescaled(self, seconds: FloatArray, flops: FloatArray | float, moved_bytes: FloatArray | float) -> FloatArray:
        """Seconds of the measured device converted to this one, by compute and memory bound."""
        if self.device.slug not in _SAME_CHIP:
            return seconds
        compute = flops / peak_flops_per_s(self.device, "bf16")
        own = moved_bytes / self.device.memory_bandwidth_bytes_per_s
        measured = moved_bytes / _SAME_CHIP[self.device.slug][1]
        return np.asarray(seconds * ((compute**4 + own**4) / (compute**4 + measured**4)) ** 0.25)

    # --- matrix products --------------------------------------------------------------------------------------------

    def gemm_level(self, scheme: str) -> EvidenceLevel:
        """How well a scheme's matrix products are known."""
        measured = gemm_surface(measured_as(self.device), SCHEMES[scheme].kernel)
        return self._level(gemm_class(scheme), is_fitted=measured is not None)

    def gemm_s(self, scheme: str, m: FloatArray, n: float, k: float) -> FloatArray:
        """m×k by k×n with weights in ``scheme``; ``m`` rises."""
        return self._own(gemm_class(scheme)) * self._gemm_s(scheme, m, n, k)

    def _gemm_s(self, scheme: str, m: FloatArray, n: float, k: float) -> FloatArray:
        kind = SCHEMES[scheme]
        surface = gemm_surface(measured_as(self.device), kind.kernel)
        if surface is None:
            return self._roofline_s(scheme, flops=2.0 * m * n * k, weights=n * k, activations=m * k, outputs=m * n)
        seconds = surface.time_s(m, n, k)
        moved = kind.weight_bytes * n * k + BYTES_16_BIT * m * (n + k)
        if kind.kernel == BLOCK_KERNEL and self.block_flops_per_s < math.inf:
            read_s = moved / self.device.memory_bandwidth_bytes_per_s
            seconds = np.maximum(seconds, read_s + 2.0 * m * n * k / self.block_flops_per_s)
        if kind.activation_bytes < BYTES_16_BIT:
            unfused = max(surface.base[3] - QUANTIZED_KERNEL_S, 0.0)
            least = KERNEL_S + moved / self.device.memory_bandwidth_bytes_per_s
            seconds = np.maximum(seconds - unfused, np.minimum(seconds, least))
        return np.maximum.accumulate(self._rescaled(seconds, 2.0 * m * n * k, moved))

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
        """Memory-bound work in a number of kernels, s."""
        seconds = kernels * KERNEL_S + moved_bytes / (MEMORY_SHARE * self.device.memory_bandwidth_bytes_per_s)
        return self._own(MEMORY_CLASS) * seconds

    def recurrence(self, kind: str, phase: str) -> RecurrentKernel | None:
        """The timed recurrence of a kind of layer; of a device with the same chip, by its memory where that binds."""
        kernel = recurrent_kernel(measured_as(self.device), kind, self.engine, phase)
        if kernel is None or phase != DECODE or self.device.slug not in _SAME_CHIP:
            return kernel
        share = self.device.memory_bandwidth_bytes_per_s / _SAME_CHIP[self.device.slug][1]
        return replace(kernel, elements_per_s=share * kernel.elements_per_s)

    # --- attention --------------------------------------------------------------------------------------------------

    def decode_attention_s(
        self,
        num_seqs: FloatArray,
        context: FloatArray,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_bytes: float,
        window: int | None = None,
    ) -> FloatArray:
        """One layer's attention of ``num_seqs`` single tokens over ``context`` tokens each."""
        seen = context if window is None else np.minimum(context, window)
        cache = num_seqs * seen * kv_heads * 2.0 * head_dim * kv_bytes
        flops = 4.0 * num_seqs * seen * heads * head_dim
        seconds = self._measured_s(
            attention_surface,
            "decode",
            batch=num_seqs,
            context=context,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=window or 0,
            kv_dtype=_KV_DTYPE.get(kv_bytes, "fp8"),
        )
        return self._decode_s(seconds, flops, cache)

    def latent_decode_attention_s(
        self, num_seqs: FloatArray, context: FloatArray, *, heads: int, width: int, rank: int, kv_bytes: float
    ) -> FloatArray:
        """Decode attention over a latent cache of ``width`` elements per token, of which ``rank`` are the values."""
        cache = num_seqs * context * width * kv_bytes
        flops = 2.0 * num_seqs * context * heads * (width + rank)
        kv_dtype = _KV_DTYPE.get(kv_bytes, "fp8")
        sizes = {"batch": num_seqs, "context": context, "num_heads": heads, "kv_dtype": kv_dtype}
        seconds = self._measured_s(latent_attention_surface, "decode", **sizes)
        return self._decode_s(seconds, flops, cache)

    def prefill_attention_s(
        self, prompt: FloatArray, *, heads: int, kv_heads: int, head_dim: int, window: int | None, pairs: FloatArray
    ) -> FloatArray:
        """One layer's causal attention of a whole prompt with ``pairs`` attended (query, key) pairs."""
        seconds = self._measured_s(
            attention_surface,
            "prefill",
            batch=1.0,
            context=0.0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            new_tokens=prompt,
            window=window or 0,
        )
        moved = BYTES_16_BIT * 4.0 * prompt * heads * head_dim
        return self._prefill_s(seconds, 4.0 * pairs * heads * head_dim, moved)

    def latent_prefill_attention_s(
        self, prompt: FloatArray, *, heads: int, query_dim: int, value_dim: int, pairs: FloatArray
    ) -> FloatArray:
        """Prefill attention with keys and values expanded from the latent cache."""
        sizes = {"batch": 1.0, "context": 0.0, "num_heads": heads, "new_tokens": prompt}
        seconds = self._measured_s(latent_attention_surface, "prefill", **sizes)
        moved = BYTES_16_BIT * 2.0 * prompt * heads * (query_dim + value_dim)
        return self._prefill_s(seconds, 2.0 * pairs * heads * (query_dim + value_dim), moved)

    def _measured_s(self, find: Callable[..., Any], phase: str, **sizes: Any) -> FloatArray | None:
        """Seconds from the surface of the engine's kernels, else of any; None where neither was measured."""
        slug = measured_as(self.device)
        surface = find(slug, phase, self.engine) or find(slug, phase)
        return None if surface is None else np.asarray(surface.time_s(**sizes))

    def _decode_s(self, measured: FloatArray | None, flops: FloatArray, cache_bytes: FloatArray) -> FloatArray:
        """Measured seconds on this device; without any, the slower of reading the cache and multiplying."""
        if measured is not None:
            return self._own(DECODE_CLASS) * self._rescaled(measured, flops, cache_bytes)
        memory = cache_bytes / (MEMORY_SHARE * self.device.memory_bandwidth_bytes_per_s)
        compute = flops / (PREFILL_ATTENTION_SHARE * peak_flops_per_s(self.device, "bf16"))
        return self._own(DECODE_CLASS) * np.asarray(KERNEL_S + np.maximum(memory, compute))

    def _prefill_s(self, measured: FloatArray | None, flops: FloatArray, moved_bytes: FloatArray) -> FloatArray:
        """Measured seconds on this device; without any, the multiplications alone."""
        if measured is not None:
            return self._own(PREFILL_CLASS) * self._rescaled(measured, flops, moved_bytes)
        compute = flops / (PREFILL_ATTENTION_SHARE * peak_flops_per_s(self.device, "bf16"))
        return self._own(PREFILL_CLASS) * (KERNEL_S + compute)

    def attention_level(self, role: Role) -> EvidenceLevel:
        """How well attention is known in a role."""
        phase, name = ("prefill", PREFILL_CLASS) if role is Role.PREFILL else ("decode", DECODE_CLASS)
        return self._level(name, is_fitted=attention_surface(measured_as(self.device), phase) is not None)

    # --- experts ----------------------------------------------------------------------------------------------------

    def _expert_kernels_s(
        self,
        scheme: str,
        tokens: FloatArray,
        shape: ExpertShape,
        *,
        skew: float = 0.0,
        load_factor: float | None = None,
        is_grouped: bool = False,
    ) -> FloatArray | None:
        """Fused experts: the fastest kernel measured on the device for few tokens, the engine's own for many.

        Engines choose special kernels for decode batches, which the tables of a single engine often lack. A release
        that was timed itself has its own times. Grouped products (DeepGEMM) are no engine's own, and were timed inside
        one. None without any table.
        """
        routing: dict[str, Any] = {"skew": skew, "load_factor": load_factor, "by_choice": True}
        for kernel in _EXPERT_KERNELS.get(scheme, ()):
            timed = expert_surface(measured_as(self.device), kernel, self.expert_kernels)
            if timed is not None and not is_grouped:
                return np.maximum.accumulate(timed.time_s(tokens, shape, **routing))
            fastest = expert_surface(measured_as(self.device), kernel)
            if fastest is None:
                continue
            few = fastest.time_s(tokens, shape, **routing)
            if is_grouped:
                return np.maximum.accumulate(few)
            own = expert_surface(measured_as(self.device), kernel, self.engine) if self.engine in FRAMEWORKS else None
            many = few if own is None else own.time_s(tokens, shape, **routing)
            share = np.clip(np.log(np.maximum(tokens, 1.0) / FEW_TOKENS) / np.log(MANY_TOKENS / FEW_TOKENS), 0.0, 1.0)
            return np.maximum.accumulate(few ** (1.0 - share) * many**share)
        return None

    def sent_experts_s(
        self,
        scheme: str,
        tokens: FloatArray,
        *,
        top_k: int,
        num_experts: int,
        local_experts: float,
        load_factor: float | None = None,
        **sizes: Any,
    ) -> FloatArray:
        """:meth:`experts_s` where the fullest device sees those alone that are sent to its experts.

        Tables were timed with every token of the group on each device, which sorts and sums them all: it is priced as
        one device with as many rows, without ``load_factor`` those of the power law's fullest device.
        """
        groups = max(round(num_experts / local_experts), 1)
        values = (float(top_k), float(num_experts), float(groups), ROUTING_SKEW)
        law = load_of_fullest(tokens, *(np.full_like(tokens, value) for value in values))
        received = tokens * top_k / groups * (law if load_factor is None else load_factor)
        own = max(round(local_experts), 1)
        return self.experts_s(scheme, received, top_k=1, num_experts=own, local_experts=local_experts, **sizes)

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
        load_factor: float | None = None,
        rows: FloatArray | None = None,
    ) -> FloatArray:
        """Routed experts of one layer on one device; ``tokens`` are all that choose among ``num_experts``.

        ``rows`` are those of the device's products where they are not those of its tokens
        (:mod:`meshplan.planner.serving.estimator.grouped_rows`): priced as evenly spread tokens that have as many.

        ``load_factor`` is the load of the fullest device over the mean, where it is known. Without it, the tables of a
        group of devices are those of a power law of exponent :data:`ROUTING_SKEW`, and rooflines take the mean.

        Tables with balanced routing hit min(k·T, E) experts with T tokens, independent choices hit E·(1 − (1 − k/E)^T):
        times are scaled by the ratio of the kernel's times for these numbers of experts.
        """
        groups = max(round(num_experts / local_experts), 1)
        if rows is not None:
            tokens, load_factor = rows * groups / top_k, 1.0
        distinct = distinct_experts(tokens, top_k=top_k, num_experts=num_experts)
        products = GATED_PRODUCTS if matrices == GATED_PRODUCTS else PLAIN_PRODUCTS
        kernels_s = partial(
            self._expert_kernels_s,
            scheme,
            shape=ExpertShape(hidden, max(round(width), 1), top_k, num_experts, groups, products),
            skew=ROUTING_SKEW if groups > 1 and load_factor is None else 0.0,
            load_factor=load_factor,
            is_grouped=rows is not None,
        )
        seconds = kernels_s(tokens)
        if seconds is not None:
            by_choice = kernels_s(distinct / top_k)
            by_table = kernels_s(np.minimum(tokens, num_experts / top_k))
            if (groups == 1 or load_factor is not None) and by_choice is not None and by_table is not None:
                seconds = seconds * np.minimum(by_choice / by_table, 1.0)
            hit = distinct / groups
            moved = SCHEMES[scheme].weight_bytes * hit * matrices * hidden * width
            flops = 2.0 * tokens * top_k / groups * (load_factor or 1.0) * matrices * hidden * width
            return self._own(gemm_class(scheme)) * self._rescaled(seconds, flops, moved)
        hit = local_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
        visits = (load_factor or 1.0) * tokens * top_k * local_experts / num_experts
        grouped = self._roofline_s(
            scheme,
            flops=2.0 * visits * matrices * hidden * width / GROUPED_SHARE,
            weights=hit * matrices * hidden * width,
            activations=visits * (hidden + width),
            outputs=visits * (hidden + (matrices - 1) * width),
        )
        return self._own(gemm_class(scheme)) * grouped + 3.0 * KERNEL_S  # routing, permutation, the second product
