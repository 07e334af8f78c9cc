"""Every model family by its Hugging Face ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.catalogs.models.families.decoders import DECODERS
from meshplan.catalogs.models.families.encoders import ENCODERS
from meshplan.catalogs.models.families.facts import Family, SlidingRule, Switch

GENERIC = Family(
    gated_mlp=None,
    qk_norm=Switch(default=False, key="use_qk_norm"),
    sliding=SlidingRule(enabled=Switch(default=True, key="use_sliding_window")),
)
"""How a ``model_type`` is read that is not listed."""

FAMILIES: Mapping[str, Family] = {**DECODERS, **ENCODERS}


def family_of(model_type: str) -> Family:
    """The family of a Hugging Face ``model_type``; the text part of a multimodal model counts as its family.

    >>> family_of("gemma3_text") is family_of("gemma3")
    True
    >>> family_of("a-model-of-tomorrow") is GENERIC
    True
    """
    return FAMILIES.get(model_type.removesuffix("_text"), GENERIC)
