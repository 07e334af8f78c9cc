"""Experts of a serving plan by recorded routing: the setting that its layout makes, and what a placement does to it.

The plan's deployment is simulated under its own load three times: as planned, with the recorded loads and the current
places of the experts, and with the new places. Copies of experts take their memory from the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.core.plan import Plan
from meshplan.planner.expert_placement.placing import Placed, keep_current, place
from meshplan.planner.expert_placement.problem.recordings import ExpertRecording
from meshplan.planner.expert_placement.search.solve import cost_of_moves
from meshplan.planner.expert_placement.setting import ExpertSetting
from meshplan.planner.serving.estimator.exchange.expert_traffic import Hops, expert_traffic
from meshplan.planner.serving.estimator.pools import pool_memory
from meshplan.planner.serving.problem.config import Pool, ServingConfig, serving_config_from_document
from meshplan.planner.serving.problem.expert_routing import Dispatch, of_moe_layers, recorded_routing
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import SCHEMES
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.search.trials import FEWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExperts:
    """A deployment with its experts in certain places.

    Args:
        ttft_mean_s: mean time to the first token.
        ttft_p99_s: its 99th percentile.
        tpot_mean_s: mean time between tokens.
        e2e_mean_s: mean latency of whole requests.
        load_factor: load of the fullest device over the mean, mean over layers; None: the skew that kernels were timed
            with.
        hops: ways of the tokens by level; None without recorded loads.
        kv_capacity_tokens: tokens of KV cache that a worker with spread experts holds.
    """

    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    e2e_mean_s: float
    load_factor: float | None
    hops: Hops | None
    kv_capacity_tokens: int


def place_served_experts(
    plan: Plan,
    problem: ServingProblem,
    recordings: Mapping[str, ExpertRecording],
    *,
    dispatch: Dispatch | None = None,
    seed: int = 0,
    **choices: Any,
) -> Placed:
    """Place the experts of a serving plan; the document says what that does to its latencies.

    Args:
        plan: with a configuration.
        problem: its question.
        recordings: scenario name → recording; what prefill and decode recorded counts together in the times.
        dispatch: where tokens are between layers; None: as the question says, else they return.
        seed: of the solver and of the requests.
        choices: as for :func:`meshplan.planner.expert_placement.placing.place`.

    Raises:
        SpecError: no experts to place, or the recordings do not fit the plan.
    """
    config, pool = _spread(plan)
    recordings = {name: of_moe_layers(one, problem.shape, name) for name, one in recordings.items()}
    recordings, copies = _from_the_plan(config, problem, recordings, int(choices.pop("num_redundant_experts", 0)))
    first = next(iter(recordings.values()))
    setting = serving_setting(plan, problem, pool, is_sample=len(first.layer_ids) < problem.shape.num_moe_layers)
    placed = place(setting, recordings, num_redundant_experts=copies, seed=seed, **choices)
    if placed.solution.assignment is None:
        return placed
    said = Dispatch.RETURNS if problem.experts is None else problem.experts.dispatch
    dispatch = dispatch or said
    merged = _merged(recordings)

    def served(placement: IntArray) -> ServedExperts:
        routing = recorded_routing(merged, problem.shape, source="", placement=placement, dispatch=dispatch)
        return serve_experts(plan, replace(problem, experts=routing), config, pool, seed=seed)

    planned = serve_experts(plan, problem, config, pool, seed=seed)
    today, new = served(placed.current), served(placed.placement)
    if new.e2e_mean_s > today.e2e_mean_s:
        placed, new = keep_current(placed), today
    moves = cost_of_moves(placed.problem, placed.placement, placed.current, placed.problem.expert_bytes or 0.0)
    document = {
        **placed.document,
        "dispatch": dispatch.value,
        "is_sample": setting.is_sample,
        "served": {"as planned": asdict(planned), "current": asdict(today), "new": asdict(new)},
        "replacement": asdict(moves),
    }
    return replace(placed, document=document)


def _from_the_plan(
    config: ServingConfig, problem: ServingProblem, recordings: Mapping[str, ExpertRecording], copies: int
) -> tuple[Mapping[str, ExpertRecording], int]:
    """The plan's own map as the one in force, and its copies where none are asked; without one, what was recorded.

    Raises:
        SpecError: other layers than the map's were recorded, or another number of copies is asked.
    """
    if config.expert_map is None or problem.shape.moe is None:
        return recordings, copies
    lies = np.array(config.expert_map)
    has = lies.shape[1] - problem.shape.moe.num_experts
    layers = next(iter(recordings.values())).load.shape[1]
    if copies not in (0, has) or layers != len(lies):
        raise _error(
            f"the plan's map has {len(lies)} layers with {has} copies; asked are {layers} with {copies}: place them "
            "for a plan without experts.placement"
        )
    return {name: replace(one, current=lies) for name, one in recordings.items()}, has


def _spread(plan: Plan) -> tuple[ServingConfig, Pool]:
    """The plan's choices, and its pool with spread experts: the last, where several spread them in the same way."""
    if not plan.config:
        raise _error(f"plan {plan.plan_id} ({plan.solution['status']}) has no configuration")
    config = serving_config_from_document(plan.config)
    spread = [pool for pool in config.pools if pool.layout.expert_parallel > 1]
    if not spread:
        raise _error(
            f"plan {plan.plan_id} has all experts on every device (expert_parallel 1); plan with, for example, "
            "fixed: {expert_parallel: 8}"
        )
    degrees = sorted({(pool.layout.expert_parallel, pool.layout.expert_tensor_parallel) for pool in spread})
    if len(degrees) > 1:
        sizes = " and ".join(str(expert) for expert, _ in degrees)
        raise _error(
            f"plan {plan.plan_id} has pools that spread experts over {sizes} devices, and a map is for one number: "
            "place them one by one with --devices, or plan both pools alike"
        )
    return config, spread[-1]


def serving_setting(plan: Plan, problem: ServingProblem, pool: Pool, *, is_sample: bool = False) -> ExpertSetting:
    """Where the experts of a pool live.

    Args:
        plan: tells how many requests run at once.
        problem: its question.
        pool: with ``expert_parallel`` above 1.
        is_sample: some layers were recorded and stand for all.
    """
    shape, layout, machine = problem.shape, pool.layout, problem.machines[pool.node_type]
    if shape.moe is None:
        raise _error(f"{shape.name} is a dense model")
    if pool.ffn is not None:
        raise _error("its experts lie on FFN devices: places of experts are not priced there")
    weight_bytes = SCHEMES[pool.quantization.experts].weight_bytes * shape.expert_parameters
    running = float((plan.answer or {}).get("num_running", 0.0)) / pool.num_workers / layout.pipeline_parallel
    layer_ids = tuple(layer for layer, is_moe in enumerate(shape.moe.moe_layers) if is_moe)
    return ExpertSetting(
        num_devices=layout.expert_parallel,
        devices_per_node=max(1, min(layout.expert_parallel, machine.domain_size // layout.expert_tensor_parallel)),
        top_k=shape.moe.num_experts_per_token,
        num_experts=shape.moe.num_experts,
        layer_ids=() if is_sample else layer_ids,
        num_layers=shape.num_hidden_layers,
        expert_bytes=weight_bytes / layout.expert_tensor_parallel,
        link_bandwidth_bytes_per_s=machine.scale_up_bytes_per_s,
        network_bandwidth_bytes_per_s=machine.scale_out_bytes_per_s or None,
        tokens_per_batch=round(running) or None,
        is_sample=is_sample,
    )


def _merged(recordings: Mapping[str, ExpertRecording]) -> ExpertRecording:
    """All recordings as one, whose counts add up; tokens and transitions where every one has them."""
    every = list(recordings.values())
    if len(every) == 1:
        return replace(every[0], current=None)
    transitions = [one.transitions for one in every if one.transitions is not None]
    return ExpertRecording(
        load=np.concatenate([one.load for one in every]),
        layer_ids=every[0].layer_ids,
        transitions=np.sum(transitions, axis=0) if len(transitions) == len(every) else None,
    )


def serve_experts(
    plan: Plan, problem: ServingProblem, config: ServingConfig, pool: Pool, *, seed: int = 0
) -> ServedExperts:
    """Simulate a deployment under the plan's load, with the routing of the question.

    Args:
        plan: its rate holds where the question leaves the load free.
        problem: the question.
        config: the choices.
        pool: whose experts are reported.
        seed: for drawing the requests.
    """
    rate = plan.predicted["requests_per_s"].value
    judged = judge(problem, config, request_rate_per_s=rate, num_requests=FEWEST, seed=seed)
    latencies = judged.metrics.latencies
    domain, moe = problem.machines[pool.node_type].domain_size, problem.shape.moe
    traffic = expert_traffic(
        problem.experts, pool.layout, top_k=1 if moe is None else moe.num_experts_per_token, domain_size=domain
    )
    return ServedExperts(
        ttft_mean_s=latencies["ttft"].mean,
        ttft_p99_s=latencies["ttft"].p99,
        tpot_mean_s=latencies["tpot"].mean,
        e2e_mean_s=latencies["e2e"].mean,
        load_factor=None if traffic is None else float(traffic.load_factor.mean()),
        hops=None if traffic is None else traffic.hops,
        kv_capacity_tokens=pool_memory(problem.site, pool, problem.workload).kv_capacity_tokens,
    )


def _error(message: str) -> SpecError:
    return SpecError.at("PLAN", message, of="the question")
