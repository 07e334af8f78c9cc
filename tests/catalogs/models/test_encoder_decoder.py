"""Encoder–decoders: parameters as transformers counts them, and every problem of the sizes at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models.config import shape_from_config
from meshplan.planner.core.plan import shape_document, shape_from_document

COUNTED = json.loads((Path(__file__).parent / "encoder_decoder_counts.json").read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_parameters_agree_with_transformers(name: str) -> None:
    """transformers 5.16.1 ties the LM head of every T5; an earlier release, and the checkpoint, have it beside."""
    config, number = COUNTED[name]["config"], COUNTED[name]["num_parameters"]
    found = shape_from_config(config | {"is_encoder_decoder": True}, slug="one")
    own_head = 0 if config.get("tie_word_embeddings", True) else config["vocab_size"] * config["d_model"]
    assert found.num_parameters - own_head == number
    assert found.encoder is not None
    assert found.encoder.bidirectional
    assert shape_from_document(json.loads(json.dumps(shape_document(found)))) == found


def test_every_problem_of_the_sizes_at_once() -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({"model_type": "t5", "d_model": "x", "num_layers": 0}, slug="wrong")
    for path in ("d_model", "num_layers", "d_ff", "num_heads", "vocab_size"):
        assert f"- {path}: " in str(caught.value)


def test_other_encoder_decoders_are_refused_by_name() -> None:
    with pytest.raises(ModelConfigError, match=r"'bart' is an encoder-decoder of a family that is not read yet"):
        shape_from_config({"model_type": "bart", "d_model": 512, "num_layers": 6}, slug="bart")
