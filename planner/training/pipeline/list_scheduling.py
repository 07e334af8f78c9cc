"""Pipeline schedules by list scheduling: greedy (as soon as possible), within a memory limit.

The papers on V-shaped, wave and bidirectional pipelines give a search or a figure rather than an order, but all define
the stage of each chunk and how many activations a stage may hold. Here the rest is one rule, simulated with nominal
times: a free stage takes a backward if one is ready (it frees memory and others wait for it), else a forward within the
memory limit, else a weight gradient. Several tie-breaking rules are tried (:data:`TIE_RULES`) and the shortest schedule
is kept, as arXiv:2401.10241, §3.1, keeps the best variant of its heuristic. So these schedules can be run within the
published memory; a paper's own hand-made order may be slightly shorter.

The limits of the V-shaped schedules come from the lifetime of an activation (Qi et al., arXiv:2405.15362, §3): with δ
units between neighbouring stages, an activation of the first chunk lives until its micro-batch has gone through the
rest of the V and back; a stage takes a new micro-batch every 6 units (F, B and W of two chunks), so it holds lifetime /
6.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshplan.planner.training.pipeline.orders import BACKWARD, FORWARD, WEIGHT, Op, PipelineOrder, zigzag
from meshplan.planner.training.pipeline.simulation import ChunkTimes, simulate

Limit = Callable[[int, int], int]
# The tie-breaking rule is chosen on this many rounds of p micro-batches.
CHOSEN_AT_ROUNDS = 4
# (prefer older micro-batches to later chunks, take a forward after each backward): the rules that are tried.
TIE_RULES = ((False, False), (False, True), (True, False), (True, True))
Nominal = tuple[float, float, float]
# Equal times of F, B and W, as in the figures of the papers.
EQUAL: Nominal = (1.0, 1.0, 1.0)
# F, B and W of the two chunks on each stage of a V.
UNITS_PER_MICROBATCH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The problem that a list schedule solves.

    Args:
        num_stages: p.
        num_microbatches: m.
        stage_of_chunk: chunk → stage.
        paths: chunks in visiting order; micro-batches take the paths in turn.
        splits_backward: W and B are separate passes.
        chunk_limit: (stage, index of the chunk on the stage) → activations of the chunk that it may hold.
        stage_limit: activations of all chunks that a stage may hold; the last is kept for the last chunk.
        nominal: relative times of F, B and W by which variants are compared. Schedules are made with these and with
            equal times, whose regular order is often shorter.
    """

    num_stages: int
    num_microbatches: int
    stage_of_chunk: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    splits_backward: bool
    chunk_limit: Limit
    stage_limit: float = math.inf
    nominal: Nominal = EQUAL


@dataclass(slots=True)
class _Stage:
    chunks: list[int]
    ready: list[Op] = field(default_factory=list)
    weights: list[Op] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    done: list[Op] = field(default_factory=list)
    busy: bool = False
    last_pass: str = FORWARD


def list_schedule(layout: Layout) -> PipelineOrder:
    """Greedy (as-soon-as-possible) schedule of ``layout``.

    The tie-breaking rule is chosen on a few micro-batches, so that schedules for different micro-batch counts share a
    prefix and only the best one is built in full.

    Raises:
        ValueError: the memory limits allow no schedule.
    """
    few = replace(layout, num_microbatches=min(layout.num_microbatches, CHOSEN_AT_ROUNDS * layout.num_stages))
    share = layout.num_stages / len(layout.paths[0])
    chunks = len(layout.stage_of_chunk)
    forward, backward, weight = ([share * seconds] * chunks for seconds in layout.nominal)
    times = ChunkTimes(forward_s=forward, input_gradient_s=backward, weight_gradient_s=weight)
    tried: list[tuple[float, int, Nominal, tuple[bool, bool], PipelineOrder]] = []
    for nominal in dict.fromkeys((EQUAL, layout.nominal)):
        for rules in TIE_RULES:
            order = _Run(replace(few, nominal=nominal), *rules).order()
            if order is not None:
                tried.append((simulate(order, times).unflushed_s, len(tried), nominal, rules, order))
    if not tried:
        raise ValueError("the memory limits let no micro-batch through; allow more activations")
    for _, _, nominal, rules, short in sorted(tried, key=lambda variant: variant[:2]):
        order = short if few == layout else _Run(replace(layout, nominal=nominal), *rules).order()
        if order is not None:
            return order
    raise ValueError("no variant gets all micro-batches through; allow more activations")


class _Run:
    def __init__(self, layout: Layout, older_first: bool, alternates: bool) -> None:
        self.layout, self.older_first, self.alternates = layout, older_first, alternates
        p, where = layout.num_stages, layout.stage_of_chunk
        self.stages = [_Stage([c for c in range(len(where)) if where[c] == i]) for i in range(p)]
        self.path_of = tuple(j % len(layout.paths) for j in range(layout.num_microbatches))
        self.next = {a: b for path in layout.paths for a, b in itertools.pairwise(path)}
        self.previous = {b: a for a, b in self.next.items()}
        self.turn = {chunk: stage.chunks.index(chunk) for stage in self.stages for chunk in stage.chunks}
        for j, path in enumerate(self.path_of):
            self._arrive(Op(FORWARD, layout.paths[path][0], j))

    def _arrive(self, op: Op) -> None:
        self.stages[self.layout.stage_of_chunk[op.chunk]].ready.append(op)

    def order(self) -> PipelineOrder | None:
        """The resulting order; None if the memory limits block it."""
        finishing: list[tuple[float, int, Op]] = []
        now = 0.0
        while True:
            for i, stage in enumerate(self.stages):
                op = None if stage.busy else self._choose(i, stage)
                if op is not None:
                    stage.busy = True
                    stage.done.append(op)
                    heapq.heappush(finishing, (now + self._seconds(op), i, op))
            if not finishing:
                break
            now = finishing[0][0]
            while finishing and finishing[0][0] <= now:
                _, i, op = heapq.heappop(finishing)
                self.stages[i].busy = False
                self._finish(self.stages[i], op)
        layout = self.layout
        passes = 3 if layout.splits_backward else 2
        if sum(len(stage.done) for stage in self.stages) < passes * layout.num_microbatches * len(layout.paths[0]):
            return None
        return PipelineOrder(
            stages=tuple(tuple(stage.done) for stage in self.stages),
            stage_of_chunk=layout.stage_of_chunk,
            paths=layout.paths,
            path_of_microbatch=self.path_of,
            splits_backward=layout.splits_backward,
        )

    def _seconds(self, op: Op) -> float:
        forward, backward, weight = self.layout.nominal
        if op.kind == FORWARD:
            return forward
        return weight if op.kind == WEIGHT else backward + (0.0 if self.layout.splits_backward else weight)

    def _finish(self, stage: _Stage, op: Op) -> None:
        if op.kind == FORWARD:
            later = self.next.get(op.chunk)
            self._arrive(Op(BACKWARD, op.chunk, op.microbatch) if later is None else op._replace(chunk=later))
            return
        if op.kind == BACKWARD:
            if op.chunk in self.previous:
                self._arrive(op._replace(chunk=self.previous[op.chunk]))
            if self.layout.splits_backward:
                stage.weights.append(op._replace(kind=WEIGHT))
                return
        stage.held[op.chunk] -= 1

    def _choose(self, index: int, stage: _Stage) -> Op | None:
        """The operation that a free stage runs next; None if it has to wait."""
        fitting = [op for op in stage.ready if op.kind == BACKWARD or self._fits(index, stage, op)]
        if self.alternates and stage.last_pass == BACKWARD:
            fitting = [op for op in fitting if op.kind == FORWARD] or fitting
        if not fitting:
            return stage.weights.pop(0) if stage.weights else None
        op = min(fitting, key=self._rank)
        stage.ready.remove(op)
        stage.last_pass = op.kind
        if op.kind == FORWARD:
            stage.held[op.chunk] = stage.held.get(op.chunk, 0) + 1
        return op

    def _rank(self, op: Op) -> tuple[int, int, int]:
        later_chunk = -self.turn[op.chunk]
        tie = (op.microbatch, later_chunk) if self.older_first else (later_chunk, op.microbatch)
        return (int(op.kind == FORWARD), *tie)

    def _fits(self, index: int, stage: _Stage, op: Op) -> bool:
        turn, last = self.turn[op.chunk], len(stage.chunks) - 1
        own, everything = stage.held.get(op.chunk, 0), sum(stage.held.values())
        kept_free = 0 if turn == last or len(self.layout.paths) > 1 else 1
        return own < self.layout.chunk_limit(index, turn) and everything + kept_free < self.layout.stage_limit


# --- the schedules ----------------------------------------------------------------------------------------------------


def v_shaped(p: int, m: int, chunk_limit: Limit, stage_limit: float, nominal: Nominal = EQUAL) -> PipelineOrder:
    """A V of two chunks per stage with split backward (arXiv:2405.15362)."""
    layout = Layout(
        num_stages=p,
        num_microbatches=m,
        stage_of_chunk=zigzag(p, 2),
        paths=(tuple(range(2 * p)),),
        splits_backward=True,
        chunk_limit=chunk_limit,
        stage_limit=stage_limit,
        nominal=nominal,
    )
    return list_schedule(layout)


def life_limit(p: int, down_units: int, up_units: int) -> Limit:
    """Memory limit of a V: activations of each chunk that a stage may hold.

    Args:
        p: stages.
        down_units: time between neighbouring stages on the first chunk, forward and backward together.
        up_units: the same for the second chunk.
    """

    def limit(stage: int, turn: int) -> int:
        first = (p - 1 - stage) * down_units + p * up_units
        life = first if turn == 0 else stage * up_units
        return math.ceil((life + UNITS_PER_MICROBATCH) / UNITS_PER_MICROBATCH)

    return limit


def waves(p: int, m: int, v: int, nominal: Nominal = EQUAL) -> PipelineOrder:
    """Hanayo: v / 2 waves over all stages (arXiv:2308.15762), in the memory of p whole-stage micro-batches."""
    layout = Layout(
        num_stages=p,
        num_microbatches=m,
        stage_of_chunk=zigzag(p, v),
        paths=(tuple(range(v * p)),),
        splits_backward=False,
        chunk_limit=lambda stage, turn: 2 * p,
        stage_limit=v * p,
        nominal=nominal,
    )
    return list_schedule(layout)


def both_ends(p: int, m: int, nominal: Nominal = EQUAL) -> PipelineOrder:
    """DualPipe-like (DeepSeek-V3, arXiv:2412.19437, §3.2.1): two copies, fed from both ends, p + 1 held.

    Forward and backward passes that DualPipe overlaps to hide expert communication run in sequence here.
    """
    layout = Layout(
        num_stages=p,
        num_microbatches=m,
        stage_of_chunk=(*range(p), *reversed(range(p))),
        paths=(tuple(range(p)), tuple(range(p, 2 * p))),
        splits_backward=True,
        chunk_limit=lambda stage, turn: p,
        stage_limit=p + 1,
        nominal=nominal,
    )
    return list_schedule(layout)
