"""Methods and depths of speculative decoding that a plan may choose from.

An acceptance profile says how many tokens g a step yields with γ drafted ones. Estimators know one acceptance α for
each token (eq. 1 of arXiv:2211.17192): for each γ it is the α with (1 − α^(γ+1)) / (1 − α) = g, so that the step's
yield is the measured one.

What a draft costs, as a share of one decode iteration of the model: n-gram look-ups 0.59 % a step whatever their
number (fitted by SpecDecode-Bench, arXiv:2601.11580, on H100); EAGLE-3 heads and prediction layers by the weights that
they read, one layer and one LM head over what a decode reads of the model. A draft model of the catalog costs the
larger of its share of what is read and of its share of the layers, since small batches of small models wait for
launches and not for memory; another one states its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.serving.problem.config import Speculation

METHODS = ("ngram", "eagle3", "mtp", "draft_model")
NGRAM_SHARE = 0.0059
_STEPS_OF_BISECTION = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """Where drafts come from.

    Args:
        method: of :data:`METHODS`.
        shape: the draft model; None of other methods, and of one that the catalog does not have.
    """

    method: str
    shape: ModelShape | None = None


def drafter_of(speculation: Speculation | None, shape: ModelShape, draft: ModelShape | None) -> Drafter | None:
    """Where the drafts of a configuration come from; None without any.

    Args:
        speculation: as planned; without a method they are of the draft model, else of prediction layers.
        shape: the model.
        draft: the draft model, where one is named that the catalog has.
    """
    if speculation is None:
        return None
    usual = "draft_model" if draft is not None else "mtp" if shape.num_nextn_predict_layers else ""
    method = speculation.method or usual
    return Drafter(method=method, shape=draft if method == "draft_model" else None)


def speculation_options(
    shape: ModelShape,
    profile: Mapping[str, Mapping[int, float]],
    methods: tuple[str, ...],
    draft_cost: float | None,
    draft: ModelShape | None = None,
) -> tuple[Speculation, ...]:
    """Every (method, depth) that the profile holds for the methods allowed.

    Args:
        shape: the model.
        profile: method → drafted tokens → tokens of a step.
        methods: of :data:`METHODS`.
        draft_cost: of one draft step, in place of the computed one.
        draft: the draft model, where one is named that the catalog has.
    """
    return tuple(
        Speculation(
            method=method,
            num_draft_tokens=drafted,
            acceptance=acceptance_of(gained, drafted),
            draft_cost=computed_cost(shape, method, drafted, draft) if draft_cost is None else draft_cost,
        )
        for method in methods
        for drafted, gained in sorted(profile.get(method, {}).items())
    )


def acceptance_of(tokens_per_step: float, num_draft_tokens: int) -> float:
    """α with which γ drafts yield so many tokens a step.

    >>> round(acceptance_of(1.5, 1), 6)
    0.5
    """
    low, high = 0.0, 1.0
    for _ in range(_STEPS_OF_BISECTION):
        middle = (low + high) / 2.0
        option = Speculation(num_draft_tokens=num_draft_tokens, acceptance=middle)
        low, high = (middle, high) if option.tokens_per_step < tokens_per_step else (low, middle)
    return high


def computed_cost(shape: ModelShape, method: str, drafted: int, draft: ModelShape | None = None) -> float:
    """Time of one draft step over one decode iteration of the model; see the module's text."""
    if method == "ngram":
        return NGRAM_SHARE / drafted
    if method == "draft_model" and draft is not None:
        read = _read_parameters(draft) / _read_parameters(shape)
        return min(max(read, draft.num_hidden_layers / shape.num_hidden_layers), 1.0)
    return eagle_parameters(shape) / _read_parameters(shape)


def eagle_parameters(shape: ModelShape) -> float:
    """What a head of EAGLE-3 reads in a step: one layer and one LM head."""
    return _layer_reads(shape, shape.num_hidden_layers - 1) + shape.vocab_size * shape.hidden_size


def _read_parameters(shape: ModelShape) -> float:
    """Parameters that a decode of one token reads, those of its LM head among them."""
    layers = sum(_layer_reads(shape, layer) for layer in range(shape.num_hidden_layers))
    return layers + shape.vocab_size * shape.hidden_size


def _layer_reads(shape: ModelShape, layer: int) -> float:
    """Parameters of a layer without the experts that a token does not visit."""
    idle = 0 if shape.moe is None else (shape.moe.num_experts - shape.moe.num_experts_per_token)
    return shape.layer_parameters(layer) - idle * shape.is_moe_layer(layer) * shape.expert_parameters
