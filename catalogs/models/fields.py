"""The values of a model configuration: the keys they hide under, the range they must lie in, every problem kept.

:class:`ConfigFields` reads one value after another and never raises; what is missing, of the wrong type or out of
range is added to its problems, so that one message can name them all. A field that could not be read is 0 (or None
where it is optional), which later steps take as "already reported".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.models.families.facts import Switch


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A size in a configuration.

    Args:
        meaning: what it is, for messages.
        at_most: largest value that is believed: at least eight times the largest published one.
        keys: its spellings, tried in order; a null counts as absent.
        at_least: smallest value.
    """

    meaning: str
    at_most: int
    keys: tuple[str, ...]
    at_least: int = 1


FIELDS: Mapping[str, WholeNumber] = {
    "num_hidden_layers": WholeNumber("layers", 2048, ("num_hidden_layers", "n_layer", "n_layers", "num_layers")),
    "hidden_size": WholeNumber("hidden size", 2**18, ("hidden_size", "n_embd", "d_model", "n_embed")),
    "intermediate_size": WholeNumber(
        "MLP width", 2**20, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    ),
    "num_attention_heads": WholeNumber(
        "attention heads", 2**12, ("num_attention_heads", "n_head", "n_heads", "num_heads")
    ),
    "num_key_value_heads": WholeNumber(
        "key/value heads", 2**12, ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups")
    ),
    "head_dim": WholeNumber("head size", 2**13, ("head_dim", "attention_head_size")),
    "vocab_size": WholeNumber("vocabulary", 2**24, ("vocab_size", "padded_vocab_size")),
    "max_sequence_length": WholeNumber(
        "context, tokens",
        2**30,
        ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
    ),
    "sliding_window": WholeNumber("attention window, tokens", 2**30, ("sliding_window",)),
    "num_experts": WholeNumber(
        "experts",
        2**14,
        ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", "num_routed_experts"),
        0,
    ),
    "num_experts_per_tok": WholeNumber(
        "experts per token",
        2**10,
        ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts"),
    ),
    "expert_groups": WholeNumber("groups of experts", 64, ("n_group",)),
    "groups_per_token": WholeNumber("groups of experts that a token may visit", 64, ("topk_group",)),
    "moe_intermediate_size": WholeNumber(
        "expert width", 2**20, ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
    ),
    "n_shared_experts": WholeNumber(
        "shared experts", 2**10, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 0
    ),
    "shared_intermediate_size": WholeNumber(
        "shared expert width",
        2**20,
        ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        0,
    ),
    "first_k_dense_replace": WholeNumber("first dense layers", 2048, ("first_k_dense_replace", "num_dense_layers"), 0),
    "moe_layer_freq": WholeNumber("distance between MoE layers", 2048, ("moe_layer_freq",)),
    "decoder_sparse_step": WholeNumber(
        "distance between MoE layers", 2048, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    ),
    "moe_layer_start_index": WholeNumber("first MoE layer", 2048, ("moe_layer_start_index",), 0),
    "moe_layer_end_index": WholeNumber("last MoE layer (-1: the last layer)", 2048, ("moe_layer_end_index",), -1),
    "q_lora_rank": WholeNumber("query rank", 2**16, ("q_lora_rank",)),
    "kv_lora_rank": WholeNumber("key/value rank", 2**16, ("kv_lora_rank",)),
    "qk_nope_head_dim": WholeNumber("head size without position", 2**13, ("qk_nope_head_dim",)),
    "qk_rope_head_dim": WholeNumber("head size with rotary position", 2**13, ("qk_rope_head_dim",)),
    "v_head_dim": WholeNumber("value head size", 2**13, ("v_head_dim",)),
    "num_nextn_predict_layers": WholeNumber(
        "multi-token-prediction layers",
        64,
        ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
        0,
    ),
    "num_position_embeddings": WholeNumber("learned positions", 2**30, ("num_position_embeddings",), 0),
    "num_token_types": WholeNumber("kinds of tokens (type_vocab_size)", 2**10, ("type_vocab_size",), 0),
    "word_embedding_size": WholeNumber("embedding width", 2**18, ("word_embedding_size",)),
    "moe_latent_size": WholeNumber("width that experts work in", 2**18, ("moe_latent_size",)),
    "full_num_key_value_heads": WholeNumber("key/value heads of full attention", 2**12, ("full_num_key_value_heads",)),
    "full_head_dim": WholeNumber("head size of full attention", 2**13, ("full_head_dim",)),
    "o_groups": WholeNumber("groups of the output projection", 2**12, ("o_groups",)),
    "o_lora_rank": WholeNumber("output rank of a group", 2**16, ("o_lora_rank",)),
    "hc_mult": WholeNumber("residual streams", 64, ("hc_mult",)),
    "sparse_compression": WholeNumber("tokens of an entry of sparse layers", 2**16, ("sparse_compression",), 2),
    "heavy_compression": WholeNumber("tokens of an entry of other layers", 2**16, ("heavy_compression",), 2),
    "linear_num_key_heads": WholeNumber("key heads of linear attention", 2**12, ("linear_num_key_heads",)),
    "linear_num_value_heads": WholeNumber("value heads of linear attention", 2**12, ("linear_num_value_heads",)),
    "linear_key_head_dim": WholeNumber("key head size of linear attention", 2**13, ("linear_key_head_dim",)),
    "linear_value_head_dim": WholeNumber("value head size of linear attention", 2**13, ("linear_value_head_dim",)),
    "convolution_kernel": WholeNumber(
        "kernel of the short convolution",
        2**10,
        ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache", "short_conv_kernel_size"),
    ),
    "mamba_num_heads": WholeNumber("state-space heads", 2**13, ("mamba_num_heads", "mamba_n_heads")),
    "mamba_head_dim": WholeNumber("state-space head size", 2**13, ("mamba_head_dim", "mamba_d_head")),
    "ssm_state_size": WholeNumber("states of a channel", 2**12, ("ssm_state_size", "mamba_d_state")),
    "ssm_groups": WholeNumber("state-space groups", 2**10, ("mamba_n_groups", "n_groups")),
    "mamba_expand": WholeNumber("state-space width over h", 64, ("mamba_expand", "expand")),
    "mamba_dt_rank": WholeNumber("rank of the state-space step", 2**16, ("mamba_dt_rank",)),
    "index_n_heads": WholeNumber("indexer heads", 2**12, ("index_n_heads",)),
    "index_head_dim": WholeNumber("indexer head size", 2**13, ("index_head_dim",)),
    "index_topk": WholeNumber("tokens that the indexer selects", 2**24, ("index_topk",)),
    "full_attention_interval": WholeNumber("distance between attention layers", 2048, ("full_attention_interval",)),
    "attn_layer_period": WholeNumber("distance between attention layers", 2048, ("attn_layer_period",)),
    "attn_layer_offset": WholeNumber("first attention layer", 2048, ("attn_layer_offset",), 0),
    "norms_per_layer": WholeNumber("norms in a layer", 8, ("norms_per_layer",), 0),
    "num_outer_norms": WholeNumber("norms outside the layers", 8, ("num_outer_norms",), 0),
}


class ConfigFields:
    """Reads the values of one configuration and keeps every problem.

    Args:
        config: the language model's configuration, in the common spelling.
        defaults: sizes that the family's published configurations leave out, by field name.
    """

    def __init__(self, config: Mapping[str, object], defaults: Mapping[str, int]) -> None:
        self.config = config
        self.problems: list[Problem] = []
        self._defaults = defaults

    def report(self, path: str, message: str) -> None:
        """Keep one problem."""
        self.problems.append(Problem(path=path, message=message))

    def optional(self, name: str) -> int | None:
        """The field, its family's default, or None; a bad value is reported and read as None."""
        field = FIELDS[name]
        key = next((key for key in field.keys if self.config.get(key) is not None), None)
        if key is None:
            return self._defaults.get(name)
        return self.whole_number(key, self.config[key], field)

    def whole_number(self, path: str, value: object, field: WholeNumber) -> int | None:
        """``value`` if it is a believable ``field``; else None, and a problem."""
        if isinstance(value, bool) or not isinstance(value, int):
            self.report(path, f"must be a whole number ({field.meaning}), is {shorten(value)}")
            return None
        if not field.at_least <= value <= field.at_most:
            self.report(
                path, f"must lie between {field.at_least} and {field.at_most} ({field.meaning}), is {shorten(value)}"
            )
            return None
        return value

    def required(self, name: str) -> int:
        """The field; 0 and a problem where it is missing or bad."""
        field = FIELDS[name]
        before = len(self.problems)
        value = self.optional(name)
        if value is None:
            if len(self.problems) == before:
                spellings = f"; also read as {', '.join(field.keys[1:])}" if len(field.keys) > 1 else ""
                self.report(field.keys[0], f"missing ({field.meaning}{spellings})")
            return 0
        return value

    def with_default(self, name: str, default: int) -> int:
        """The field, or ``default`` where it is missing or bad."""
        value = self.optional(name)
        return default if value is None else value

    def switch(self, switch: Switch) -> bool:
        """A yes-or-no fact of the architecture."""
        value = None if switch.key is None else self.config.get(switch.key)
        if value is None:
            return switch.default
        if not isinstance(value, bool):
            self.report(str(switch.key), f"must be true or false, is {shorten(value)}")
            return switch.default
        return value is not switch.negated

    def layer_numbers(self, key: str, num_layers: int) -> frozenset[int]:
        """A list of layer numbers (from 0); empty where the key is absent."""
        value = self.config.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list | tuple) or not all(_is_layer(item, num_layers) for item in value):
            self.report(key, f"must be a list of layer numbers from 0 to {num_layers - 1}, is {shorten(value)}")
            return frozenset()
        return frozenset(value)


def _is_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_layers


def shorten(value: object, limit: int = 60) -> str:
    """How a value is shown in a message: containers by their size, the rest cut after ``limit`` characters.

    >>> shorten("a" * 100, 10)
    "'aaaaaaaaa…"
    >>> shorten([1, 2])
    'a list of 2 values'
    """
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} values"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > limit:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long integers
    text = repr(value[:limit]) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
