"""Models that answer with a vector or a score: what stands in the place of an LM head.

An embedding model turns the last hidden states of a text into one vector (of the first or last token, or their mean),
a reranker a query and a document into one score. Neither has an LM head; some have layers over the pooled state:
BERT's pooler (h → h), a classifier (h → labels), or both.

Source: Hugging Face transformers 5.16.1, modelling files of the families, and ``AutoModelForSequenceClassification``;
tests/catalogs/models/test_encoders.py compares parameter counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CLASSIFIER = "ForSequenceClassification"  # how transformers ends the name of a class with a classifier
_UNSTATED_LABELS = 2  # transformers, PretrainedConfig.num_labels
_MOST_LABELS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """What follows the last layer of a model without an LM head.

    Args:
        has_dense: a layer h → h works on the pooled state: BERT's pooler, or the first of a classifier.
        num_labels: scores of a classifier; 0 where the pooled state itself is the answer.
        bias: the products have biases (or a norm in their place).
    """

    has_dense: bool = False
    num_labels: int = 0
    bias: bool = True

    def columns(self, hidden_size: int) -> int:
        """Outputs of all products over one pooled state, each of h inputs; 0 without any."""
        return self.has_dense * hidden_size + self.num_labels

    def parameters(self, hidden_size: int) -> int:
        """Parameters beyond the last layer: columns·(h + 1)."""
        return self.columns(hidden_size) * (hidden_size + self.bias)


def is_classifier(config: Mapping[str, object]) -> bool:
    """Whether a configuration is that of a checkpoint with a classifier: a reranker, a reward model."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(
        isinstance(name, str) and name.endswith(CLASSIFIER) for name in architectures
    )


def num_labels(config: Mapping[str, object]) -> int:
    """Scores of a classifier: ``num_labels``, or as many as ``id2label`` names.

    >>> num_labels({"id2label": {"0": "LABEL_0"}}), num_labels({})
    (1, 2)
    """
    stated, named = config.get("num_labels"), config.get("id2label")
    if isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated <= _MOST_LABELS:
        return stated
    return len(named) if isinstance(named, Mapping) and named else _UNSTATED_LABELS


def pooled(config: Mapping[str, object], *, is_encoder: bool, has_pooler: bool) -> Pooling | None:
    """What follows the last layer of a configuration's model; None: an LM head.

    Args:
        config: the language model's section.
        is_encoder: its family has no LM head; a decoder has a classifier in its place, of one matrix.
        has_pooler: its plain model ends in a pooler. With a classifier every family read here has a layer h → h.
    """
    labels = num_labels(config) if is_classifier(config) else 0
    if not is_encoder:
        return Pooling(num_labels=labels, bias=False) if labels else None
    return Pooling(has_dense=has_pooler or labels > 0, num_labels=labels)
