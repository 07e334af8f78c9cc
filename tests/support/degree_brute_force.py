"""The degree search written again as plain loops: every choice, every rule asked of one configuration at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.pipeline.layers import split_layers_evenly
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingObjective, TrainingProblem
from meshplan.planner.training.search.layer_partition import balance_arithmetic

Pricing = Callable[[TrainingProblem, TrainingConfig], Priced]

MODES = ("none", "selective", "full")


def _dividing(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def every_legal_config(problem: TrainingProblem) -> Iterator[TrainingConfig]:
    """All configurations that the rules allow within ``max_devices``, pins respected."""
    shape, most = problem.shape, problem.limits.max_devices
    degrees = range(1, most + 1)
    for t, p, c, d in itertools.product(degrees, degrees, degrees, degrees):
        if t * p * c * d > most or p > shape.num_hidden_layers:
            continue
        if problem.workload.global_batch_size % d or problem.workload.sequence_length % (2 * c if c > 1 else 1):
            continue
        for config in itertools.chain.from_iterable(
            with_styles(problem, plain) for plain in _of_degrees(problem, t, p, c, d)
        ):
            pinned = all(
                getattr(config, name) == value
                for name, value in problem.fixed.items()
                if not (name == "sequence_parallel" and t == 1)
            )
            if pinned and not problem.rules.broken(shape, config):
                yield config


def with_styles(problem: TrainingProblem, config: TrainingConfig) -> Iterator[TrainingConfig]:
    """A configuration with every way to split its sequences that the question asks for."""
    yield config
    if "context_parallel_style" not in problem.search_over or config.context_parallel == 1:
        return
    for style in ("all-gather", "all-to-all"):
        yield replace(config, context_parallel_style=style)
    for heads in _dividing(config.context_parallel)[1:-1]:
        if heads * config.tensor_parallel <= problem.machine.domain_size:
            yield replace(config, context_parallel_style="all-to-all+ring", context_parallel_heads=heads)


def _of_degrees(problem: TrainingProblem, t: int, p: int, c: int, d: int) -> Iterator[TrainingConfig]:
    shape, batch = problem.shape, problem.workload.global_batch_size
    experts = [1] if shape.moe is None else _dividing(shape.moe.num_experts)
    widths = [1] if shape.moe is None else _dividing(shape.moe.expert_intermediate_size)
    widths = [w for w in widths if w <= problem.machine.domain_size]
    for e, w, (v, schedule, deal), m, mode in itertools.product(
        experts, widths, _splits(problem, p), _dividing(batch // d), MODES
    ):
        if (t * c * d) % (e * w):
            continue
        if mode == "selective" and "activation_recompute" not in problem.fixed and _keeps_no_scores(problem):
            continue  # the same as none
        for zero, shard in _states(d, d if "data_parallel_shard" in problem.fixed else problem.machine.domain_size):
            yield TrainingConfig(
                tensor_parallel=t,
                pipeline_parallel=p,
                virtual_pipeline_stages=v,
                context_parallel=c,
                data_parallel=d,
                data_parallel_shard=shard,
                expert_parallel=e,
                expert_tensor_parallel=w,
                sequence_parallel=t > 1
                and bool(problem.fixed.get("sequence_parallel", problem.rules.sequence_parallel)),
                zero_stage=zero,
                activation_recompute=mode,
                pipeline_schedule=schedule,
                layers_per_chunk=deal,
                micro_batch_size=m,
                num_microbatches=batch // d // m,
                global_batch_size=batch,
                sequence_length=problem.workload.sequence_length,
                precision=problem.workload.precision,
            )


def _splits(problem: TrainingProblem, p: int) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Chunks a stage, schedule, layers of each chunk."""
    shape = problem.shape
    for v in _chunks(shape.num_hidden_layers, p):
        deals = [split_layers_evenly(shape.num_hidden_layers, p * v)]
        if v == 1 and p > 1:
            balanced = balance_arithmetic(shape, problem.workload.sequence_length, deals[0])
            deals += [] if balanced is None else [balanced]
        names = ["none"] if p == 1 else ["1f1b", "zb-1p", "zb-2p"] if v == 1 else ["interleaved"]
        names += ["zb-v"] if p > 1 and v == 2 else []
        if problem.limits.unvalidated_schedules and p > 1 and v == 2:
            names += ["v-half", "v-min", "dualpipe-v"]
        for schedule, deal in itertools.product(names, deals):
            if schedule in problem.rules.pipeline_schedules:
                yield v, schedule, deal


def _chunks(layers: int, p: int) -> list[int]:
    """Chunks a stage: one, or as many as deal all layers evenly (the two ends counted as layers if need be)."""
    if p == 1:
        return [1]
    even = [
        v for v in range(2, layers + 1) if p * v <= layers and (layers % (p * v) == 0 or (layers + 2) % (p * v) == 0)
    ]
    return [1, *even]


def _keeps_no_scores(problem: TrainingProblem) -> bool:
    recipe = problem.calibration.recipe
    return recipe.flash_attention and recipe.selective_kept_share == 1.0


def _states(d: int, most: int) -> list[tuple[int, int]]:
    """ZeRO stage and replicas that share one copy; a shard of one among several replicas is ZeRO 0."""
    shards = [s for s in _dividing(d) if (s > 1 or d == 1) and (s <= most or s == d)]
    return [(0, 1), *((zero, s) for zero in (1, 2, 3) for s in shards)]


def objective_of(problem: TrainingProblem, config: TrainingConfig, step_s: float) -> tuple[float, float]:
    """What is minimised, as a pair in lexicographic order."""
    n, machine = config.world_size, problem.machine
    if problem.objective is TrainingObjective.THROUGHPUT:
        return (step_s, 0.0)
    if problem.objective is TrainingObjective.NUM_DEVICES:
        return (float(n), step_s)
    if problem.objective is TrainingObjective.ENERGY:
        return (step_s * n * (machine.device.tdp_w or 1.0), 0.0)
    return (step_s * n * (machine.usd_per_hour_per_device or 1.0) / 3600.0 * (problem.num_steps or 1.0), 0.0)


def price_all(problem: TrainingProblem) -> list[tuple[TrainingConfig, Priced]]:
    """Every legal configuration without recompute of a block, priced.

    Neither objective nor limits (but ``max_devices``) matter here.
    """
    return [(config, price(problem, config)) for config in every_legal_config(problem)]


def brute_force(
    problem: TrainingProblem, everything: Sequence[tuple[TrainingConfig, Priced]], pricing: Pricing = price
) -> list[tuple[tuple[float, float], TrainingConfig]]:
    """Every feasible configuration with its objective, best first."""
    found = [
        (objective_of(problem, config, priced.step_s), config)
        for config, priced in [*everything, *_least_blocks(problem, everything, pricing)]
        if _within(problem, config, priced)
    ]
    return sorted(found, key=lambda item: item[0])


def blocks_of(
    problem: TrainingProblem, config: TrainingConfig, pricing: Pricing = price
) -> Iterator[tuple[TrainingConfig, Priced]]:
    """A configuration without recompute, with the first 1, 2, … layers of each chunk recomputed, but not all."""
    for layers in range(1, max(config.layers_per_chunk)):
        block = replace(config, activation_recompute="block", recompute_num_layers=layers)
        yield block, pricing(problem, block)


def _least_blocks(
    problem: TrainingProblem, everything: Sequence[tuple[TrainingConfig, Priced]], pricing: Pricing
) -> Iterator[tuple[TrainingConfig, Priced]]:
    """The smallest block that fits, of every configuration that does not fit without recompute."""
    memory = problem.limits.memory_bytes
    if "block" not in problem.rules.recompute_modes or "activation_recompute" in problem.fixed:
        return
    for config, priced in everything:
        if config.activation_recompute == "none" and priced.safe_bytes > memory:
            yield from itertools.islice(
                (pair for pair in blocks_of(problem, config, pricing) if pair[1].safe_bytes <= memory), 1
            )


def _within(problem: TrainingProblem, config: TrainingConfig, priced: Priced) -> bool:
    limits, n = problem.limits, config.world_size
    usd_per_hour = (problem.machine.usd_per_hour_per_device or 0.0) * n
    usd_per_run = usd_per_hour / 3600.0 * priced.step_s * (problem.num_steps or 0.0)
    states = max(stage.components["weights"] + stage.components["optimizer"] for stage in priced.stages)
    on_host = states * min(problem.machine.devices_per_host, n)
    pairs = (
        (priced.safe_bytes, limits.memory_bytes),
        (priced.step_s, limits.max_step_s),
        (usd_per_hour, limits.max_usd_per_hour),
        (usd_per_run, limits.max_usd_per_run),
        (on_host, limits.host_memory_bytes),
    )
    return all(limit is None or value <= limit for value, limit in pairs)
