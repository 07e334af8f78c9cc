"""Which blocks each layer of a model holds: softmax attention, a recurrent mixer, both, an MLP or experts.

Configurations say it as a list of words (``layer_types``, ``layers_block_type``), a pattern of letters
(``hybrid_override_pattern``), flags (``attn_type_list``), numbers of the attention layers, or a period. The first that
is there wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshplan.catalogs.models.families.facts import Family
from meshplan.catalogs.models.fields import ConfigFields, shorten
from meshplan.catalogs.models.layers.recurrent import LayerBlocks, Mixer, SparseIndexer
from meshplan.catalogs.models.layers.registry import read_attention_forms, read_recurrent, recurrent_keys

ATTENTION_WORDS = (
    *("full_attention", "attention", "global", "sliding_attention", "chunked_attention", "local"),
    *("deepseek_sparse_attention", "minimax_m3_sparse", "compressed_sparse_attention", "heavily_compressed_attention"),
)
RECURRENT_WORDS = ("linear_attention", "mamba", "conv")
MLP_WORDS = ("mlp", "moe")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # Nemotron-H's hybrid_override_pattern
_FLAGS = {0: "linear_attention", 1: "full_attention"}  # MiniMax's attn_type_list


def layer_words(fields: ConfigFields, family: Family, num_layers: int) -> tuple[str, ...]:
    """One word per layer of :data:`ATTENTION_WORDS`, :data:`RECURRENT_WORDS` or :data:`MLP_WORDS`; empty where a
    configuration lists no layers, and where what it lists is reported as a problem.

    So is a configuration that states the sizes of recurrent layers and not which layers they are: it would
    be read as a transformer, these layers as attention. A ``family`` with both mixers in every layer needs no list.
    """
    for key, listed in _LISTED.items():
        if fields.config.get(key) in (None, "", []):
            continue
        words = listed(fields, key, num_layers)
        if words and num_layers and len(words) != num_layers:
            fields.report(key, f"has {len(words)} entries for {num_layers} layers")
            return ()
        unknown = sorted(set(words) - set(ATTENTION_WORDS) - set(RECURRENT_WORDS) - set(MLP_WORDS))
        if unknown:
            fields.report(key, f"layers of kind {', '.join(shorten(kind) for kind in unknown)} are not supported yet")
            return ()
        return words
    stated = recurrent_keys(fields)
    if stated and not family.parallel_mixers:
        keys = ", ".join(_LISTED)
        fields.report(stated[0], f"sizes of recurrent layers, but nothing says which layers these are ({keys})")
    return ()


def layer_blocks(fields: ConfigFields, family: Family, words: tuple[str, ...], hidden_size: int) -> LayerBlocks | None:
    """The blocks of the layers; None for a transformer whose layers are all softmax attention and an MLP or experts.

    Args:
        fields: the configuration.
        family: whether its layers have both mixers side by side, and whether attention has an output gate.
        words: of :func:`layer_words`; one per layer even where the configuration lists none.
        hidden_size: h.
    """
    single = any(word in MLP_WORDS for word in words)
    mixers = tuple(Mixer.BOTH if family.parallel_mixers else _mixer(word) for word in words)
    has_mlp = tuple(word in MLP_WORDS if single else True for word in words)
    gate, indexer = fields.switch(family.output_gate), _indexer(fields, hidden_size)
    forms, form_of = read_attention_forms(fields, hidden_size, words)
    indexer = None if forms else indexer
    plain = all(mixer is Mixer.ATTENTION for mixer in mixers) and all(has_mlp)
    if plain and not gate and indexer is None and not forms:
        return None
    needed = any(mixer in (Mixer.RECURRENT, Mixer.BOTH) for mixer in mixers)
    recurrent = read_recurrent(fields, hidden_size) if needed else None
    return LayerBlocks(
        mixers=mixers,
        has_mlp=has_mlp,
        recurrent=recurrent,
        indexer=indexer,
        output_gate=gate,
        indexed=() if indexer is None else _indexed(fields, len(words)),
        forms=forms,
        form_of=form_of,
    )


def _indexed(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers have an indexer of their own; empty: all.

    ``indexer_types`` says ``full``, or ``shared``: attend to what the layer before selected (GLM-5.2).
    """
    listed = fields.config.get("indexer_types")
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        fields.report("indexer_types", f"must list full, shared or none for {num_layers} layers, is {shorten(listed)}")
        return ()
    return tuple(word == "full" for word in listed)


def _mixer(word: str) -> Mixer:
    if word in RECURRENT_WORDS:
        return Mixer.RECURRENT
    return Mixer.NONE if word in MLP_WORDS else Mixer.ATTENTION


def _indexer(fields: ConfigFields, hidden_size: int) -> SparseIndexer | None:
    """Sparse attention's indexer, where the configuration states how many tokens it selects."""
    top_k = fields.optional("index_topk")
    if top_k is None:
        return None
    return SparseIndexer(
        num_heads=fields.required("index_n_heads"),
        head_dim=fields.required("index_head_dim"),
        top_k=top_k,
        query_inputs=fields.optional("q_lora_rank") or hidden_size,
    )


def _words(fields: ConfigFields, key: str, num_layers: int) -> tuple[str, ...]:
    del num_layers
    words = fields.config[key]
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        fields.report(key, f"must be a list of texts, one a layer, is {shorten(words)}")
        return ()
    return tuple(words)


def _letters(fields: ConfigFields, key: str, num_layers: int) -> tuple[str, ...]:
    del num_layers
    letters = fields.config[key]
    if not isinstance(letters, str) or not set(letters) <= set(_LETTERS):
        known = ", ".join(f"{letter} ({word})" for letter, word in _LETTERS.items())
        fields.report(key, f"must be made of {known}, is {shorten(letters)}")
        return ()
    return tuple(_LETTERS[letter] for letter in letters)


def _flags(fields: ConfigFields, key: str, num_layers: int) -> tuple[str, ...]:
    del num_layers
    flags = fields.config[key]
    if not isinstance(flags, list | tuple) or not all(flag in (0, 1) for flag in flags):
        fields.report(key, f"must be a list of 0 (linear) and 1 (softmax attention), is {shorten(flags)}")
        return ()
    return tuple(_FLAGS[int(flag)] for flag in flags)


def _kimi(fields: ConfigFields, key: str, num_layers: int) -> tuple[str, ...]:
    """``linear_attn_config.full_attn_layers``: numbers from 1."""
    section = fields.config[key]
    listed = section.get("full_attn_layers") if isinstance(section, Mapping) else None
    if not isinstance(listed, list | tuple) or not all(isinstance(number, int) for number in listed):
        fields.report(f"{key}.full_attn_layers", f"must be a list of layer numbers from 1, is {shorten(listed)}")
        return ()
    return _attention_at({number - 1 for number in listed}, num_layers, "linear_attention")


def _numbers(fields: ConfigFields, key: str, num_layers: int) -> tuple[str, ...]:
    """Numbers of the attention layers, from 0 (Bamba, LFM2)."""
    rest = "conv" if key == "full_attn_idxs" else "mamba"
    return _attention_at(set(fields.layer_numbers(key, num_layers)), num_layers, rest)


def _period(fields: ConfigFields, key: str, num_layers: int) -> tuple[str, ...]:
    """Jamba: every ``attn_layer_period``-th layer from ``attn_layer_offset``; Qwen3-Next: the last of each interval."""
    every = fields.optional(key)
    if not every:
        return ()
    offset = fields.with_default("attn_layer_offset", 0) if key == "attn_layer_period" else every - 1
    chosen = {layer for layer in range(num_layers) if layer % every == offset % every}
    return _attention_at(chosen, num_layers, "mamba" if key == "attn_layer_period" else "linear_attention")


def _attention_at(layers: set[int], num_layers: int, rest: str) -> tuple[str, ...]:
    return tuple("full_attention" if layer in layers else rest for layer in range(num_layers))


_LISTED: Mapping[str, Callable[[ConfigFields, str, int], tuple[str, ...]]] = {
    "layer_types": _words,
    "layers_block_type": _words,
    "hybrid_override_pattern": _letters,
    "attn_type_list": _flags,
    "linear_attn_config": _kimi,
    "attn_layer_indices": _numbers,
    "full_attn_idxs": _numbers,
    "attn_layer_period": _period,
    "full_attention_interval": _period,
}
