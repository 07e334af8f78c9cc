"""How a report names the layers of a model that are not softmax attention and an MLP."""

from __future__ import annotations

from collections import Counter

from meshplan.catalogs.models.shapes import ModelShape


def describe_blocks(shape: ModelShape) -> str:
    """What is unlike a plain transformer, in a few words; empty for one.

    Source: :mod:`meshplan.catalogs.models.layers.recurrent`.
    """
    if shape.blocks is None:
        return ""
    parts = []
    if shape.blocks.recurrent is not None:
        kind = shape.blocks.recurrent.kind
        parts.append(f"{shape.num_recurrent_layers} of {shape.num_hidden_layers} layers are recurrent ({kind})")
    if forms := shape.attention_forms:
        counts = Counter({form.name: 0 for form, _, _ in forms})
        for form, _, count in forms:
            counts[form.name] += count
        parts.append("attention of several forms: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    if shape.blocks.indexer is not None:
        parts.append(f"attention sees the {shape.blocks.indexer.top_k} tokens that an indexer selects")
    return ", ".join(parts) or "layers of one block each, or attention with an output gate"
