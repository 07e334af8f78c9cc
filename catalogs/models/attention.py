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

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """The low-rank factors with their norms, and the output projection."""
        query_width = num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            queries = hidden_size * query_width
        else:
            queries = hidden_size * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * query_width
        keys_values = hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        keys_values += self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + keys_values + num_heads * self.v_head_dim * hidden_size
