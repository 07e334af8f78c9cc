"""Who holds which part of a job's states.

A layer's parameters are a unit square. Tensor parallelism cuts its columns, sharding over data parallelism its rows;
expert parallelism cuts the rows of the experts' square, expert tensor parallelism its columns. Every rank then holds
one rectangle of weights and one of optimizer states of each layer of its chunks:

    weights    rows  [0, 1), with ZeRO 3 the shard                  columns [t/T, (t+1)/T)
    optimizer  rows  the shard [d/D, (d+1)/D), without ZeRO all     columns [t/T, (t+1)/T)
    experts    rows  [e/E, (e+1)/E), and its shard within           columns [x/X, (x+1)/X)

The embedding comes before the first layer and the LM head after the last; their rows are the vocabulary's, which tensor
parallelism cuts, so both are counted by their columns here. Norms and routers are counted with the layer's other
parameters, although every rank holds them whole: below 0.1 % of a model.

Source       Megatron-Core and FSDP2 shard in this way up to the order of rows: a shard of Megatron's distributed
             optimizer is a range of a flat buffer instead. How many bytes move changes little by it, which ones does.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.training.problem.problem import TrainingConfig
from meshplan.planner.training.problem.schedules import SCHEDULES

ZERO_OPTIMIZER, ZERO_PARAMETERS = 1, 3
EMBEDDING = -1
Span = tuple[float, float]
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Part of a unit square: rows and columns, each from … to."""

    rows: Span
    columns: Span

    @property
    def area(self) -> float:
        """Share of the square."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def overlap(self, other: Rectangle) -> float:
        """Share of the square that both cover."""
        rows = min(self.rows[1], other.rows[1]) - max(self.rows[0], other.rows[0])
        columns = min(self.columns[1], other.columns[1]) - max(self.columns[0], other.columns[0])
        return max(0.0, rows) * max(0.0, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds of each of its layers.

    Args:
        layers: their numbers; :data:`EMBEDDING` and, one behind the last layer, the LM head.
        weights, states: rectangle of the dense part.
        expert_weights, expert_states: of the routed experts.
    """

    layers: frozenset[int]
    weights: Rectangle
    states: Rectangle
    expert_weights: Rectangle
    expert_states: Rectangle


def part(index: int, count: int, within: Span = (0.0, 1.0)) -> Span:
    """The ``index``-th of ``count`` equal parts of a span."""
    low, high = within
    return low + (high - low) * index / count, low + (high - low) * (index + 1) / count


def holdings(config: TrainingConfig) -> list[Holding]:
    """What each rank holds; ranks count tensor parallelism fastest, then context, data, pipeline."""
    layers = [_layers(config, stage) for stage in range(config.pipeline_parallel)]
    in_stage = config.world_size // config.pipeline_parallel
    return [_holding(config, rank, layers[rank // in_stage]) for rank in range(config.world_size)]


def _holding(config: TrainingConfig, rank: int, layers: frozenset[int]) -> Holding:
    t, left = rank % config.tensor_parallel, rank // config.tensor_parallel
    c, left = left % config.context_parallel, left // config.context_parallel
    d = left % config.data_parallel
    columns = part(t, config.tensor_parallel)
    # States are sharded over the context-parallel ranks, too, within groups of data_parallel_shard.
    shards = config.data_parallel_shard * config.context_parallel
    shard = (d % config.data_parallel_shard) * config.context_parallel + c
    rows: Span = (0.0, 1.0)
    own = part(shard, shards)
    in_stage = rank % (config.world_size // config.pipeline_parallel)
    x, left = in_stage % config.expert_tensor_parallel, in_stage // config.expert_tensor_parallel
    e, replica = left % config.expert_parallel, left // config.expert_parallel
    expert_rows = part(e, config.expert_parallel)
    expert_columns = part(x, config.expert_tensor_parallel)
    groups = config.data_parallel // config.data_parallel_shard
    expert_shards = max(1, config.expert_data_parallel // groups)
    expert_own = part(replica % expert_shards, expert_shards, expert_rows)
    sharded, gathered = config.zero_stage >= ZERO_OPTIMIZER, config.zero_stage < ZERO_PARAMETERS
    return Holding(
        layers=layers,
        weights=Rectangle(rows if gathered else own, columns),
        states=Rectangle(own if sharded else rows, columns),
        expert_weights=Rectangle(expert_rows if gathered else expert_own, expert_columns),
        expert_states=Rectangle(expert_own if sharded else expert_rows, expert_columns),
    )


def _layers(config: TrainingConfig, stage: int) -> frozenset[int]:
    """Layers of a stage's chunks, with the embedding on the first chunk and the LM head on the last."""
    stages, chunks = config.pipeline_parallel, len(config.layers_per_chunk)
    held: set[int] = set()
    first = 0
    for chunk, count in enumerate(config.layers_per_chunk):
        turn, place = divmod(chunk, stages)
        goes_back = SCHEDULES[config.pipeline_schedule].is_zigzag and turn % 2 == 1
        if (stages - 1 - place if goes_back else place) == stage:
            held |= set(range(first, first + count))
            held |= {EMBEDDING} if chunk == 0 else set()
            held |= {sum(config.layers_per_chunk)} if chunk == chunks - 1 else set()
        first += count
    return frozenset(held)
