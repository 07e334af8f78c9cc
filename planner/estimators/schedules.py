"""In which order does each pipeline stage work? A schedule as lists of operations.

A micro-batch visits the model's chunks along a *path*. On each chunk it runs a forward pass F, a backward pass B and,
where the schedule splits the backward, a weight-gradient pass W (B is then the input gradient alone). What a schedule
decides is on which stage a chunk lies and in which order a stage runs its operations; when they run follows from that
(:mod:`.simulation`).

GPipe, 1F1B, interleaved 1F1B and ZB-H1 have a written order, here. The others are list schedules under a memory limit
(:mod:`.list_schedules`), because their papers give a search or a figure instead of an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
# Schedules whose chunks lie there and back over the stages.
ZIGZAG = frozenset({"zb-v", "v-half", "v-min", "hanayo"})


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
        paths: chunks in visiting order; several where micro-batches enter from both ends (DualPipe).
        path_of_microbatch: micro-batch → index of its path.
        splits_backward: W runs apart from B.
    """

    stages: tuple[tuple[Op, ...], ...]
    stage_of_chunk: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    path_of_microbatch: tuple[int, ...]
    splits_backward: bool

    @property
    def chunk_share(self) -> float:
        """What one chunk is of a stage's layers."""
        return len(self.stages) / len(self.paths[0])


def wrapped(num_stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk → stage, round and round: Megatron's interleaving."""
    return tuple(chunk % num_stages for chunk in range(num_stages * chunks_per_stage))


def zigzag(num_stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk → stage, there and back: a V of two chunks a stage, or waves of more.

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
