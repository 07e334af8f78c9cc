"""The shape of a transformer: what an estimator needs to know of a model, and nothing else.

A shape is read from a Hugging Face ``config.json`` (:mod:`meshplan.catalogs.model_config`) or from the catalog. It
counts its own parameters; the counts include biases, norms and position embeddings, so that they can be compared
with the published totals.

Notation: h hidden size, a attention heads, k key/value heads, d head dimension, f MLP width, E experts, V vocabulary.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """The expert part of a model.

    Args:
        num_experts: routed experts in each MoE layer.
        num_experts_per_token: routed experts that each token visits (top-k).
        expert_intermediate_size: MLP width of one routed expert.
        shared_intermediate_size: total MLP width of the shared experts, 0 where there are none.
        moe_layers: which layers are MoE layers, one flag a layer.
        expert_bias: experts and router carry biases (gpt-oss).
    """

    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    moe_layers: tuple[bool, ...]
    expert_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One decoder-only transformer.

    Args:
        slug: catalog name, such as ``llama-3.1-70b``.
        name: as its publisher writes it.
        family: Hugging Face ``model_type``.
        num_hidden_layers: transformer layers, without multi-token-prediction layers.
        hidden_size: h.
        intermediate_size: f of the dense MLP (unused where every layer is an MoE layer).
        gated_mlp: three matrices (SwiGLU, GeGLU) instead of two.
        num_attention_heads: a.
        num_key_value_heads: k; equals a for multi-head latent attention.
        head_dim: d, of queries and keys.
        vocab_size: V as configured; frameworks pad it.
        tie_word_embeddings: the LM head shares the embedding's matrix.
        attention: see :class:`AttentionKind`.
        latent: sizes of multi-head latent attention, else None.
        moe: the expert part, None for a dense model.
        sliding_windows: one entry a layer: attention window in tokens, None for full attention; empty when every
            layer is full.
        num_position_embeddings: learned absolute positions (GPT-2, OPT), 0 with rotary or ALiBi.
        max_sequence_length: longest trained context in tokens, None where unknown.
        attention_bias: biases on the query, key and value projections.
        attention_output_bias: bias on the output projection.
        mlp_bias: biases on the MLP.
        norm_bias: norms have a bias (LayerNorm) or not (RMSNorm).
        norms_per_layer: norms over h in each layer (2; 4 in Gemma 2/3; 1 with a parallel attention-MLP block and
            one shared norm).
        qk_norm: queries and keys are normalised per head (Qwen3, Gemma 3): 2·d parameters a layer.
        num_nextn_predict_layers: multi-token-prediction layers (DeepSeek-V3); they train but do not count as layers.
        source: citation of the configuration.
    """

    slug: str
    name: str
    family: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    gated_mlp: bool
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention: AttentionKind = AttentionKind.GROUPED_QUERY
    latent: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    sliding_windows: tuple[int | None, ...] = ()
    num_position_embeddings: int = 0
    max_sequence_length: int | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    num_nextn_predict_layers: int = 0
    source: str = ""

    # --- layers -------------------------------------------------------------------------------------------------

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) routes tokens to experts."""
        return self.moe is not None and self.moe.moe_layers[layer]

    def window(self, layer: int) -> int | None:
        """Attention window of layer ``layer`` in tokens, None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    # --- parameters ---------------------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block, output projection included.

        Grouped query: h·d·(2a + 2k). Latent: the low-rank factors of DeepSeek-V2 §2.1, with their norms.
        """
        h, a = self.hidden_size, self.num_attention_heads
        if self.latent is not None:
            return self._latent_attention_parameters(self.latent)
        queries, keys = a * self.head_dim, self.num_key_value_heads * self.head_dim
        weights = h * (2 * queries + 2 * keys)
        biases = self.attention_bias * (queries + 2 * keys) + self.attention_output_bias * h
        return weights + biases + self.qk_norm * 2 * self.head_dim

    def _latent_attention_parameters(self, latent: LatentAttention) -> int:
        h, a = self.hidden_size, self.num_attention_heads
        query_width = a * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        if latent.q_lora_rank is None:
            queries = h * query_width
        else:
            queries = h * latent.q_lora_rank + latent.q_lora_rank + latent.q_lora_rank * query_width
        keys_values = h * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
        keys_values += latent.kv_lora_rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)
        return queries + keys_values + a * latent.v_head_dim * h

    @property
    def mlp_matrices(self) -> int:
        """Weight matrices of one MLP: 3 when gated, else 2."""
        return 3 if self.gated_mlp else 2

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of one dense MLP: matrices·h·f and biases."""
        width = self.intermediate_size
        biases = self.mlp_bias * ((self.mlp_matrices - 1) * width + self.hidden_size)
        return self.mlp_matrices * self.hidden_size * width + biases

    @property
    def expert_parameters(self) -> int:
        """Parameters of ONE routed expert; 0 for a dense model."""
        if self.moe is None:
            return 0
        width = self.moe.expert_intermediate_size
        biases = self.moe.expert_bias * ((self.mlp_matrices - 1) * width + self.hidden_size)
        return self.mlp_matrices * self.hidden_size * width + biases

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of the shared experts of one MoE layer together."""
        return 0 if self.moe is None else self.mlp_matrices * self.hidden_size * self.moe.shared_intermediate_size

    @property
    def router_parameters(self) -> int:
        """Parameters of one router: h·E (and its bias)."""
        if self.moe is None:
            return 0
        return self.hidden_size * self.moe.num_experts + self.moe.expert_bias * self.moe.num_experts

    @property
    def norm_parameters_per_layer(self) -> int:
        """Parameters of the norms over h in one layer."""
        return self.norms_per_layer * self.hidden_size * (2 if self.norm_bias else 1)

    def layer_parameters(self, layer: int) -> int:
        """All parameters of one layer, every expert included."""
        common = self.attention_parameters + self.norm_parameters_per_layer
        if self.moe is None or not self.is_moe_layer(layer):
            return common + self.dense_mlp_parameters
        experts = self.moe.num_experts * self.expert_parameters
        return common + experts + self.shared_expert_parameters + self.router_parameters

    @property
    def embedding_parameters(self) -> int:
        """Input embedding: V·h and learned positions."""
        return (self.vocab_size + self.num_position_embeddings) * self.hidden_size

    @property
    def lm_head_parameters(self) -> int:
        """Output projection V·h; 0 when tied to the embedding."""
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters, without multi-token-prediction layers (as publishers count)."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_hidden_layers))
        final_norm = self.hidden_size * (2 if self.norm_bias else 1)
        return layers + self.embedding_parameters + self.lm_head_parameters + final_norm

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts it does not visit."""
        if self.moe is None:
            return self.num_parameters
        idle = (self.moe.num_experts - self.moe.num_experts_per_token) * self.expert_parameters
        return self.num_parameters - idle * sum(self.moe.moe_layers)
