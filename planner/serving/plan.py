"""From a solved serving problem to the plan that is stored, shown and launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from meshplan.catalogs.models.layers.naming import describe_blocks
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.recurrent import KERNELS
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, own_version, plain, shape_document
from meshplan.planner.serving.advice import advice
from meshplan.planner.serving.estimator.breakdown import iteration_parts
from meshplan.planner.serving.estimator.instances import share_doubt, share_error_p90
from meshplan.planner.serving.estimator.memory import caches
from meshplan.planner.serving.estimator.pools import pool_memory
from meshplan.planner.serving.estimator.power.cap import SLOWDOWN_ERROR_P90
from meshplan.planner.serving.problem.config import Pool, ServingConfig, serving_config_document
from meshplan.planner.serving.problem.nodes import place_workers, pools_by_node_type
from meshplan.planner.serving.problem.problem import ServingObjective, ServingProblem
from meshplan.planner.serving.problem.weight_tiers import SEPARATION_ERROR_P90, TIER_ERROR_P90
from meshplan.planner.serving.resolve import ResolvedServing
from meshplan.planner.serving.search.branch import TIE, Simulated
from meshplan.planner.serving.search.candidates import config_label, power_at
from meshplan.planner.serving.search.scores import objective_change, usd_per_million_tokens
from meshplan.planner.serving.search.search import ServingReport

# Latencies that every plan predicts, in addition to those with an SLO.
SHOWN = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "e2e_mean_s", "e2e_p99_s")
_THROUGHPUT = "throughput"


def make_serving_plan(
    resolved: ResolvedServing,
    chosen: Simulated,
    report: ServingReport,
    *,
    solution: Mapping[str, Any],
    identity: PlanIdentity,
    top: int,
    beyond: bool = True,
) -> Plan:
    """Put the parts of a serving plan together.

    Args:
        resolved: the problem and its sources.
        chosen: the best deployment.
        report: the record of the search.
        solution: the solver's report.
        identity: kind, spec and digests.
        top: number of runners-up to keep.
        beyond: whether to simulate what the plan answers beyond itself.
    """
    problem = resolved.problem
    config = chosen.candidate.config
    return Plan(
        config=serving_config_document(config),
        predicted=predicted(problem, chosen),
        solution=solution,
        rank_table=rank_table(problem, config),
        memory={
            "pools": [
                row
                for name, pool in zip(config.pool_names, config.pools, strict=True)
                for row in memory_rows(problem, pool, name)
            ]
        },
        breakdown=tuple(breakdown(problem, chosen)),
        provenance=provenance(resolved, config),
        alternatives=tuple(runner_up_rows(problem, chosen, report, top=top)),
        rejected=tuple(rejected_rows(report)),
        answer=advice(problem, chosen, report, seed=int(solution.get("seed", 0))) if beyond else None,
        **identity,
    )


# --- metrics ----------------------------------------------------------------------------------------------------------


def predicted(problem: ServingProblem, simulated: Simulated) -> dict[str, Interval]:
    """Every metric that a plan predicts, with its 90 % interval."""
    metrics, candidate = simulated.judged.metrics, simulated.candidate
    spread = error_factors(problem, candidate.config)
    found: dict[str, Interval] = {}
    shown = [key for key in SHOWN if key.startswith("e2e")] if problem.workload.task.is_pooled else SHOWN
    for key in dict.fromkeys((*(slo.key for slo in problem.slos), *shown)):
        metric, percentile, _ = key.split("_")
        latency = metrics.latencies[metric]
        if latency.count:
            found[key] = _around(latency.value(percentile), spread["ttft" if metric == "ttft" else "tpot"])
    tokens_per_s, devices = simulated.judged.output_tokens_per_s, candidate.config.num_devices
    # Under open arrivals the rate is what clients send, not a prediction, unless they send more than is finished.
    sent = problem.workload.request_rate_per_s
    factor = 1.0 if sent is not None and simulated.judged.requests_per_s >= sent else spread[_THROUGHPUT]
    rates = {
        "requests_per_s": simulated.judged.requests_per_s,
        "output_tokens_per_s": tokens_per_s,
        "output_tokens_per_s_per_device": tokens_per_s / devices,
    }
    found |= {name: _around(value, factor) for name, value in rates.items()}
    if candidate.usd_per_hour is not None:
        found["usd_per_hour"] = _around(candidate.usd_per_hour, 1.0)
        if tokens_per_s > 0.0:
            found["usd_per_million_tokens"] = _around(
                usd_per_million_tokens(candidate.usd_per_hour, tokens_per_s), factor
            )
    power_w = power_at(candidate, simulated.judged.requests_per_s)
    if power_w is not None:
        error = problem.power.error_p90.get("power", 0.0)
        around = _around(power_w, math.exp(error))
        found["power_w"] = replace(around, high=min(around.high, power_limit_w(problem, candidate.config)))
        if tokens_per_s > 0.0:  # errors of power and rate hardly depend on each other
            both = math.exp(math.hypot(error, math.log(factor)))
            found["energy_j_per_token"] = _around(power_w / tokens_per_s, both)
    return found


def error_factors(problem: ServingProblem, config: ServingConfig) -> dict[str, float]:
    """Metric → factor by which its 90 % interval extends each way: the widest over the pools, a power limit's error
    and those of weights in host memory and of FFN devices included.
    """
    widest: dict[str, float] = {}
    for pool in config.pools:
        beyond = 0.0 if pool.weight_tiers is None else TIER_ERROR_P90 + pool.weight_tiers.drive_doubt
        slowed = 0.0 if pool.power_cap_w is None else SLOWDOWN_ERROR_P90
        slowed += 0.0 if pool.share is None else share_error_p90(pool.share)
        beyond += 0.0 if pool.ffn is None else SEPARATION_ERROR_P90
        for name, error in problem.calibrations[pool.node_type].error_p90.items():
            widest[name] = max(widest.get(name, 1.0), math.exp(math.hypot(error, slowed, beyond)))
    return widest


def power_limit_w(problem: ServingProblem, config: ServingConfig) -> float:
    """Power limit of all devices in use, W: no average exceeds it. Infinite where one is unknown."""
    each = [(pool, pool.power_cap_w or problem.machines[pool.node_type].device.tdp_w) for pool in config.pools]
    return sum(math.inf if limit is None else pool.num_ranks * limit for pool, limit in each)


def _around(value: float, factor: float) -> Interval:
    return Interval(value=value, low=value / factor, high=value * factor)


# --- memory and time --------------------------------------------------------------------------------------------------


def memory_rows(problem: ServingProblem, pool: Pool, name: str) -> list[dict[str, Any]]:
    """Rows of a pool of that name: of its own devices, and of those that compute its MLPs or experts apart."""
    rows = [{"pool": name, **memory_row(problem, pool)}]
    if pool.ffn is not None and problem.separation is not None:
        memory = problem.separation.ffn_memory(problem, pool)
        device = problem.machines[pool.ffn.node_type].device
        held = {"device": device.slug, "device_memory_bytes": device.memory_bytes, "kv_cache_bytes": 0.0}
        rows.append({"pool": f"{name} FFN", "role": pool.role.value, **asdict(memory), **held})
    return rows


def memory_row(problem: ServingProblem, pool: Pool) -> dict[str, Any]:
    """Bytes of the fullest device of a pool, and what its cache holds."""
    memory = pool_memory(problem.site, pool, problem.workload)
    held = memory.kv_capacity_tokens / caches(problem.experts, pool.layout) * memory.kv_bytes_per_token
    device = problem.machines[pool.node_type].device
    return {
        "role": pool.role.value,
        "device": device.slug,
        "device_memory_bytes": device.memory_bytes,
        "budget_bytes": memory.budget_bytes,
        "weights_bytes": memory.weights_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "kv_cache_bytes": held,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_capacity_tokens": memory.kv_capacity_tokens,
        **_host_row(problem, pool),
    }


def _host_row(problem: ServingProblem, pool: Pool) -> dict[str, Any]:
    """Weights of one worker in host memory, and what that has; empty where all lie on the devices."""
    if pool.weight_tiers is None:
        return {}
    return {
        "host_weights_bytes": pool.weight_tiers.host_bytes,
        "host_memory_bytes": float(problem.machines[pool.node_type].host_memory_bytes or 0),
    }


def breakdown(problem: ServingProblem, simulated: Simulated) -> list[dict[str, Any]]:
    """Parts of an iteration's time, pool by pool, largest first, with their level of evidence."""
    rows: list[dict[str, Any]] = []
    metrics = simulated.judged.metrics
    config = simulated.candidate.config
    for name, pool in zip(config.pool_names, config.pools, strict=True):
        parts = iteration_parts(problem, pool, num_running=max(metrics.mean_decoding, 1.0))
        total = sum(part.seconds for part in parts)
        rows += [
            {
                "pool": name,
                "name": part.name,
                "seconds": part.seconds,
                "share": part.seconds / total,
                "evidence": part.level.value,
            }
            for part in sorted(parts, key=lambda part: -part.seconds)
            if part.seconds > 0.0
        ]
    return rows


def rank_table(problem: ServingProblem, config: ServingConfig) -> tuple[tuple[int, int], ...]:
    """(host, device on the host) of each rank: workers one after the other, each pool on the hosts of its node type;
    after the devices of its workers those that compute their MLPs or experts apart.

    Workers are packed on nodes as :mod:`meshplan.planner.serving.problem.nodes` says.
    """
    slots: list[tuple[int, int]] = []
    offsets = _host_offsets(problem)
    places = {
        name: iter(place_workers(groups, problem.machines[name].domain_size))
        for name, groups in pools_by_node_type(config.pools).items()
    }
    for node_type, size in (side for pool in config.pools for side in pool.sides):
        machine = problem.machines[node_type]
        for place in next(places[node_type]):
            start = place.node * machine.domain_size + place.first
            for device in range(start, start + size):
                host, slot = divmod(device, machine.devices_per_host)
                slots.append((offsets[node_type] + host, slot))
    return tuple(slots)


def _host_offsets(problem: ServingProblem) -> dict[str, int]:
    """First host number of each node type, in the order of the cluster."""
    offsets, following = {}, 0
    for name, machine in problem.machines.items():
        offsets[name] = following
        following += -(-machine.num_devices // machine.devices_per_host)
    return offsets


# --- tables -----------------------------------------------------------------------------------------------------------


def runner_up_rows(
    problem: ServingProblem, chosen: Simulated, report: ServingReport, *, top: int
) -> list[dict[str, Any]]:
    """The best simulated deployments, the chosen one first, with their figures and why the others were not chosen."""
    rows = []
    for index, simulated in enumerate(report.simulated[:top]):
        metrics, config = simulated.judged.metrics, simulated.candidate.config
        rows.append(
            {
                "name": "chosen" if simulated is chosen else f"rank {index + 1}",
                "chosen": simulated is chosen,
                "config": serving_config_document(config),
                "label": config_label(config) + _batch_label(problem, simulated),
                "num_devices": config.num_devices,
                "ttft_p99_s": metrics.latencies["ttft"].p99,
                "tpot_mean_s": metrics.latencies["tpot"].mean,
                "slo_latencies": {slo.key: metrics.value(slo) for slo in problem.slos},
                "requests_per_s": simulated.judged.requests_per_s,
                "output_tokens_per_s_per_device": simulated.judged.output_tokens_per_s / config.num_devices,
                "usd_per_hour": simulated.candidate.usd_per_hour,
                "reason": _reason(problem.objective, chosen, simulated),
            }
        )
    return rows


def _batch_label(problem: ServingProblem, simulated: Simulated) -> str:
    """The prefill chunk size where it is not the engine's default, and the running requests where they are capped, or
    more than the engine's default.
    """
    kind = simulated.candidate.family.kinds[0]
    default = problem.rules.default_limits(problem.machines[kind.placed.node_type].device)
    limits = kind.placed.limits
    chunk = "" if limits.max_batched_tokens == default.max_batched_tokens else f", chunk {limits.max_batched_tokens}"
    is_more = limits.max_num_seqs > default.max_num_seqs * kind.placed.layout.attention_data_parallel
    return chunk + (f", at most {limits.max_num_seqs} running" if kind.capped or is_more else "")


def _simplicity(simulated: Simulated) -> tuple[float, ...]:
    return simulated.candidate.family.simplicity(simulated.candidate.counts)


def _reason(objective: ServingObjective, chosen: Simulated, other: Simulated) -> str:
    if other is chosen:
        return ""
    if other.judged.violated:
        return f"{other.judged.worst_miss.key} {other.judged.worst_miss.text}"
    if not other.judged.is_met:
        return other.judged.worst_miss.text
    if abs(other.score / chosen.score - 1.0) <= TIE and _simplicity(other) >= _simplicity(chosen):
        is_as_simple = _simplicity(other) == _simplicity(chosen)
        return "a tie, answers later" if is_as_simple else "a tie, less simple"
    if other.score < chosen.score and not other.judged.is_settled:
        return "not held against longer runs"
    return f"objective {objective_change(objective, chosen.score, other.score):+.1%}"


def rejected_rows(report: ServingReport) -> list[dict[str, Any]]:
    """Reasons for rejection with the number of workers or deployments, most frequent first.

    Without a deployment that meets every SLO nothing is left out for being no better.
    """
    rows: list[dict[str, Any]] = [
        {"reason": reason, "count": count, "example": None} for reason, count in report.rejected.most_common()
    ]
    unseen = report.num_candidates - len(report.simulated) - report.num_refused
    if unseen > 0:
        is_found = any(one.judged.is_met for one in report.simulated)
        reason = "cannot beat the best found (bound)" if is_found else "not simulated: others are more likely to do"
        rows.append({"reason": reason, "count": unseen, "example": None})
    return rows


def provenance(resolved: ResolvedServing, config: ServingConfig | None = None) -> dict[str, Any]:
    """Version, calibration and sources of the figures."""
    problem = resolved.problem
    power = {key: value for key, value in problem.power.to_document().items() if key != "constants"}
    if problem.power_caps_w:
        power["slowdown_error_p90"] = SLOWDOWN_ERROR_P90
    return {
        "meshplan": own_version(),
        "calibration": {
            name: {
                "engine": calibration.engine,
                "architecture": calibration.architecture,
                "num_runs": calibration.num_runs,
                "error_p90": dict(calibration.error_p90),
                **({"start_error_p90": dict(calibration.start_error_p90)} if calibration.start_error_p90 else {}),
                "basis": dict(calibration.basis),
                "source": calibration.source,
                "date": calibration.date,
            }
            for name, calibration in problem.calibrations.items()
        },
        "power": power,
        "sources": dict(resolved.sources),
        "model": shape_document(problem.shape),
        **_not_validated(problem, config),
        **({} if problem.tiering is None else {"host": problem.tiering.document()}),
    }


def _not_validated(problem: ServingProblem, config: ServingConfig | None) -> dict[str, Any]:
    """What the constants were not fitted to, if anything."""
    doubts = [] if problem.shape.blocks is None else [_unlike_the_fitted(problem.shape)]
    if problem.workload.task.is_pooled:
        doubts.append(
            "vectors and scores: no run of an embedding or reranking server was compared; the time outside the engine "
            "is that of generation, and texts of equal length are assumed where length_ratio does not say otherwise"
        )
    if problem.shape.encoder is not None:
        doubts.append(
            "an encoder of sound: no run was compared; its layers are priced as a text encoder's, without launches of "
            "its kernels, and what the host does to sound (reading, resampling, spectrograms) is left out"
        )
    if problem.tiering is not None and config and any(pool.weight_tiers for pool in config.pools):
        doubts += problem.tiering.doubts
    if config and config.pools[0].share is not None:  # all pools have the same
        doubts.append(share_doubt(config.pools[0].share))
    if problem.separation is not None and config and any(pool.ffn for pool in config.pools):
        doubts += problem.separation.doubts
    return {"not_validated": doubts} if doubts else {}


def _unlike_the_fitted(shape: ModelShape) -> str:
    """What few runs were compared with, and how those ran.

    Qwen3.5-397B on 4 and 8 B200 with SGLang, 73 published rows (silicon_sample.csv of aiconfigurator), and
    Nemotron-Nano-v2 of 9B and 12B on a B200 with vLLM 0.11 (ML.ENERGY, 25 rows), each predicted by constants that have
    not seen the model: tests/benchmarks/hybrids.py.
    """
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    timed = recurrent is not None and any(kind == recurrent.kind for _, kind, *_ in KERNELS.rows)
    return (
        f"{describe_blocks(shape)}: {'its recurrence was timed alone' if timed else 'no kernel timings'}. Three such "
        "models were compared: Qwen3.5 on SGLang, time per token 14 % off, first token 37 % too short; Nemotron-Nano "
        "9B and 12B on vLLM, gaps between tokens 31 % too short in the median, batches with prompts 58 %"
    )


def catalog_content(resolved: ResolvedServing) -> dict[str, Any]:
    """Every catalog entry used by an answer, as plain JSON; its digest is the plan's ``catalog_digest``."""
    problem = resolved.problem
    return {
        "machines": plain(problem.machines),
        "model": shape_document(problem.shape),
        "prices": plain(resolved.prices),
        "calibrations": {name: item.to_document() for name, item in problem.calibrations.items()},
        "power": problem.power.to_document(),
        "rules": {"name": problem.rules.name, "version": problem.rules.version},
        "recipe": plain(problem.recipe),
        **({} if problem.tiering is None else {"host": problem.tiering.document()}),
    }
