"""How long must a stage of 1F1B idle for the stages after it? Part of the bound of a split of the layers.

*Notation.* Stage i of p takes f forward and b backward for a micro-batch, the stages after it S together, both ways; m
micro-batches, of which it runs w = p − i forward before its first backward.

*Bound.* From its first forward to its first backward pass f + S at least, in which it runs w forwards; from the end of
its last forward to its last backward S at least, in which it runs w − 1 backwards. With m > w the last forward comes
after the first backward, so that both count:

    idle ≥ max(0, S − (w − 1)·f) + max(0, S − (w − 1)·b)

On equal stages that is all of the bubble. Else (m ≤ w) nothing is counted.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray


def least_idle_s(
    *, warm_up: int, num_microbatches: IntArray, forward_s: FloatArray, backward_s: FloatArray, after_s: FloatArray
) -> FloatArray:
    """The bound of the module docstring, s [., n].

    Args:
        warm_up: w.
        num_microbatches: m, [n].
        forward_s: f, [., n].
        backward_s: b, [., n].
        after_s: S, or less, [., n].

    >>> float(least_idle_s(warm_up=4, num_microbatches=np.array(8), forward_s=np.array(1.0), backward_s=np.array(2.0),
    ...                    after_s=np.array(9.0)))
    9.0
    """
    others = warm_up - 1
    if not others:  # the last stage; a time may be infinite
        return np.zeros(np.shape(after_s))
    idle = np.maximum(after_s - others * forward_s, 0.0) + np.maximum(after_s - others * backward_s, 0.0)
    return np.where(num_microbatches > warm_up, idle, 0.0)
