"""Encoder–decoders: sizes and parameters of T5 and Whisper, and why no question about them is answered yet.

An encoder of L_e layers reads the input; each of the L_d decoder layers attends to its own tokens and, by a second
attention (cross-attention), to the encoder's output. With width h, attention width w = a·d and MLP width f::

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
from dataclasses import dataclass

from meshplan.catalogs.models.fields import FIELDS, ConfigFields

_KERNEL = 3  # frames of both of Whisper's convolutions
_ATTENTIONS_OF_A_DECODER_LAYER = 2
_BUCKETS, _HEAD_DIM = 32, 64  # T5's defaults

WHY_UNPLANNED: Mapping[str, str] = {
    "t5": "cross-attention is not priced; Megatron-LM trains T5 with tensor and data parallelism alone (pretrain_t5.py "
    "refuses pipeline stages), and of the engines here TensorRT-LLM alone lists it",
    "whisper": "cross-attention and requests of audio are not priced, although vLLM and TensorRT-LLM serve Whisper; no "
    "target trains it",
}
"""Family → what is missing."""
FAMILIES: Mapping[str, str] = {"t5": "t5", "mt5": "t5", "umt5": "t5", "whisper": "whisper"}
"""Hugging Face ``model_type`` → family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """Sizes of one model.

    Args:
        family: of :data:`WHY_UNPLANNED`.
        encoder_layers: L_e.
        decoder_layers: L_d.
        num_parameters: all of them, as transformers counts.
    """

    family: str
    encoder_layers: int
    decoder_layers: int
    num_parameters: int


def read_encoder_decoder(config: Mapping[str, object]) -> tuple[EncoderDecoder | None, ConfigFields]:
    """The sizes that a configuration states, and its fields with the problems found; None where its family is not read.

    Args:
        config: the parsed ``config.json``.
    """
    family = FAMILIES.get(str(config.get("model_type", "")))
    fields = ConfigFields(config, {})
    if family is None:
        return None, fields
    found = _t5(fields) if family == "t5" else _whisper(fields)
    return (None if fields.problems else found), fields


def _size(fields: ConfigFields, key: str, like: str, default: int | None = None) -> int:
    """One whole number, within the limits of the field of a language model that it is like."""
    value = fields.config.get(key, default)
    if value is None:
        fields.report(key, f"missing ({FIELDS[like].meaning})")
        return 0
    return fields.whole_number(key, value, FIELDS[like]) or 0


def _t5(fields: ConfigFields) -> EncoderDecoder:
    h, f = _size(fields, "d_model", "hidden_size"), _size(fields, "d_ff", "intermediate_size")
    heads, d = _size(fields, "num_heads", "num_attention_heads"), _size(fields, "d_kv", "head_dim", _HEAD_DIM)
    layers, vocab = _size(fields, "num_layers", "num_hidden_layers"), _size(fields, "vocab_size", "vocab_size")
    decoder = _size(fields, "num_decoder_layers", "num_hidden_layers", layers or None)
    buckets = _size(fields, "relative_attention_num_buckets", "hidden_size", _BUCKETS)
    gated = "gated" in str(fields.config.get("feed_forward_proj", "relu"))
    attention, mlp = 4 * h * heads * d + h, (2 + gated) * h * f + h
    tables = layers + decoder if fields.config.get("model_type") == "umt5" else 2
    ends = vocab * h * (1 if fields.config.get("tie_word_embeddings", True) is not False else 2)
    stacks = layers * (attention + mlp) + decoder * (_ATTENTIONS_OF_A_DECODER_LAYER * attention + mlp) + 2 * h
    return EncoderDecoder(
        family="t5",
        encoder_layers=layers,
        decoder_layers=decoder,
        num_parameters=stacks + tables * buckets * heads + ends,
    )


def _whisper(fields: ConfigFields) -> EncoderDecoder:
    h, vocab = _size(fields, "d_model", "hidden_size"), _size(fields, "vocab_size", "vocab_size")
    layers = _size(fields, "encoder_layers", "num_hidden_layers")
    decoder = _size(fields, "decoder_layers", "num_hidden_layers")
    read, written = (
        2 * h * width + width + h
        for width in (_size(fields, f"{side}_ffn_dim", "intermediate_size") for side in ("encoder", "decoder"))
    )
    mels = _size(fields, "num_mel_bins", "hidden_size", 80)
    frames = _size(fields, "max_source_positions", "max_sequence_length", 1500)
    tokens = _size(fields, "max_target_positions", "max_sequence_length", 448)
    attention, norm = 4 * h * h + 3 * h, 2 * h
    entry = _KERNEL * h * (mels + h) + 2 * h + (frames + tokens + vocab) * h
    stacks = layers * (attention + read + 2 * norm) + decoder * (2 * attention + written + 3 * norm) + 2 * norm
    return EncoderDecoder(
        family="whisper", encoder_layers=layers, decoder_layers=decoder, num_parameters=entry + stacks
    )
