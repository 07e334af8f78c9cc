"""Which layers of a model are MoE layers, and which attend to a sliding window.

Families say it in several ways: a list with one entry per layer, a list of layer numbers, or a rule (every n-th layer,
the first k dense). A list wins over a rule.
"""

from __future__ import annotations

import itertools

from meshplan.catalogs.models.families.facts import SlidingRule
from meshplan.catalogs.models.fields import FIELDS, ConfigFields, shorten

_WINDOWED = ("sliding_attention", "chunked_attention", "local")


def moe_layers(fields: ConfigFields, num_layers: int, words: tuple[str, ...] = ()) -> tuple[bool, ...]:
    """One flag per layer: does it route tokens to experts?

    Lists: ``moe_layers`` (Llama 4, layer numbers), ``mlp_layer_types`` (transformers 5: ``dense`` or ``sparse``),
    ``moe_layer_freq`` as 0/1 flags (MiMo). Rules, all of which must hold: not before ``first_k_dense_replace``, every
    ``moe_layer_freq``-th from 0 (DeepSeek), every ``decoder_sparse_step``-th or ``interleave_moe_layer_step``-th from
    1 (Qwen, Llama 4), not in ``mlp_only_layers`` (Qwen), within ``moe_layer_start_index`` and ``moe_layer_end_index``
    (ERNIE).
    """
    if "moe" in words or "mlp" in words:  # layers of one block each (Nemotron-H)
        return tuple(word == "moe" for word in words)
    if fields.config.get("moe_layers") is not None:
        listed = fields.layer_numbers("moe_layers", num_layers)
        return tuple(layer in listed for layer in range(num_layers))
    for key, (dense, sparse) in {"mlp_layer_types": ("dense", "sparse"), "moe_layer_freq": (0, 1)}.items():
        kinds = fields.config.get(key)
        if isinstance(kinds, list | tuple):
            if len(kinds) == num_layers and all(kind in (dense, sparse) for kind in kinds):
                return tuple(kind == sparse for kind in kinds)
            fields.report(key, f"must hold {num_layers} entries {dense} or {sparse}, one a layer, is {shorten(kinds)}")
            return (True,) * num_layers
    return _moe_layers_by_rule(fields, num_layers)


def _moe_layers_by_rule(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    first = max(fields.with_default("first_k_dense_replace", 0), fields.with_default("moe_layer_start_index", 0))
    end = fields.with_default("moe_layer_end_index", -1)
    last = num_layers - 1 if end < 0 else end
    distance = fields.with_default("moe_layer_freq", 1)
    step = fields.with_default("decoder_sparse_step", 1)
    dense = fields.layer_numbers("mlp_only_layers", num_layers)
    return tuple(
        first <= layer <= last and layer % distance == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(num_layers)
    )


def sliding_windows(
    fields: ConfigFields, rule: SlidingRule, num_layers: int, words: tuple[str, ...]
) -> tuple[int | None, ...]:
    """One entry per layer: the attention window in tokens or None; empty where every layer has full attention.

    ``words`` are the kinds of layer that the configuration lists; empty where it lists none.
    """
    window = fields.optional("sliding_window")
    if window is None and "sliding_window" not in fields.config:
        window = rule.default_window
    if words:
        has_window = tuple(word in _WINDOWED for word in words)
    else:
        has_window = _by_rule(fields, rule, num_layers) if fields.switch(rule.enabled) else ()
    if not any(has_window):
        return ()
    if window is None:
        if words:
            fields.report("sliding_window", "missing (layer_types lists layers with an attention window)")
        return ()
    return tuple(window if windowed else None for windowed in has_window)


def _by_rule(fields: ConfigFields, rule: SlidingRule, num_layers: int) -> tuple[bool, ...]:
    """The family's rule; ``sliding_window_pattern`` is a distance or letters such as ``LLLG`` (local, global)."""
    pattern = fields.config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return tuple(letter == "L" for letter in itertools.islice(itertools.cycle(pattern), num_layers))
    full_every: int | None = rule.full_every
    if pattern is not None and rule.full_every:
        full_every = fields.whole_number("sliding_window_pattern", pattern, FIELDS["num_hidden_layers"])
    first = _first_windowed_layer(fields, rule)
    return tuple(layer >= first and not (full_every and (layer + 1) % full_every == 0) for layer in range(num_layers))


def _first_windowed_layer(fields: ConfigFields, rule: SlidingRule) -> int:
    """Qwen's ``max_window_layers``: layers before it have full attention."""
    if rule.first_layer_key is None or fields.config.get(rule.first_layer_key) is None:
        return 0
    return (
        fields.whole_number(rule.first_layer_key, fields.config[rule.first_layer_key], FIELDS["first_k_dense_replace"])
        or 0
    )
