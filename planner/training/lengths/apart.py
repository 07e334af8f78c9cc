"""Attention and linear work balanced apart, for plans without a pipeline (:mod:`meshplan.planner.lengths.apart`).

The documents of a step are dealt to as many micro-batches over all ranks as the plan's ranks have; in each of them
every layer waits for the longest attention, then for tokens that move. What attention takes in a group of c is the
plan's micro-batch priced with context parallelism c, less its linear work; tokens move as hidden states of 16 bits, to
attention and back, forward and backward, over the slowest link between ranks, and nothing hides it.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.apart import ApartQuestion, spread_apart
from meshplan.planner.lengths.balance import balanced
from meshplan.planner.training.lengths.assigned import Setting, Way, way_of
from meshplan.planner.training.lengths.group_costs import GroupCosts
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

APART = "attention apart"
# Bytes of a hidden state, and how often it moves in a layer.
_BYTES, _MOVES = 2.0, 4.0
MOST_STEPS = 4


def per_moved_token_s(problem: TrainingProblem, config: TrainingConfig) -> float:
    """Seconds for one token that a rank receives, there and back through all layers, forward and backward."""
    shape, machine = problem.shape, problem.machine
    layers = sum(shape.has_attention(layer) for layer in range(shape.num_hidden_layers))
    inside = config.world_size <= machine.domain_size
    rate = machine.scale_up_bytes_per_s if inside else machine.scale_out_bytes_per_s
    return _MOVES * layers * shape.hidden_size * _BYTES / config.tensor_parallel / rate


def attention_apart(setting: Setting, costs: GroupCosts, moved_s: float) -> Way:
    """What it comes to over some steps; a step that would be longer keeps the plan's sequences as they come.

    Args:
        setting: the configuration and its documents.
        costs: what documents take in groups.
        moved_s: see :func:`per_moved_token_s`.
    """
    config = setting.config
    outside = setting.equal_s - config.num_microbatches * setting.mean_s
    seconds, even, gaps, imbalance = [], [], [], []
    for pieces, sequence_of in setting.steps()[:MOST_STEPS]:
        static = setting.sequences_s(pieces, sequence_of).reshape(config.data_parallel, -1).sum(axis=1)
        even.append(setting.even_s(float(setting.work.of(pieces).sum())))
        found = _step(setting, costs, moved_s, pieces)
        if found is None or found[0] >= static.max():
            seconds.append(outside + float(static.max()))
            imbalance.append(float(static.max() / static.mean()))
            continue
        seconds.append(outside + found[0])
        gaps.append(1.0 - (outside + found[1]) / (outside + found[0]))
        imbalance.append(found[2])
    return way_of(setting, APART, seconds, even, imbalance, gaps)


def _step(setting: Setting, costs: GroupCosts, moved_s: float, pieces: IntArray) -> tuple[float, float, float] | None:
    """(seconds, their bound, longest attention over the mean) of all micro-batches of a step."""
    whole = _question(costs, moved_s, pieces)
    try:
        dealt = balanced(
            setting.work.of(pieces),
            pieces,
            ranks=1,
            micro_batches=setting.config.num_microbatches,
            most_tokens=costs.ranks * costs.most_tokens,
        )
    except ValueError:  # full sequences leave no room to deal
        return None
    seconds, busy = 0.0, []
    for inside in dealt.ranks[0]:
        if not inside:
            continue
        found = spread_apart(_question(costs, moved_s, pieces[list(inside)]))
        if found is None:
            return None
        seconds += found.seconds
        busy.append(found.attention_s)
    longest, mean = sum(float(one.max()) for one in busy), sum(float(one.mean()) for one in busy)
    # Short documents in groups whose products are the faster ones leave no attention to be uneven.
    return seconds, whole.least_attention_s() + whole.linear_s, longest / mean if mean else 1.0


def _question(costs: GroupCosts, moved_s: float, tokens: IntArray) -> ApartQuestion:
    return ApartQuestion(
        attention={size: _attention_s(costs, size, tokens) for size in costs.works},
        tokens=tokens,
        ranks=costs.ranks,
        per_token_s=costs.works[1].per_token_s,
        per_moved_token_s=moved_s,
        most_tokens=costs.most_tokens,
    )


def _attention_s(costs: GroupCosts, size: int, tokens: IntArray) -> FloatArray:
    """What documents take in a group, less the linear work of their tokens."""
    return np.maximum(costs.seconds(size, tokens) - costs.works[1].per_token_s * tokens / size, 0.0)
