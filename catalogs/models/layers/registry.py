"""The kinds of recurrent mixers and of unlike attention: the keys of a configuration that tell each, and its reader.

A new kind is a file beside this one, and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers import (
    compressed_attention,
    gated_delta,
    kimi_delta,
    lightning,
    mamba1,
    mamba2,
    short_convolution,
    two_sizes,
)
from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer

Reader = Callable[[ConfigFields, int], RecurrentMixer]
FormReader = Callable[[ConfigFields, int, Sequence[str]], tuple[tuple[AttentionForm, ...], list[int]]]

KINDS: Mapping[str, tuple[tuple[str, ...], Reader]] = {
    "gated-delta": (("linear_num_value_heads", "linear_value_head_dim"), gated_delta.read),
    "kimi-delta": (("linear_attn_config",), kimi_delta.read),
    "mamba-2": (("mamba_num_heads", "mamba_n_heads"), mamba2.read),
    "mamba-1": (("mamba_d_state", "mamba_dt_rank"), mamba1.read),
    "short-convolution": (("conv_L_cache",), short_convolution.read),
    "lightning": (("attn_type_list", "linear_attn_alpha_factor", "layernorm_linear_attention_alpha"), lightning.read),
}
"""Name → (keys of which one is in such a configuration, reader), the most telling keys first."""

ATTENTION_FORMS: Mapping[str, tuple[tuple[str, ...], FormReader]] = {
    "compressed": (("o_groups",), compressed_attention.read),
    "two-sizes": (("full_head_dim", "full_num_key_value_heads"), two_sizes.read),
}
"""The same for models whose layers have attention of several forms."""


def recurrent_keys(fields: ConfigFields) -> list[str]:
    """The keys of recurrent mixers that a configuration states."""
    telling = (key for keys, _ in KINDS.values() for key in keys)
    return [key for key in telling if fields.config.get(key) not in (None, {}, [])]


def read_recurrent(fields: ConfigFields, hidden_size: int) -> RecurrentMixer | None:
    """The recurrent mixer that a configuration describes; None, and a problem, where its keys tell of no kind."""
    stated = recurrent_keys(fields)
    for keys, read in KINDS.values():
        if any(key in stated for key in keys):
            return read(fields, hidden_size)
    known = "; ".join(f"{name}: {' or '.join(keys)}" for name, (keys, _) in KINDS.items())
    fields.report("layer_types", f"lists recurrent layers, but no key states their sizes ({known})")
    return None


def read_attention_forms(
    fields: ConfigFields, hidden_size: int, words: Sequence[str]
) -> tuple[tuple[AttentionForm, ...], tuple[int, ...]]:
    """The forms of attention of a model's layers and which each layer has; empty where all layers have the same."""
    for keys, read in ATTENTION_FORMS.values():
        if any(fields.config.get(key) not in (None, {}, []) for key in keys):
            forms, form_of = read(fields, hidden_size, words)
            return forms, tuple(form_of)
    return (), ()
