"""Encoder–decoders: the shapes of T5 and Whisper, two stacks of layers each.

An encoder of L_e layers reads the input; each of the L_d decoder layers attends to its own tokens and, by a second
attention (cross-attention), to the encoder's output. The shape is that of the decoder and holds the encoder's. With
width h, attention width w = a·d and MLP width f::

    T5       4·h·w an attention, 2 or 3·h·f an MLP (gated), a norm of h before each, one table of position biases
             (buckets × heads) a stack (umT5: a layer), V·h once or, where the configuration unties the LM head, twice
             (as checkpoints of T5 1.1 hold it; transformers 5.16.1 ties it all the same)
    Whisper  4·h² + 3·h an attention (keys have no bias), 2·h·f + f + h an MLP, norms of 2·h, two convolutions over
             three frames, learned positions on both sides, V·h once

Source: modelling files of ``t5``, ``mt5``, ``umt5`` and ``whisper`` in Hugging Face transformers 5.16.1;
tests/catalogs/models/test_encoder_decoder.py compares parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.catalogs.models.audio import AudioEntry
from meshplan.catalogs.models.fields import FIELDS, ConfigFields
from meshplan.catalogs.models.shapes import ModelShape

_BUCKETS, _HEAD_DIM = 32, 64  # T5's defaults
_MELS, _FRAMES, _TOKENS = 80, 1500, 448  # Whisper's
WINDOW_S = 30.0  # of every Whisper: its feature extractor pads sound to it
_NORMS_OF_A_DECODER_LAYER = 3

FAMILIES: Mapping[str, str] = {"t5": "t5", "mt5": "t5", "umt5": "t5", "whisper": "whisper"}
"""Hugging Face ``model_type`` → family."""


def is_encoder_decoder(config: Mapping[str, object]) -> bool:
    """Whether a ``config.json`` is that of a family that is read here."""
    return str(config.get("model_type", "")) in FAMILIES


def read_encoder_decoder(
    config: Mapping[str, object], *, slug: str, name: str = "", source: str = ""
) -> tuple[ModelShape, ConfigFields]:
    """The shape that a configuration of :data:`FAMILIES` states, and its fields with the problems found.

    Args:
        config: the parsed ``config.json``.
        slug: catalog name.
        name: as the publisher writes it; the slug where empty.
        source: citation of the configuration.
    """
    fields = ConfigFields(config, {})
    model_type = str(config["model_type"])
    shape = (_t5 if FAMILIES[model_type] == "t5" else _whisper)(fields)
    encoder = None if shape.encoder is None else replace(shape.encoder, slug=slug, name=name or slug, family=model_type)
    return replace(shape, slug=slug, name=name or slug, family=model_type, source=source, encoder=encoder), fields


def _size(fields: ConfigFields, key: str, like: str, default: int | None = None) -> int:
    """One whole number, within the limits of the field of a language model that it is like."""
    value = fields.config.get(key, default)
    if value is None:
        fields.report(key, f"missing ({FIELDS[like].meaning})")
        return 0
    return fields.whole_number(key, value, FIELDS[like]) or 0


def _with_encoder(decoder: ModelShape, encoder: ModelShape) -> ModelShape:
    """The decoder with its encoder, which has no vocabulary of its own: it reads by the decoder's embedding."""
    both_ways = replace(encoder, bidirectional=True, vocab_size=0, tie_word_embeddings=True)
    return replace(decoder, encoder=both_ways, norms_per_layer=_NORMS_OF_A_DECODER_LAYER)


def _t5(fields: ConfigFields) -> ModelShape:
    """RMS norms, no biases but those of positions; a head is as wide as the configuration says (``d_kv``)."""
    heads, layers = _size(fields, "num_heads", "num_attention_heads"), _size(fields, "num_layers", "num_hidden_layers")
    decoder_layers = _size(fields, "num_decoder_layers", "num_hidden_layers", layers or None)
    table = heads * _size(fields, "relative_attention_num_buckets", "hidden_size", _BUCKETS)
    tables = (decoder_layers, layers) if fields.config.get("model_type") == "umt5" else (1, 1)
    decoder = ModelShape(
        slug="",
        name="",
        family="",
        num_hidden_layers=decoder_layers,
        hidden_size=_size(fields, "d_model", "hidden_size"),
        intermediate_size=_size(fields, "d_ff", "intermediate_size"),
        gated_mlp="gated" in str(fields.config.get("feed_forward_proj", "relu")),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_size(fields, "d_kv", "head_dim", _HEAD_DIM),
        vocab_size=_size(fields, "vocab_size", "vocab_size"),
        tie_word_embeddings=fields.config.get("tie_word_embeddings", True) is not False,
        position_bias_parameters=tables[0] * table,
    )
    encoder = replace(decoder, num_hidden_layers=layers, position_bias_parameters=tables[1] * table)
    return _with_encoder(decoder, encoder)


def _whisper(fields: ConfigFields) -> ModelShape:
    """Layer norms, biases, learned positions; the encoder reads windows of sound (:mod:`.audio`)."""
    h, positions = _size(fields, "d_model", "hidden_size"), "max_sequence_length"
    decoder = _whisper_stack(fields, "decoder", h, _size(fields, "max_target_positions", positions, _TOKENS))
    encoder = _whisper_stack(fields, "encoder", h, _size(fields, "max_source_positions", positions, _FRAMES))
    audio = AudioEntry(num_mel_bins=_size(fields, "num_mel_bins", "hidden_size", _MELS), window_s=WINDOW_S)
    decoder = replace(decoder, vocab_size=_size(fields, "vocab_size", "vocab_size"))
    return _with_encoder(decoder, replace(encoder, audio=audio))


def _whisper_stack(fields: ConfigFields, side: str, hidden_size: int, positions: int) -> ModelShape:
    heads = _size(fields, f"{side}_attention_heads", "num_attention_heads")
    if heads and hidden_size % heads:
        fields.report(f"{side}_attention_heads", f"{heads} does not divide d_model {hidden_size}")
    return ModelShape(
        slug="",
        name="",
        family="",
        num_hidden_layers=_size(fields, f"{side}_layers", "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_size(fields, f"{side}_ffn_dim", "intermediate_size"),
        gated_mlp=False,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads if heads else 0,
        vocab_size=0,
        tie_word_embeddings=True,
        num_position_embeddings=positions,
        max_sequence_length=positions,
        attention_bias=True,
        key_bias=False,
        attention_output_bias=True,
        mlp_bias=True,
        norm_bias=True,
    )
