"""Encoder–decoders: parameters as transformers counts them, and a refusal that says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.encoder_decoder import read_encoder_decoder

COUNTED = json.loads((Path(__file__).parent / "encoder_decoder_counts.json").read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_parameters_agree_with_transformers(name: str) -> None:
    """transformers 5.16.1 ties the LM head of every T5; an earlier release, and the checkpoint, have it beside."""
    config, number = COUNTED[name]["config"], COUNTED[name]["num_parameters"]
    found, fields = read_encoder_decoder(config)
    assert fields.problems == []
    assert found is not None
    own_head = 0 if config.get("tie_word_embeddings", True) else config["vocab_size"] * config["d_model"]
    assert found.num_parameters - own_head == number


def test_a_refusal_says_what_the_model_is_and_what_is_missing() -> None:
    with pytest.raises(ModelConfigError, match=r"24 \+ 24 layers, 2,849,757,184 parameters\): cross-attention") as t5:
        shape_from_config(COUNTED["flan-t5-xl"]["config"] | {"is_encoder_decoder": True}, slug="flan-t5-xl")
    assert "tensor and data parallelism alone" in str(t5.value)
    with pytest.raises(ModelConfigError, match="although vLLM and TensorRT-LLM serve Whisper"):
        shape_from_config(COUNTED["whisper-large-v3"]["config"], slug="whisper")


def test_every_problem_of_the_sizes_at_once() -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({"model_type": "t5", "d_model": "x", "num_layers": 0}, slug="wrong")
    for path in ("d_model", "num_layers", "d_ff", "num_heads", "vocab_size"):
        assert f"- {path}: " in str(caught.value)
