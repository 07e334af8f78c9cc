"""The kinds of recurrent mixers: the keys of a configuration that tell each, and who reads its sizes.

A new kind is a file beside this one, and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshplan.catalogs.models.fields import ConfigFields
from meshplan.catalogs.models.layers import gated_delta, kimi_delta, lightning, mamba1, mamba2, short_convolution
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer

Reader = Callable[[ConfigFields, int], RecurrentMixer]

KINDS: Mapping[str, tuple[tuple[str, ...], Reader]] = {
    "gated-delta": (("linear_num_value_heads", "linear_value_head_dim"), gated_delta.read),
    "kimi-delta": (("linear_attn_config",), kimi_delta.read),
    "mamba-2": (("mamba_num_heads", "mamba_n_heads"), mamba2.read),
    "mamba-1": (("mamba_d_state", "mamba_dt_rank"), mamba1.read),
    "short-convolution": (("conv_L_cache",), short_convolution.read),
    "lightning": (("attn_type_list", "linear_attn_alpha_factor", "layernorm_linear_attention_alpha"), lightning.read),
}
"""Name → (keys of which one is in such a configuration, reader), the most telling keys first."""


def read_recurrent(fields: ConfigFields, hidden_size: int) -> RecurrentMixer | None:
    """The recurrent mixer that a configuration describes; None, and a problem, where its keys tell of no kind."""
    for keys, read in KINDS.values():
        if any(fields.config.get(key) not in (None, {}, []) for key in keys):
            return read(fields, hidden_size)
    known = "; ".join(f"{name}: {' or '.join(keys)}" for name, (keys, _) in KINDS.items())
    fields.report("layer_types", f"lists recurrent layers, but no key states their sizes ({known})")
    return None
