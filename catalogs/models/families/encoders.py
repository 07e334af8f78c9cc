"""Families of text encoders: every token attends to all others of its text, and no LM head follows.

Source: modelling files of Hugging Face transformers 5.16.1, folder ``src/transformers/models/<family>``;
tests/catalogs/models/test_encoders.py compares parameter counts with ``AutoModel`` and
``AutoModelForSequenceClassification``, of published sizes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.catalogs.models.families import dialects as config_dialects
from meshplan.catalogs.models.families.facts import PLAIN, YES, Family, SlidingRule

_BERT = replace(
    PLAIN,
    num_outer_norms=1,  # after the embedding; none follows the layers, which end in one themselves
    position_offset=0,
    bidirectional=YES,
    is_encoder=True,
    has_pooler=True,
    defaults={"num_token_types": 2},
)
_ROBERTA = replace(_BERT, dialect=config_dialects.roberta)

ENCODERS: Mapping[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    # Rotary positions, gated MLP, no biases.
    "nomic_bert": Family(
        tie_word_embeddings=True,
        norm_bias=YES,
        bidirectional=YES,
        is_encoder=True,
        defaults={"num_token_types": 2},
    ),
    "modernbert": Family(
        tie_word_embeddings=True,
        # After the embedding and after the last layer, but none before the attention of the first.
        num_outer_norms=1,
        bidirectional=YES,
        is_encoder=True,
        sliding=SlidingRule(default_window=128),
        dialect=config_dialects.modernbert,
    ),
}
