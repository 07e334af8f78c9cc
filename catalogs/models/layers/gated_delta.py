"""Gated delta rule (Gated DeltaNet, arXiv:2412.06464): Qwen3-Next, Qwen3.5, OLMo Hybrid.

S_t = α_t·S_{t−1}·(I − β_t·k_t·k_tᵀ) + β_t·v_t·k_tᵀ,  o_t = S_t·q_t, with one d_k × d_v state a value head. In chunks of
C tokens (§3.3): K·Kᵀ, its triangular inverse, W = T·K, U = T·V, W·S, Q·S, Q·Kᵀ, (Q·Kᵀ)·U and Kᵀ·U, that is
3·C·d_k + 2·C·d_v + 3·d_k·d_v multiply-adds per token and head (the inverse, C²/3, left out).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer

CHUNK = 64  # tokens; assumed, kernels choose it
# Kernels of a prompt: a second input product, its split, convolution, gates, norms of queries and of keys, states read
# and written, sums of decays, K·Kᵀ, its inverse, W and U, states of chunks, outputs, gated norm (of flash-linear-
# attention's fla/ops/gated_delta_rule; SGLang's linear attention backend), less rotation and attention.
PROMPT_KERNELS = 15 - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """H_k key heads of size d_k, H_v value heads of size d_v, and the convolution's kernel."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int


def sizes(mixer: RecurrentMixer) -> DeltaSizes:
    """The sizes of which :func:`read` made a mixer, back from its totals."""
    values = mixer.output_inputs
    key_dim = mixer.state_elements // values
    keys = mixer.num_heads * key_dim
    value_heads = (mixer.split_outputs - 2 * keys - 2 * values) // 2
    return DeltaSizes(
        num_key_heads=mixer.num_heads,
        num_value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=values // value_heads,
        kernel=mixer.convolution_elements // (2 * keys + values) + 1,
    )


def read(fields: ConfigFields, hidden_size: int) -> RecurrentMixer:
    """Sizes from ``linear_num_key_heads``, ``linear_num_value_heads``, their head sizes and the convolution's kernel.

    Projections: queries and keys (2·H_k·d_k), values and gate (2·H_v·d_v), decay and step (2·H_v); a convolution over
    queries, keys and values; a norm of d_v.
    """
    del hidden_size
    key_heads, value_heads = fields.required("linear_num_key_heads"), fields.required("linear_num_value_heads")
    key_dim, value_dim = fields.required("linear_key_head_dim"), fields.required("linear_value_head_dim")
    kernel = fields.with_default("convolution_kernel", 4)
    keys, values = key_heads * key_dim, value_heads * value_dim
    if key_heads and value_heads % key_heads:
        fields.report("linear_num_value_heads", f"{value_heads} value heads are no multiple of {key_heads} key heads")
    convolved = 2 * keys + values
    scanned = 3 * CHUNK * key_dim + 2 * CHUNK * value_dim + 3 * key_dim * value_dim
    return RecurrentMixer(
        kind="gated-delta",
        num_heads=key_heads,
        split_outputs=2 * keys + 2 * values + 2 * value_heads,
        output_inputs=values,
        vector_parameters=convolved * kernel + 2 * value_heads + value_dim,
        state_elements=value_heads * key_dim * value_dim,
        convolution_elements=convolved * (kernel - 1),
        scan_flops_per_token=2 * value_heads * scanned,
        streamed_elements=2 * convolved + 3 * values,
        prompt_kernels=PROMPT_KERNELS,
    )
