"""Micro-batches that alternate between attention devices and FFN devices: how long an iteration takes.

A micro-batch passes four stages in every layer: attention (a seconds), the link to the FFN devices (s), MLP or experts
(f), the link back (b). Each stage works on one micro-batch at a time, links send and receive at once, and a micro-batch
enters a layer when it has left the one before. With m equal micro-batches that is a closed cycle of m jobs over stages
of constant length, whose steady state is known exactly: a layer takes all of them::

    P = max(m·max(a, s, f, b), a + s + f + b)

Either the slowest stage never rests, or a micro-batch never waits. The first micro-batch is done after a + s + f + b
and L − 1 more layers, the last one m − 1 of the slowest stage later. The condition m·f ≥ a + s + f + b of
MegaScale-Infer (arXiv:2504.02263, §4.1) is that the first of the two holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Times of one micro-batch in one layer, s; arrays of one shape [N].

    Args:
        attention: on the attention devices.
        sent: hidden states to the FFN devices.
        ffn: MLP or experts.
        back: results to the attention devices.
    """

    attention: FloatArray
    sent: FloatArray
    ffn: FloatArray
    back: FloatArray

    @property
    def slowest(self) -> FloatArray:
        """[N] the stage that takes longest."""
        return np.maximum(np.maximum(self.attention, self.ffn), np.maximum(self.sent, self.back))

    @property
    def one_pass(self) -> FloatArray:
        """[N] all stages, one after the other."""
        return self.attention + self.sent + self.ffn + self.back

    def layer_s(self, micro_batches: FloatArray) -> FloatArray:
        """[N] P, a layer of all micro-batches in the steady state."""
        return np.maximum(micro_batches * self.slowest, self.one_pass)


def layers_s(stages: Stages, num_layers: int, micro_batches: FloatArray) -> FloatArray:
    """[N] ``num_layers`` equal layers, from the start of the first micro-batch to the end of the last one."""
    last = stages.one_pass + (micro_batches - 1.0) * stages.slowest
    return (num_layers - 1) * stages.layer_s(micro_batches) + last
