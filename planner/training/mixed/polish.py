"""Small changes of a plan's layers: one at a time from a slow stage to another, as long as the step gets shorter.

The split of a search is exact for the slowest stage's time; which of several equal splits a schedule likes best (1F1B
hides slow early stages) is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshplan.planner.core.budget import Budget
from meshplan.planner.training.mixed.stages import MixedConfig

# Stages that give a layer away: those that hold most, by the time that their layers take.
GIVING = 4
MOST_ROUNDS = 8


def polished(
    config: MixedConfig,
    step_s: float,
    *,
    price: Callable[[MixedConfig], float],
    weight: Callable[[MixedConfig, int], float],
    fits: Callable[[MixedConfig], bool],
    budget: Budget,
) -> tuple[MixedConfig, float]:
    """A plan that no move of one layer from a slow stage makes faster, and its step.

    Args:
        config: to start from.
        step_s: its step.
        price: step of a plan.
        weight: time of a micro-batch on one of its stages.
        fits: whether a plan stays within the memory.
        budget: what it may spend.
    """
    for _ in range(MOST_ROUNDS):
        better = None
        for other in _moves(config, weight):
            if budget.stopped:
                break
            seconds = price(other)
            if seconds < step_s * (1.0 - 1e-9) and fits(other):
                better, step_s = other, seconds
        if better is None:
            return config, step_s
        config = better
    return config, step_s


def _moves(config: MixedConfig, weight: Callable[[MixedConfig, int], float]) -> Iterator[MixedConfig]:
    """The plan with one layer moved."""
    stages = config.stages
    slowest = sorted(range(len(stages)), key=lambda index: -weight(config, index))[:GIVING]
    for giver in slowest:
        if stages[giver].num_layers <= 1:
            continue
        seen = set()
        for taker, stage in enumerate(stages):
            if taker == giver:
                continue
            # Among equal neighbours, the first and the last are enough.
            key = (stage, taker == 0, taker == len(stages) - 1, taker < giver)
            if key in seen:
                continue
            seen.add(key)
            moved = list(stages)
            moved[giver] = replace(stages[giver], num_layers=stages[giver].num_layers - 1)
            moved[taker] = replace(stage, num_layers=stage.num_layers + 1)
            yield replace(config, stages=tuple(moved))
