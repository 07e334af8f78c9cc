"""What one stage may be on each pool, and what it takes by the number of its layers.

For a micro-batch of S sequences over all replicas a stage on a pool is an *option*: tensor parallelism t, sequences per
replica b (so that S/b replicas work side by side) and recompute. By the estimator, exactly:

    time of a stage   a·l + e         l layers; e what the embedding or the LM head adds
    safe memory       c₀ + c₁·l + f·(g₀ + g₁·l)      f micro-batches in flight

so that a few calls of it tell every stage of every pipeline; tests hold both to single prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import StageClass
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.mixed.estimator import stage_model
from meshplan.planner.training.mixed.stages import MixedProblem
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

# Most sequences of one replica in a micro-batch that are looked at, and most devices of a matrix product.
MOST_SEQUENCES, MOST_TENSOR_PARALLEL = 16, 64
# Places of a stage: (embedding, LM head).
ENDS = ((False, False), (True, False), (False, True), (True, True))
MIDDLE, FIRST, LAST, WHOLE = range(4)
Modelled = tuple[TrainingModel, StageClass]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """Options of one pool. Arrays [n].

    Args:
        sequences: S, of a micro-batch over all replicas.
        num_microbatches: of a step.
        tensor_parallel: t.
        micro_batch_size: b.
        data_parallel: S/b.
        recompute: index into RECOMPUTE_MODES.
        most_stages: stages that the pool's devices make; those of one node, where no network joins its nodes.
        layer_s: a.
        ends_s: e by place, [4, n].
        ending_s: least that a stage of l layers or more takes after its last micro-batch, [n, L]: exposed data-parallel
            communication and optimizer.
        memory: c₀, c₁, g₀, g₁ by place, [4 places, 4, n].
        limit_bytes: device memory that a plan may use.
    """

    sequences: IntArray
    num_microbatches: IntArray
    tensor_parallel: IntArray
    micro_batch_size: IntArray
    data_parallel: IntArray
    recompute: IntArray
    most_stages: IntArray
    layer_s: FloatArray
    ends_s: FloatArray
    ending_s: FloatArray
    memory: FloatArray
    limit_bytes: float

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def alike(self) -> IntArray:
        """A number that options of one S share which differ in recompute alone, [n]."""
        return self.tensor_parallel * (MOST_SEQUENCES + 1) + self.micro_batch_size

    def recomputes(self, row: int) -> IntArray:
        """Options that differ from one in recompute alone, itself among them, the least recompute first."""
        same = (self.alike == self.alike[row]) & (self.sequences == self.sequences[row])
        return np.flatnonzero(same)

    @property
    def devices(self) -> IntArray:
        """Devices of one stage, [n]."""
        return self.tensor_parallel * self.data_parallel

    def most_layers(self, place: int, in_flight: FloatArray | float, rows: IntArray | slice) -> FloatArray:
        """Most layers of a stage that fit the memory with so many micro-batches in flight, [rows]."""
        constant, layer, kept, kept_layer = self.memory[place][:, rows]
        left = self.limit_bytes - constant - in_flight * kept
        return np.maximum(np.floor(left / (layer + in_flight * kept_layer)), 0.0)


def pool_options(problem: MixedProblem, pool: int) -> PoolOptions | None:
    """Every option of a pool; None where it has none."""
    own = problem.pools[pool]
    rows = list(_choices(problem, own))
    if not rows:
        return None
    sequences, tensor, micro, recompute = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    data = sequences // micro
    batch = own.workload.global_batch_size
    rounds = batch // sequences
    zero = zero_stage(problem)

    def model(place: int, layers: int, index: int) -> Modelled:
        embedding, head = ENDS[place]
        stage = StageClass(layers=(layers,), has_embedding=embedding, has_head=head, first_index=index, count=1)
        made = stage_model(
            problem,
            pool,
            stage,
            num_stages=2,
            num_microbatches=rounds,
            tensor_parallel=tensor,
            data_parallel=data,
            data_parallel_shard=data if zero else np.ones_like(data),
            micro_batch_size=micro,
            zero_stage=np.full_like(data, zero),
            recompute=recompute,
            sequence_parallel=(tensor > 1) & own.rules.sequence_parallel,
        )
        return made, stage

    def seconds(place: int, layers: int) -> FloatArray:
        made, stage = model(place, layers, 1)
        return made.stages_s([stage])[0]

    middle, stage = model(MIDDLE, 1, 1)
    figures = middle.figures([stage])[0]
    zeros = np.zeros(len(data))
    ends = np.stack([zeros, *(seconds(place, 1) - figures.seconds for place in (FIRST, LAST, WHOLE))])

    def safe(place: int, layers: int, index: int) -> FloatArray:
        made, of_stage = model(place, layers, index)
        return made.memory.stage(of_stage).safe_bytes

    return PoolOptions(
        sequences=sequences,
        num_microbatches=rounds,
        tensor_parallel=tensor,
        micro_batch_size=micro,
        data_parallel=data,
        recompute=recompute,
        most_stages=np.minimum(own.most_devices // (tensor * data), own.shape.num_hidden_layers),
        layer_s=figures.seconds,
        ends_s=ends,
        ending_s=_ending_s(problem, pool, model),
        memory=np.stack([_bilinear(place, safe, rounds) for place in range(len(ENDS))]),
        limit_bytes=own.limits.memory_bytes,
    )


def _ending_s(problem: MixedProblem, pool: int, model: Callable[[int, int, int], Modelled]) -> FloatArray:
    """Least time after the last micro-batch of a stage with l layers or more, [n, L] for l = 1 … L.

    With X(l) = x₀ + x₁·l the collectives of a step and t(l) = a·l + e a micro-batch, no less than
    max(X − w·t, u·X) is exposed: at most a window of w is hidden, and never more than 1 − u.
    """
    own = problem.pools[pool]
    constants, recipe = own.calibration.time, own.calibration.recipe
    window = float(np.asarray(constants.data_parallel_window)) if recipe.overlaps_data_parallel else 0.0
    layers = np.arange(1.0, own.shape.num_hidden_layers + 1.0)
    least = []
    for place in range(len(ENDS)):
        figures = []
        for count in (1, 2):
            made, stage = model(place, count, 1)
            bare = replace(
                made, calibration=replace(made.calibration, time=replace(constants, data_parallel_window=0.0))
            )
            figures.append(bare.figures([stage])[0])
        one, two = figures
        collectives = _line(one.exposed_s, two.exposed_s, layers)
        seconds = _line(one.seconds, two.seconds, layers)
        exposed = np.maximum(collectives - window * seconds, UNHIDDEN_SHARE * collectives)
        least.append(exposed + _line(one.optimizer_s, two.optimizer_s, layers))
    ending = np.maximum(np.minimum.reduce(least), 0.0)
    # The least of so many layers or more.
    return np.asarray(np.minimum.accumulate(ending[:, ::-1], axis=1)[:, ::-1])


def _line(one: FloatArray, two: FloatArray, layers: FloatArray) -> FloatArray:
    """A figure of l layers from those of one and of two, [n, L]."""
    first = np.broadcast_to(one, np.shape(two))[:, None]
    return np.asarray(first + (two - one)[:, None] * (layers - 1.0))


def _bilinear(place: int, safe: Callable[[int, int, int], FloatArray], rounds: IntArray) -> FloatArray:
    """c₀, c₁, g₀, g₁ of one place, [4, n], from memory at one and two layers and micro-batches in flight."""
    one, two = safe(place, 1, 1), safe(place, 2, 1)
    more, most = safe(place, 1, 0), safe(place, 2, 0)
    # With one micro-batch in a step there is never a second in flight.
    both = rounds > 1
    kept_layer = np.where(both, (most - more) - (two - one), 0.0)
    kept = np.where(both, (more - one) - kept_layer, 0.0)
    layer = (two - one) - kept_layer
    return np.stack([one - layer - kept - kept_layer, layer, kept, kept_layer])


def zero_stage(problem: MixedProblem) -> int:
    """Optimizer states are sharded over a stage's replicas unless the user pins ``zero_stage: 0``."""
    return int(problem.pins.get("zero_stage", 1))


def _choices(problem: MixedProblem, own: TrainingProblem) -> Iterator[tuple[int, int, int, int]]:
    """(S, t, b, recompute) of every legal option."""
    batch, machine, pins = own.workload.global_batch_size, own.machine, problem.pins
    modes = [mode for mode in ("none", "selective", "full") if mode in own.rules.recompute_modes]
    wanted = str(pins["activation_recompute"]) if "activation_recompute" in pins else None
    tensors = [2**power for power in range(MOST_TENSOR_PARALLEL.bit_length())]
    micros = [size for size in range(1, MOST_SEQUENCES + 1) if batch % size == 0]
    for tensor, micro, mode in product(tensors, micros, [wanted] if wanted else modes):
        if tensor > machine.domain_size or pins.get("tensor_parallel", tensor) != tensor:
            continue
        if pins.get("micro_batch_size", micro) != micro or mode not in modes:
            continue
        for data in _divisors(batch // micro):
            if tensor * data <= own.most_devices and _is_legal(own, tensor, data, micro, mode):
                yield micro * data, tensor, micro, RECOMPUTE_MODES.index(mode)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _is_legal(own: TrainingProblem, tensor: int, data: int, micro: int, mode: str) -> bool:
    """Whether the framework takes the degrees, as of a pipeline of one stage."""
    if own.shape.num_attention_heads % tensor:
        return False
    config = TrainingConfig(
        tensor_parallel=tensor,
        pipeline_parallel=1,
        virtual_pipeline_stages=1,
        context_parallel=1,
        data_parallel=data,
        data_parallel_shard=data,
        expert_parallel=1,
        expert_tensor_parallel=1,
        sequence_parallel=tensor > 1 and own.rules.sequence_parallel,
        zero_stage=1,
        activation_recompute=mode,
        pipeline_schedule="none",
        layers_per_chunk=(own.shape.num_hidden_layers,),
        micro_batch_size=micro,
        num_microbatches=own.workload.global_batch_size // (micro * data),
        global_batch_size=own.workload.global_batch_size,
        sequence_length=own.workload.sequence_length,
        precision=own.workload.precision,
    )
    return not own.rules.broken(own.shape, config)
