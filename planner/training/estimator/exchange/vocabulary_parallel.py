"""What it adds to a step that every pipeline stage holds a part of the vocabulary.

Each micro-batch's last hidden state goes to all stages and the sum of its gradients back, likewise the embeddings (each
counts as an all-reduce of T·h elements), and two fp32 numbers per token are reduced for the softmax. The barrier
between the two passes of the head delays the backward by one micro-batch, so that the pipeline is one interval longer
(Algorithm 2 of arXiv:2411.05288: p + 1 micro-batches in flight).

Assumes: these messages overlap with the layers except for a share of :data:`~.collectives.UNHIDDEN_SHARE`.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE, CommunicationModel

# Bytes reduced per token for the softmax over a split vocabulary: maximum and sum, in fp32.
SOFTMAX_BYTES = 8.0
# Barriers of Algorithm 2 in arXiv:2411.05288; Algorithm 1 has two.
BARRIERS = 1


def vocabulary_parallel_s(
    links: CommunicationModel,
    candidates: Candidates,
    hidden_bytes: FloatArray,
    tokens: FloatArray,
    slowest_s: FloatArray,
) -> FloatArray:
    """Communication and bubble of a step, s, [n]; see the module docstring.

    Args:
        links: what messages take.
        candidates: of one split.
        hidden_bytes: hidden states of one micro-batch, on all tensor-parallel ranks together, [n].
        tokens: T, [n].
        slowest_s: one micro-batch on the slowest stage, [n].
    """
    split, apart = candidates.split, candidates.stage_devices
    if not split.vocabulary_parallel:
        return np.zeros_like(slowest_s)
    size = np.full(len(candidates), split.pipeline_parallel)
    moved = 2.0 * links.all_reduce_s(hidden_bytes / candidates.tensor_parallel, size, apart)
    moved = moved + links.all_reduce_s(SOFTMAX_BYTES * tokens, size, apart)
    return UNHIDDEN_SHARE * candidates.num_microbatches * moved + BARRIERS * slowest_s
