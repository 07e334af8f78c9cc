"""Methods and depths of speculative decoding that a plan may choose from.

An acceptance profile says how many tokens g a step yields with γ drafted ones. Estimators know one acceptance α for
each token (eq. 1 of arXiv:2211.17192): for each γ it is the α with (1 − α^(γ+1)) / (1 − α) = g, so that the step's
yield is the measured one.

What a draft costs, as a share of one decode iteration of the model: n-gram look-ups 0.59 % a step whatever their
number (fitted by SpecDecode-Bench, arXiv:2601.11580, on H100); EAGLE-3 heads and prediction layers by the weights that
they read, one layer and one LM head over what a decode reads of the model. A draft model states its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.serving.problem.config import Speculation

METHODS = ("ngram", "eagle3", "mtp", "draft_model")
NGRAM_SHARE = 0.0059
_STEPS_OF_BISECTION = 60


def speculation_options(
    shape: ModelShape, profile: Mapping[str, Mapping[int, float]], methods: tuple[str, ...], draft_cost: float | None
) -> tuple[Speculation, ...]:
    """Every (method, depth) that the profile holds for the methods allowed.

    Args:
        shape: the model.
        profile: method → drafted tokens → tokens of a step.
        methods: of :data:`METHODS`.
        draft_cost: of one draft step, in place of the computed one.
    """
    return tuple(
        Speculation(
            method=method,
            num_draft_tokens=drafted,
            acceptance=acceptance_of(gained, drafted),
            draft_cost=_draft_cost(shape, method, drafted) if draft_cost is None else draft_cost,
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


def _draft_cost(shape: ModelShape, method: str, drafted: int) -> float:
    """Time of one draft step over one decode iteration of the model; see the module's text."""
    if method == "ngram":
        return NGRAM_SHARE / drafted
    head = shape.vocab_size * shape.hidden_size
    layers = range(shape.num_hidden_layers)
    idle = 0 if shape.moe is None else (shape.moe.num_experts - shape.moe.num_experts_per_token)
    each = [
        shape.layer_parameters(layer) - idle * shape.is_moe_layer(layer) * shape.expert_parameters for layer in layers
    ]
    return (each[-1] + head) / (sum(each) + head)
