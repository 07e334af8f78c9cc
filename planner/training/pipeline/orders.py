"""Pipeline schedules as the order of operations on each stage.

A micro-batch visits the model's chunks along a *path*. On each chunk it runs a forward pass F, a backward pass B and,
if the schedule splits the backward, a weight-gradient pass W (B is then the input gradient alone). A schedule assigns
chunks to stages and orders the operations of each stage; their times follow from that (:mod:`.simulation`).

This file has the written orders: GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-H2, ZB-V and DualPipeV. The others are list
schedules under a memory limit (:mod:`.list_scheduling`), because their papers give a search or a figure instead of an
order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshplan.planner.training.problem.schedules import SCHEDULES

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
# A pass of a written order: forward, input gradient, weight gradient, unsplit backward, or the oldest remaining W.
F, B, W, BW, OLDEST = "F", "B", "W", "BW", "oldest W"
# Schedules whose chunks lie there and back over the stages.
ZIGZAG = frozenset(name for name, row in SCHEDULES.items() if row.is_zigzag)


class Op(NamedTuple):
    """One operation: its kind (F, B or W), the model chunk and the micro-batch."""

    kind: str
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """A schedule for p stages and m micro-batches.

    Args:
        stages: operations of each stage, in order.
        stage_of_chunk: chunk → stage.
        paths: chunks in visiting order; several if micro-batches enter from both ends (DualPipe).
        path_of_microbatch: micro-batch → index of its path.
        splits_backward: W and B are separate passes.
        whole: backwards that are not split although ``splits_backward``: their W is part of B.
        paired: forwards that run as one with the operation after them: the pair starts when the inputs of both are
            available, and the results of both are available at its end.
    """

    stages: tuple[tuple[Op, ...], ...]
    stage_of_chunk: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    path_of_microbatch: tuple[int, ...]
    splits_backward: bool
    whole: frozenset[Op] = frozenset()
    paired: frozenset[Op] = frozenset()

    def contains_weights(self, op: Op) -> bool:
        """Whether a backward computes its weight gradients too."""
        return not self.splits_backward or op in self.whole

    @property
    def chunk_share(self) -> float:
        """Share of a stage's layers in one chunk."""
        return len(self.stages) / len(self.paths[0])


@lru_cache(maxsize=1024)
def wrapped(num_stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk → stage, cyclic: Megatron's interleaving."""
    return tuple(chunk % num_stages for chunk in range(num_stages * chunks_per_stage))


def zigzag(num_stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk → stage, alternating in direction: a V of two chunks per stage, or several waves.

    >>> zigzag(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(num_stages))
    return tuple(stage for turn in range(chunks_per_stage) for stage in (there if turn % 2 == 0 else there[::-1]))


def stage_of_chunk(schedule: str, num_stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk → stage under a schedule of one path."""
    place = zigzag if schedule in ZIGZAG else wrapped
    return place(num_stages, chunks_per_stage)


def single_path(
    stages: list[list[Op]], stage_of_chunk: tuple[int, ...], num_microbatches: int, *, splits_backward: bool
) -> PipelineOrder:
    """An order in which every micro-batch takes the same path through all chunks."""
    return PipelineOrder(
        stages=tuple(tuple(ops) for ops in stages),
        stage_of_chunk=stage_of_chunk,
        paths=(tuple(range(len(stage_of_chunk))),),
        path_of_microbatch=(0,) * num_microbatches,
        splits_backward=splits_backward,
    )


def gpipe(p: int, m: int) -> PipelineOrder:
    """All forwards, then all backwards (Huang et al., arXiv:1811.06965)."""
    stages = [
        [Op(FORWARD, i, j) for j in range(m)] + [Op(BACKWARD, i, j) for j in reversed(range(m))] for i in range(p)
    ]
    return single_path(stages, wrapped(p, 1), m, splits_backward=False)


def one_forward_one_backward(p: int, m: int) -> PipelineOrder:
    """PipeDream-Flush (Narayanan et al., arXiv:2006.09503): stage i runs p − 1 − i forwards ahead."""
    stages = []
    for i in range(p):
        ahead = min(p - 1 - i, m)
        ops = [Op(FORWARD, i, j) for j in range(ahead)]
        for j in range(ahead, m):
            ops += [Op(FORWARD, i, j), Op(BACKWARD, i, j - ahead)]
        stages.append(ops + [Op(BACKWARD, i, j) for j in range(m - ahead, m)])
    return single_path(stages, wrapped(p, 1), m, splits_backward=False)


def interleaved(p: int, m: int, v: int) -> PipelineOrder:
    """Interleaved 1F1B in Megatron-LM's order (arXiv:2104.04473, §2.2); m is a multiple of p.

    Virtual micro-batch k of p·v is micro-batch (k mod p) of its group on chunk (k // p); stage i runs
    2(p − i − 1) + (v − 1)p of them ahead.
    """
    if m % p:
        raise ValueError(f"interleaving {m} micro-batches over {p} stages: not a multiple")
    total = m * v

    def virtual(kind: str, stage: int, k: int) -> Op:
        group, inside = divmod(k, p * v)
        turn, offset = divmod(inside, p)
        turn = v - 1 - turn if kind == BACKWARD else turn
        return Op(kind, turn * p + stage, group * p + offset)

    stages = []
    for i in range(p):
        ahead = min(2 * (p - i - 1) + (v - 1) * p, total)
        ops = [virtual(FORWARD, i, k) for k in range(ahead)]
        for k in range(ahead, total):
            ops += [virtual(FORWARD, i, k), virtual(BACKWARD, i, k - ahead)]
        stages.append(ops + [virtual(BACKWARD, i, k) for k in range(total - ahead, total)])
    return single_path(stages, wrapped(p, v), m, splits_backward=False)


def zb_h1(p: int, m: int) -> PipelineOrder:
    """ZB-H1 (Qi et al., arXiv:2401.10241, §2.1): 1F1B with weight gradients i behind on stage i, in 1F1B's memory."""
    stages = []
    for i in range(p):
        behind = min(i, m)
        ops: list[Op] = []
        for op in one_forward_one_backward(p, m).stages[i]:
            ops.append(op)
            if op.kind == BACKWARD and op.microbatch >= behind:
                ops.append(Op(WEIGHT, i, op.microbatch - behind))
        stages.append(ops + [Op(WEIGHT, i, j) for j in range(m - behind, m)])
    return single_path(stages, wrapped(p, 1), m, splits_backward=True)


def _numbered(passes: Sequence[tuple[str, int]], chunks: Sequence[int], m: int) -> list[Op]:
    """Operations of (kind, chunk index) passes: each kind on each chunk counts up micro-batches, up to m."""
    count: dict[tuple[str, int], int] = {}
    ops = []
    for kinds, turn in passes:
        for kind in kinds:
            microbatch = count[kind, turn] = count.get((kind, turn), -1) + 1
            if microbatch < m:
                ops.append(Op(kind, chunks[turn], microbatch))
    return ops


def zb_h2(p: int, m: int) -> PipelineOrder:
    """ZB-H2 (Qi et al., arXiv:2401.10241, §2.2): 2(p − i) − 1 forwards ahead, weight gradients 2i behind on stage i.

    Every stage holds 2p − 1 micro-batches; without bubble if F, B and W take equally long.
    """
    stages = []
    for i in range(p):
        ahead, behind = min(2 * (p - i) - 1, m), min(2 * i, m)
        passes = [(F, 0)] * ahead
        for j in range(m):
            passes += [(B, 0), *[(W, 0)] * (j >= behind), (F, 0)]
        stages.append(_numbered([*passes, *[(W, 0)] * behind], (i,), m))
    return single_path(stages, wrapped(p, 1), m, splits_backward=True)


def zb_v(p: int, m: int) -> PipelineOrder:
    """ZB-V (Qi et al., arXiv:2405.15362): two chunks per stage in a V, split backward, the memory of p micro-batches.

    Stage i runs 2(p − i) − 1 forwards of its first chunk ahead, i of each chunk in turn, then p − i of the second chunk
    with their backwards; from there on each chunk runs F, B, W in turn. Without bubble if F, B and W take equally
    long. Defined for 2p − 1 micro-batches or more.

    Source: torch 2.13, distributed/pipelining/schedules.py, ScheduleZBVZeroBubble (read, not run).
    """
    rounds = max(m, 2 * p - 1) - (2 * p - 1)
    stages = []
    for i in range(p):
        passes = [(F, 0)] * (2 * (p - i) - 1) + [(F, 1), (F, 0)] * i + [(F, 1), (BW, 1)] * (p - i)
        passes += [(F, 0), (BW, 0), (F, 1), (BW, 1)] * (rounds + i) + [(BW, 0), (F, 1), (BW, 1)] * (p - 1 - i)
        passes += [(B, 0), (B, 1)] * i + [(BW, 0)] * (p - i) + [(W, 1)] * i + [(W, 0)] * i
        stages.append(_numbered(passes, (i, 2 * p - 1 - i), m))
    return single_path(stages, zigzag(p, 2), m, splits_backward=True)


def dualpipe_v(p: int, m: int) -> PipelineOrder:
    """DualPipeV: DualPipe folded in the middle, two chunks per stage in a V, one copy of the parameters; m ≥ 2p.

    A forward of one chunk and the backward of another run as one pass (so that the messages of one overlap with the
    compute of the other); most backwards are not split. Bubble (p − 1)(F&B + B − 3W) of one chunk's passes, B whole.

    Source: github.com/deepseek-ai/DualPipe (README and the eight steps of its schedule); torch 2.13,
    distributed/pipelining/schedules.py, ScheduleDualPipeV (read, not run), which runs the two passes of a pair in turn.
    """
    if m < 2 * p:
        raise ValueError(f"dualpipe-v: {m} micro-batches for {p} stages of two chunks; it needs {2 * p} or more")
    stages: list[list[Op]] = []
    whole: set[Op] = set()
    paired: set[Op] = set()
    for i in range(p):
        ops: list[Op] = []
        waiting: list[Op] = []
        chunks = (i, 2 * p - 1 - i)
        count: dict[tuple[str, int], int] = {}
        for kind, turn in _dualpipe_v_passes(p, m, i):
            if kind == OLDEST:
                ops += [waiting.pop(0)] if waiting else []
                continue
            name = FORWARD if kind == F else BACKWARD
            microbatch = count[name, turn] = count.get((name, turn), -1) + 1
            op = Op(name, chunks[turn], microbatch)
            ops.append(op)
            if kind == B:
                waiting.append(op._replace(kind=WEIGHT))
            elif kind == BW:
                whole.add(op)
        stages.append(ops)
        # Pairs start after the warm-up; on the last stage the first forward is not paired, to shorten the bubble.
        warm_up = 2 * (p - 1 - i) + 2 * (i + 1) + 3 * (p - 1 - i) + 2 * (i == p - 1)
        after_it = itertools.pairwise(ops[warm_up:])
        paired |= {one for one, two in after_it if one.kind == FORWARD and two in whole}
    return PipelineOrder(
        stages=tuple(tuple(ops) for ops in stages),
        stage_of_chunk=zigzag(p, 2),
        paths=(tuple(range(2 * p)),),
        path_of_microbatch=(0,) * m,
        splits_backward=True,
        whole=frozenset(whole),
        paired=frozenset(paired),
    )


def _dualpipe_v_passes(p: int, m: int, i: int) -> list[tuple[str, int]]:
    """The passes of stage i, step by step."""
    after = p - 1 - i
    passes = [(F, 0)] * (2 * after) + [(F, 0), (F, 1)] * (i + 1) + [(B, 1), (OLDEST, 0), (F, 1)] * after
    passes += [(F, 0), (BW, 1), (F, 1), (BW, 0)] * (m - 2 * p + i + 1) + [(BW, 1), (F, 1), (BW, 0)] * after
    # The last i + 1 backwards of each chunk; the second half is split, to end the step with weight gradients.
    for turn in range(2 * (i + 1)):
        passes.append((B if turn > i else BW, 1 - turn % 2))
    return passes + [(OLDEST, 0), (B, 0)] * after + [(OLDEST, 0)] * (i + 1)
