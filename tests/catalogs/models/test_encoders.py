"""Text encoders, embedding models and rerankers: parameters as transformers counts them, and what each attends to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_configs import SMALL_LLAMA

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import shape_document, shape_from_document

COUNTED = json.loads((Path(__file__).parent / "encoder_parameter_counts.json").read_text(encoding="utf-8"))
FAMILIES = COUNTED["families"]


def read(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(config, slug="test")


@pytest.mark.parametrize("case", sorted(FAMILIES))
def test_families_agree_with_transformers(case: str) -> None:
    counted = FAMILIES[case]
    shape = read(counted["config"])
    assert shape.num_parameters == counted["num_parameters"]
    classifier = {"architectures": [counted["class"]], "id2label": {"0": "LABEL_0"}}
    assert read(counted["config"] | classifier).num_parameters == counted["with_classifier"]
    assert shape.bidirectional
    assert shape_from_document(shape_document(shape)) == shape


@pytest.mark.parametrize("slug", sorted(COUNTED["without_lm_head"]))
def test_decoders_that_embed(slug: str, catalog: Catalog) -> None:
    """They are read as the language models that they were; what an embedding model leaves out is the LM head."""
    shape = catalog.model_shape(slug)
    assert shape.num_parameters - shape.lm_head_parameters == COUNTED["without_lm_head"][slug]
    assert not shape.bidirectional


def test_context_of_roberta_leaves_the_rows_of_padding_out() -> None:
    """XLM-R's table has 514 rows for texts of 512 tokens, bge-m3's 8,194 for 8,192."""
    config = FAMILIES["xlm-roberta"]["config"]
    shape = read(config | {"max_position_embeddings": 514, "pad_token_id": 1})
    assert (shape.num_position_embeddings, shape.max_sequence_length) == (514, 512)


def test_modernbert_attends_to_windows_between_whole_texts() -> None:
    shape = read(FAMILIES["modernbert"]["config"])
    assert shape.sliding_windows == (None, 16, 16, None, 16, 16)


def test_decoder_whose_configuration_says_that_it_is_not_causal() -> None:
    """gte-Qwen2, and what vLLM reads of any configuration (``is_causal``)."""
    assert read(SMALL_LLAMA | {"is_causal": False}).bidirectional
    assert not read(SMALL_LLAMA | {"is_causal": True}).bidirectional


def test_decoder_with_a_classifier_has_no_lm_head() -> None:
    shape = read(SMALL_LLAMA | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3})
    assert shape.lm_head_parameters == 3 * shape.hidden_size
    assert shape.output_columns == 3
