"""Deployments that no supported engine runs: bounds in closed form, labelled "what if, not validated".

*Attention-FFN disaggregation* (Step-3, arXiv:2507.19427; with memory-rich devices for the attention: Lamina,
arXiv:2405.01814). A devices hold attention weights and KV cache, F devices the MLPs and experts. m micro-batches
alternate between the two, so that a layer takes the time of its slowest stage for each of them::

    tpot(n) ≥ host + L·m·max(attention(n/(A·m)), ffn(n/m), exchange(n/m)) + head(n/A)

with the kernel times of the estimator, so that it bounds what a schedule makes of those, not what better kernels might.
DeepSeek-V3 on 128 H800 with 4,048 tokens of context in FP8 comes out at 2,286 tokens/s a device within 50 ms; Step-3's
authors print 2,324 for DeepSeek's own deployment, which does not split them (abstract of arXiv:2507.19427). A spec that
says ``attention_ffn`` plans such deployments (:mod:`meshplan.planner.serving.attention_ffn`) instead of bounding them.

*Experts in host memory* (MoE-Lens, arXiv:2504.09345; HybriMoE, arXiv:2504.05897). A share g of the experts of a node
stays in device memory, as many as fit in addition to attention and cache; meanwhile the CPU reads the distinct experts
hit among the others from host memory::

    tpot(n) ≥ device parts(n) + L_moe·max(experts on devices(g, n), (1 − g)·hit(n)·bytes/B_host)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.surfaces.experts import distinct_experts
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import weights_bytes, worker_memory
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingObjective, ServingProblem
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization
from meshplan.planner.serving.search.scores import usd_per_million_tokens

# Micro-batches in flight: two overlap attention with FFN, three overlap the exchange as well.
MICRO_BATCHES = (2, 3)
# Shares of the devices tried for attention.
ATTENTION_SHARES = (0.25, 0.5, 0.75)
# Requests in flight that are looked at: so many numbers of them, evenly in the logarithm, on attention devices up to
# their memory (or MOST_RUNNING), on a node with a host up to MOST_BESIDE_HOST.
MOST_RUNNING, RUNNING_LEVELS = 4096, 32
MOST_BESIDE_HOST, BESIDE_HOST_LEVELS = 256, 24
# Devices over which experts are spread of which none lies on a given one.
ELSEWHERE = 10**9
# Memory bandwidth of a host: two sockets with eight channels of DDR5-4800 each, 614 GB/s by the JEDEC standard, of
# which streaming reads attain about 80 %. An assumption, not a measurement.
HOST_BYTES_PER_S = 0.8 * 614e9


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A bound on a deployment that no engine runs.

    Args:
        name: what differs from a supported deployment.
        label: devices and degrees.
        num_devices: in use.
        num_running: requests in flight.
        tpot_s: lower bound of the time per output token.
        tokens_per_s_per_device: upper bound; prefill runs on separate workers.
        source: paper.
        usd_per_million_tokens: lower bound of what the devices of both kinds cost; None without their prices.
    """

    name: str
    label: str
    num_devices: int
    num_running: int
    tpot_s: float
    tokens_per_s_per_device: float
    source: str
    usd_per_million_tokens: float | None = None


def what_if(problem: ServingProblem) -> list[WhatIf]:
    """The best of each kind within the SLO on the time per output token; those that violate it are left out.

    None where no token is decoded (the first comes out of prefill), since all are ways to decode, and none in MIG
    instances, which no link joins.
    """
    if problem.workload.output_length <= 1.0 or problem.share is not None:
        return []
    kinds = (_disaggregated_attention(problem), _host_experts(problem))
    found = [_best(list(shapes), problem.objective) for shapes in kinds]
    return [one for one in found if one is not None]


def _best(shapes: list[WhatIf], objective: ServingObjective) -> WhatIf | None:
    """The most tokens for a dollar where that is the objective and prices are known, else the most for a device."""
    priced = [(shape.usd_per_million_tokens, shape) for shape in shapes if shape.usd_per_million_tokens is not None]
    if objective is ServingObjective.USD_PER_MILLION_TOKENS and priced:
        return min(priced, key=lambda one: one[0])[1]
    return max(shapes, key=lambda shape: shape.tokens_per_s_per_device, default=None)


# --- attention-FFN disaggregation -------------------------------------------------------------------------------------


def _disaggregated_attention(problem: ServingProblem) -> Iterator[WhatIf]:
    for attention_type, attention in problem.machines.items():
        for ffn_type, ffn in problem.machines.items():
            have = min(attention.num_devices, ffn.num_devices)
            total = have if attention_type == ffn_type else 2 * have
            total = min(total, problem.limits.max_devices or total)
            for share in ATTENTION_SHARES:
                num_attention = max(int(share * total), 1)
                num_ffn = _ffn_devices(problem, total - num_attention)
                if num_ffn < 1 or num_attention > attention.num_devices or num_ffn > ffn.num_devices:
                    continue
                for quantization in problem.quantizations:
                    label = f"{num_attention} attention on {attention_type}, {num_ffn} FFN on {ffn_type}"
                    yield from _alternating(
                        problem, (attention_type, ffn_type), num_attention, num_ffn, quantization, label
                    )


def _ffn_devices(problem: ServingProblem, most: int) -> int:
    """The largest number of devices that splits the experts (or the MLP) evenly."""
    whole = problem.shape.intermediate_size if problem.shape.moe is None else problem.shape.moe.num_experts
    return next((count for count in range(most, 0, -1) if whole % count == 0), 0)


def _alternating(
    problem: ServingProblem,
    node_types: tuple[str, str],
    num_attention: int,
    num_ffn: int,
    quantization: Quantization,
    label: str,
) -> Iterator[WhatIf]:
    """The first equation of the module's text with one split of the devices, for each number of micro-batches.

    Args:
        problem: the question.
        node_types: of the attention and of the FFN devices.
        num_attention: attention devices A.
        num_ffn: FFN devices F.
        quantization: number formats.
        label: the split, in words.
    """
    shape, layers = problem.shape, problem.shape.num_hidden_layers
    is_moe = shape.moe is not None
    ffn_layout = Layout(tensor_parallel=1, expert_parallel=num_ffn if is_moe else 1)
    attention = _worker(problem, node_types[0], Layout(), quantization)
    ffn = _worker(problem, node_types[1], ffn_layout, quantization)
    running = _running(problem, attention.machine, num_attention, quantization)
    if running is None or not _ffn_fits(problem, ffn.machine, num_ffn, quantization):
        return
    context = np.full_like(running, (attention.contexts.least + attention.contexts.most) / 2.0)
    for micro in MICRO_BATCHES:
        own, all_tokens = np.ceil(running / (num_attention * micro)), running / micro
        attention_s = attention.attention_linear_s(own) + attention.decode_attention_s(own, context) / layers
        ffn_s = _ffn_layer_s(problem, ffn, all_tokens, num_ffn)
        row = shape.hidden_size * (SCHEMES[quantization.experts].activation_bytes + BYTES_16_BIT)
        rate = min(worker.exchange.transfer_bytes_per_s for worker in (attention, ffn))
        moved_s = attention.machine.scale_out_latency_s + np.maximum(own, all_tokens / num_ffn) * row / rate
        slowest = np.maximum(np.maximum(attention_s, ffn_s), moved_s)
        tpot = (
            attention.constants.host_step_s
            + layers * micro * slowest
            + attention.head_s(np.ceil(running / num_attention))
        )
        yield from _within_slo(
            problem,
            tpot,
            running,
            num_attention + num_ffn,
            usd_per_hour=_usd_per_hour((attention.machine, num_attention), (ffn.machine, num_ffn)),
            name="attention and FFN on different devices",
            label=f"{label}, {micro} micro-batches",
            source="Step-3, arXiv:2507.19427; Lamina, arXiv:2405.01814",
        )


def _ffn_layer_s(problem: ServingProblem, worker: Worker, tokens: FloatArray, num_ffn: int) -> FloatArray:
    """Mean time of the MLP or experts of a layer on the FFN devices, s."""
    shape = problem.shape
    dense = shape.num_dense_layers
    total = np.zeros_like(tokens)
    if dense:
        total = total + dense * worker.mlp_s(tokens, shape.intermediate_size / num_ffn)
    if shape.moe is not None:
        each = worker.routed_s(tokens)
        if shape.moe.shared_intermediate_size:
            each = each + worker.mlp_s(tokens, shape.moe.shared_intermediate_size / num_ffn)
        total = total + shape.num_moe_layers * each
    return total / shape.num_hidden_layers


def _running(
    problem: ServingProblem, machine: Machine, num_attention: int, quantization: Quantization
) -> FloatArray | None:
    """Concurrency levels that fit the attention devices' memory; None where no request fits."""
    # An attention device holds neither experts nor MLP: modelled as experts spread over very many devices.
    layout = Layout(expert_parallel=ELSEWHERE) if problem.shape.moe is not None else Layout()
    limits = replace(problem.engine_limits(machine.device, Role.DECODE), max_num_seqs=MOST_RUNNING)
    held = problem.workload.input_length + problem.workload.output_length
    memory = worker_memory(problem.shape, machine.device, layout, limits, quantization, context=held)
    spare = 0.0
    if problem.shape.moe is None:
        mlp = SCHEMES[quantization.mlp].weight_bytes * problem.shape.dense_mlp_parameters
        spare = problem.shape.num_hidden_layers * mlp
    room = memory.budget_bytes - memory.weights_bytes - memory.workspace_bytes + spare
    most = int(min(num_attention * room / (memory.kv_bytes_per_token * held), MOST_RUNNING * num_attention))
    return None if most < num_attention else np.unique(np.geomspace(num_attention, most, RUNNING_LEVELS).round())


def _ffn_fits(problem: ServingProblem, machine: Machine, num_ffn: int, quantization: Quantization) -> bool:
    """Whether the weights without those of attention fit the FFN devices."""
    shape = problem.shape
    whole = weights_bytes(shape, quantization, Layout())
    attention = SCHEMES[quantization.attention].weight_bytes * shape.attention_parameters * shape.num_hidden_layers
    limits = problem.engine_limits(machine.device, Role.DECODE)
    return (whole - attention) / num_ffn <= limits.memory_fraction * machine.device.usable_memory_bytes


# --- experts in host memory -------------------------------------------------------------------------------------------


def _host_experts(problem: ServingProblem) -> Iterator[WhatIf]:
    """The second equation of the module's text on one node of each type whose host memory is known and needed."""
    shape = problem.shape
    if shape.moe is None:
        return
    for node_type, machine in problem.machines.items():
        devices = min(machine.devices_per_host, machine.num_devices)
        if machine.host_memory_bytes is None or shape.num_attention_heads % devices:
            continue
        for quantization in problem.quantizations:
            expert = SCHEMES[quantization.experts].weight_bytes * shape.expert_parameters
            all_experts = expert * shape.moe.num_experts * shape.num_moe_layers
            layout = Layout(tensor_parallel=devices, expert_parallel=devices)
            limits = replace(problem.engine_limits(machine.device), max_num_seqs=MOST_RUNNING)
            budget = limits.memory_fraction * machine.device.usable_memory_bytes * devices
            held = problem.workload.input_length + problem.workload.output_length
            memory = worker_memory(shape, machine.device, layout, limits, quantization, context=held)
            if memory.fits or all_experts > machine.host_memory_bytes:
                continue  # everything fits on the devices, or not even in host memory
            rest = devices * (memory.weights_bytes + memory.workspace_bytes) - all_experts
            worker = _worker(problem, node_type, layout, quantization)
            running = np.unique(np.geomspace(1, MOST_BESIDE_HOST, BESIDE_HOST_LEVELS).round())
            cache = running * held * memory.kv_bytes_per_token * devices
            share = np.clip((budget - rest - cache) / all_experts, 0.0, 1.0)
            on_device = (budget - rest - cache) > 0.0
            hit = distinct_experts(running, top_k=shape.moe.num_experts_per_token, num_experts=shape.moe.num_experts)
            from_host = (1.0 - share) * hit * expert / HOST_BYTES_PER_S
            context = np.full_like(running, problem.workload.input_length + problem.workload.output_length / 2.0)
            parts = np.asarray(sum(worker.dense_parts_s(running).values()))
            tpot = worker.constants.host_step_s + parts + worker.decode_attention_s(running, context)
            tpot = tpot + worker.head_s(running)
            tpot = tpot + shape.num_moe_layers * np.maximum(share * worker.routed_s(running), from_host)
            best = float(share[on_device].max(initial=0.0))
            yield from _within_slo(
                problem,
                tpot[on_device],
                running[on_device],
                devices,
                usd_per_hour=_usd_per_hour((machine, devices)),
                name="experts that do not fit are computed from host memory",
                label=f"TP{devices} on {node_type}, {best:.0%} of the experts on devices",
                source="MoE-Lens, arXiv:2504.09345; HybriMoE, arXiv:2504.05897",
            )


# --- common -----------------------------------------------------------------------------------------------------------


def _worker(problem: ServingProblem, node_type: str, layout: Layout, quantization: Quantization) -> Worker:
    """One decode worker, whose kernels price the parts."""
    machine = problem.machines[node_type]
    pool = Pool(
        role=Role.DECODE,
        layout=layout,
        num_workers=1,
        limits=problem.engine_limits(machine.device, Role.DECODE),
        quantization=quantization,
        node_type=node_type,
        power_cap_w=problem.caps_of(machine.device)[0],
    )
    # Bounds on shapes whose experts lie elsewhere than a map or a recording says.
    return pool_worker(replace(problem.site, experts=None), pool, problem.workload)


def _usd_per_hour(*parts: tuple[Machine, int]) -> float | None:
    """Price of some devices at their shares of their nodes' prices, USD/h; None where one has none."""
    prices = [(machine.usd_per_hour_per_device, number) for machine, number in parts]
    return None if any(each is None for each, _ in prices) else sum((each or 0.0) * number for each, number in prices)


def _within_slo(
    problem: ServingProblem,
    tpot: FloatArray,
    running: FloatArray,
    num_devices: int,
    *,
    usd_per_hour: float | None,
    name: str,
    label: str,
    source: str,
) -> Iterator[WhatIf]:
    """The load with the most tokens/s per device within the SLO on the time per output token."""
    within = np.flatnonzero(tpot <= problem.tpot_limit_s)
    if not len(within):
        return
    at = within[np.argmax(running[within] / tpot[within])]
    rate = float(running[at] / tpot[at])
    yield WhatIf(
        name=name,
        label=label,
        num_devices=num_devices,
        num_running=int(running[at]),
        tpot_s=float(tpot[at]),
        tokens_per_s_per_device=rate / num_devices,
        source=source,
        usd_per_million_tokens=None if usd_per_hour is None else usd_per_million_tokens(usd_per_hour, rate),
    )
