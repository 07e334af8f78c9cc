"""In which formats the checkpoints that people name are stored: by their publisher's habit, where no file tells.

A model that is named without a format is planned as its publisher stores it: in 16 bits, unless :data:`PUBLISHED` says
otherwise. A checkpoint whose name ends in a format (``Qwen3-32B-FP8``) holds that; whether its fp8 is scaled in blocks,
which an engine refuses to cut (``tensor_parallel`` 8 of Qwen3-235B-A22B-FP8), the name does not tell, its publisher
does. A ``config.json`` at hand is read instead (:mod:`meshplan.catalogs.models.stored_formats`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.serving.problem.quantization import Quantization, checkpoint_formats


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
# Z.ai: model card of zai-org/GLM-5.3 (GLM-4.5 and 4.6 are scaled by channels); Meta: arXiv:2407.21783, §6.2, attention
# stays wide.
NAMED: Mapping[tuple[str, str], Published] = {
    ("qwen/", "-fp8"): _BLOCKS,
    ("zai-org/glm-5", "-fp8"): _BLOCKS,
    ("minimaxai/", "-fp8"): _BLOCKS,
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
    name = written.strip().rstrip("/").lower()
    found = (held for (first, last), held in NAMED.items() if name.startswith(first) and name.endswith(last))
    published = next(found, None if scheme else published_formats(shape))
    return published.with_cache(kv_cache) if published else checkpoint_formats(shape, scheme or "bf16", kv_cache)
