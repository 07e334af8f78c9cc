"""Numeric formats of a served model: of stored weights, of activations, and of the multiplication.

A *scheme* names the format of one kind of weights and how it is multiplied. Weight-only schemes (``w8a16``,
``w4a16``) read few bytes and multiply in 16 bits: they make decode, which is bound by the weights' bytes, faster and
leave prefill as it is. Full schemes (``fp8``, ``nvfp4`` …) multiply in the narrow format as well.

*Of checkpoints that people name.* A model that is named without a format is planned as its publisher stores it: in 16
bits, unless :data:`PUBLISHED` says otherwise. A checkpoint whose name ends in a format (``Qwen3-32B-FP8``) holds that;
whether its fp8 is scaled in blocks, which an engine refuses to cut (``tensor_parallel`` 8 of Qwen3-235B-A22B-FP8), the
name does not tell, its publisher does. A ``config.json`` at hand is read instead
(:mod:`meshplan.catalogs.models.stored_formats`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.constants import BYTES_16_BIT

# Bytes of scales per value: fp8 blocks of 128 × 128 with an fp32 scale; MX formats
# 32 values with one byte (OCP Microscaling 1.0, 2023); nvfp4 16 values with one byte; AWQ groups of 128 with a
# 16-bit scale and a 4-bit zero point (arXiv:2306.00978).
# Formats of GGUF files: bits of a weight of Llama-3.1-8B, mean over the whole file, because most of them mix formats by
# tensor (llama.cpp, tools/quantize/README.md, table "Llama-3.1-8B", read 2026-11-25); q4_0 by its block of 32 values in
# 18 bytes (ggml-common.h).
_GGUF_BITS = {
    "q8_0": 8.5008,
    "q6_k": 6.5633,
    "q5_k_m": 5.7036,
    "q4_k_m": 4.8944,
    "q4_0": 4.5,
    "iq4_xs": 4.4597,
    "q3_k_s": 3.6429,
    "q2_k": 3.1593,
}
_MX_SCALE = 1.0 / 32.0
_NVFP4_SCALE = 1.0 / 16.0
_GROUP_SCALE = 2.5 / 128.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to store and multiply weights.

    Args:
        name: as in a spec.
        weight_bytes: bytes of one stored weight, scales included.
        activation_bytes: bytes of one activation element as the product reads it.
        peak_dtype: format whose peak rate bounds the product.
        kernel: name of the measured GEMM kernels (:mod:`meshplan.catalogs.surfaces.gemm`).
        needs: dtypes of which the device must have one to run the scheme natively; empty where any device does.
        holds_ends: embedding and LM head are stored in it, too; publishers of other formats leave them in 16 bits.
    """

    name: str
    weight_bytes: float
    activation_bytes: float
    peak_dtype: str
    kernel: str
    needs: tuple[str, ...] = ()
    holds_ends: bool = False


def _scheme(name: str, weight: float, activation: float, peak: str, kernel: str, *needs: str) -> Scheme:
    return Scheme(
        name=name, weight_bytes=weight, activation_bytes=activation, peak_dtype=peak, kernel=kernel, needs=needs
    )


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _scheme("bf16", 2.0, 2.0, "bf16", "bfloat16"),
        _scheme("fp16", 2.0, 2.0, "bf16", "bfloat16"),
        _scheme("fp8", 1.0, 1.0, "fp8", "fp8", "fp8"),
        _scheme("fp8_block", 1.0, 1.0, "fp8", "fp8_block", "fp8"),
        _scheme("mxfp8", 1.0 + _MX_SCALE, 1.0, "fp8", "fp8", "fp8"),
        _scheme("nvfp4", 0.5 + _NVFP4_SCALE, 0.5, "fp4", "nvfp4", "fp4"),
        _scheme("mxfp4", 0.5 + _MX_SCALE, 2.0, "bf16", "int4_wo"),
        _scheme("int8", 1.0, 1.0, "int8", "sq", "int8"),
        _scheme("w8a16", 1.0, 2.0, "bf16", "int8_wo"),
        _scheme("w4a16", 0.5 + _GROUP_SCALE, 2.0, "bf16", "int4_wo"),
        # Multiplied by kernels of llama.cpp that no table has.
        *(
            Scheme(
                name=name,
                weight_bytes=bits / 8.0,
                activation_bytes=2.0,
                peak_dtype="bf16",
                kernel="gguf",
                holds_ends=True,
            )
            for name, bits in _GGUF_BITS.items()
        ),
    )
}
GGUF_SCHEMES = tuple(_GGUF_BITS)
# q8_0 and q4_0: blocks of 32 values with a 16-bit scale (ggml-common.h).
KV_CACHE_BYTES: Mapping[str, float] = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5 + _NVFP4_SCALE,
    "q8_0": 34.0 / 32.0,
    "q4_0": 18.0 / 32.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Formats of a served model.

    Args:
        attention: scheme of the attention projections (checkpoints often leave them wider).
        mlp: scheme of dense MLPs and shared experts.
        experts: scheme of the routed experts.
        kv_cache: dtype of keys and values, a key of :data:`KV_CACHE_BYTES`.
    """

    attention: str
    mlp: str
    experts: str
    kv_cache: str = "bf16"

    @classmethod
    def uniform(cls, scheme: str, *, kv_cache: str = "bf16") -> Quantization:
        """One scheme for all weights."""
        return cls(attention=scheme, mlp=scheme, experts=scheme, kv_cache=kv_cache)

    @property
    def label(self) -> str:
        """Short form for tables: the experts' scheme where it differs, the KV dtype where it is narrow.

        >>> Quantization(attention="bf16", mlp="bf16", experts="mxfp4", kv_cache="fp8").label
        'bf16, experts mxfp4, kv fp8'
        """
        words = [self.mlp]
        if self.attention != self.mlp:
            words.append(f"attention {self.attention}")
        if self.experts != self.mlp:
            words.append(f"experts {self.experts}")
        if KV_CACHE_BYTES[self.kv_cache] < BYTES_16_BIT:
            words.append(f"kv {self.kv_cache}")
        return ", ".join(words)

    @property
    def kv_bytes(self) -> float:
        """Bytes of one element of the KV cache."""
        return KV_CACHE_BYTES[self.kv_cache]

    @property
    def ends(self) -> str:
        """Scheme of embedding and LM head."""
        return self.mlp if SCHEMES[self.mlp].holds_ends else "bf16"

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes in use, each once."""
        return tuple(dict.fromkeys((self.attention, self.mlp, self.experts)))

    def missing_on(self, device: Device) -> tuple[str, ...]:
        """Schemes that the device has no arithmetic units for."""
        return tuple(
            name
            for name in self.schemes
            if SCHEMES[name].needs and not set(SCHEMES[name].needs) & set(device.peak_flops_per_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPadding:
    """Multiples to which an engine rounds the matrices of an expert up when it loads them, for its kernels.

    Args:
        hidden: of the hidden size.
        width: of an expert's intermediate size, of the part that a device holds.
    """

    hidden: int = 1
    width: int = 1

    def growth(self, hidden_size: int, width: float) -> float:
        """Stored over published elements of a matrix of so many columns and, on one device, rows.

        >>> round(ExpertPadding(hidden=256, width=128).growth(2880, 2880), 3)
        1.09
        """
        return _rounded_up(hidden_size, self.hidden) * _rounded_up(width, self.width) / (hidden_size * width)


NO_PADDING = ExpertPadding()


def _rounded_up(size: float, multiple: int) -> int:
    return -int(-size // multiple) * multiple


def checkpoint_formats(shape: ModelShape, scheme: str, kv_cache: str) -> Quantization:
    """Formats of a checkpoint that is published as ``scheme``: what publishers leave in 16 bits stays in 16 bits.

    MXFP4 checkpoints (gpt-oss) hold their experts in it and all else in 16 bits; NVFP4 checkpoints of models with
    latent attention (nvidia/DeepSeek-R1-NVFP4) leave the attention in 16 bits.
    """
    if scheme == "mxfp4":
        return Quantization(attention="bf16", mlp="bf16", experts="mxfp4", kv_cache=kv_cache)
    if scheme == "nvfp4" and shape.latent is not None:
        return Quantization(attention="bf16", mlp="nvfp4", experts="nvfp4", kv_cache=kv_cache)
    return Quantization.uniform(scheme, kv_cache=kv_cache)


@dataclass(frozen=True, slots=True)
class Published:
    """Formats of a published checkpoint: of attention, of dense MLPs and shared experts, and of routed experts."""

    attention: str
    mlp: str
    experts: str

    def with_cache(self, kv_cache: str) -> Quantization:
        """The same with a KV cache."""
        return Quantization(attention=self.attention, mlp=self.mlp, experts=self.experts, kv_cache=kv_cache)

    @property
    def schemes(self) -> frozenset[str]:
        """Formats in use."""
        return frozenset((self.attention, self.mlp, self.experts))


_BLOCKS = Published("fp8_block", "fp8_block", "fp8_block")
_INT4_EXPERTS = Published("bf16", "bf16", "w4a16")
# Model of the catalog, or family, → formats, by quantization_config of the config.json of the checkpoint that the
# catalog's entry names. DeepSeek-V4: experts in FP4, all else in FP8 (model card; vllm 0.33.0,
# models/deepseek_v4/quant_config.py). Kimi K2.5: experts in INT4 (docs/deploy_guidance.md of Kimi-K2-Thinking; that of
# Kimi-K2.6 refers to K2.5's); compressed-tensors leaves out attention, shared experts and dense MLPs.
PUBLISHED: Mapping[str, Published] = {
    "kimi-k2.5": _INT4_EXPERTS,
    "kimi-k2.6": _INT4_EXPERTS,
    "kimi-k2-thinking": _INT4_EXPERTS,
    "deepseek_v3": _BLOCKS,
    "deepseek_v32": _BLOCKS,
    "deepseek_v4": Published("fp8_block", "fp8_block", "mxfp4"),
    "gpt_oss": Published("bf16", "bf16", "mxfp4"),
    "kimi_k2": _BLOCKS,
    "mimo_v2_flash": _BLOCKS,
    "minimax_m2": _BLOCKS,
}
# Beginning and end of a Hugging Face id in small letters → formats. Qwen: vllm-project/vllm, issues 17569 and 52997;
# Z.ai: model card of zai-org/GLM-5.3 (GLM-4.5 and 4.6 are scaled by channels); MiniMax: weight_block_size of
# quantization_config, M2 to M2.5; Meta: arXiv:2407.21783, §6.2, attention stays wide.
NAMED: Mapping[tuple[str, str], Published] = {
    ("qwen/", "-fp8"): _BLOCKS,
    ("zai-org/glm-5", "-fp8"): _BLOCKS,
    ("minimaxai/minimax-m2", ""): _BLOCKS,
    ("meta-llama/", "-405b-instruct-fp8"): Published("bf16", "fp8", "fp8"),
}


def published_formats(shape: ModelShape) -> Published | None:
    """Formats in which the publisher of a model stores it; None where in 16 bits."""
    return PUBLISHED.get(shape.slug) or PUBLISHED.get(shape.family)


def named_formats(written: str, scheme: str, shape: ModelShape, kv_cache: str) -> Quantization:
    """Formats of a checkpoint that a spec names, with a KV cache.

    Args:
        written: as in the spec.
        scheme: that its name tells; empty where it tells none.
        shape: the model.
        kv_cache: dtype of keys and values.
    """
    published = named(written) or (None if scheme else published_formats(shape))
    return published.with_cache(kv_cache) if published else checkpoint_formats(shape, scheme or "bf16", kv_cache)


def named(written: str) -> Published | None:
    """Formats of a checkpoint by its name alone, in any case; None where it does not tell.

    >>> named("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8").mlp
    'fp8_block'
    """
    name = written.strip().rstrip("/").lower()
    found = (held for (first, last), held in NAMED.items() if name.startswith(first) and name.endswith(last))
    return next(found, None)
