"""From a priced plan on several pools to the plan that is stored, shown and launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, own_version, plain
from meshplan.planner.training.admission import peak_interval
from meshplan.planner.training.estimator.flops import model_flops_per_step
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.mixed.estimator import MixedPriced, SharePrice
from meshplan.planner.training.mixed.resolve import MixedResolved
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Stage
from meshplan.planner.training.plan import catalog_content, evidence_of

# What no calibration covers: constants of each type were fitted on runs of that type alone.
NOT_VALIDATED = "several node types in one job: constants were fitted on runs of one type each"
SPREAD_OF_MIXING = 0.10  # added to the interval for it; assumed


def mixed_content(resolved: MixedResolved) -> dict[str, Any]:
    """Every catalog entry that an answer rests on, as plain JSON."""
    links = resolved.problem.links
    return {
        "pools": [catalog_content(pool) for pool in resolved.pools],
        "between": [[list(names), source] for names, source in sorted(links.sources.items())],
    }


def config_document(problem: MixedProblem, config: MixedConfig) -> dict[str, Any]:
    """The choices as plain JSON."""
    workload = problem.any.workload
    return {
        "stages": [_stage_document(problem, stage) for stage in config.stages],
        "pipeline_parallel": len(config.stages),
        "pipeline_schedule": config.schedule,
        "num_microbatches": config.num_microbatches,
        "zero_stage": config.zero_stage,
        "sequence_parallel": config.sequence_parallel,
        "global_batch_size": workload.global_batch_size,
        "sequence_length": workload.sequence_length,
        "precision": workload.precision,
        "world_size": config.world_size,
    }


def _stage_document(problem: MixedProblem, stage: Stage) -> dict[str, Any]:
    share = stage.shares[0]
    return {
        "node_type": problem.names[share.pool],
        "num_layers": int(stage.num_layers),
        "tensor_parallel": stage.tensor_parallel,
        "data_parallel": share.data_parallel,
        "micro_batch_size": share.micro_batch_size,
        "activation_recompute": stage.activation_recompute,
    }


def make_mixed_plan(
    resolved: MixedResolved,
    priced: MixedPriced,
    *,
    solution: Mapping[str, Any],
    identity: PlanIdentity,
    alternatives: tuple[Mapping[str, Any], ...] = (),
) -> Plan:
    """Put the parts of a plan together; arguments as of :func:`~meshplan.planner.training.plan.make_training_plan`."""
    problem = resolved.problem
    rows = _breakdown(problem, priced)
    return Plan(
        config=config_document(problem, priced.config),
        predicted=_predicted(problem, priced),
        solution=solution,
        rank_table=rank_table(problem, priced.config),
        memory=_memory(problem, priced),
        breakdown=rows,
        provenance={"meshplan": own_version(), **_provenance(resolved, priced, rows)},
        alternatives=alternatives,
        **identity,
    )


def _predicted(problem: MixedProblem, priced: MixedPriced) -> dict[str, Interval]:
    config, workload = priced.config, problem.any.workload
    devices, step = config.world_size, priced.step_s
    flops = model_flops_per_step(problem.any.shape, workload.sequence_length, workload.global_batch_size)
    peak = sum(
        config.devices_of(pool) * peak_flops_per_s(problem.pools[pool].machine.device, workload.precision)
        for pool in config.pools
    )
    values = {
        "iteration_s": step,
        "tokens_per_s": workload.tokens_per_step / step,
        "tokens_per_s_per_device": workload.tokens_per_step / step / devices,
        "samples_per_s": workload.global_batch_size / step,
        "model_flops_per_s_per_device": flops / step / devices,
        "mfu": flops / step / peak,
    }
    prices = [problem.pools[pool].machine.usd_per_hour_per_device for pool in config.pools]
    steps = problem.any.num_steps
    per_hour = None
    if all(one is not None for one in prices):
        per_hour = sum((one or 0.0) * config.devices_of(pool) for one, pool in zip(prices, config.pools, strict=True))
    if steps is not None:
        values["run_time_s"] = step * steps
        if per_hour is not None:
            values["usd_per_run"] = step * steps * per_hour / SECONDS_PER_HOUR
    kind = problem.any.kind_of_work
    spread = 1.0 + max(problem.pools[pool].calibration.error_p90[kind] for pool in config.pools) + SPREAD_OF_MIXING
    metrics = {name: Interval(value=value, low=value / spread, high=value * spread) for name, value in values.items()}
    typical = max(one.typical_bytes for one in priced.shares)
    safe = max(one.safe_bytes for one in priced.shares)
    metrics["peak_memory_bytes"] = peak_interval(typical, safe)
    if per_hour is not None:
        metrics["usd_per_hour"] = Interval(value=per_hour, low=per_hour, high=per_hour)
    return metrics


def _memory(problem: MixedProblem, priced: MixedPriced) -> dict[str, Any]:
    """Bytes of a rank of every stage, and of the one that comes closest to its device's limit."""
    worst = priced.worst
    return {
        "device_memory_bytes": problem.pools[worst.share.pool].machine.device.memory_bytes,
        "limit_bytes": worst.limit_bytes,
        "worst": _memory_row(problem, priced, worst),
        "stages": [_memory_row(problem, priced, one) for one in priced.shares],
    }


def _memory_row(problem: MixedProblem, priced: MixedPriced, one: SharePrice) -> dict[str, Any]:
    return {
        "first_stage": one.stage,
        "num_stages": 1,
        "num_layers": int(priced.config.stages[one.stage].num_layers),
        "node_type": problem.names[one.share.pool],
        **{f"{name}_bytes": float(values[0]) for name, values in one.memory.components.items()},
        "typical_bytes": one.typical_bytes,
        "safe_bytes": one.safe_bytes,
        "device_limit": one.limit_bytes,
        "micro_batch_s": one.seconds,
    }


def _breakdown(problem: MixedProblem, priced: MixedPriced) -> tuple[dict[str, Any], ...]:
    """Where the step's time goes, largest first; work is that of the slowest stage, under its pool's evidence."""
    slowest = max(priced.shares, key=lambda one: one.seconds)
    own = problem.pools[slowest.share.pool]
    parts = {name: float(seconds[0]) for name, seconds in priced.estimate.breakdown_s.items()}
    return tuple(
        {
            "name": name,
            "seconds": seconds,
            "share": seconds / priced.step_s,
            "evidence": evidence_of(own, name).value,
        }
        for name, seconds in sorted(parts.items(), key=lambda item: (-item[1], item[0]))
        if seconds > 0.0
    )


def _provenance(resolved: MixedResolved, priced: MixedPriced, rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    shares: dict[str, float] = {}
    for row in rows:
        shares[row["evidence"]] = shares.get(row["evidence"], 0.0) + row["share"]
    problem = resolved.problem
    kind = problem.any.kind_of_work
    pools = [problem.pools[pool] for pool in priced.config.pools]
    widest = max(pools, key=lambda pool: pool.calibration.error_p90[kind]).calibration
    sources = {what: text for pool in resolved.pools for what, text in pool.sources.items()}
    sources |= {f"link {' – '.join(names)}": text for names, text in problem.links.sources.items()}
    return {
        "share_of_time_by_evidence": shares,
        "calibration": {
            "framework": widest.framework,
            "architecture": ", ".join(dict.fromkeys(pool.calibration.architecture for pool in pools)),
            "num_runs": widest.num_runs,
            "time_error_p90": widest.error_p90[kind],
            "time_error_basis": widest.error_basis.get(kind, ""),
            "basis": widest.basis,
            "memory_basis": widest.memory_basis,
            "source": widest.source,
            "date": widest.date,
        },
        "not_validated": [NOT_VALIDATED],
        "sources": sources,
        "model": plain(problem.any.shape),
    }


def rank_table(problem: MixedProblem, config: MixedConfig) -> tuple[tuple[int, int], ...]:
    """(host, device) of each rank: tensor fastest, then data, then pipeline; hosts are counted pool by pool.

    Stages of a pool take its devices in order.
    """
    first_host, used, table = [], [0] * len(problem.pools), []
    hosts = 0
    for own in problem.pools:
        first_host.append(hosts)
        hosts += own.machine.num_devices // own.machine.devices_per_host
    for stage in config.stages:
        for share in stage.shares:
            per_host = problem.pools[share.pool].machine.devices_per_host
            for _ in range(share.data_parallel * stage.tensor_parallel):
                place = used[share.pool]
                table.append((first_host[share.pool] + place // per_host, place % per_host))
                used[share.pool] += 1
    return tuple(table)
