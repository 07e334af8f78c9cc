"""Interleaved 1F1B where the chunks of a stage take different times: which of them waits for which, slot by slot.

The closed form (:mod:`.closed_forms`) prices a stage by the sum of its chunks, as if all of them were alike. Stages
pass work on to each other chunk by chunk, so that a long chunk of one stage keeps the others waiting even where every
stage has as much to do in all: with layers 2, 1, 2, 1 on one row of chunks and 1, 2, 1, 2 on the next, eight stages
take a fifth longer (Narayanan et al., arXiv:2104.04473, §2.2, divide the layers evenly and leave no such case).

*Notation.* p stages, v rows of chunks: row r of stage s is chunk r·p + s, which takes f_rs forward and b_rs backward.
Pass k of a direction is of row ⌊k/p⌋ mod v forward, v − 1 − ⌊k/p⌋ mod v backward. Stage s runs
w_s = 2(p − 1 − s) + (v − 1)p forward passes ahead (Megatron-LM's ``forward_backward_pipelining_with_interleaving``).

*Slots.* Let stage s do in slot n the forward pass n − s and after it the backward pass n + s − 2(p − 1) − (v − 1)p,
where there are such: that is the schedule's own order, as w_s passes lie between them. Then everything that a pass
waits for ended in the slot before, on a neighbour in the ring of stages, because pass k of the last stage goes on as
pass k + p of the first. With F_s(n) and B_s(n) the ends of both passes,

    F_s(n) = max(B_s(n − 1), F_{s−1}(n − 1)) + f      B_s(n) = max(F_s(n), B_{s+1}(n − 1)) + b

(indices of stages modulo p; a pass that enters the model on the first chunk, or begins its way back on the last one,
waits for its own stage alone). T is the end of the last pass: two array operations over the stages per slot, exact. A
group of p micro-batches, p·v slots, adds half of what the fourth and the fifth add together: now and then one of two
waits, and the other does not. Within 1 % of the step (tests; 0.5 % at most in 3,000 random cases with chunks of one to
three layers, where the fourth group alone was 1.6 % off).

*Bound.* T of up to five groups is a longest path, which grows with the time of each chunk. What two groups add is a
difference of two longest paths, B_0 at the end of the fifth and at that of the third, and may fall where a chunk takes
longer. The longest path from the one end to the other is no more than that, as the first lies on a way to the second;
and it grows. With it in place of the difference, chunks that are too short bound all longer ones.

Assumes: messages are priced elsewhere; of m micro-batches, not a multiple of p, the last group lacks some.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

# Groups of p micro-batches after which each further group adds the mean of the last ones: tests hold what that costs.
GROUPS, AVERAGED = 5, 2
# Candidates whose slots are held at once: some 50 MB at 16 stages of 8 chunks.
ROWS_AT_ONCE = 256


def unlike_chunks_s(
    forward_s: FloatArray, backward_s: FloatArray, num_microbatches: IntArray, *, least: bool = False
) -> FloatArray:
    """Time of interleaved 1F1B from the first forward to the last backward, [n].

    Args:
        forward_s: of a micro-batch on each chunk, [v, p, n].
        backward_s: the same backward, [v, p, n].
        num_microbatches: m, [n].
        least: a bound of the time that grows with that of each chunk, see the module docstring.
    """
    _, p, n = forward_s.shape
    # One candidate may be priced under many constants at once; then times have more columns than m.
    m = np.broadcast_to(num_microbatches, n)
    further = np.maximum(-(-m // p) - GROUPS, 0)
    few, seconds = m - further * p, np.zeros(n)
    for count in sorted(set(few.tolist())):
        own = np.flatnonzero(few == count)
        for begin in range(0, len(own), ROWS_AT_ONCE):
            rows = own[begin : begin + ROWS_AT_ONCE]
            slots = _Slots(forward_s[..., rows], backward_s[..., rows], count)
            end, group = slots.end_and_group()
            if further[rows].any():
                end = end + further[rows] * (slots.least_group() if least else group)
            seconds[rows] = end
    return seconds


class _Slots:
    """The recurrence of the module docstring for m micro-batches; times are [v, p, n]."""

    def __init__(self, forward_s: FloatArray, backward_s: FloatArray, m: int) -> None:
        v, p, _ = forward_s.shape
        groups, stages, last = -(-m // p), np.arange(p), p - 1
        slots = np.arange(groups * p * v + 2 * last + (v - 1) * p)[:, None]
        ahead, behind = slots - stages, slots + stages - 2 * last - (v - 1) * p
        row, row_back = ahead // p % v, v - 1 - behind // p % v
        runs, runs_back = _exists(ahead, p, v, m), _exists(behind, p, v, m)
        self._forward = forward_s[row, stages] * runs[..., None]
        self._backward = backward_s[row_back, stages] * runs_back[..., None]
        # A pass that there is none of, or that comes from no other stage, waits for its own stage alone.
        waits, waits_back = runs & ((stages > 0) | (row > 0)), runs_back & ((stages < last) | (row_back < v - 1))
        self._own, self._own_back = (np.where(own, 0.0, -np.inf)[..., None] for own in (waits, waits_back))
        # Slots between the ends of the groups of forwards on the first stage that are averaged.
        self._groups = max(groups - AVERAGED, 0) * p * v, groups * p * v

    def end_and_group(self) -> tuple[FloatArray, FloatArray]:
        """T, and what a group adds in the middle, [n] each."""
        begin, end = self._groups
        earlier = self._run(np.zeros(self._forward.shape[1:]), np.zeros(self._forward.shape[1:]), 0, begin)
        later = self._run(*earlier, begin, end)
        _, backward_end = self._run(*later, end, len(self._forward))
        return backward_end.max(axis=0), (later[1][0] - earlier[1][0]) / AVERAGED

    def least_group(self) -> FloatArray:
        """The longest path between those two ends of the first stage, for each group, [n]."""
        nowhere = np.full(self._forward.shape[1:], -np.inf)
        begin = nowhere.copy()
        begin[0] = 0.0
        return np.asarray(self._run(nowhere, begin, *self._groups)[1][0]) / AVERAGED

    def _run(
        self, forward_end: FloatArray, backward_end: FloatArray, begin: int, end: int
    ) -> tuple[FloatArray, FloatArray]:
        """F and B after some slots, [p, n] each."""
        # The ring cut open, the stage before the first and the one after the last once more at its ends: a neighbour is
        # then a view. All in place, as there are thousands of slots of a few numbers.
        ahead = np.concatenate([forward_end[-1:], forward_end])
        behind = np.concatenate([backward_end, backward_end[:1]])
        left, forward_end, backward_end, right = ahead[:-1], ahead[1:], behind[:-1], behind[1:]
        waited, part = np.empty_like(forward_end), slice(begin, end)
        slots = zip(self._own[part], self._forward[part], self._own_back[part], self._backward[part], strict=True)
        for own, forward, own_back, backward in slots:
            np.add(left, own, out=waited)
            np.maximum(waited, backward_end, out=waited)
            np.add(waited, forward, out=forward_end)
            ahead[0] = ahead[-1]
            np.add(right, own_back, out=waited)
            np.maximum(waited, forward_end, out=waited)
            np.add(waited, backward, out=backward_end)
            behind[-1] = behind[0]
        return forward_end, backward_end


def _exists(passes: IntArray, p: int, v: int, m: int) -> BoolArray:
    """Whether passes of these numbers are of one of m micro-batches."""
    return np.asarray((passes >= 0) & (passes // (p * v) * p + passes % p < m))
