"""What the training estimators work on: a batch of candidates as a struct of arrays.

One plan is a batch of one; there is no second, scalar model. All candidates of a batch share the pipeline split
(how layers are assigned to stages), because a split decides how many stages there are to look at; everything else is an
array of shape ``[n]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.network.rank_layout import Degrees
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.pipeline.orders import stage_of_chunk
from meshplan.planner.training.problem.choice import Choice, ContextStyle
from meshplan.planner.training.problem.choices import ALL_STATES, COLUMNS, SPLIT

_COLUMN_NAMES = tuple(one.column for one in COLUMNS)
NUMBERS_AT_ONCE = 4096  # of an array, up to which a pass costs little more than one over a few


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClass:
    """Stages that cost the same: the same layers, the same ends.

    Several classes may be held as one (:func:`as_one`): then fields are columns, and what is worked out [classes, n].

    Args:
        layers: layers of each kind (see :func:`layer_kinds`) on the stage, all its chunks together.
        has_embedding: the stage holds the input embedding.
        has_head: the stage holds the LM head and computes the loss.
        first_index: lowest index of such a stage: it keeps the most micro-batches in flight.
        count: how many stages are of this class.
        first_layers: for n = 0, 1, … up to the longest chunk: layers of each kind among the first n of every chunk of
            the stage (what recompute in blocks of n recomputes); empty where no block is asked for.
        vocabulary_share: part of the embedding's and the LM head's vocabulary that the stage holds where it is split
            over all stages; then no stage has the whole of either.
        in_flight: micro-batches whose activations it holds, where a measured run states them; 0: the schedule's.
    """

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    first_index: int
    count: int
    first_layers: tuple[tuple[int, ...], ...] = ()
    vocabulary_share: float = 0.0
    in_flight: int = 0

    def recomputed(self, num_layers: IntArray) -> IntArray:
        """Layers of each kind that recompute of the first ``num_layers`` of every chunk repeats, [kinds, n]."""
        return self.first(num_layers)

    def first(self, num_layers: IntArray) -> IntArray:
        """Layers of each kind among the first ``num_layers`` of the stage's chunks, [kinds, n]; of several classes
        held as one [kinds, classes, n].
        """
        if not num_layers.any():
            return np.zeros((len(self.layers), len(num_layers)), dtype=np.int64)
        table = np.array(self.first_layers, dtype=np.int64)
        return table[np.minimum(num_layers, len(table) - 1)].T


def classes_at_once(rows: int) -> int:
    """Classes of stages that are worked out together for so many candidates."""
    return max(NUMBERS_AT_ONCE // max(rows, 1), 1)


def as_one(classes: Sequence[StageClass]) -> StageClass:
    """Several classes of one pipeline held as one, each field a column [classes, 1].

    Estimators are sums over layers and ends, so that they take a column where they take a number: one pass over small
    arrays instead of one for each class.
    """
    depth = max(len(one.first_layers) for one in classes)
    tables = [one.first_layers + one.first_layers[-1:] * (depth - len(one.first_layers)) for one in classes]
    columns: dict[str, Any] = {
        name: np.array([getattr(one, name) for one in classes])[:, None]
        for name in ("has_embedding", "has_head", "first_index", "count")
    }
    columns["layers"] = tuple(np.array([one.layers for one in classes]).T[..., None])
    columns["first_layers"] = np.array(tables).swapaxes(0, 1)  # [depth, classes, kinds]
    return StageClass(vocabulary_share=classes[0].vocabulary_share, **columns)


def of_class(figures: FloatArray, index: int) -> FloatArray:
    """Figures of one of several classes that were worked out as one; themselves where they are alike in all, [n]."""
    return figures[index] if figures.ndim > 1 else figures


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """How the layers are assigned to pipeline stages.

    Args:
        pipeline_parallel: stages.
        virtual_pipeline_stages: chunks on each stage.
        layers_per_chunk: layers of each chunk in visiting order; on which stage a chunk lies is the schedule's
            (:func:`meshplan.planner.training.pipeline.orders.stage_of_chunk`).
        schedule: a key of :data:`meshplan.planner.training.problem.schedules.SCHEDULES`.
        kinds: the distinct kinds of layer; ``StageClass.layers`` counts them in this order.
        classes: the distinct stages.
        class_of_stage: index into ``classes`` of each stage.
        vocabulary_parallel: embedding and LM head are split over all stages (arXiv:2411.05288).
    """

    pipeline_parallel: int
    virtual_pipeline_stages: int
    layers_per_chunk: tuple[int, ...]
    schedule: str
    kinds: tuple[LayerKind, ...]
    classes: tuple[StageClass, ...]
    class_of_stage: tuple[int, ...]
    vocabulary_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of a model that cost the same.

    Args:
        is_moe: routes tokens to experts.
        window: attention window in tokens, None for full attention.
        has_attention: has softmax attention.
        has_recurrent: has a recurrent mixer.
        has_mlp: has an MLP or experts.
        form: softmax attention of its own sizes; None where it has the model's common ones.
        has_indexer: its attention has an indexer of its own.
        is_encoder: of the encoder in front, which reads a sequence of its own.
        has_cross_attention: attends to the encoder's output as well.
    """

    is_moe: bool
    window: int | None
    has_attention: bool = True
    has_recurrent: bool = False
    has_mlp: bool = True
    form: AttentionForm | None = None
    has_indexer: bool = False
    is_encoder: bool = False
    has_cross_attention: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks with a residual connection: the mixers of a layer, side by side, cross-attention, and its MLP or
        experts.
        """
        return (self.has_attention or self.has_recurrent) + self.has_cross_attention + self.has_mlp


@lru_cache(maxsize=16)  # a search asks for every split of the layers
def layer_kinds(shape: ModelShape) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The distinct kinds of layer and, for each layer, the index of its kind; those of an encoder come first."""
    per_layer = [] if shape.encoder is None else [replace(kind, is_encoder=True) for kind in _layers(shape.encoder)]
    per_layer += _layers(shape)
    kinds = tuple(dict.fromkeys(per_layer))
    return kinds, tuple(kinds.index(kind) for kind in per_layer)


def _layers(shape: ModelShape) -> list[LayerKind]:
    return [
        LayerKind(
            is_moe=shape.is_moe_layer(layer),
            window=shape.window(layer),
            has_attention=shape.has_attention(layer),
            has_recurrent=shape.has_recurrent(layer),
            has_mlp=shape.has_mlp(layer),
            form=shape.attention_form(layer),
            has_indexer=shape.blocks is not None and shape.blocks.has_indexer(layer),
            has_cross_attention=shape.encoder is not None,
        )
        for layer in range(shape.num_hidden_layers)
    ]


def chunk_kinds(shape: ModelShape, layers_per_chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The kind of each layer of each chunk; the layers of an encoder lie in front of the first chunk's."""
    _, kind_of = layer_kinds(shape)
    first = len(kind_of) - shape.num_hidden_layers
    start = 0
    for count in layers_per_chunk:
        yield kind_of[start : first + count]
        start = first = first + count


def attention_windows(shape: ModelShape) -> tuple[tuple[int | None, int], ...]:
    """(attention window, number of layers with it) of a model."""
    windows = [shape.window(layer) for layer in range(shape.num_hidden_layers)]
    return tuple((window, windows.count(window)) for window in dict.fromkeys(windows))


def split_layers(
    shape: ModelShape,
    *,
    pipeline_parallel: int,
    virtual_pipeline_stages: int,
    layers_per_chunk: tuple[int, ...],
    schedule: str,
    vocabulary_parallel: bool = False,
) -> PipelineSplit:
    """Assign layers to stages and find the distinct stages.

    Args:
        shape: the model.
        pipeline_parallel: stages p.
        virtual_pipeline_stages: chunks per stage v.
        layers_per_chunk: p·v counts that sum to the model's layers.
        schedule: pipeline schedule.
        vocabulary_parallel: embedding and LM head are split over all stages.
    """
    kinds, _ = layer_kinds(shape)
    chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pipeline_parallel)]
    places = stage_of_chunk(schedule, pipeline_parallel, virtual_pipeline_stages)
    for chunk, inside in enumerate(chunk_kinds(shape, layers_per_chunk)):
        chunks[places[chunk]].append(inside)
    last = places[-1]
    tables = {own: first_layers(own, len(kinds)) for own in {tuple(own) for own in chunks}}
    distinct: dict[tuple[tuple[tuple[int, ...], ...], bool, bool], list[int]] = {}
    for stage, own in enumerate(chunks):
        ends = (False, False) if vocabulary_parallel else (stage == 0, stage == last)
        distinct.setdefault((tables[tuple(own)], *ends), []).append(stage)
    class_of = {stage: index for index, where in enumerate(distinct.values()) for stage in where}
    classes = tuple(
        StageClass(
            layers=table[-1],
            has_embedding=first,
            has_head=end,
            first_index=where[0],
            count=len(where),
            first_layers=table,
            vocabulary_share=1.0 / pipeline_parallel if vocabulary_parallel else 0.0,
        )
        for (table, first, end), where in distinct.items()
    )
    return PipelineSplit(
        pipeline_parallel=pipeline_parallel,
        virtual_pipeline_stages=virtual_pipeline_stages,
        layers_per_chunk=layers_per_chunk,
        schedule=schedule,
        kinds=kinds,
        classes=classes,
        class_of_stage=tuple(class_of[stage] for stage in range(pipeline_parallel)),
        vocabulary_parallel=vocabulary_parallel,
    )


@lru_cache(maxsize=1024)  # an estimate and the simulation of its plan ask for the same ones
def chunk_classes(shape: ModelShape, split: PipelineSplit) -> tuple[StageClass, ...]:
    """Every chunk as a stage of its own, in visiting order; alike ones are equal."""
    kinds, _ = layer_kinds(shape)
    last, whole = len(split.layers_per_chunk) - 1, not split.vocabulary_parallel
    return tuple(
        StageClass(
            layers=tuple(inside.count(index) for index in range(len(kinds))),
            has_embedding=whole and chunk == 0,
            has_head=whole and chunk == last,
            first_index=0,
            count=1,
            first_layers=first_layers([inside], len(kinds)),
            vocabulary_share=0.0 if whole else 1.0 / (last + 1),
        )
        for chunk, inside in enumerate(chunk_kinds(shape, split.layers_per_chunk))
    )


def first_layers(chunks: Sequence[Sequence[int]], num_kinds: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each kind among the first n layers of every chunk, n from 0 to the longest chunk.

    Args:
        chunks: kind of each layer, chunk by chunk.
        num_kinds: how many kinds there are.

    >>> first_layers([[0, 1], [1, 1, 1]], 2)
    ((0, 0), (1, 1), (1, 3), (1, 4))
    """
    counts = [0] * num_kinds
    table = [tuple(counts)]
    if num_kinds == 1:  # alike layers are counted by the lengths of the chunks alone
        ends = Counter(map(len, chunks))
        longer = len(chunks)
        for position in range(max(ends)):
            longer -= ends[position]
            table.append((table[-1][0] + longer,))
        return tuple(table)
    for position in range(max(map(len, chunks))):
        for chunk in chunks:
            if position < len(chunk):
                counts[chunk[position]] += 1
        table.append(tuple(counts))
    return tuple(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A batch of training configurations that share a pipeline split. Arrays have shape [n].

    The arrays are the columns of :data:`meshplan.planner.training.problem.choices.COLUMNS`, names by their codes;
    ``on_nvme`` says that offloaded states and layers' activations lie there, not in host memory.
    """

    split: PipelineSplit
    tensor_parallel: IntArray
    context_parallel: IntArray
    data_parallel: IntArray
    data_parallel_shard: IntArray
    expert_parallel: IntArray
    expert_tensor_parallel: IntArray
    micro_batch_size: IntArray
    num_microbatches: IntArray
    zero_stage: IntArray
    recompute: IntArray
    recompute_num_layers: IntArray
    sequence_parallel: BoolArray
    optimizer_offload: BoolArray
    optimizer_offload_percent: IntArray
    parameter_offload: BoolArray
    activation_offload: BoolArray
    activation_offload_num_layers: IntArray
    on_nvme: BoolArray
    context_parallel_style: IntArray
    context_parallel_heads: IntArray
    zero_hpz_partition_size: IntArray
    outer_zero_stage: IntArray
    gathered_num_layers: IntArray

    def __len__(self) -> int:
        return len(self.tensor_parallel)

    @property
    def world_size(self) -> IntArray:
        """Devices in use, [n]."""
        return self.split.pipeline_parallel * self.stage_devices

    @property
    def stage_devices(self) -> IntArray:
        """Devices of one pipeline stage, [n]."""
        return self.tensor_parallel * self.context_parallel * self.data_parallel

    @property
    def degrees(self) -> Degrees:
        """Degrees that decide which ranks a group joins, [n] each."""
        return Degrees(
            tensor=self.tensor_parallel,
            context=self.context_parallel,
            data=self.data_parallel,
            shard=self.data_parallel_shard,
            stages=np.full(len(self), self.split.pipeline_parallel),
        )

    @property
    def offloads_states(self) -> BoolArray:
        """Optimizer states or parameters lie off the devices, [n]."""
        return self.optimizer_offload | self.parameter_offload

    @property
    def offloads_layers(self) -> BoolArray:
        """Activations of layers that are not recomputed lie off the devices, [n]."""
        return self.activation_offload_num_layers > 0

    @property
    def moved_optimizer(self) -> FloatArray:
        """Share of the optimizer states that lie off the devices, [n]."""
        return np.where(self.optimizer_offload, self.optimizer_offload_percent / ALL_STATES, 0.0)

    @property
    def expert_data_parallel(self) -> IntArray:
        """Replicas of each expert, [n]."""
        return self.stage_devices // (self.expert_parallel * self.expert_tensor_parallel)

    @property
    def head_exchange(self) -> IntArray:
        """Ranks of a context-parallel group that exchange heads for tokens, [n]."""
        whole = self.context_parallel_style == ContextStyle.ALL_TO_ALL
        return np.where(whole, self.context_parallel, self.context_parallel_heads)

    @property
    def context_ring(self) -> IntArray:
        """Ranks, or groups of ranks that exchange heads, among which a sequence's tokens stay split, [n]."""
        return self.context_parallel // self.head_exchange

    def take(self, rows: IntArray | BoolArray | slice) -> Candidates:
        """The candidates at ``rows``."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
            if rows.all():
                return self
            rows = np.flatnonzero(rows)  # once, not for each column
        return Candidates(split=self.split, **{name: getattr(self, name)[rows] for name in _COLUMN_NAMES})

    def distinct(self) -> tuple[IntArray, IntArray]:
        """One row of each distinct candidate [k], and which of these each candidate is [n]."""
        columns = np.stack([getattr(self, name).astype(np.int64) for name in _COLUMN_NAMES])
        _, first, which = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        return first, np.ravel(which)

    def columns_as_bytes(self) -> Iterator[bytes]:
        """Every column as bytes: equal in batches of the same candidates under any split."""
        return (getattr(self, name).tobytes() for name in _COLUMN_NAMES)

    def codes(self, choice: Choice, row: int | slice = slice(None)) -> Any:
        """Column of a choice, [n], or one row of it: where offloaded states and layers lie counts only where there are
        any.
        """
        codes = getattr(self, choice.column)[row]
        return codes & (self.offloads_states | self.offloads_layers)[row] if choice.name == "offload_to" else codes

    def shared(self) -> dict[str, Any]:
        """Choice → value, of those that all candidates share through the split."""
        return {choice.name: getattr(self.split, choice.split) for choice in SPLIT}

    def choices(self, row: int) -> dict[str, Any]:
        """Choice → value of one candidate, without those that the question settles."""
        return {**self.shared(), **{one.name: one.decode(self.codes(one, row)) for one in COLUMNS}}


def joined(batches: Sequence[Candidates]) -> Candidates:
    """The candidates of several batches with one split."""
    if len(batches) == 1:
        return batches[0]
    columns = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in _COLUMN_NAMES}
    return Candidates(split=batches[0].split, **columns)
