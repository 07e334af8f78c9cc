"""Further answers about a chosen deployment: headroom, sensitivity to the requests, other trade-offs, what-ifs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from meshplan.planner.serving.estimator.bounds.nano_batches import steady_nano_batches
from meshplan.planner.serving.estimator.bounds.overlap_bound import overlap_bound
from meshplan.planner.serving.estimator.encoders.sound import cross_cache_bytes
from meshplan.planner.serving.estimator.encoders.vision import encoder_bytes
from meshplan.planner.serving.estimator.exchange.expert_traffic import expert_traffic
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.pareto import pareto_front, useful_batch
from meshplan.planner.serving.problem.config import Pool, Role, ServingConfig
from meshplan.planner.serving.problem.expert_routing import copies_of
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload
from meshplan.planner.serving.search.branch import Simulated
from meshplan.planner.serving.search.cache_shapes import simulated_shapes
from meshplan.planner.serving.search.candidates import layout_label
from meshplan.planner.serving.search.deployment import slowest_front_ends
from meshplan.planner.serving.search.search import ServingReport, sustainable_rate
from meshplan.planner.serving.search.slo_judgement import RATE_KEY, Judged, judge
from meshplan.planner.serving.search.trials import FEWEST, LONGER_RUN
from meshplan.planner.serving.search.what_if import what_if
from meshplan.planner.serving.simulation.metrics import confidence_interval, samples_of, series
from meshplan.planner.serving.simulation.slo_attainment import attainment, goodput

LONGER, MORE, BURSTY = 2.0, 1.25, 2.0
NUM_BINS = 60
# Requests of a run under other requests, over those of the chosen one: it is shown, nothing is decided by it.
SENSITIVITY_SHARE = 0.25


def advice(problem: ServingProblem, chosen: Simulated, report: ServingReport, *, seed: int = 0) -> dict[str, Any]:
    """The ``answer`` of a serving plan.

    Returns:
        ``pareto`` (closed form, including points that violate SLOs), ``num_running``, ``useful_batch``, ``sensitivity``
        (the chosen deployment under other requests), ``most_passed_on_per_s`` (requests/s that its API servers let
        pass; where there are some), ``prefixes`` (shares of prompt tokens: found in the run, and at most by caches
        without limit) where requests say what they share, ``experts`` where the question says how they are routed,
        and, where a rate is given, ``max_request_rate_per_s`` within the SLOs.
    """
    last = chosen.candidate.parts[-1][0]
    passed, messages = slowest_front_ends(problem.site, chosen.candidate.config, problem.workload)
    between_s = passed.request_s(messages)
    found: dict[str, Any] = {
        "pareto": [
            {
                "label": layout_label(point.layout),
                "node_type": point.node_type,
                "quantization": point.quantization.label,
                "num_running": point.num_running,
                "tokens_per_s_per_user": point.tokens_per_s_per_user,
                "tokens_per_s_per_device": point.tokens_per_s_per_device,
                "keeps_promises": point.meets_slos,
            }
            for point in pareto_front(report.mixed, problem.workload.output_length)
        ],
        "num_running": chosen.judged.metrics.mean_in_flight,
        "sensitivity": list(_sensitivity(problem, chosen, seed)),
        "sampling": sampling(problem, chosen),
        "series": _series(chosen),
        "overlap": _overlap(chosen),
        "what_if": what_if_rows(problem),
        "what_if_simulated": _shapes(problem, chosen, seed),
        **_idle(problem, chosen),
    }
    if (share := chosen.judged.metrics.found_share) is not None:
        found["prefixes"] = {"found": share, "most": problem.workload.prefix_hit_rate}
    if between_s:
        found["most_passed_on_per_s"] = 1.0 / between_s
    if last.placed.role is not Role.PREFILL:
        found["useful_batch"] = useful_batch(last)
    if problem.experts is not None:
        found["experts"] = [
            {"pool": name, **_experts(problem, pool)}
            for name, pool in zip(chosen.candidate.config.pool_names, chosen.candidate.config.pools, strict=True)
        ]
    if problem.workload.request_rate_per_s is not None and problem.workload.trace is None and problem.slos:
        found["max_request_rate_per_s"] = sustainable_rate(problem, chosen, seed=seed)
    return found


def _overlap(chosen: Simulated) -> list[dict[str, Any]]:
    """What each pool reaches of the bound of its devices; see :mod:`~.estimator.overlap_bound`."""
    metrics, candidate = chosen.judged.metrics, chosen.candidate
    shares = candidate.family.shares(candidate.counts, 1.0)
    rows = []
    for name, (kind, count), share in zip(candidate.config.pool_names, candidate.parts, shares, strict=True):
        each = 1.0 if candidate.family.is_disaggregated else share
        found = overlap_bound(
            kind.worker,
            most_running=float(kind.steady.num_seqs[-1]),
            num_running=metrics.mean_decoding,
            requests_per_s=chosen.judged.requests_per_s * each / count,
            cached=kind.cached,
        )
        row = {"pool": name, **asdict(found), "seconds": dict(found.seconds)}
        in_parts = steady_nano_batches(kind.worker, num_running=metrics.mean_decoding)
        if in_parts is not None:
            row["nano_batches_speedup"] = in_parts.speedup
        rows.append(row)
    return rows


def _series(chosen: Simulated) -> dict[str, list[float]]:
    """Requests and KV cache use over the simulated time, :data:`NUM_BINS` averages each."""
    over_time = series(chosen.judged.run, num_bins=NUM_BINS)
    names = ("end_s", "decoding", "prefilling", "queued", "kv_use")
    return {name: [float(f"{value:.4g}") for value in getattr(over_time, name)] for name in names}


def sampling(problem: ServingProblem, chosen: Simulated) -> dict[str, Any]:
    """Sampling uncertainty: 95 % confidence intervals of the latencies with an SLO, the 99 % interval of the highest
    rate where that was searched for, the share of requests within every SLO with its Wilson lower bound, and
    ``kept_by_runs_of``: the requests of the longer runs that keep the SLOs, 0 where none tell.
    """
    run = chosen.judged.run
    intervals = {}
    for slo in problem.slos:
        if slo.metric != "itl" and chosen.judged.metrics.latencies[slo.metric].count:
            low, high = confidence_interval(samples_of(run, slo.metric), slo.percentile)
            intervals[slo.key] = {"low": low, "high": high}
    found: dict[str, Any] = {"num_requests": len(run), "intervals": intervals}
    if chosen.judged.refuted_per_s is not None:
        found["highest_rate"] = {"low": chosen.judged.requests_per_s, "high": chosen.judged.refuted_per_s}
    if problem.slos:
        share, at_least = attainment(run, problem.slos)
        found |= {"attainment": share, "attainment_at_least": at_least, "goodput_per_s": goodput(run, problem.slos)}
        if not chosen.judged.is_exact and chosen.judged.is_met:
            found["kept_by_runs_of"] = LONGER_RUN if chosen.judged.is_settled else 0
    return found


def what_if_rows(problem: ServingProblem) -> list[dict[str, Any]]:
    """Bounds on deployments that no supported engine runs, as plain JSON."""
    return [{**asdict(shape), "validated": False} for shape in what_if(problem)]


def _loaded(problem: ServingProblem, chosen: Simulated) -> ServingProblem:
    """The question under the load at which the plan was judged: where the load is free, the rate of the plan."""
    if not problem.has_free_load:
        return problem
    rate = chosen.judged.requests_per_s
    arrival = problem.workload.open_arrival
    return replace(problem, workload=replace(problem.workload, arrival=arrival, request_rate_per_s=rate))


def _shapes(problem: ServingProblem, chosen: Simulated, seed: int) -> list[dict[str, Any]]:
    """The chosen deployment with other places for its KV cache."""
    config, cost = chosen.candidate.config, chosen.candidate.parts[0][0].cost
    shapes = simulated_shapes(_loaded(problem, chosen), config, cost, chosen.judged.metrics, seed=seed)
    return [{**asdict(shape), "validated": False} for shape in shapes]


def _experts(problem: ServingProblem, pool: Pool) -> dict[str, Any]:
    """What the question's routing means for the layout of a pool, or why it is not used."""
    layout, moe = pool.layout, problem.shape.moe
    top_k = 1 if moe is None else moe.num_experts_per_token
    domain = problem.machines[pool.node_type].domain_size
    traffic = expert_traffic(problem.experts, layout, top_k=top_k, domain_size=domain)
    row: dict[str, Any] = {"expert_parallel": layout.expert_parallel}
    if traffic is None:
        return {**row, "unused_because": "every device has all experts, so routing changes no time"}
    whole, copies = (
        weights_bytes(problem.shape, pool.quantization, layout, expert_copies=number)
        for number in (0, copies_of(problem.experts, layout))
    )
    return {
        **row,
        "load_factor": float(traffic.load_factor.mean()),
        "hops": asdict(traffic.hops),
        "num_copies": copies_of(problem.experts, layout),
        "copies_bytes_per_device": copies - whole,
    }


def _idle(problem: ServingProblem, chosen: Simulated) -> dict[str, Any]:
    """Devices that the plan leaves idle, and why."""
    idle = problem.num_devices - chosen.candidate.config.num_devices
    if idle <= 0:
        return {"num_idle_devices": 0}
    because = "another copy does not fit on them" if problem.has_free_load else "the load needs no more"
    if not chosen.judged.is_met:  # one configuration was asked for, whatever the load needs
        because = "the configuration that is asked for does not use them"
    return {"num_idle_devices": idle, "idle_because": because}


def _sensitivity(problem: ServingProblem, chosen: Simulated, seed: int) -> Iterator[dict[str, Any]]:
    """The chosen deployment under requests that are longer, more frequent or burstier."""
    num = max(round(SENSITIVITY_SHARE * len(chosen.judged.run)), FEWEST)
    for change, workload in _changed(problem, chosen):
        asked = replace(problem, workload=workload)
        judged = judge(asked, chosen.candidate.config, num_requests=num, seed=seed)
        latencies = judged.metrics.latencies
        yield {
            "change": change,
            "ttft_p99_s": latencies["ttft"].p99,
            "tpot_mean_s": latencies["tpot"].mean,
            "num_rejected": judged.metrics.num_rejected,
            "broken": _missed(judged),
        }


def _missed(judged: Judged) -> list[str]:
    """Keys of what a deployment does not keep: SLOs, and the rate where its queue only grows."""
    return [slo.key for slo, _ in judged.violated] + ([] if judged.offered_per_s is None else [RATE_KEY])


def _changed(problem: ServingProblem, chosen: Simulated) -> Iterator[tuple[str, ServingWorkload]]:
    base = _loaded(problem, chosen).workload
    if base.trace is not None:
        return
    rate = base.request_rate_per_s
    yield "prompts twice as long", replace(base, input_length=LONGER * base.input_length)
    yield "answers twice as long", replace(base, output_length=LONGER * base.output_length)
    if rate is not None:
        yield "a quarter more requests", replace(base, request_rate_per_s=MORE * rate)
        bursty = replace(base, arrival=Arrival.GAMMA, burstiness=BURSTY * max(base.burstiness, 1.0))
        yield "gaps between requests twice as uneven", bursty
    elif base.concurrency is not None:
        yield "a quarter more in flight", replace(base, concurrency=round(MORE * base.concurrency))
    if base.prefix_hit_rate > 0.0:
        yield "no prefix found in the cache", replace(base, prefix_hit_rate=0.0)


# --- images, sound ----------------------------------------------------------------------------------------------------


def images_answer(problem: ServingProblem, config: ServingConfig) -> dict[str, Any] | None:
    """What the images of a request are to the plan; None for text alone.

    The time is that of one prompt's images on an otherwise idle worker, before calibration.
    """
    images = problem.workload.images
    if images is None:
        return None
    pool = config.pools[0]
    return {
        "tokens": images.tokens,
        "encoder_bytes": encoder_bytes(problem.shape, images, pool.layout),
        "encode_s": pool_worker(problem.site, pool, problem.workload, config.speculation).encode_s,
    }


def sound_answer(problem: ServingProblem, config: ServingConfig) -> dict[str, Any] | None:
    """What the sound of a request is to the plan; None for text alone. The time is that before calibration."""
    shape, pool = problem.shape, config.pools[0]
    if shape.encoder is None or not problem.workload.sound_frames:
        return None
    tensor = pool.layout.tensor_parallel
    return {
        "frames": problem.workload.sound_frames,
        "encoder_bytes": weights_bytes(shape.encoder, pool.quantization, pool.layout),
        "cache_bytes": cross_cache_bytes(shape, pool.quantization, tensor_parallel=tensor),
        "encode_s": pool_worker(problem.site, pool, problem.workload, config.speculation).encode_s,
    }
