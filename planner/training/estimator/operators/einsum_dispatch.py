"""Tokens dealt out to experts by products with masks, as GShard and its descendants do, on a device.

Tokens are taken in groups of s. An expert takes C = k·s/E of a group (E experts, k for each token), more are dropped,
so that all experts have k·s rows. A mask says which token is which row: s·E·C = k·s² elements a group, and the same
again with the gates' weights::

    dispatch   GSEC,GSM→EGCM   2·k·s²·h FLOP a group forward, as many backward (the mask has no gradient)
    combine    GSEC,GECM→GSM   2·k·s²·h FLOP a group forward, twice as many backward (outputs and weights)

that is 4·k·s·h a token, where the experts themselves take 4·k·h·f: s/f of their time. The masks pass through memory
(:data:`FORWARD_BYTES`, :data:`BACKWARD_BYTES`). The experts' own products are one batched product of fixed shape, not a
grouped one of as many as there are experts, and nothing is sorted.

Source: Lepikhin et al., GShard, arXiv:2006.16668, algorithm 2 and section 3.2.1; alpa/model/moe.py of
alpa-projects/alpa (top2_gating, FlaxPositionWiseMoELayer).

Assumes: XLA fuses what is between the products into as few passes as their outputs need; no run shows that apart.
"""

from __future__ import annotations

from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.operators.costs import OperatorCosts
from meshplan.planner.training.estimator.operators.products import Cost

TRUTH_BYTES = 1.0
# Bytes of memory traffic for each element of a mask. Forward: the weights are written, the mask is written as truth
# values, read and written in 16 bits for its product, and each of the two products reads its own.
FORWARD_BYTES = 4.0 * BYTES_16_BIT + 2.0 * TRUTH_BYTES
# Backward: the two products read mask and weights, the gradient of the weights is written, and read by the gates.
BACKWARD_BYTES = 4.0 * BYTES_16_BIT


def einsum_dispatch(costs: OperatorCosts, moe: MixtureOfExperts, tokens: FloatArray, group_size: int) -> Cost:
    """Dispatch and combine of one layer.

    Args:
        costs: prices operators.
        moe: k.
        tokens: whose masks the device makes, [n].
        group_size: s.
    """
    rows = float(moe.num_experts_per_token * group_size)
    ones = tokens * 0.0 + 1.0
    one = costs.gemm(rows * ones, costs.shape.expert_hidden_size * ones, group_size * ones)
    products = Cost(forward_s=2.0 * one.forward_s, backward_s=1.5 * one.backward_s).scaled(tokens / group_size)
    masks = costs.memory_op(FORWARD_BYTES * rows * tokens, backward_ratio=BACKWARD_BYTES / FORWARD_BYTES)
    return products + masks
