"""Context parallelism by style: exchange, buffers and causal imbalance.

Notation: T tokens of a micro-batch on one device, c = context_parallel, t = tensor_parallel, a query and k key/value
heads of d_qk and d_v elements (k = a in latent attention, whose keys are expanded before they travel), u ranks that
exchange heads for tokens (c in ``all-to-all``, context_parallel_heads in ``all-to-all+ring``, else 1), r = c/u.

- ring, ring-plain (arXiv:2310.01889): r − 1 steps of T·k·(d_qk + d_v)/t elements forward and twice that backward (keys,
  values and their gradients); attention hides what its own time allows.
- all-gather (Llama 3, arXiv:2407.21783, §3.3.2): keys and values gathered forward and again backward, their gradients
  scattered; nothing hides them (megatron-core 0.19.2, ``TransformerConfig.cp_comm_type``).
- all-to-all (DeepSpeed Ulysses, arXiv:2309.14509, §3.1): four exchanges forward, queries, keys, values and the output,
  and four backward of their gradients: T·heads·width/t elements each. Where a rank has fewer than u key/value heads
  they are replicated, so that every rank gets one. Nothing hides them.
- all-to-all+ring (USP, arXiv:2405.07719): all-to-alls of u neighbours, then a ring of r such groups with stride u·t.

Recompute of a layer repeats the forward all-gathers and all-to-alls.

Causal work: rank i of r plain rings attends to the tokens before it, so the last one has 2 − 1/r of the mean work and
all wait for it. Zig-zag or striped rings (arXiv:2311.09431) split it evenly, as do whole sequences for a part of
the heads.

Assumes: sliding windows change the arithmetic alone, not what is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.constants.training import Constant, FrameworkRecipe
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE, CommunicationModel
from meshplan.planner.training.problem.choice import ContextStyle

# Copies of the whole sequence's keys and values: themselves, and in the backward pass also their gradients.
GATHERED_COPIES = 2.0


def causal_imbalance(batch: Candidates, recipe: FrameworkRecipe) -> FloatArray | None:
    """Attention work of the most loaded context-parallel rank over the mean, [n]; None where all are balanced.

    Args:
        batch: the candidates.
        recipe: whether the framework balances causal work where it can (every style but ``ring-plain``).
    """
    if recipe.balances_context_parallel:
        if not batch.context_parallel_style.any():
            return None
        plain = batch.context_parallel_style == ContextStyle.RING_PLAIN
        return np.where(plain, 2.0 - 1.0 / batch.context_parallel, 1.0)
    return 2.0 - 1.0 / batch.context_ring  # the rank with the last tokens attends to all others


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelModel:
    """Context-parallel costs of a batch of candidates.

    Args:
        shape: the model.
        sequence_length: tokens of one sequence.
        element_bytes: bytes of one element of the activations.
        candidates: the batch.
    """

    shape: ModelShape
    sequence_length: int
    element_bytes: float
    candidates: Candidates

    @property
    def _tokens(self) -> FloatArray:
        batch = self.candidates
        return batch.micro_batch_size * self.sequence_length / batch.context_parallel

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, elements of a query or key, elements of a value."""
        shape = self.shape
        if shape.latent is None:
            return shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.head_dim
        query_key = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim
        return shape.num_attention_heads, shape.num_attention_heads, query_key, shape.latent.v_head_dim

    @property
    def _exchanges_heads(self) -> FloatArray:
        return self.candidates.head_exchange > 1

    @property
    def _key_value_heads(self) -> FloatArray:
        """Key/value heads that one rank sends for its tokens, replicas included, [n]."""
        batch = self.candidates
        per_rank_heads = self._widths[1] / batch.tensor_parallel
        return np.where(self._exchanges_heads, np.maximum(per_rank_heads, batch.head_exchange), per_rank_heads)

    # --- time -----------------------------------------------------------------------------------------------------

    def exposed_s(
        self, links: CommunicationModel, attention_s: FloatArray, again: FloatArray, overlap: Constant
    ) -> FloatArray:
        """Exposed exchange of one layer and micro-batch, [n].

        Args:
            links: prices collectives.
            attention_s: attention core of the layer, forward and backward [n].
            again: how often the forward pass is repeated, 0 to 1 [n].
            overlap: share of the attention time that hides ring exchange.
        """
        batch = self.candidates
        style = batch.context_parallel_style
        if not style.any():
            return self._ring_s(links, batch.context_parallel, batch.tensor_parallel, attention_s, overlap)
        stride = batch.tensor_parallel * batch.head_exchange
        ring = self._ring_s(links, batch.context_ring, stride, attention_s, overlap)
        gathered = style == ContextStyle.ALL_GATHER
        seconds = np.where(gathered, 0.0, ring)
        if gathered.any():
            seconds = seconds + np.where(gathered, self._all_gather_s(links, again), 0.0)
        if self._exchanges_heads.any():
            seconds = seconds + np.where(self._exchanges_heads, self._all_to_all_s(links, again), 0.0)
        return seconds

    def _ring_s(
        self, links: CommunicationModel, size: IntArray, stride: IntArray, attention_s: FloatArray, overlap: Constant
    ) -> FloatArray:
        batch = self.candidates
        _, _, key, value = self._widths
        token = self.element_bytes * self._tokens
        step = token * float(self._widths[1] * (key + value)) / batch.tensor_parallel
        if batch.context_parallel_style.any():
            step = np.where(self._exchanges_heads, token * self._key_value_heads * (key + value), step)
        ring = (size - 1) * links.ring_step_s(step, size, stride)
        hidden = overlap * attention_s
        return np.where(size > 1, np.maximum(3.0 * ring - hidden, UNHIDDEN_SHARE * ring), 0.0)

    def _all_gather_s(self, links: CommunicationModel, again: FloatArray) -> FloatArray:
        batch = self.candidates
        heads, wide = self._widths[1] / batch.tensor_parallel, self.element_bytes * self.sequence_length
        seconds: FloatArray = np.zeros(len(batch))
        for width in self._widths[2:]:
            whole = wide * batch.micro_batch_size * heads * width
            seconds = seconds + links.gather_s(whole, batch.context_parallel, batch.tensor_parallel)
        return (3.0 + again) * seconds

    def _all_to_all_s(self, links: CommunicationModel, again: FloatArray) -> FloatArray:
        batch = self.candidates
        queries, _, key, value = self._widths
        per_rank = queries / batch.tensor_parallel
        seconds: FloatArray = np.zeros(len(batch))
        for heads, width in (
            (per_rank, key),
            (self._key_value_heads, key),
            (self._key_value_heads, value),
            (per_rank, value),
        ):
            sent = self.element_bytes * self._tokens * heads * width
            seconds = seconds + links.all_to_all_s(sent, batch.head_exchange, batch.tensor_parallel)
        return (2.0 + again) * seconds

    # --- memory ---------------------------------------------------------------------------------------------------

    def kept_bytes(self) -> FloatArray | None:
        """Activation bytes of a layer and micro-batch beyond those of a ring, [n]; None where no one exchanges heads.

        The output is kept twice, as attention made it (some heads of many tokens) and as the projection reads it, and
        so are copied key/value heads.
        """
        batch = self.candidates
        if not batch.context_parallel_style.any() or not self._exchanges_heads.any():
            return None
        queries, heads, key, value = self._widths
        t = batch.tensor_parallel
        copies = (self._key_value_heads - heads / t) * (key + value)
        kept = self.element_bytes * self._tokens * (queries / t * value + copies)
        return np.where(self._exchanges_heads, kept, 0.0)

    def buffer_bytes(self) -> FloatArray | None:
        """Exchange buffers of the running layer, bytes [n]; None where all are rings, whose buffers are not modelled.

        all-gather: keys and values of the whole sequence, in the backward pass with their gradients. All-to-all:
        queries, keys, values and output once more while they are sent.
        """
        batch = self.candidates
        if not batch.context_parallel_style.any():
            return None
        gathers = batch.context_parallel_style == ContextStyle.ALL_GATHER
        queries, heads, key, value = self._widths
        t = batch.tensor_parallel
        token = self.element_bytes * self._tokens
        whole = GATHERED_COPIES * token * batch.context_parallel * heads / t * (key + value)
        sent = token * (queries / t + self._key_value_heads) * (key + value)
        return np.where(gathers, whole, np.where(self._exchanges_heads, sent, 0.0))
