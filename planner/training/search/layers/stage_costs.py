"""What does a stage take, as a function of the layers that it holds? Time and memory, for the splits to come.

*Notation.* As in :mod:`~.uneven`: t_i(k, j) and M_i(k, j) of stage i with the layers k ≤ l < j. Both grow by the same
amount with each layer of a kind: two evaluations of the estimator for each kind and each pair of ends give them all.
Where layers are alike, :class:`StageTable` holds the estimator's own figure for each number of layers instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, StageClass, layer_kinds
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS, predicting_kinds
from meshplan.planner.training.estimator.priced import training_model
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.pipeline.orders import stage_of_chunk
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.layers.counted_stages import stage_of, stages_of, unit
from meshplan.planner.training.search.layers.stage_bytes import (
    StageBytes,
    flying_on,
    least_bytes,
    nothing_known,
    stage_bytes,
)
from meshplan.planner.training.search.memory_savers import takes_blocks

# Numbers of layers of a stage for which times are tabulated.
MOST_COUNTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Time and memory of the stages of a batch of candidates, as functions of the layers they hold.

    Args:
        kind_of: kind of each layer in order, [L].
        layer_s: of a layer of each kind, [kinds, n].
        base_s: what each stage adds, [p, n].
        again_s: time that recompute of a layer of each kind adds, [kinds, n].
        layer_bytes: of a layer of each kind on each stage, [p, kinds, n].
        base_bytes: what each stage adds, [p, n].
        saved_bytes: most that recompute of a layer saves on each stage, [p, kinds, n]; 0 where there is none.
    """

    kind_of: tuple[int, ...]
    layer_s: FloatArray
    base_s: FloatArray
    again_s: FloatArray
    layer_bytes: FloatArray
    base_bytes: FloatArray
    saved_bytes: FloatArray

    def take(self, rows: IntArray) -> StageCosts:
        """The same for some candidates."""
        columns = ("layer_s", "base_s", "again_s", "layer_bytes", "base_bytes", "saved_bytes")
        return replace(self, **{name: getattr(self, name)[..., rows] for name in columns})

    def of_the_least_layer(self) -> StageCosts:
        """The same with every layer as quick and as small as any, recomputed or not: a bound for any order of kinds."""
        bytes_, saved = least_bytes(self.layer_bytes, self.saved_bytes)
        return replace(
            self,
            kind_of=(0,) * len(self.kind_of),
            layer_s=self.layer_s.min(axis=0, keepdims=True),
            again_s=self.again_s.min(axis=0, keepdims=True),
            layer_bytes=bytes_,
            saved_bytes=saved,
        )

    def main_kind(self) -> int:
        """The kind whose layers take most of the time together."""
        counts = np.array([self.kind_of.count(kind) for kind in range(len(self.layer_s))])
        return int(np.argmax(counts * self.layer_s.mean(axis=1)))

    def of_kind(self, kind: int) -> StageCosts:
        """Only the layers of one kind: a bound for any order, as the others add to it."""
        return replace(
            self,
            kind_of=(0,) * self.kind_of.count(kind),
            layer_s=self.layer_s[[kind]],
            again_s=self.again_s[[kind]],
            layer_bytes=self.layer_bytes[:, [kind]],
            saved_bytes=self.saved_bytes[:, [kind]],
        )

    def layers_before(self) -> IntArray:
        """Layers of each kind before each one, [kinds, L + 1]."""
        kinds = np.arange(len(self.layer_s))[:, None]
        before = np.zeros((len(kinds), len(self.kind_of) + 1), dtype=np.int64)
        np.cumsum(np.array(self.kind_of) == kinds, axis=1, out=before[:, 1:])
        return before


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """What a stage with one pair of ends takes, by its number of layers, which are alike; row 0 is of ``fewest``.

    Args:
        fewest: layers of the first row.
        seconds: of a micro-batch, forward + backward, [counts, n].
        exposed_s: gradient reduction after the last micro-batch, [counts, n].
        optimizer_s: optimizer step, [counts, n].
    """

    fewest: int
    seconds: FloatArray
    exposed_s: FloatArray
    optimizer_s: FloatArray

    def take(self, rows: IntArray) -> StageTable:
        """The same for some candidates."""
        return replace(
            self,
            seconds=self.seconds[:, rows],
            exposed_s=self.exposed_s[:, rows],
            optimizer_s=self.optimizer_s[:, rows],
        )


class SplitCosts:
    """What the stages of one batch of candidates take, for any number of layers on each of them.

    Args:
        problem: the question.
        batch: candidates under the usual split of their stages and chunks.
        most_chunks: the least of what interleaving keeps with any number of chunks from those of the split to this one;
            None: with those of the split.
    """

    def __init__(self, problem: TrainingProblem, batch: Candidates, most_chunks: int | None = None) -> None:
        self.problem, self.batch, self.split = problem, batch, batch.split
        self.most_chunks = most_chunks or batch.split.virtual_pipeline_stages
        self.kinds, self.kind_of = layer_kinds(problem.shape)
        self.model = training_model(problem, batch)
        self._again_s: FloatArray | None = None
        self._memory: dict[bool, StageBytes] = {}
        self.head_stage = stage_of_chunk(
            self.split.schedule, self.split.pipeline_parallel, self.split.virtual_pipeline_stages
        )[-1]

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage has the embedding, and whether it has the LM head."""
        if self.split.vocabulary_parallel:
            return False, False
        return stage == 0, stage == self.head_stage

    def fewest_layers(self, stage: int) -> int:
        """Fewest layers of a stage: one in each chunk but the first and the last."""
        return max(self.split.virtual_pipeline_stages - sum(self.ends(stage)), 0)

    def fewest_of(self, kind: int) -> list[int]:
        """Fewest layers of a kind on each stage, [p].

        Every chunk but the first and the last, C in all, holds a layer or more: chunk c holds none before layer c − 1,
        and none that leaves too few for those after it. Where all that it can hold are of the kind, it has one of them.
        """
        places = stage_of_chunk(self.split.schedule, self.split.pipeline_parallel, self.split.virtual_pipeline_stages)
        fewest, last = [0] * self.split.pipeline_parallel, len(places) - 1
        ends = () if self.split.vocabulary_parallel else (0, last)
        for chunk, stage in enumerate(places):
            possible = self.kind_of[max(chunk - 1, 0) : len(self.kind_of) - max(last - 1 - chunk, 0)]
            fewest[stage] += chunk not in ends and set(possible) == {kind}
        return fewest

    @cached_property
    def unsharded(self) -> TrainingModel:
        """The estimator of the same candidates without the transfers of ZeRO-3, which are no sum over layers."""
        if not (self.batch.zero_stage >= ZERO_PARAMETERS).any():
            return self.model
        below = np.minimum(self.batch.zero_stage, ZERO_PARAMETERS - 1)
        return training_model(self.problem, replace(self.batch, zero_stage=below))

    def costs(self) -> StageCosts:
        """See :class:`StageCosts`; transfers of ZeRO-3 are left out."""
        split = self.split
        p, kinds = split.pipeline_parallel, len(self.kinds)
        usual = -(-self.problem.shape.num_hidden_layers // p)
        point = [usual - 1 if kinds == 1 else 0, *[0] * (kinds - 1)]
        ends = {self.ends(stage) for stage in range(p)}
        asked: list[StageClass] = []
        where: dict[tuple[bool, bool], int] = {}
        for first, head in sorted(ends):
            share = 1.0 / p if split.vocabulary_parallel else 0.0
            where[first, head] = len(asked)
            asked.append(replace(stage_of(point, first=first, head=head), vocabulary_share=share))
            for kind in range(kinds):
                more = [count + (index == kind) for index, count in enumerate(point)]
                asked.append(replace(stage_of(more, first=first, head=head), vocabulary_share=share))
        seconds = self.unsharded.stages_s(asked)
        plain = where[False, False] if (False, False) in where else min(where.values())
        units = [seconds[plain + 1 + kind] - seconds[plain] for kind in range(kinds)]
        base = {key: seconds[at] - point[0] * units[0] for key, at in where.items()}
        memory = self.memory(may_be_empty=False)
        return StageCosts(
            kind_of=tuple(self.kind_of),
            layer_s=np.stack(units),
            base_s=np.stack([base[self.ends(stage)] for stage in range(p)]),
            again_s=self.again_s(),
            layer_bytes=memory.layer_bytes,
            base_bytes=memory.base_bytes,
            saved_bytes=memory.saved_bytes,
        )

    def take(self, rows: IntArray) -> SplitCosts:
        """The same of some candidates, with what is known of them."""
        other = SplitCosts(self.problem, self.batch.take(rows), self.most_chunks)
        other.model = self.model.take(rows)
        if self.unsharded is not self.model:
            other.__dict__["unsharded"] = self.unsharded.take(rows)
        other._again_s = self.again_s()[:, rows]
        other._memory = {is_full: bytes_.take(rows) for is_full, bytes_ in self._memory.items()}
        return other

    def again_s(self) -> FloatArray:
        """Time that recompute of one more layer of each kind adds to a micro-batch's work, [kinds, n]."""
        if self._again_s is None:
            self._again_s = self._priced_again_s()
        return self._again_s

    def _priced_again_s(self) -> FloatArray:
        again_s = np.zeros((len(self.kinds), len(self.batch)))
        rows = np.flatnonzero(self.batch.recompute == Recompute.NONE)
        if not takes_blocks(self.problem) or not len(rows):
            return again_s
        plain = self.unsharded.take(rows)
        layers = [stage_of(unit(kind, len(self.kinds))) for kind in range(len(self.kinds))]
        pairs = zip(plain.with_block_of_one().stages_s(layers), plain.stages_s(layers), strict=True)
        again_s[:, rows] = [again - once for again, once in pairs]
        return again_s

    def memory(self, *, may_be_empty: bool = True) -> StageBytes:
        """See :class:`StageBytes`. Under ZeRO-3 the gathered layer is the smallest of any kind.

        Args:
            may_be_empty: what an end needs without layers counts if that is less; else every stage holds one or more,
                and has the working set of a recomputed or gathered layer.
        """
        if not self._memory:
            self._memory = self._bytes(self.model.memory)
            if self.most_chunks > self.split.virtual_pipeline_stages:
                split = replace(self.split, virtual_pipeline_stages=self.most_chunks)
                more = self._bytes(training_model(self.problem, replace(self.batch, split=split)).memory)
                self._memory = {key: bytes_.least(more[key]) for key, bytes_ in self._memory.items()}
        return self._memory[may_be_empty]

    def memory_of_any_recompute(self) -> StageBytes:
        """What bounds full recompute too: it drops the layers that predict further tokens, which no block does.

        Of NONE they are kept whole beside the logits; of FULL their inputs, beside the logits or the layer that runs.
        """
        found, count = self.memory(), self.problem.shape.num_nextn_predict_layers
        if not count:
            return found
        memory = self.model.memory
        further = predicting_kinds(self.problem.shape)
        dropped = sum(memory.layer_bytes(self.kinds[index]) - memory.layer_input_bytes() for index in further)
        saved = count * flying_on(memory, self.head_stage) * dropped * memory.safe_per_activation_byte
        base = found.base_bytes.copy()
        base[self.head_stage] -= np.where(self.batch.recompute == Recompute.NONE, saved, 0.0)
        return replace(found, base_bytes=base)

    def _bytes(self, memory: MemoryModel) -> dict[bool, StageBytes]:
        """Whether ends may be empty → :meth:`memory`, by the estimator's memory of the batch."""
        ends = {stage: self.ends(stage) for stage in sorted({0, self.head_stage})}
        layers = len(self.kind_of)
        if self.split.vocabulary_parallel:
            none = nothing_known(memory)
            return {True: none, False: none}
        bytes_, empty = stage_bytes(memory, ends, layers, takes_blocks=takes_blocks(self.problem))
        least = bytes_.base_bytes.copy()
        for stage, alone in empty.items():
            least[stage] = np.minimum(least[stage], alone)
        return {False: bytes_, True: replace(bytes_, base_bytes=least)}

    def embedding_bytes(self, stages: Sequence[int]) -> list[FloatArray]:
        """What the embedding adds to each of some stages, with the micro-batches that it keeps in flight, [n] each."""
        layer = unit(0, len(self.kinds))
        asked = [stage_of(layer, first=first, index=stage) for stage in stages for first in (True, False)]
        safe = [own.safe_bytes for own in self.model.memory.stages(asked)]
        return [added - plain for added, plain in zip(safe[::2], safe[1::2], strict=True)]

    def tables(self, fewest: int, most: int, busy_s: FloatArray) -> dict[tuple[bool, bool], StageTable]:
        """Stage's ends → :class:`StageTable`; none where layers differ or there are too many counts.

        Args:
            fewest: layers of the first row.
            most: layers of the last row.
            busy_s: gradients hide behind a micro-batch that takes at least as long, [n].
        """
        if len(self.kinds) > 1 or most - fewest >= MOST_COUNTS:
            return {}
        tables = {}
        share = 1.0 / self.split.pipeline_parallel if self.split.vocabulary_parallel else 0.0
        for first, head in sorted({self.ends(stage) for stage in range(self.split.pipeline_parallel)}):
            stages = replace(
                stages_of([[count] for count in range(fewest, most + 1)], first=first, head=head),
                vocabulary_share=share,
            )
            shape = (most + 1 - fewest, len(self.batch))
            seconds = np.broadcast_to(self.model.stages_s([stages])[0], shape)
            exposed_s, optimizer_s = self.model.ending_s(stages, np.maximum(seconds, busy_s))
            tables[first, head] = StageTable(
                fewest=fewest,
                seconds=seconds,
                exposed_s=np.broadcast_to(exposed_s, shape),
                optimizer_s=np.broadcast_to(optimizer_s, shape),
            )
        return tables
