"""How much memory does a stage need, as a function of the layers that it holds?

*Notation.* As in :mod:`.uneven`. The safe memory of a stage grows by the same amount with each layer of a kind, and
with each micro-batch in flight: the estimator's figures for one layer and two, on the first stage and the last, give
all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.parameters import ZERO_PARAMETERS
from meshplan.planner.training.pipeline.closed_forms import in_flight
from meshplan.planner.training.problem.choice import Recompute
from meshplan.planner.training.search.layers.counted_stages import stage_of, unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Memory of the stages of a batch of candidates; 0 where the bound leaves it.

    Args:
        layer_bytes: what one more layer of each kind adds to each stage, [p, kinds, n].
        base_bytes: what each stage needs without layers, [p, n].
        saved_bytes: most that recompute of a layer of each kind saves on each stage, [p, kinds, n]; 0 where there is
            none.
    """

    layer_bytes: FloatArray
    base_bytes: FloatArray
    saved_bytes: FloatArray

    def take(self, rows: IntArray) -> StageBytes:
        """The same for some candidates."""
        return StageBytes(
            layer_bytes=self.layer_bytes[..., rows],
            base_bytes=self.base_bytes[..., rows],
            saved_bytes=self.saved_bytes[..., rows],
        )

    def least(self, other: StageBytes) -> StageBytes:
        """The less of both, entry by entry: of two numbers of micro-batches in flight on each stage the lower one.

        Fewer in flight never ask for more recompute, although each layer saves less: n layers of (l + f·s) bytes, f of
        them in flight, on X bytes of states recompute n·s/d − (M − X − n·l)/(f·d) layers, where each saves f·d. That
        grows with f while M ≥ X + n·l; below, d ≤ s makes it more than all n.
        """
        return StageBytes(
            layer_bytes=np.minimum(self.layer_bytes, other.layer_bytes),
            base_bytes=np.minimum(self.base_bytes, other.base_bytes),
            saved_bytes=np.minimum(self.saved_bytes, other.saved_bytes),
        )

    def of_the_least_layer(self) -> StageBytes:
        """The same with one kind of layer, as small as any, recomputed or not."""
        bytes_, saved = least_bytes(self.layer_bytes, self.saved_bytes)
        return replace(self, layer_bytes=bytes_, saved_bytes=saved)


def least_bytes(layer_bytes: FloatArray, saved_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The least that a layer of any kind holds, and what recompute saves of it, [p, 1, n] each.

    Both what is held and what stays after recompute are the least of any kind, so that no kind does better.
    """
    least = layer_bytes.min(axis=1, keepdims=True)
    return least, np.maximum(least - (layer_bytes - saved_bytes).min(axis=1, keepdims=True), 0.0)


def nothing_known(memory: MemoryModel) -> StageBytes:
    """Stages that need nothing: a bound where memory is no sum over layers."""
    split = memory.candidates.split
    shape = split.pipeline_parallel, len(split.kinds), len(memory.candidates)
    none = np.zeros(shape)
    return StageBytes(layer_bytes=none, base_bytes=none[:, 0], saved_bytes=none)


def stage_bytes(
    memory: MemoryModel, ends: Mapping[int, tuple[bool, bool]], layers: int, *, takes_blocks: bool
) -> tuple[StageBytes, dict[int, FloatArray]]:
    """Memory of the stages of a batch that hold a layer or more, and of the ends without any, [n] each.

    Layers of different kinds on a stage share the working set of the largest and gather their mean: the smallest of any
    kind is counted.

    Args:
        memory: of the batch.
        ends: stage → whether it has the embedding, and whether it has the LM head.
        layers: of the model.
        takes_blocks: layers may be recomputed one by one.
    """
    batch, split = memory.candidates, memory.candidates.split
    figures = _figures(memory, ends, layers)
    flying = np.stack([flying_on(memory, stage) for stage in range(split.pipeline_parallel)])
    slope, least_base = _lines(figures, flying)
    base = np.broadcast_to(least_base, flying.shape).copy()
    gathers, empty = batch.zero_stage >= ZERO_PARAMETERS, {}
    for stage, held in figures.with_ends.items():
        one, every, _ = held - figures.of_first_kind[stage]
        # A fully sharded rank gathers a layer's share of all parameters of its stage, the ends' among them: that of a
        # stage with all layers is the smallest.
        base[stage] += np.where(gathers, every, one)
        empty[stage] = held[2]
    dropped = np.stack([memory.layer_bytes(kind) for kind in split.kinds]) - memory.layer_input_bytes()
    saved = flying[:, None] * dropped * memory.safe_per_activation_byte
    again = (batch.recompute == Recompute.NONE) & takes_blocks
    # While a checkpoint is loaded whole, memory is not what it is in a step.
    known = ~gathers | (not memory.calibration.recipe.loads_whole)
    bytes_ = StageBytes(
        layer_bytes=np.where(known, slope, 0.0),
        base_bytes=np.where(known, base, 0.0),
        saved_bytes=np.where(again & known, saved, 0.0),
    )
    return bytes_, empty


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Safe memory of a few stages, by their place in the pipeline: the first, the last, and those with ends.

    Args:
        one: with one layer of each kind and no end, [kinds, n].
        two: with two, [kinds, n].
        of_first_kind: with one layer of the first kind, with as many as the model has, with none, [3, n].
        with_ends: the same three of stages with their ends, [3, n].
    """

    one: Mapping[int, FloatArray]
    two: Mapping[int, FloatArray]
    of_first_kind: Mapping[int, FloatArray]
    with_ends: Mapping[int, FloatArray]


def _figures(memory: MemoryModel, ends: Mapping[int, tuple[bool, bool]], layers: int) -> _Figures:
    """The estimator's figures, all asked for at once."""
    split = memory.candidates.split
    kinds = len(split.kinds)
    of_first_kind = [unit(0, kinds), unit(0, kinds, layers), unit(0, kinds, 0)]
    of_each = [unit(kind, kinds, count) for kind in range(kinds) for count in (1, 2)]
    places = sorted({0, split.pipeline_parallel - 1, *ends})
    asked = [[stage_of(counts, index=index) for counts in (*of_first_kind, *of_each)] for index in places]
    for stage, (first, head) in ends.items():
        asked.append([stage_of(counts, first=first, head=head, index=stage) for counts in of_first_kind])
    safe = np.stack([own.safe_bytes for own in memory.stages([stage for group in asked for stage in group])])
    groups = np.split(safe, np.cumsum([len(group) for group in asked])[:-1])
    plain = dict(zip(places, groups, strict=False))
    return _Figures(
        one={index: found[3::2] for index, found in plain.items()},
        two={index: found[4::2] for index, found in plain.items()},
        of_first_kind={index: found[:3] for index, found in plain.items()},
        with_ends=dict(zip(ends, groups[len(places) :], strict=True)),
    )


def _lines(figures: _Figures, flying: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What a layer of each kind adds on every stage, [p, kinds, n], and the least that a stage needs without any, [n].

    Between the first stage and the last memory is linear in the micro-batches in flight.

    Args:
        figures: of both.
        flying: micro-batches in flight, [p, n].
    """
    one, two, last = figures.one, figures.two, len(flying) - 1
    spread = np.maximum(flying[0] - flying[last], 1e-9)
    weight = np.where(flying[0] > flying[last], (flying - flying[last]) / spread, 1.0)[:, None]  # of the first stage
    slope = weight * (two[0] - one[0]) + (1.0 - weight) * (two[last] - one[last])
    return slope, (2.0 * one[0] - two[0]).min(axis=0)


def flying_on(memory: MemoryModel, stage: int) -> FloatArray:
    """Micro-batches whose activations a stage keeps, [n]."""
    split = memory.candidates.split
    return in_flight(
        split.schedule,
        pipeline_parallel=split.pipeline_parallel,
        virtual_pipeline_stages=split.virtual_pipeline_stages,
        stage=stage,
        num_microbatches=memory.candidates.num_microbatches,
    )
