"""What must data parallelism add to a step on uneven links? The least over all ways to shard the states.

*Notation.* As in :mod:`.cell_bounds`: m micro-batches, and b̄ what the mean stage needs for one; P is the least time of
the pipeline, at least M·b̄ with M = m + β'·(p − 1), and m times its slowest stage. States are sharded over c·s ranks, s
a divisor of d, and copied d/s times. For the gradients of a stage with the mean number of parameters, A is the time of
a reduce-scatter over the ranks that share a copy and B that of the all-reduce over the copies of a shard; Q is a gather
of its parameters over the former. Some stage has as many parameters, and what it moves grows with them.

*Bound.* w and w' are the shares of a micro-batch that hide gradients and parameters, u is the share that nothing hides.
A stage takes P/m or less for a micro-batch, so that ZeRO 1 and 2 take

    T ≥ P + max(A + B − w·P/m, u·(A + B)) + max(Q − w'·P/m, u·Q)

ZeRO 0 takes the first two terms with an all-reduce over all c·d ranks. ZeRO 3 moves A + Q or more in every micro-batch
and hides the share o of it at most behind b̄; with S = b̄ + max(A + Q − o·b̄, (1 − o)·(A + Q))

    T ≥ max(M·S·(1 − w/m) + B, M·S + u·B)

and, where FSDP sums whole gradients in a pipeline, the first two terms of ZeRO 1. All grow with P and b̄, so that
bounds of these will do. Routed experts are left out, and so are adapters, whose gradients are small.

Assumes: w + w' ≤ 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.planner.cluster.network.rank_layout import Degrees
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE, CommunicationModel
from meshplan.planner.training.estimator.exchange.data_parallel import BACKWARD_SHARE, FORWARD_SHARE
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.estimator.states import StateModel
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.templates import divisors

# What decides which ranks share states, and how many of its parameters a rank holds.
LAYOUT = ("tensor_parallel", "context_parallel", "data_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """What the mean stage moves, for each way to shard its states, s [ways, layouts]; ∞ where there is no such way.

    Args:
        scatter_s: A.
        copies_s: B.
        gather_s: Q.
        whole_s: all-reduce over all ranks, [layouts].
    """

    scatter_s: FloatArray
    copies_s: FloatArray
    gather_s: FloatArray
    whole_s: FloatArray


class ExchangeBounds:
    """Bounds of the data-parallel communication of the templates of one question.

    Args:
        problem: the question.
        columns: of its templates.
        whole: its templates as candidates of one stage.
    """

    def __init__(self, problem: TrainingProblem, columns: Mapping[str, IntArray], whole: Candidates) -> None:
        self.problem = problem
        layouts, first, which = np.unique(
            np.stack([columns[name] for name in LAYOUT]), axis=1, return_index=True, return_inverse=True
        )
        self._tensor, self._context, self._data = layouts
        self._which = which.ravel()
        states = StateModel(
            shape=problem.shape,
            workload=problem.workload,
            candidates=whole.take(first),
            calibration=problem.calibration,
        )
        stage = whole.split.classes[0]
        self._gradient_bytes = states.dense_parameters(stage) * states.gradient_reduce_bytes
        self._parameter_bytes = states.gathered_dense_bytes(stage)
        self._known: dict[int, _Moved] = {}

    @staticmethod
    def applies(problem: TrainingProblem) -> bool:
        """Whether the bound says anything of a question."""
        phase, outer = problem.workload.phase, "outer_zero_stage"
        is_usual = outer not in problem.fixed and outer not in problem.search_over
        return problem.machine.network_model is not None and not phase.has_adapters and is_usual

    def pinned(self, problem: TrainingProblem, rows: IntArray) -> ExchangeBounds:
        """The bounds of some of the templates, under more pins or other links."""
        other = object.__new__(ExchangeBounds)
        other.__dict__.update(self.__dict__)
        other.problem, other._which, other._known = problem, self._which[rows], {}
        return other

    def least_s(
        self,
        stages: int,
        rows: slice | IntArray,
        *,
        pipeline_s: FloatArray,
        mean_s: FloatArray,
        passes: FloatArray,
        num_microbatches: IntArray,
    ) -> FloatArray:
        """Lower bound of the pipeline with what data parallelism adds to it, s [n].

        Args:
            stages: p.
            rows: the templates.
            pipeline_s: P, [n].
            mean_s: b̄, [n].
            passes: M, [n].
            num_microbatches: m, [n].
        """
        if stages not in self._known:
            self._known[stages] = self._moved(stages)
        moved, which = self._known[stages], self._which[rows]
        time, recipe = self.problem.calibration.time, self.problem.calibration.recipe
        window = float(np.max(time.data_parallel_window)) if recipe.overlaps_data_parallel else 0.0
        each_s = pipeline_s / num_microbatches
        hidden_s, hidden_gathers_s = window * BACKWARD_SHARE * each_s, window * FORWARD_SHARE * each_s
        scatter, copies, gather = (one[:, which] for one in (moved.scatter_s, moved.copies_s, moved.gather_s))
        reduced_s = _exposed(scatter + copies, hidden_s)
        zero = self.problem.fixed.get("zero_stage")
        least = np.full(len(each_s), np.inf)
        if zero in {None, 0}:
            least = _exposed(moved.whole_s[which], hidden_s)
        if zero not in {0, ZERO_PARAMETERS}:
            least = np.minimum(least, (reduced_s + _exposed(gather, hidden_gathers_s)).min(axis=0))
        least = pipeline_s + least
        if zero in {None, ZERO_PARAMETERS}:
            overlap = float(np.max(time.fully_sharded_overlap))
            swept = scatter + gather
            stage_s = mean_s + np.maximum(swept - overlap * mean_s, (1.0 - overlap) * swept)
            busy_s = passes * stage_s
            share = window * BACKWARD_SHARE / num_microbatches
            sharded = np.maximum(busy_s * (1.0 - share) + copies, busy_s + UNHIDDEN_SHARE * copies)
            sharded = np.maximum(sharded, pipeline_s + UNHIDDEN_SHARE * copies)
            if recipe.is_fsdp and stages > 1:
                sharded = np.minimum(sharded, pipeline_s + reduced_s)
            least = np.minimum(least, sharded.min(axis=0))
        return np.asarray(least)

    def _moved(self, stages: int) -> _Moved:
        """What the mean of so many stages moves."""
        world = self._tensor * self._context * self._data * stages
        fits = np.flatnonzero(world <= self.problem.limits.max_devices)
        data = self._data[fits]
        pinned = self.problem.fixed.get("data_parallel_shard")
        sizes = sorted({size for own in np.unique(data).tolist() for size in divisors(own)})
        ways = [self._of_way(stages, fits, size) for size in (sizes if pinned is None else [int(pinned)])]
        tables = np.full((max(len(ways), 1), 3, len(world)), np.inf)
        if ways:
            tables[:, :, fits] = np.stack(ways)
        alone = np.ones_like(data)
        whole_s = self._links(stages, fits, alone).all_reduce_s(
            self._gradient_bytes[fits] / stages, self._context[fits] * data, self._tensor[fits]
        )
        whole = np.full(len(world), np.inf)
        whole[fits] = np.where(self._is_possible(stages, fits, alone), whole_s, np.inf)
        return _Moved(scatter_s=tables[:, 0], copies_s=tables[:, 1], gather_s=tables[:, 2], whole_s=whole)

    def _of_way(self, stages: int, fits: IntArray, size: int) -> FloatArray:
        """A, B and Q of states that ``size`` data-parallel ranks share, [3, fits]."""
        data, tensor = self._data[fits], self._tensor[fits]
        shard = np.where(data % size == 0, size, data)
        links, ranks = self._links(stages, fits, shard), self._context[fits] * shard
        gradient_bytes = self._gradient_bytes[fits] / stages
        moved = [
            links.gather_s(gradient_bytes, ranks, tensor),
            links.all_reduce_s(gradient_bytes / ranks, data // shard, tensor * ranks),
            links.gather_s(self._parameter_bytes[fits] / stages, ranks, tensor),
        ]
        return np.where((data % size == 0) & self._is_possible(stages, fits, shard), np.stack(moved), np.inf)

    def _degrees(self, stages: int, fits: IntArray, shard: IntArray) -> Degrees:
        return Degrees(
            tensor=self._tensor[fits],
            context=self._context[fits],
            data=self._data[fits],
            shard=shard,
            stages=np.full(len(fits), stages),
        )

    def _is_possible(self, stages: int, fits: IntArray, shard: IntArray) -> BoolArray:
        model = self.problem.machine.network_model
        return (
            np.ones(len(fits), dtype=bool) if model is None else model.is_possible(self._degrees(stages, fits, shard))
        )

    def _links(self, stages: int, fits: IntArray, shard: IntArray) -> CommunicationModel:
        degrees = self._degrees(stages, fits, shard)
        return CommunicationModel(
            machine=self.problem.machine,
            calibration=self.problem.calibration,
            world_size=degrees.tensor * degrees.context * degrees.data * stages,
            degrees=degrees,
        )


def _exposed(seconds: FloatArray, hidden_s: FloatArray) -> FloatArray:
    """What stays of a collective that so much work can hide, as the estimator has it."""
    return np.maximum(seconds - hidden_s, UNHIDDEN_SHARE * seconds)
