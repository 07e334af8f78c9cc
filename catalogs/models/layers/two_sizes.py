"""Layers with an attention window and layers with full attention that differ in their heads (Gemma 4, MiMo-V2).

Query heads are the same number in both. Keys and values of a layer: k_l heads of d_l elements (values of v_l), which
Gemma 4 projects once for both in layers with full attention (``attention_k_eq_v``). The cache holds keys and values
apart all the same: keys are rotated and normalised in their own way.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers.attention_form import AttentionForm, Matrix

WINDOWED, FULL = "sliding", "full"


def read(fields: ConfigFields, hidden_size: int, words: Sequence[str]) -> tuple[tuple[AttentionForm, ...], list[int]]:
    """Two forms, and which of them each layer has; ``words`` are the kinds of its layers."""
    windowed = _form(fields, hidden_size, WINDOWED, has_sinks=fields.config.get("add_swa_attention_sink_bias") is True)
    full = _form(
        fields,
        hidden_size,
        FULL,
        shares_projection=fields.config.get("attention_k_eq_v") is True,
        has_sinks=fields.config.get("add_full_attention_sink_bias") is True,
    )
    return (windowed, full), [0 if word == "sliding_attention" else 1 for word in words]


def _form(
    fields: ConfigFields, hidden_size: int, name: str, *, shares_projection: bool = False, has_sinks: bool = False
) -> AttentionForm:
    heads, full = fields.required("num_attention_heads"), name == FULL
    kv_heads = fields.required("num_key_value_heads")
    key_dim = fields.required("head_dim")
    if full:
        kv_heads = fields.with_default("full_num_key_value_heads", kv_heads)
        key_dim = fields.with_default("full_head_dim", key_dim)
    value_dim = fields.with_default("v_head_dim", key_dim)
    projections = [Matrix(inputs=hidden_size, outputs=kv_heads * key_dim, divides="outputs", at_most=kv_heads)]
    if not shares_projection:
        projections.append(
            Matrix(inputs=hidden_size, outputs=kv_heads * value_dim, divides="outputs", at_most=kv_heads)
        )
    return AttentionForm(
        name=name,
        matrices=(
            Matrix(inputs=hidden_size, outputs=heads * key_dim, divides="outputs"),
            *projections,
            Matrix(inputs=heads * value_dim, outputs=hidden_size, divides="inputs"),
        ),
        vector_parameters=2 * key_dim * (fields.config.get("has_qk_norm") is True) + heads * has_sinks,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
