"""Every legal training plan of a small question, written as plain loops that share nothing with the search.

Only the definitions are taken from the code under test: the rules say what is legal, the estimator what it costs. Every
degree, every size of sharding group, every split of the layers into chunks and every number of recomputed layers is
tried, and every way to split sequences where the question says so.

Selective recompute is left out: with fused attention it is none to the estimator.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.training.estimator.candidates import Candidates, split_layers
from meshplan.planner.training.estimator.energy import energy_j, step_work
from meshplan.planner.training.estimator.step import TrainingModel
from meshplan.planner.training.problem.choices import COLUMNS
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem

# What each number of chunks may run under, without schedules that are pinned or asked for.
SCHEDULES = {1: ("1f1b", "zb-1p", "zb-2p"), 2: ("interleaved", "zb-v")}
MODES = ("none", "full")
# (layers, chunks) → layers of each chunk, of every split that counts.
Splits = Callable[[int, int], Iterable[tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costed:
    """A legal plan and what the estimator says of it.

    Args:
        config: its choices.
        step_s: step time.
        safe_bytes: safe memory of its worst rank.
        host_bytes: weights, optimizer states and offloaded states of its worst rank.
        energy_j: of a step.
    """

    config: TrainingConfig
    step_s: float
    safe_bytes: float
    host_bytes: float
    energy_j: float


def _dividing(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def layer_splits(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """All splits into chunks of a layer or more; the first and the last may have none.

    >>> list(layer_splits(2, 3))
    [(0, 1, 1), (0, 2, 0), (1, 1, 0)]
    """
    if chunks == 1:
        yield (layers,)
        return
    for cuts in itertools.combinations_with_replacement(range(layers + 1), chunks - 1):
        sizes = tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))
        if all(sizes[1:-1]):
            yield sizes


def is_weighted(split: tuple[int, ...]) -> bool:
    """Whether a framework of small weights (TorchTitan) deals these layers, on one stage or more.

    With the ends counted as so many layers the chunks differ by one at most, longer ones first, and whole chunks of the
    longest length hold all.

    >>> is_weighted((15, 16, 16, 15)), is_weighted((16, 16, 16, 13)), is_weighted((4, 3, 4))
    (True, True, False)
    """
    if len(split) == 1:
        return True
    for first, last in itertools.product((0, 1), (0, 1, 2, 3)):
        loads = [split[0] + first, *split[1:-1], split[-1] + last]
        longest = max(loads)
        is_dealt = loads == sorted(loads, reverse=True) and longest - min(loads) <= 1
        if is_dealt and min(loads) >= max(1, first, last) and math.ceil(sum(loads) / longest) == len(loads):
            return True
    return False


def pipelines(
    problem: TrainingProblem, splits: Splits = layer_splits
) -> Iterator[tuple[int, int, str, tuple[int, ...]]]:
    """Stages, chunks of a stage, schedule, layers of each chunk."""
    layers, rules = problem.shape.num_hidden_layers, problem.rules
    for p in range(1, min(layers, problem.limits.max_devices) + 1):
        for v in range(1, layers // p + 1 if p > 1 else 2):
            names = ("none",) if p == 1 else SCHEDULES.get(v, ("interleaved",))
            if problem.limits.unvalidated_schedules and p > 1 and v == 2:
                names = (*names, "v-half", "v-min", "dualpipe-v")
            for split in splits(layers, p * v):
                if rules.layer_splits is not None and not is_weighted(split):
                    continue
                for schedule in names:
                    if schedule in rules.pipeline_schedules:
                        yield p, v, schedule, split


def _degrees(
    problem: TrainingProblem, p: int, v: int, schedule: str, split: tuple[int, ...]
) -> Iterator[TrainingConfig]:
    """Legal or not: every plan without recompute of blocks on one pipeline."""
    shape, workload, most = problem.shape, problem.workload, problem.limits.max_devices
    batch, sequence = workload.global_batch_size, workload.sequence_length
    experts = [1] if shape.moe is None else _dividing(shape.moe.num_experts)
    widths = [1] if shape.moe is None else _dividing(shape.moe.expert_intermediate_size)
    degrees = range(1, most // p + 1)
    for t, c, d in itertools.product(degrees, degrees, degrees):
        if p * t * c * d > most or batch % d or sequence % c or shape.num_attention_heads % t:
            continue
        for e, w, m, mode, (zero, shard), together in itertools.product(
            experts, widths, _dividing(batch // d), MODES, _states(d), {False, t > 1}
        ):
            if (t * c * d) % (e * w):
                continue
            yield TrainingConfig(
                tensor_parallel=t,
                pipeline_parallel=p,
                virtual_pipeline_stages=v,
                context_parallel=c,
                data_parallel=d,
                data_parallel_shard=shard,
                expert_parallel=e,
                expert_tensor_parallel=w,
                sequence_parallel=together,
                zero_stage=zero,
                activation_recompute=mode,
                pipeline_schedule=schedule,
                layers_per_chunk=split,
                micro_batch_size=m,
                num_microbatches=batch // d // m,
                global_batch_size=batch,
                sequence_length=sequence,
                precision=workload.precision,
            )


def _styled(problem: TrainingProblem, config: TrainingConfig) -> Iterator[TrainingConfig]:
    """The plan with every way to split sequences, if it splits any and the question leaves the way open."""
    yield config
    c = config.context_parallel
    if c == 1 or "context_parallel_style" not in problem.search_over:
        return
    for style in ("all-gather", "all-to-all"):
        yield replace(config, context_parallel_style=style)
    for heads in _dividing(c)[1:-1]:
        yield replace(config, context_parallel_style="all-to-all+ring", context_parallel_heads=heads)


def _states(d: int) -> list[tuple[int, int]]:
    """ZeRO stage and replicas that share one copy."""
    return [(0, 1), *((zero, shard) for zero in (1, 2, 3) for shard in _dividing(d))]


def _is_pinned(problem: TrainingProblem, config: TrainingConfig) -> bool:
    return all(getattr(config, name) == value for name, value in problem.fixed.items())


def every_legal_config(problem: TrainingProblem, splits: Splits = layer_splits) -> Iterator[TrainingConfig]:
    """All configurations that the rules allow within ``max_devices``, pins respected, recompute of blocks included."""
    legal: dict[tuple[int, int, str], list[TrainingConfig]] = {}
    modes = problem.rules.recompute_modes
    for p, v, schedule, split in pipelines(problem, splits):
        if (p, v, schedule) not in legal:  # no rule asks for the layers of a full chunk
            full = (1,) * (p * v)
            plain = (one for each in _degrees(problem, p, v, schedule, full) for one in _styled(problem, each))
            allowed = (config for config in plain if config.activation_recompute in modes)
            legal[p, v, schedule] = [one for one in allowed if not problem.rules.broken(problem.shape, one)]
        for one in legal[p, v, schedule]:
            config = replace(one, layers_per_chunk=split)
            blocks = max(split) if config.activation_recompute == "none" and "block" in modes else 1
            blocks += blocks > 1 and problem.shape.num_nextn_predict_layers > 0  # full recompute repeats these, too
            for count in range(blocks):
                block = {"activation_recompute": "block", "recompute_num_layers": count} if count else {}
                mixed = replace(config, **block)
                if _is_pinned(problem, mixed):
                    yield mixed


def price_all(problem: TrainingProblem) -> list[Costed]:
    """Every legal configuration with what it costs; limits but ``max_devices`` do not matter."""
    groups: dict[tuple[int, int, str, tuple[int, ...]], list[TrainingConfig]] = defaultdict(list)
    for config in every_legal_config(problem):
        key = (config.pipeline_parallel, config.virtual_pipeline_stages, config.pipeline_schedule)
        groups[*key, config.layers_per_chunk].append(config)
    found = []
    for (p, v, schedule, layers_per_chunk), configs in groups.items():
        split = split_layers(
            problem.shape,
            pipeline_parallel=p,
            virtual_pipeline_stages=v,
            layers_per_chunk=layers_per_chunk,
            schedule=schedule,
        )
        columns = {
            one.column: np.array([one.encode(getattr(config, one.name)) for config in configs], dtype=one.dtype)
            for one in COLUMNS
        }
        batch = Candidates(split=split, **columns)
        model = TrainingModel(
            shape=problem.shape,
            machine=problem.machine,
            workload=problem.workload,
            candidates=batch,
            calibration=problem.calibration,
        )
        estimate = model.estimate()
        joules = energy_j(problem.machine, step_work(problem, model), estimate.step_s, batch.world_size)
        on_host = np.maximum.reduce(
            [stage.components["weights"] + stage.components["optimizer"] for stage in estimate.stages]
        )
        costs = {"step_s": estimate.step_s, "safe_bytes": estimate.safe_bytes, "host_bytes": on_host}
        rows = zip(*(column.tolist() for column in (*costs.values(), joules)), strict=True)
        names = (*costs, "energy_j")
        found += [
            Costed(config=one, **dict(zip(names, row, strict=True))) for one, row in zip(configs, rows, strict=True)
        ]
    return found


def objective_of(problem: TrainingProblem, config: TrainingConfig, step_s: float, energy_j: float = math.nan) -> float:
    """What is minimised, as one number."""
    n, machine = config.world_size, problem.machine
    if problem.objective is TrainingObjective.THROUGHPUT:
        return step_s
    if problem.objective is TrainingObjective.NUM_DEVICES:
        return n + step_s / (1.0 + step_s)
    if problem.objective is TrainingObjective.ENERGY:
        return energy_j
    return step_s * n * (machine.usd_per_hour_per_device or 1.0) / 3600.0 * (problem.num_steps or 1.0)


def is_within(problem: TrainingProblem, costed: Costed) -> bool:
    """Whether a plan keeps every limit."""
    limits, n = problem.limits, costed.config.world_size
    usd_per_hour = (problem.machine.usd_per_hour_per_device or 0.0) * n
    usd_per_run = usd_per_hour / 3600.0 * costed.step_s * (problem.num_steps or 0.0)
    pairs = (
        (costed.safe_bytes, limits.memory_bytes),
        (costed.step_s, limits.max_step_s),
        (usd_per_hour, limits.max_usd_per_hour),
        (usd_per_run, limits.max_usd_per_run),
        (costed.host_bytes * min(problem.machine.devices_per_host, n), limits.host_memory_bytes),
    )
    return n >= limits.min_devices and all(limit is None or value <= limit for value, limit in pairs)


def brute_force(problem: TrainingProblem, everything: list[Costed]) -> list[tuple[float, TrainingConfig]]:
    """Every feasible configuration with its objective, best first."""
    found = [
        (objective_of(problem, costed.config, costed.step_s, costed.energy_j), costed.config)
        for costed in everything
        if is_within(problem, costed)
    ]
    return sorted(found, key=lambda item: item[0])
