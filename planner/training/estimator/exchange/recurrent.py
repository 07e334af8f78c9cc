"""Context parallelism of recurrent layers: heads for tokens before the convolution, and back after the recurrence.

A recurrence needs all tokens of a sequence in their order. Megatron-LM (megatron-core 0.19.2, core/ssm:
mamba_context_parallel.py, gated_delta_net/gdn.py) therefore sends what the input projection made of a rank's tokens to
the ranks that have the heads, whatever the style of attention's context parallelism, and the output back.

Notation: T tokens of a micro-batch on one device, c = context_parallel, t = tensor_parallel. Forward every rank sends
T·p/t elements of the projection, p its outputs (gate, input, B, C and step of Mamba-2 in five all-to-alls, those of
a gated delta net in one), and T·o/t of the output, o the inputs of the output projection. Backward the same of their
gradients; a recomputed layer repeats the forward exchange. Nothing hides it. Where a rank has fewer than c groups of
Mamba-2's heads, its B and C are repeated so that each of the c ranks gets one.

Assumes: the convolution of repeated groups, and the copies that put tokens in order again, take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.layers import mamba2
from meshplan.catalogs.models.layers.recurrent import RecurrentMixer
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentExchange:
    """What one recurrent layer sends between its context-parallel ranks.

    Args:
        mixer: sizes of the layer.
        sequence_length: tokens of one sequence.
        element_bytes: bytes of one element of the activations.
        candidates: the batch.
    """

    mixer: RecurrentMixer
    sequence_length: int
    element_bytes: float
    candidates: Candidates

    def sent_bytes(self) -> tuple[FloatArray, ...]:
        """Bytes that one rank sends forward in each all-to-all of a layer and micro-batch, its own part included."""
        batch = self.candidates
        t, c = batch.tensor_parallel, batch.context_parallel
        token = self.element_bytes * batch.micro_batch_size * self.sequence_length / c
        output = token * self.mixer.output_inputs / t
        if self.mixer.kind != "mamba-2":
            return (token * self.mixer.split_outputs / t, output)
        sizes = mamba2.sizes(self.mixer)
        inner = sizes.num_heads * sizes.head_dim
        shared = token * np.maximum(sizes.num_groups / t, c) * sizes.state_size
        step = token * sizes.num_heads / t
        return (token * inner / t, token * inner / t, shared, shared, step, output)

    def exposed_s(self, links: CommunicationModel, again: FloatArray) -> FloatArray:
        """Exchange of one layer and micro-batch, forward and backward, [n]; ``again``: forward passes repeated."""
        batch = self.candidates
        seconds: FloatArray = np.zeros(len(batch))
        for sent in self.sent_bytes():
            seconds = seconds + links.all_to_all_s(sent, batch.context_parallel, batch.tensor_parallel)
        return (2.0 + again) * seconds

    def buffer_bytes(self) -> FloatArray:
        """What the running layer holds twice while it is sent, bytes [n]."""
        whole: FloatArray = np.zeros(len(self.candidates))
        for sent in self.sent_bytes():
            whole = whole + sent
        return np.where(self.candidates.context_parallel > 1, whole, 0.0)
