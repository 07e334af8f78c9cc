"""Load of the most loaded expert-parallel rank, relative to balanced routing.

Dropless, with e expert-parallel ranks, E experts and k of them per token: the imbalance λ of the workload (most loaded
rank over mean), at most the load if every token visits as many experts of one rank as it can:

    load = min(λ, e·min(k, E/e)/k)

so that with one rank (e = 1) or k = E there is no imbalance. All ranks wait for the most loaded one, which differs from
layer to layer: the load holds for the step time, and is an upper bound for memory.

With token dropping every expert gets exactly c times the mean (capacity factor c): excess tokens are dropped and
missing ones padded, as Megatron-LM's ``--moe-pad-expert-input-to-capacity`` does. Padding is sent too.
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.problem.problem import TrainingWorkload


def arriving_load(workload: TrainingWorkload, moe: MixtureOfExperts, expert_parallel: IntArray) -> FloatArray:
    """Token copies that arrive at the most loaded rank, over the balanced number without dropping, [n].

    Args:
        workload: imbalance, or capacity factor.
        moe: experts E, of which a token visits k.
        expert_parallel: e, [n].
    """
    if workload.drops_tokens:
        return np.full(np.shape(expert_parallel), float(workload.expert_capacity_factor))
    visits = moe.num_experts_per_token
    most = expert_parallel * np.minimum(visits, moe.num_experts / expert_parallel) / visits
    return np.minimum(workload.expert_imbalance, most)


def leaving_load(workload: TrainingWorkload) -> float:
    """Token copies that a rank sends, over those that its tokens need; padding is sent too."""
    return float(workload.expert_capacity_factor) if workload.drops_tokens else 1.0
