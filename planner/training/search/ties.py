"""Plans that the estimator cannot tell apart: the one that an expert would take.

Two plans of one question whose predicted steps differ by less than :data:`~.report.TIE_WIDTH` are in the measured
order no more often than by the throw of a coin. Among all plans that close to the best bound, on as many devices as the
best plan, the first in this order is chosen. The reasons are NVIDIA's: G is Megatron-Bridge's performance guide, R its
table of published runs (docs/performance-guide.md, docs/performance-summary.md, 25.11), A its page on recompute
(docs/training/activation-recomputation.md).

1. Nothing offloaded, nothing that no measured run has, no sharding of gradients and parameters whose launches go
   against those of tensor or context parallelism (Megatron-FSDP before Blackwell: Megatron-LM warns).
2. No sequence split below its use: shards of fewer tokens than in any run of R are "skinny" (G).
3. Tensor parallelism inside a scale-up domain: it communicates most (G).
4. No recompute of every layer: "only when selective recomputation still does not fit" (A). It adds a third to the
   work for memory that the plans before it do not lack.
5. Experts split over ranks before a model with experts is split into stages: expert parallelism uses the data-parallel
   ranks that are there (G), every run of R with experts has it, and its absence shows only in weights that are kept,
   reduced and updated on every rank.
6. Fewest parallel dimensions: begin with data parallelism, add tensor, then pipeline parallelism where memory runs out
   (G). Expert parallelism is none of them, as it needs no further ranks; splitting single experts is (G: "usually 1").
7. Fewest recomputed layers, by kind of recompute.
8. Fewest stages, then the smallest degrees of context, expert-tensor and tensor parallelism: each adds messages whose
   hiding is the estimator's least certain part.
9. Shards over all replicas of a scale-up domain: groups within it keep more of each state on every device, for messages
   that its links carry at full speed; HSDP shards "within a node" and copies across nodes (ShardingStrategy of
   PyTorch FSDP).
10. Expert parallelism inside a scale-up domain (G), of that as much as it holds: each expert is kept and reduced by
    the fewest ranks, and none of its messages leaves the domain (R: 8 on nodes of 8, 32 and 64 on racks of 72);
    beyond it, the least.
11. Equal layers on all chunks between the first and the last, whose ends count as a layer (G); fewest chunks of a
    stage; equals by their objective.

The bound stays that of the search; the gap says what the choice may cost.

*Method.* The degree search once more, with the number of devices fixed, the objective bounded by bound/(1 − width), or
by the best plan's over (1 − width) where that is not proven so closely, and candidates left out that are no simpler
than the simplest found. It begins with what the search has priced, and leaves out what that has :mod:`~.seen` as far.
Splits of the layers other than the usual one count only where the search had kept them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.arrays import BoolArray
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Solution, relative_gap, status_of
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.parameters import ZERO_OPTIMIZER
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.problem.choice import ContextStyle, Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.problem.schedules import NO_PIPELINE
from meshplan.planner.training.search.degrees import DegreeSearch
from meshplan.planner.training.search.incumbents import Incumbents, scored_row
from meshplan.planner.training.search.report import TIE_WIDTH, ScoredConfig, SearchReport
from meshplan.planner.training.search.seen import PricedBatch

# Tokens of a sequence on each device below which it is not split: the least in NVIDIA's published Llama 3 recipes
# (NeMo and Megatron-Bridge train 70B and 405B at 8,192 tokens with context_parallel 2).
LEAST_TOKENS_PER_RANK = 4096
# Schedules that frameworks run unasked.
USUAL_SCHEDULES = frozenset({NO_PIPELINE, "1f1b", "interleaved"})


def complexity(problem: TrainingProblem, batch: Candidates) -> list[Any]:
    """How far candidates are from plain, [n] each, what counts most first."""
    split, t, c = batch.split, batch.tensor_parallel, batch.context_parallel
    n, p = len(batch), split.pipeline_parallel

    def whole(value: int) -> Any:
        return np.full(n, value)

    offloads = batch.optimizer_offload.astype(int) + batch.parameter_offload + batch.activation_offload
    offloads = offloads + batch.offloads_layers
    unusual = (batch.context_parallel_style != ContextStyle.RING).astype(int) + (batch.zero_hpz_partition_size > 1)
    unusual = unusual + (batch.outer_zero_stage > 0) + (batch.gathered_num_layers > 0)
    unusual = unusual + (split.schedule not in USUAL_SCHEDULES) + split.vocabulary_parallel
    if problem.machine.device.architecture in problem.rules.one_queue_architectures:
        unusual = unusual + ((batch.zero_stage > ZERO_OPTIMIZER) & ((t > 1) | (c > 1)))
    below_use = (c > 1) & (problem.workload.sequence_length < LEAST_TOKENS_PER_RANK * c)
    experts, width = batch.expert_parallel, batch.expert_tensor_parallel
    replicated = (experts * width == 1) & (problem.shape.moe is not None and p > 1)
    dimensions = (t > 1).astype(int) + (p > 1) + (c > 1) + (width > 1)
    beyond = experts * width > problem.machine.domain_size
    replicas_of_domain = np.minimum(batch.data_parallel, np.maximum(problem.machine.domain_size // (t * c), 1))
    small_groups = (batch.zero_stage > 0) & (batch.data_parallel_shard < replicas_of_domain)
    return [
        offloads,
        unusual,
        below_use,
        t > problem.machine.domain_size,
        batch.recompute == Recompute.FULL,
        replicated,
        dimensions,
        batch.recompute,
        whole(p),
        c,
        width,
        t,
        small_groups,
        beyond,
        np.where(beyond, experts, -experts),
        whole(len(set(split.layers_per_chunk[1:-1])) > 1),
        whole(split.virtual_pipeline_stages),
    ]


def _is_simpler(columns: Sequence[Any], than: Sequence[float]) -> BoolArray:
    """Rows that come before ``than`` in lexicographic order, [n]."""
    simpler = np.zeros(len(columns[0]), dtype=bool)
    equal = ~simpler
    for column, value in zip(columns, than, strict=True):
        simpler |= equal & (column < value)
        equal &= column == value
    return simpler


class _SimplestTie(Incumbents):
    """The simplest of the candidates that tie with the best; no others count.

    Args:
        search: the search whose incumbents are known.
        limit: largest objective of a tie.
    """

    def __init__(self, search: DegreeSearch, limit: float) -> None:
        super().__init__(search.problem, search.objective, SearchReport(), keep=1)
        known = search.best
        self.largest, self.num_devices = limit, known[0].config.world_size
        self.chosen, self.rank = known[0], self._rank_of(known[0])
        for scored in known[1:]:
            rank = self._rank_of(scored)
            if scored.objective <= limit and scored.config.world_size == self.num_devices and rank < self.rank:
                self.chosen, self.rank = scored, rank

    def _rank_of(self, scored: ScoredConfig) -> tuple[float, ...]:
        columns = complexity(self.problem, candidates_of(self.problem, scored.config))
        return (*(float(column[0]) for column in columns), scored.objective)

    @property
    def threshold(self) -> float:
        return self.largest

    def device_range(self) -> tuple[float, float]:
        return self.num_devices, self.num_devices

    def wanted(self, batch: Candidates) -> Candidates:
        # What a candidate lacks in memory, recompute of a block may bring: that is no simpler than none.
        return batch.take(_is_simpler([*complexity(self.problem, batch), np.zeros(len(batch))], self.rank))

    def take(self, batch: PricedBatch) -> None:
        ties = (batch.objective <= self.largest) & (batch.candidates.world_size == self.num_devices)
        if not ties.any():
            return
        columns = [*complexity(self.problem, batch.candidates), batch.objective]
        rows = np.flatnonzero(ties & _is_simpler(columns, self.rank))
        if not len(rows):
            return
        row = int(rows[np.lexsort([column[rows] for column in reversed(columns)])[0]])
        self.rank = tuple(float(column[row]) for column in columns)
        self.chosen = scored_row(self.problem, batch, row)


def settle_ties(
    search: DegreeSearch, solution: Solution[ScoredConfig], budget: Budget | None = None
) -> Solution[ScoredConfig]:
    """The solution with the simplest of the plans that tie with it, which then leads ``search.best``.

    Args:
        search: that found it.
        solution: its best plan.
        budget: what is left of it. Once it is spent, or with Ctrl-C, the simplest seen until then is taken.
    """
    if solution.assignment is None or solution.bound is None:
        return solution
    limit = solution.bound / (1.0 - TIE_WIDTH)
    if solution.assignment.objective > limit:  # not even the best is proven within the width: what ties with the best
        limit = solution.assignment.objective / (1.0 - TIE_WIDTH)
    ties = _SimplestTie(search, limit)
    wall, cpu, budget = time.perf_counter(), time.process_time(), budget or Budget()
    with budget.keeping(), suppress(SolverError):  # out of budget before another tie was met: one is known
        seen = search.incumbents.seen.part(search.space.splits)
        DegreeSearch(search.problem, incumbents=ties, space=search.space, usual_splits=True, seen=seen).run(budget)
    chosen = ties.chosen
    others = (scored for scored in search.best if scored.config != chosen.config)
    search.incumbents.best = [chosen, *others][: search.incumbents.keep]
    return replace(
        solution,
        assignment=chosen,
        objective=chosen.objective,
        gap=relative_gap(chosen.objective, solution.bound),
        status=status_of(chosen.objective, solution.bound, tolerance=TIE_WIDTH),
        wall_s=solution.wall_s + time.perf_counter() - wall,
        cpu_s=solution.cpu_s + time.process_time() - cpu,
    )
