"""How many token copies the busiest expert-parallel rank gets, over what every rank would get under balanced routing.

Dropless, with e expert-parallel ranks, E experts and k of them for each token: the imbalance λ that the workload says
(busiest rank over mean), at most what a rank gets when every token visits as many of its experts as it can:

    load = min(λ, e·min(k, E/e)/k)

so that one rank (e = 1), or as many experts for a token as there are, cannot be out of balance. All ranks wait for the
busiest one, in each layer another: the load is that of the step, and of the memory as a bound.

With token dropping every expert gets exactly c times the mean (capacity factor c): what is beyond is dropped, what is
missing is padded, as Megatron-LM's ``--moe-pad-expert-input-to-capacity`` does. Padded rows are sent, too.
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.problem.problem import TrainingWorkload


def arriving_load(workload: TrainingWorkload, moe: MixtureOfExperts, expert_parallel: IntArray) -> FloatArray:
    """Token copies that arrive at the busiest rank over the mean without dropping, [n].

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
    """Token copies that a rank sends, over those that its tokens ask for: padding is sent too."""
    return float(workload.expert_capacity_factor) if workload.drops_tokens else 1.0
