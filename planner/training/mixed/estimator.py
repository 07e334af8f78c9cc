"""Time and memory of one plan on several types of devices.

There is no second cost model: a stage costs what :class:`~meshplan.planner.training.estimator.step.TrainingModel` says
of it on its pool's machine, under its pool's constants, as if the whole pipeline were of such stages, and
:func:`~meshplan.planner.training.estimator.step.assembled` puts stages together as it does on one type. On equal pools
this *is* the uniform price; a property test holds it.

- A stage with ranks on several pools takes as long as the slowest of them, and its data-parallel collectives run over
  the slowest of the networks that join its ranks.
- Between stages each device sends its part of a micro-batch, the larger of the parts on both sides where their
  degrees differ; between pools over the network that joins them.
- Fixed overhead of a step: the largest of the pools in use.

Assumes: what a stage sends is dealt out to as many devices as the smaller of the two stages has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.admission import Admission, strictest
from meshplan.planner.training.estimator.assembly import StageFigures, TrainingEstimate, assembled
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, StageClass, layer_kinds
from meshplan.planner.training.estimator.exchange.boundaries import (
    message_bytes,
    tied_gradient_bytes,
    waits_of_a_round,
)
from meshplan.planner.training.estimator.exchange.collectives import UNHIDDEN_SHARE, CommunicationModel
from meshplan.planner.training.estimator.memory import StageMemory
from meshplan.planner.training.estimator.operators.products import activation_bytes
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share
from meshplan.planner.training.problem.choice import RECOMPUTE_MODES
from meshplan.planner.training.problem.choices import COLUMNS
from meshplan.planner.training.problem.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePrice:
    """What one pool's part of a stage takes.

    Args:
        stage: index of the stage.
        share: which ranks.
        seconds: of one micro-batch, forward and backward.
        memory: of one rank, arrays of one element.
        limit_bytes: device memory that a plan may use.
    """

    stage: int
    share: Share
    seconds: float
    memory: StageMemory
    limit_bytes: float

    @property
    def typical_bytes(self) -> float:
        """Expected peak."""
        return float(self.memory.typical_bytes[0])

    @property
    def safe_bytes(self) -> float:
        """Bound that no measured run exceeded."""
        return float(self.memory.safe_bytes[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPriced:
    """A priced plan.

    Args:
        config: the choices.
        estimate: of the step, arrays of one element.
        shares: of every stage, in pipeline order.
    """

    config: MixedConfig
    estimate: TrainingEstimate
    shares: tuple[SharePrice, ...]

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return float(self.estimate.step_s[0])

    @property
    def worst(self) -> SharePrice:
        """The ranks that come closest to their own device's limit by the safe bound, or exceed it most."""
        return max(self.shares, key=lambda one: one.safe_bytes / one.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its own device's memory by the safe bound."""
        return all(one.safe_bytes <= one.limit_bytes for one in self.shares)

    @property
    def admission(self) -> Admission:
        """The strictest figure by which every rank stays within its own device's memory."""
        return strictest((one.safe_bytes, one.typical_bytes, one.limit_bytes) for one in self.shares)


def price_mixed(problem: MixedProblem, config: MixedConfig) -> MixedPriced:
    """Time and memory of one plan; see the module docstring."""
    shares: list[SharePrice] = []
    stages: list[StageFigures] = []
    for index, stage in enumerate(config.stages):
        figures = []
        for share in stage.shares:
            model = _model(problem, config, index, share)
            own = model.candidates.split.classes[0]
            figures.append(model.figures([own])[0])
            shares.append(
                SharePrice(
                    stage=index,
                    share=share,
                    seconds=float(figures[-1].seconds[0]),
                    memory=model.memory.stage(own),
                    limit_bytes=problem.pools[share.pool].limits.memory_bytes,
                )
            )
        stages.append(_slowest(figures))
    overheads = [problem.pools[pool].calibration.time.step_overhead_s for pool in config.pools]
    estimate = assembled(
        stages,
        schedule=config.schedule,
        virtual_pipeline_stages=1,
        num_microbatches=np.array([config.num_microbatches]),
        messages_s=np.array([messages_s(problem, config)]),
        overhead_s=np.asarray(max(float(np.asarray(one)) for one in overheads)),
        memory=tuple(one.memory for one in shares),
    )
    return MixedPriced(config=config, estimate=estimate, shares=tuple(shares))


def stage_figures(problem: MixedProblem, config: MixedConfig, index: int) -> StageFigures:
    """What one stage takes, by parts of a step."""
    models = [_model(problem, config, index, share) for share in config.stages[index].shares]
    return _slowest([model.figures(model.candidates.split.classes)[0] for model in models])


def stage_model(
    problem: MixedProblem,
    pool: int,
    stage: StageClass,
    *,
    num_stages: int,
    num_microbatches: int | IntArray,
    machine: Machine | None = None,
    **columns: Any,
) -> TrainingModel:
    """The model of a batch of stages on one pool, each as if the whole pipeline were of such stages.

    Args:
        problem: the question.
        pool: index of the pool.
        stage: layers, ends and place of the stage.
        num_stages: of the pipeline.
        num_microbatches: of a step, one number or [n].
        machine: instead of the pool's.
        columns: values of :class:`Candidates`, one number or [n]; the others are plain.
    """
    own = problem.pools[pool]
    kinds, _ = layer_kinds(own.shape)
    split = PipelineSplit(
        pipeline_parallel=num_stages,
        virtual_pipeline_stages=1,
        layers_per_chunk=(1,) * num_stages,
        schedule="1f1b" if num_stages > 1 else "none",
        kinds=kinds,
        classes=(stage,),
        class_of_stage=(0,) * num_stages,
    )
    given = {"num_microbatches": num_microbatches, **columns}
    length = max((len(value) for value in given.values() if np.ndim(value)), default=1)
    filled = {one.column: one.default if one.default is not None else 1 for one in COLUMNS}
    arrays = {}
    for choice in COLUMNS:
        value = given.get(choice.column, filled[choice.column])
        code = value if choice.column in given else choice.encode(value)
        arrays[choice.column] = np.broadcast_to(np.asarray(code, dtype=choice.dtype), (length,))
    return TrainingModel(
        shape=own.shape,
        machine=machine or own.machine,
        workload=own.workload,
        candidates=Candidates(split=split, **arrays),
        calibration=own.calibration,
    )


def _model(problem: MixedProblem, config: MixedConfig, index: int, share: Share) -> TrainingModel:
    """The model of one pool's part of a stage."""
    stage = config.stages[index]
    kinds, _ = layer_kinds(problem.any.shape)
    # Layers of several kinds are dealt in the order of the model, half layers only in models of one kind.
    layers = _layers_by_kind(problem, config, index) if len(kinds) > 1 else (stage.num_layers,)
    own = StageClass(
        layers=layers,  # type: ignore[arg-type]  # fractions of layers: runs that were cut inside one
        has_embedding=index == 0,
        has_head=index == len(config.stages) - 1,
        first_index=index,
        count=1,
        in_flight=stage.in_flight,
    )
    return stage_model(
        problem,
        share.pool,
        own,
        num_stages=len(config.stages),
        num_microbatches=config.num_microbatches,
        machine=_joined(problem, share.pool, tuple(other.pool for other in stage.shares)),
        tensor_parallel=stage.tensor_parallel,
        data_parallel=stage.data_parallel,
        data_parallel_shard=stage.data_parallel if config.zero_stage else 1,
        micro_batch_size=share.micro_batch_size,
        zero_stage=config.zero_stage,
        recompute=RECOMPUTE_MODES.index(stage.activation_recompute),
        sequence_parallel=config.sequence_parallel and stage.tensor_parallel > 1,
    )


def _layers_by_kind(problem: MixedProblem, config: MixedConfig, index: int) -> tuple[int, ...]:
    """Layers of each kind on a stage."""
    kinds, kind_of = layer_kinds(problem.any.shape)
    first = sum(int(stage.num_layers) for stage in config.stages[:index])
    inside = kind_of[first : first + int(config.stages[index].num_layers)]
    return tuple(inside.count(kind) for kind in range(len(kinds)))


def _joined(problem: MixedProblem, pool: int, others: Sequence[int]) -> Machine:
    """A pool's machine whose network is no faster than the ways to the pools that its ranks work with."""
    machine, links = problem.pools[pool].machine, problem.links
    beyond = [other for other in others if other != pool]
    if not beyond:
        return machine
    own = [machine.scale_out_bytes_per_s] if machine.scale_out_bytes_per_s else []
    rate = min(own + [float(links.bytes_per_s[pool, other]) for other in beyond])
    latency = max([machine.scale_out_latency_s] + [float(links.latency_s[pool, other]) for other in beyond])
    # The ring leaves every node of the pool, however few replicas are on it.
    return replace(machine, scale_out_bytes_per_s=rate, scale_out_latency_s=latency)


def _slowest(figures: Sequence[StageFigures]) -> StageFigures:
    """A stage that waits for the slowest of its ranks, in every part of a step."""
    if len(figures) == 1:
        return figures[0]
    last = max(figures, key=lambda one: float(one.seconds[0]))
    return replace(
        last,
        exposed_s=np.maximum.reduce([one.exposed_s for one in figures]),
        reduce_s=np.maximum.reduce([one.reduce_s for one in figures]),
        optimizer_s=np.maximum.reduce([one.optimizer_s for one in figures]),
    )


def messages_s(problem: MixedProblem, config: MixedConfig) -> float:
    """Exposed stage-to-stage messages, s: filled once, then each micro-batch waits for the slowest stage's exchanges.

    The same formula as on equal links (:mod:`~meshplan.planner.cluster.network.network_model`), with the round trip
    over each boundary by itself; besides, the gradient of a tied embedding between the two ends.
    """
    stages = config.stages
    if len(stages) == 1:
        return 0.0
    inside, outside = _round_trips(problem, config)
    crosses = _crossings(problem, config)
    hops = np.where(crosses, outside[:, None], inside[:, None])
    none = np.zeros_like(hops[:1])
    beside = np.concatenate([none, hops]) + np.concatenate([hops, none])
    share = UNHIDDEN_SHARE if SCHEDULES[config.schedule].hides_neighbour_messages else 1.0
    waits = share * waits_of_a_round(problem.any.calibration.recipe) * (config.num_microbatches - 1)
    exposed = float((hops.sum(axis=0) + waits * beside.max(axis=0) / 2.0).max())
    return exposed + _tied_gradient_s(problem, config)


def _tied_gradient_s(problem: MixedProblem, config: MixedConfig) -> float:
    """All-reduce of a tied embedding's gradient between first and last stage: half of it there and back."""
    first, last = config.stages[0], config.stages[-1]
    whole = tied_gradient_bytes(problem.any.shape, problem.any.workload, problem.any.calibration.recipe)
    if not whole:
        return 0.0
    half = whole / min(first.tensor_parallel, last.tensor_parallel) / 2.0
    ways = [hop_s(problem, one.pool, other.pool, half) for one in first.shares for other in last.shares]
    is_near = len(config.pools) == 1 and config.world_size <= problem.pools[config.pools[0]].machine.domain_size
    return max(near if is_near else far for near, far in ways)


def _round_trips(problem: MixedProblem, config: MixedConfig) -> tuple[FloatArray, FloatArray]:
    """Round trip over each stage boundary inside a node, and over the network, [stages − 1] each."""
    inside, outside = [], []
    for first, second in zip(config.stages, config.stages[1:], strict=False):
        ends = {(one.pool, other.pool) for one in first.shares for other in second.shares}
        split = boundary_bytes(problem, first.sequences, min(first.num_devices, second.num_devices))
        recipe, workload = problem.any.calibration.recipe, problem.any.workload
        sent = float(message_bytes(split, second.tensor_parallel, recipe, workload))
        near, far = zip(*(hop_s(problem, one, other, sent) for one, other in ends), strict=True)
        inside.append(max(near))
        outside.append(max(far))
    return np.array(inside), np.array(outside)


def boundary_bytes(problem: MixedProblem, sequences: int, devices: int) -> float:
    """Bytes of a micro-batch that one of ``devices`` sends over a stage boundary, one way."""
    shape, workload = problem.any.shape, problem.any.workload
    return activation_bytes(workload) * sequences * workload.sequence_length * shape.hidden_size / devices


def hop_s(problem: MixedProblem, first: int, second: int, sent_bytes: float) -> tuple[float, float]:
    """Round trip between devices of two pools (or of one): inside a node, and over the network, s."""
    inside, efficiencies = [], []
    for pool in (first, second):
        own = problem.pools[pool]
        links = CommunicationModel(machine=own.machine, calibration=own.calibration)
        inside.append(sent_bytes / float(links.pair_bytes_per_s) + own.machine.scale_up_latency_s)
        efficiencies.append(float(np.asarray(links.network_efficiency)))
    machine = problem.pools[first].machine
    rate, latency = machine.scale_out_bytes_per_s, machine.scale_out_latency_s
    if first != second:
        rate, latency = float(problem.links.bytes_per_s[first, second]), float(problem.links.latency_s[first, second])
    outside = sent_bytes / min(efficiencies) / rate + latency if rate else float("inf")
    return 2.0 * max(inside), 2.0 * outside


def _crossings(problem: MixedProblem, config: MixedConfig) -> FloatArray:
    """Whether each pipeline crosses nodes at each boundary, [stages − 1, pipelines].

    Stages of a pool take its devices in order. Between pools, and beside stages on several, every pipeline crosses.
    """
    width = max(stage.num_devices for stage in config.stages)
    used = [0] * len(problem.pools)
    nodes: list[FloatArray | None] = []
    for stage in config.stages:
        pool = stage.shares[0].pool
        domain = problem.pools[pool].machine.domain_size
        places = used[pool] + np.arange(width) * stage.num_devices // width
        nodes.append(places // domain if len(stage.shares) == 1 else None)
        for share in stage.shares:
            used[share.pool] += share.data_parallel * stage.tensor_parallel
    rows = []
    for index, (before, after) in enumerate(itertools.pairwise(nodes)):
        first, second = config.stages[index], config.stages[index + 1]
        if before is None or after is None or first.shares[0].pool != second.shares[0].pool:
            rows.append(np.ones(width, dtype=bool))
        else:
            # Beyond a node, all boundaries cross.
            whole = first.num_devices >= problem.pools[first.shares[0].pool].machine.domain_size
            rows.append((before != after) | whole)
    return np.array(rows)
