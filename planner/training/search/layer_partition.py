"""How many layers should each pipeline stage hold? The split whose slowest stage is fastest, within memory.

*Notation.* L layers in order, layer l takes t_l seconds, holds w_l bytes of states and a_l bytes of activations of a
micro-batch. The first stage adds the embedding (t_E, w_E), the last one the LM head and loss (t_H, w_H, with the
multi-token-prediction layers). Stage i keeps n_i micro-batches in flight.

*Objective.* min over cuts 0 = c_0 < c_1 < … < c_p = L of max_i T_i, T_i = Σ_{c_i ≤ l < c_{i+1}} t_l (+ ends); among the
best, the least Σ T_i², so that no other stage is slower than it needs to be.

*Constraint.* W_i + n_i·A_i ≤ M for every stage i, W and A summed like T; at least one layer per stage.

*Method.* Dynamic programming over (stages placed, layers placed): D_i(j) = min_{k<j} max(D_{i−1}(k), T_i(k, j)), then
once more for Σ T_i² with every T_i at most D_p(L). Both are exact; O(p·L²), in NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.flops import FLOPS_PER_MULTIPLY_ADD, attention_width, mean_context

Matrix = NDArray[np.float64]
# Loads this close are equal: sums of the same layers in another order.
TIE_RELATIVE = 1e-12
# Least gain of the slowest stage for which the search looks at another split: below it the estimator's own error of a
# layer's time decides.
WORTHWHILE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoads:
    """What the layers and the two ends of a model cost; any one unit of time and of memory.

    Args:
        layer_s: of each layer, one micro-batch.
        first_s: added to the first stage.
        last_s: added to the last stage.
        state_bytes: of each layer; empty where memory does not matter.
        activation_bytes: of each layer and micro-batch in flight; as ``state_bytes``.
        first_bytes: added to the first stage.
        last_bytes: added to the last stage.
    """

    layer_s: Sequence[float]
    first_s: float = 0.0
    last_s: float = 0.0
    state_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    first_bytes: float = 0.0
    last_bytes: float = 0.0


def partition_layers(
    loads: LayerLoads, num_stages: int, *, in_flight: Sequence[float] = (), memory_bytes: float = float("inf")
) -> tuple[int, ...] | None:
    """Layers of each stage, or None where no split keeps every stage within memory.

    Args:
        loads: see :class:`LayerLoads`.
        num_stages: p.
        in_flight: micro-batches that each stage holds, p of them; needed with a memory limit.
        memory_bytes: M.

    >>> partition_layers(LayerLoads(layer_s=[1.0] * 8, last_s=1.0), 3)
    (3, 3, 2)
    """
    stage_costs = _stage_costs(loads, num_stages, in_flight, memory_bytes)
    slowest, _ = _best_cuts(stage_costs, num_stages, np.maximum)
    if not np.isfinite(slowest):
        return None
    limit = slowest * (1.0 + TIE_RELATIVE)

    def squares(stage: int) -> Matrix:
        seconds = stage_costs(stage)
        return np.where(seconds <= limit, seconds, np.inf) ** 2

    _, cuts = _best_cuts(squares, num_stages, np.add)
    return tuple(int(count) for count in np.diff(cuts))


@cache
def balance_arithmetic(shape: ModelShape, sequence_length: int, usual: tuple[int, ...]) -> tuple[int, ...] | None:
    """The split whose stage with the most FLOPs has fewest, LM head and multi-token prediction on the last stage.

    FLOPs and not seconds, because one split serves every candidate.

    Args:
        shape: the model.
        sequence_length: tokens.
        usual: layers of each stage under the even split.

    Returns:
        The split; None unless it takes :data:`WORTHWHILE` or more off the slowest stage of ``usual``.
    """
    layers = [_layer_flops(shape, layer, sequence_length) for layer in range(shape.num_hidden_layers)]
    extra = shape.num_nextn_predict_layers
    head = FLOPS_PER_MULTIPLY_ADD * (1 + extra) * shape.vocab_size * shape.hidden_size + extra * layers[-1]
    ends = np.cumsum([0, *usual])
    slowest = max(sum(layers[first:end]) + head * (end == ends[-1]) for first, end in itertools.pairwise(ends.tolist()))
    if not _fits_below(layers, head, len(usual), (1.0 - WORTHWHILE) * slowest):
        return None
    return partition_layers(LayerLoads(layer_s=layers, last_s=head), len(usual))


def _fits_below(layers: Sequence[float], head: float, num_stages: int, limit: float) -> bool:
    """Whether some split keeps every stage at or below ``limit``: from the end, each stage takes all that fits."""
    stages, load = 1, head + layers[-1]
    if load > limit:
        return False
    for layer in reversed(layers[:-1]):
        if load + layer > limit:
            stages, load = stages + 1, 0.0
        if load + layer > limit:
            return False
        load += layer
    return stages <= num_stages


def _layer_flops(shape: ModelShape, layer: int, sequence_length: int) -> float:
    """Forward FLOPs of one token on one layer, visited experts only."""
    active = float(shape.attention_parameters)
    if shape.moe is not None and shape.is_moe_layer(layer):
        active += shape.moe.num_experts_per_token * shape.expert_parameters
        active += shape.shared_expert_parameters + shape.router_parameters
    else:
        active += shape.dense_mlp_parameters
    scores = mean_context(sequence_length, shape.window(layer)) * attention_width(shape)
    return FLOPS_PER_MULTIPLY_ADD * (active + scores)


def _stage_costs(
    loads: LayerLoads, num_stages: int, in_flight: Sequence[float], memory_bytes: float
) -> Callable[[int], Matrix]:
    """Stage → T(k, j) of holding the layers k ≤ l < j, [L + 1, L + 1]; infinite where empty or beyond memory."""
    seconds, states, kept = (_between(values) for values in (loads.layer_s, loads.state_bytes, loads.activation_bytes))
    empty = np.tri(len(loads.layer_s) + 1, dtype=bool)

    def costs(stage: int) -> Matrix:
        first, last = stage == 0, stage == num_stages - 1
        total = seconds + loads.first_s * first + loads.last_s * last
        beyond = empty
        if np.isfinite(memory_bytes):
            held = states + in_flight[stage] * kept + loads.first_bytes * first + loads.last_bytes * last
            beyond = empty | (held > memory_bytes)
        return np.where(beyond, np.inf, total)

    return costs


def _between(values: Sequence[float]) -> Matrix:
    """Sums of the values k ≤ l < j, [n + 1, n + 1]."""
    until = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    return until[None, :] - until[:, None]


def _best_cuts(
    costs: Callable[[int], Matrix], num_stages: int, combine: Callable[[Matrix, Matrix], Matrix]
) -> tuple[float, list[int]]:
    """Least combined cost of all stages, and the layers before each stage with the total at the end."""
    best: Matrix = costs(0)[0]
    choices: list[NDArray[np.int64]] = []
    for stage in range(1, num_stages):
        total = combine(best[:, None], costs(stage))
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    cuts = [len(best) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[-1]), [0, *reversed(cuts)]
