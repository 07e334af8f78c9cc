"""Kinds of softmax attention that all layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AttentionKind(Enum):
    """How queries, keys and values are made."""

    GROUPED_QUERY = "gqa"  # multi-head (k = a) and multi-query (k = 1) are its ends
    MULTI_HEAD_LATENT = "mla"  # DeepSeek-V2/V3: low-rank queries and keys/values


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1).

    Args:
        q_lora_rank: rank of the query projection; None where queries are projected directly.
        kv_lora_rank: rank of the joint key/value projection, which is what the KV cache holds.
        qk_nope_head_dim: per-head query/key size without position.
        qk_rope_head_dim: per-head query size (shared key size) with rotary position.
        v_head_dim: per-head value size.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
