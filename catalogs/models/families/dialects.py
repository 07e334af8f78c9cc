"""Families that spell their sizes in their own way, rewritten into the common keys of a ``config.json``.

Each function takes a configuration and returns a copy in which the keys that :mod:`meshplan.catalogs.models.fields`
knows say the same. Nothing is checked here: a value of the wrong type is passed on, or left alone where it would have
to be computed with, and the reader of the field reports it.

Two keys exist only between these functions and the reader: ``norms_per_layer`` and ``num_outer_norms``, for families
where a flag of the configuration changes the number of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Config = Mapping[str, object]
Dialect = Callable[[Config], dict[str, object]]

_MPT_DEFAULT_RATIO = 4
_GEMMA_PERIOD = 6  # every sixth layer of Gemma 4 has full attention, and the last
_MOST_LAYERS = 2048  # no list is made for more: the reader of the number reports it


def common(config: Config) -> dict[str, object]:
    """The common spelling: nothing to rewrite."""
    return dict(config)


def llama4(config: Config) -> dict[str, object]:
    """``intermediate_size`` is an expert's width, one shared expert is as wide, attention is chunked.

    A chunk is read as a sliding window of its size: the cache holds as much, and a query attends to at most as much.
    """
    return {
        **config,
        "moe_intermediate_size": config.get("intermediate_size"),
        "intermediate_size": config.get("intermediate_size_mlp"),
        "n_shared_experts": 1,
        "sliding_window": config.get("attention_chunk_size", 8192),
    }


def roberta(config: Config) -> dict[str, object]:
    """Positions are counted from the padding token's number on: so many rows hold no text (``pad_token_id`` + 1)."""
    rows, padding = config.get("max_position_embeddings"), config.get("pad_token_id", 1)
    if not isinstance(rows, int) or not isinstance(padding, int) or not 0 <= padding < rows - 1:
        return dict(config)
    return {**config, "num_position_embeddings": rows, "max_position_embeddings": rows - padding - 1}


def modernbert(config: Config) -> dict[str, object]:
    """``local_attention`` tokens in all around each one, in all but every ``global_attn_every_n_layers``-th from 0."""
    layers, every = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers", 3)
    rewritten: dict[str, object] = {**config, "sliding_window": config.get("local_attention", 128)}
    if "layer_types" not in config and isinstance(layers, int) and isinstance(every, int) and every > 0:
        listed = range(min(layers, _MOST_LAYERS))
        rewritten["layer_types"] = ["sliding_attention" if layer % every else "full_attention" for layer in listed]
    return rewritten


def stablelm(config: Config) -> dict[str, object]:
    """With ``use_parallel_residual`` attention and MLP share one norm."""
    return {**config, "norms_per_layer": 1 if config.get("use_parallel_residual") is True else 2}


def qwen1(config: Config) -> dict[str, object]:
    """``intermediate_size`` counts the gate and the up projection together."""
    width = config.get("intermediate_size")
    return {**config, "intermediate_size": width // 2} if isinstance(width, int) else dict(config)


def chatglm(config: Config) -> dict[str, object]:
    """Key/value heads count only with ``multi_query_attention``; ``kv_channels`` is the head size."""
    grouped = config.get("multi_query_attention") is True
    return {
        **config,
        "num_key_value_heads": config.get("multi_query_group_num") if grouped else None,
        "head_dim": config.get("kv_channels"),
    }


def dbrx(config: Config) -> dict[str, object]:
    """Attention and expert sizes lie in ``attn_config`` and ``ffn_config``."""
    attention, experts = _section(config, "attn_config"), _section(config, "ffn_config")
    return {
        **config,
        "num_key_value_heads": attention.get("kv_n_heads"),
        "moe_intermediate_size": experts.get("ffn_hidden_size"),
        "num_experts": experts.get("moe_num_experts"),
        "num_experts_per_tok": experts.get("moe_top_k"),
    }


def gpt_bigcode(config: Config) -> dict[str, object]:
    """One key/value head unless ``multi_query`` is false."""
    return {**config, "num_key_value_heads": None if config.get("multi_query") is False else 1}


def opt(config: Config) -> dict[str, object]:
    """The post-norm variant (OPT-350M) has no final norm; its embedding may be narrower than h."""
    no_final_norm = config.get("do_layer_norm_before") is False or config.get("_remove_final_layer_norm") is True
    width = config.get("word_embed_proj_dim")
    return {
        **config,
        "num_outer_norms": 0 if no_final_norm else 1,
        "word_embedding_size": None if width == config.get("hidden_size") else width,
    }


def mpt(config: Config) -> dict[str, object]:
    """Width is a ratio, key/value heads and position encoding lie in ``attn_config``.

    Learned positions are made only where ALiBi and rotary embeddings are off (llm-foundry,
    ``MPTConfig._validate_config``), whatever ``learned_pos_emb`` says.
    """
    attention = _section(config, "attn_config")
    rewritten: dict[str, object] = {
        **config,
        "num_key_value_heads": attention.get("kv_n_heads"),
        "qk_ln": attention.get("qk_ln"),
    }
    if attention.get("attn_type") == "multiquery_attention":
        rewritten["num_key_value_heads"] = 1
    ratio, hidden = config.get("expansion_ratio", _MPT_DEFAULT_RATIO), config.get("d_model")
    if isinstance(ratio, int) and isinstance(hidden, int):
        rewritten["intermediate_size"] = ratio * hidden
    encoded = attention.get("alibi", True) is True or attention.get("rope") is True
    if not encoded and config.get("learned_pos_emb", True) is True:
        rewritten["num_position_embeddings"] = config.get("max_seq_len", 2048)
    return rewritten


def falcon(config: Config) -> dict[str, object]:
    """Key/value heads and norms follow from three flags (transformers, ``FalconDecoderLayer``)."""
    rewritten = dict(config)
    if config.get("new_decoder_architecture") is True:
        rewritten["norms_per_layer"] = config.get("num_ln_in_parallel_attn") or 2
        return rewritten
    multi_query = config.get("multi_query", True) is True
    rewritten["num_kv_heads"] = rewritten["n_head_kv"] = None
    rewritten["num_key_value_heads"] = 1 if multi_query else None
    rewritten["norms_per_layer"] = 1 if config.get("parallel_attn", True) is True else 2
    return rewritten


def qwen3_next(config: Config) -> dict[str, object]:
    """Every fourth layer has softmax attention unless another interval is stated."""
    return {"full_attention_interval": 4, **{key: value for key, value in config.items() if value is not None}}


def nemotron_h(config: Config) -> dict[str, object]:
    """``num_hidden_layers`` is out of date in some configurations: the listed layers count."""
    listed = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    return {**config, "num_hidden_layers": len(listed)} if isinstance(listed, list | str) else dict(config)


def minimax(config: Config) -> dict[str, object]:
    """Without a list every second layer has softmax attention; the mixer is lightning attention."""
    rewritten = {"layernorm_linear_attention_alpha": 1, **config}
    layers = config.get("num_hidden_layers")
    if not config.get("layer_types") and isinstance(layers, int) and layers <= _MOST_LAYERS:
        rewritten["layer_types"] = ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)]
    return rewritten


def state_space(config: Config) -> dict[str, object]:
    """``auto`` head sizes follow from the heads."""
    return {key: value for key, value in config.items() if not (key.startswith("mamba_") and value == "auto")}


def granite_hybrid(config: Config) -> dict[str, object]:
    """Without experts the shared MLP is the dense one."""
    rewritten = state_space(config)
    if not config.get("num_local_experts"):
        rewritten |= {"num_local_experts": 0, "intermediate_size": config.get("shared_intermediate_size")}
    return rewritten


def falcon_h1(config: Config) -> dict[str, object]:
    """The gated norm of the state-space mixer is off unless stated; its projections share one bias switch."""
    rewritten = {"mamba_rms_norm": False, "mamba_proj_bias": config.get("projectors_bias", False), **config}
    return state_space(rewritten)


def jamba(config: Config) -> dict[str, object]:
    """Experts in every ``expert_layer_period``-th layer from ``expert_layer_offset``, else a dense MLP."""
    rewritten = state_space(config)
    rewritten.setdefault("attn_layer_period", 8)
    rewritten.setdefault("attn_layer_offset", 4)
    layers, period = config.get("num_hidden_layers"), config.get("expert_layer_period", 2)
    offset = config.get("expert_layer_offset", 1)
    if not isinstance(layers, int) or not isinstance(period, int) or not isinstance(offset, int):
        return rewritten
    if period > 0 and layers <= _MOST_LAYERS and config.get("num_experts") != 1:
        rewritten["moe_layers"] = [layer for layer in range(layers) if layer % period == offset % period]
    return rewritten


def lfm2(config: Config) -> dict[str, object]:
    """The stated MLP width is that of two matrices: two thirds of it, times a multiplier, rounded up to a multiple."""
    width = config.get("block_ff_dim", config.get("intermediate_size"))
    rewritten = {**config, "intermediate_size": width}
    if config.get("tie_embedding") is not None:
        rewritten["tie_word_embeddings"] = config["tie_embedding"]
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    adjusts = config.get("block_auto_adjust_ff_dim", True) is True
    if adjusts and isinstance(width, int) and isinstance(factor, int | float) and isinstance(multiple, int):
        narrowed = int((1.0 if factor is None else factor) * int(2 * width / 3))
        rewritten["intermediate_size"] = -(-narrowed // multiple) * multiple if multiple > 0 else narrowed
    return rewritten


def olmo_hybrid(config: Config) -> dict[str, object]:
    """Linear attention has as many heads as attention, keys of 3/4·h over all heads, values twice as wide."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    rewritten = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "full_attention_interval": 4,
        **{key: value for key, value in config.items() if value is not None},
    }
    key_heads = rewritten["linear_num_key_heads"]
    if isinstance(hidden, int) and isinstance(key_heads, int) and key_heads > 0:
        rewritten.setdefault("linear_key_head_dim", int(0.75 * hidden / key_heads))
        key_dim = rewritten["linear_key_head_dim"]
        if isinstance(key_dim, int):
            rewritten.setdefault("linear_value_head_dim", 2 * key_dim)
    return rewritten


def gemma4(config: Config) -> dict[str, object]:
    """Heads of layers with full attention are stated apart; experts stand beside the dense MLP, as a shared one does.

    Norms: four, and with experts three more and the router's scale.
    """
    rewritten: dict[str, object] = {
        **config,
        "has_qk_norm": True,
        "full_head_dim": config.get("global_head_dim") or config.get("head_dim"),
        "full_num_key_value_heads": config.get("num_global_key_value_heads") or config.get("num_key_value_heads"),
    }
    layers = config.get("num_hidden_layers")
    if not config.get("layer_types") and isinstance(layers, int) and 0 < layers <= _MOST_LAYERS:
        last = {layer for layer in range(layers) if layer % _GEMMA_PERIOD == _GEMMA_PERIOD - 1} | {layers - 1}
        rewritten["layer_types"] = ["full_attention" if i in last else "sliding_attention" for i in range(layers)]
    if config.get("enable_moe_block") is True:
        rewritten |= {"norms_per_layer": 8, "shared_intermediate_size": config.get("intermediate_size")}
    else:
        rewritten["num_experts"] = 0
    return rewritten


def minimax_m3(config: Config) -> dict[str, object]:
    """An indexer selects blocks of tokens in the layers that ``sparse_attention_freq`` flags; ``intermediate_size``
    is an expert's width.
    """
    rewritten = {"moe_intermediate_size": config.get("intermediate_size"), **config}
    if config.get("dense_intermediate_size") is not None:
        rewritten["intermediate_size"] = config["dense_intermediate_size"]
    sparse = _section(config, "sparse_attention_config")
    blocks, size = sparse.get("sparse_topk_blocks"), sparse.get("sparse_block_size")
    flags = sparse.get("sparse_attention_freq")
    if isinstance(blocks, int) and isinstance(size, int) and sparse.get("use_sparse_attention") is not False:
        rewritten |= {
            "index_topk": blocks * size,
            "index_n_heads": sparse.get("sparse_num_index_heads"),
            "index_head_dim": sparse.get("sparse_index_dim"),
        }
        if isinstance(flags, list):
            rewritten["indexer_types"] = ["full" if flag else "none" for flag in flags]
    return rewritten


_COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def deepseek_v4(config: Config) -> dict[str, object]:
    """Kinds of layer from ``compress_ratios``, of which the last are those of prediction layers; all have experts."""
    rewritten = {key: value for key, value in config.items() if key != "mlp_layer_types"}
    ratios, layers = config.get("compress_ratios"), config.get("num_hidden_layers")
    if isinstance(ratios, list) and isinstance(layers, int) and not config.get("layer_types"):
        rewritten["layer_types"] = [_COMPRESSED.get(ratio, ratio) for ratio in ratios[:layers]]
    rates = _section(config, "compress_rates")
    rewritten["sparse_compression"] = rates.get("compressed_sparse_attention", 4)
    rewritten["heavy_compression"] = rates.get("heavily_compressed_attention", 128)
    return rewritten


def mimo_v2(config: Config) -> dict[str, object]:
    """Layers with a window have twice the key/value heads of the others, and a sink for each head."""
    heads = config.get("num_key_value_heads")
    windowed = config.get("swa_num_key_value_heads", 2 * heads if isinstance(heads, int) else None)
    rewritten: dict[str, object] = {
        "add_swa_attention_sink_bias": True,
        **config,
        "num_key_value_heads": windowed,
        "full_num_key_value_heads": heads,
    }
    pattern = config.get("hybrid_layer_pattern")
    if isinstance(pattern, list) and not config.get("layer_types"):
        rewritten["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in pattern]
    return rewritten


def _section(config: Config, key: str) -> Config:
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}
