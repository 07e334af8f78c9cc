"""Decode workers with FFN devices as the search and the estimator ask for them: placements, workers, memory.

Attention devices hold attention weights, embeddings, routers and the KV cache; FFN devices hold the routed experts in
even parts and a copy of dense layers and shared experts each, or, of a dense model, an even part of the MLPs.

*The space.* Every pair of node types that a network (or one scale-up domain) joins. On either side powers of two up to
a scale-up domain, beyond it whole domains: one, two, three, four, six, eight, twelve … of them. Tensor parallelism of
the attention over powers of two that divide its heads, inside a domain; FFN devices that divide the experts or the MLP,
an MLP inside a domain; one to four micro-batches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.hardware import EvidenceLevel
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.attention_ffn.worker import Link, SeparatedWorker, without_ffn
from meshplan.planner.serving.estimator.breakdown import Part
from meshplan.planner.serving.estimator.exchange.collectives import Exchange
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import FIXED_BYTES, WorkerMemory, weights_bytes
from meshplan.planner.serving.estimator.pools import pool_memory
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization
from meshplan.planner.serving.problem.weight_tiers import FfnDevices
from meshplan.planner.serving.search.layouts import PlacedWorker, default_limits, tokens_held

# Micro-batches tried. MegaScale-Infer (arXiv:2504.02263, §4.1) needs three where links take less than half of a stage,
# four where they take more.
MICRO_BATCHES = (1, 2, 3, 4)
NEVER_RUN = (
    "attention and FFN on different devices: no run was compared (Step-3's published rate is met within 2 to 13 %), "
    "and no release of an engine that is read here takes it. Experimental: SGLang's main branch (--afd-role, Qwen3-MoE "
    "alone; pull request 36258) and a plugin of vLLM (vllm-project/afd-plugin: --additional-config, two micro-batches)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFfn:
    """A question's machines, between which attention and FFN may be split.

    Args:
        machines: node type → devices and links.
        constants: node type → calibrated constants.
        is_asked: other decode workers are no answer.
    """

    machines: Mapping[str, Machine]
    constants: Mapping[str, ServingConstants]
    is_asked: bool = False

    # --- what the search asks -----------------------------------------------------------------------------------------

    def placements(self, problem: ServingProblem, rejected: Counter[str]) -> Iterator[PlacedWorker]:
        """Every worker of the space that fits its devices."""
        for own, other in itertools.product(self.machines, repeat=2):
            if not self._are_joined(own, other):
                rejected[f"no network joins attention on {own} with FFN on {other}"] += 1
                continue
            for quantization in problem.quantizations:
                if _misses(quantization, self.machines[own], self.machines[other]):
                    rejected[f"{own} or {other} has no units for its part of {', '.join(quantization.schemes)}"] += 1
                    continue
                for layout, ffn in self._splits(problem, own, other):
                    placed = self._placed(problem, own, layout, ffn, quantization)
                    if placed is None:
                        rejected["attention, or its FFN devices' weights, do not fit"] += 1
                    else:
                        yield placed

    def _are_joined(self, own: str, other: str) -> bool:
        return self._is_one_domain(own, other) or all(self.machines[name].is_joined for name in (own, other))

    def _is_one_domain(self, own: str, other: str) -> bool:
        machine = self.machines[own]
        return own == other and machine.num_devices <= machine.domain_size

    def _splits(self, problem: ServingProblem, own: str, other: str) -> Iterator[tuple[Layout, FfnDevices]]:
        shape, pinned = problem.shape, problem.pinned.of(Role.DECODE)
        limit = problem.limits.max_devices or problem.num_devices
        whole = shape.intermediate_size if shape.moe is None else shape.moe.num_experts
        for number in sizes(self.machines[other]):
            within = number <= self.machines[other].domain_size
            if whole % number or (shape.moe is None and not within) or pinned.get("expert_parallel", number) != number:
                continue
            left = min(limit - number, self.machines[own].num_devices - (number if own == other else 0))
            for size, tensor in itertools.product(sizes(self.machines[own]), _tensors(problem, self.machines[own])):
                ranks = size // tensor
                if size > left or size % tensor or pinned.get("attention_data_parallel", ranks) != ranks:
                    continue
                expert = 1 if shape.moe is None else number
                layout = Layout(tensor_parallel=tensor, attention_data_parallel=ranks, expert_parallel=expert)
                for micro in MICRO_BATCHES:
                    yield layout, FfnDevices(node_type=other, num_devices=number, micro_batches=micro)

    def _placed(
        self, problem: ServingProblem, own: str, layout: Layout, ffn: FfnDevices, quantization: Quantization
    ) -> PlacedWorker | None:
        machine, ranks, held = self.machines[own], layout.attention_data_parallel, tokens_held(problem, Role.DECODE)
        limits = default_limits(problem, Role.DECODE, machine.device, layout)
        pool = Pool(
            role=Role.DECODE,
            layout=layout,
            num_workers=1,
            limits=limits,
            quantization=quantization,
            node_type=own,
            ffn=ffn,
        )
        memory = pool_memory(problem.site, pool, problem.workload)
        most = int(memory.kv_capacity_tokens / held) // ranks * ranks
        if most < ranks:
            return None
        if "max_num_seqs" not in problem.pinned.of(Role.DECODE):
            pool = replace(pool, limits=replace(limits, max_num_seqs=min(limits.max_num_seqs, most)))
        room = self.ffn_memory(problem, pool)
        if room.weights_bytes + room.workspace_bytes > room.budget_bytes:
            return None
        return PlacedWorker(
            role=Role.DECODE,
            node_type=own,
            machine=machine,
            layout=layout,
            quantization=quantization,
            limits=pool.limits,
            memory=memory,
            ffn=ffn,
            ffn_machine=self.machines[ffn.node_type],
        )

    # --- what the estimator asks --------------------------------------------------------------------------------------

    def worker(self, worker: Worker, pool: Pool) -> Worker:
        """The worker of a pool with its MLPs or experts on FFN devices."""
        ffn = pool.ffn
        if ffn is None:
            return worker
        split = Layout(tensor_parallel=ffn.num_devices)
        if worker.shape.moe is not None:
            split = Layout(attention_data_parallel=ffn.num_devices, expert_parallel=ffn.num_devices)
        given = {name: getattr(worker, name) for name in Worker.__dataclass_fields__}
        other = replace(
            worker, machine=self.machines[ffn.node_type], constants=self.constants[ffn.node_type], layout=split
        )
        return SeparatedWorker(**given, ffn=other, link=self._link(pool.node_type, ffn), alternating=ffn.micro_batches)

    def _link(self, own: str, ffn: FfnDevices) -> Link:
        sides = (self.machines[own], self.machines[ffn.node_type])
        if self._is_one_domain(own, ffn.node_type):
            machine = sides[0]
            share = 1.0
            if machine.mesh is not None:  # without a switch: what lies between the members of a group
                group = np.array(machine.num_devices)
                share = float(machine.mesh.all_to_all_share(group, np.array(1), group))
            return Link(
                bytes_per_s=share * Exchange(machine=machine).scale_up_bytes_per_s,
                peak_bytes_per_s=machine.scale_up_bytes_per_s,
                latency_s=machine.scale_up_latency_s,
                nodes=ffn.num_devices,
            )
        return Link(
            bytes_per_s=min(Exchange(machine=machine).network_bytes_per_s for machine in sides),
            peak_bytes_per_s=min(machine.scale_out_bytes_per_s for machine in sides),
            latency_s=max(machine.scale_out_latency_s for machine in sides),
            nodes=-(-ffn.num_devices // sides[1].domain_size),
        )

    def memory(self, memory: WorkerMemory, shape: ModelShape, pool: Pool) -> WorkerMemory:
        """Memory of an attention device: no MLPs, no experts, and what they leave is cache."""
        if pool.ffn is None:
            return memory
        layout, formats = pool.layout, pool.quantization
        routers = shape.num_moe_layers * BYTES_16_BIT * shape.router_parameters
        beside = memory.weights_bytes - weights_bytes(shape, formats, layout)
        weights = beside + routers + weights_bytes(without_ffn(shape), formats, layout)
        room = max(memory.budget_bytes - weights - memory.workspace_bytes, 0.0)
        tokens = int(room / memory.kv_bytes_per_token * layout.attention_data_parallel)
        return replace(memory, weights_bytes=weights, kv_capacity_tokens=tokens)

    def ffn_memory(self, problem: ServingProblem, pool: Pool) -> WorkerMemory:
        """Memory of an FFN device: its weights, and the rows of every micro-batch with the widest layer of one."""
        ffn, shape, formats = pool.ffn, problem.shape, pool.quantization
        if ffn is None:
            raise AssertionError("a pool without FFN devices has no memory of theirs")
        device, mlp = self.machines[ffn.node_type].device, SCHEMES[formats.mlp].weight_bytes
        weights = shape.num_dense_layers * mlp * shape.dense_mlp_parameters
        tokens = float(pool.limits.max_num_seqs)
        if shape.moe is None:
            weights, width, visits = weights / ffn.num_devices, shape.intermediate_size / ffn.num_devices, 1.0
        else:
            experts = SCHEMES[formats.experts].weight_bytes * shape.moe.num_experts * shape.expert_parameters
            weights += shape.num_moe_layers * (experts / ffn.num_devices + mlp * shape.shared_expert_parameters)
            width = float(shape.moe.expert_intermediate_size)
            visits = max(shape.moe.num_experts_per_token / ffn.num_devices, 1.0 / ffn.num_devices)
        rows = tokens * visits * (2.0 * shape.hidden_size + shape.mlp_matrices * width / ffn.micro_batches)
        return WorkerMemory(
            weights_bytes=weights,
            workspace_bytes=FIXED_BYTES + BYTES_16_BIT * rows,
            kv_bytes_per_token=0.0,
            budget_bytes=pool.limits.memory_fraction * device.usable_memory_bytes,
            kv_capacity_tokens=0,
        )

    def parts(self, worker: Worker, num_running: float) -> list[Part]:
        """One decode iteration: its slowest stage, what is waited for the others, the rest."""
        if not isinstance(worker, SeparatedWorker):
            raise AssertionError("parts are those of workers with FFN devices")
        running = np.array([max(num_running, 1.0)])
        context = np.array([(worker.contexts.least + worker.contexts.most) / 2.0])
        busy = dict.fromkeys(("attention", "links", "FFN"), 0.0)
        for count, micro, (stages,) in worker.stages(running, [context]):
            links = np.maximum(stages.sent, stages.back)
            for name, seconds in zip(busy, (stages.attention, links, stages.ffn), strict=True):
                busy[name] += count * float((micro * seconds)[0])
        slowest = max(busy, key=lambda name: busy[name])
        whole = float(worker.traversals_s(running, context)[0, 0])
        seqs = running / worker.layout.attention_data_parallel
        host = worker.constants.host_step_s + worker.constants.host_s_per_seq * float(seqs[0])
        level = EvidenceLevel.ASSUMED
        return [
            Part(name=f"{slowest}, the slowest stage", seconds=busy[slowest], level=level),
            Part(name="waiting for the other stages", seconds=max(whole - busy[slowest], 0.0), level=level),
            Part(name="LM head and sampling", seconds=float(worker.head_s(seqs)[0]), level=level),
            Part(name="host and scheduler", seconds=host, level=level),
        ]

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was not held against a run."""
        return (NEVER_RUN,)


def sizes(machine: Machine) -> list[int]:
    """Numbers of devices of one side; see the module's text.

    Powers of two up to a domain of 8, then 8, 16, 24, 32, 48, 64 …
    """
    domain, most = machine.domain_size, machine.num_devices
    inside = [2**power for power in range(domain.bit_length()) if 2**power < domain]
    domains = sorted({base * 2**power for base in (1, 3) for power in range(most.bit_length())} - {0})
    return [size for size in (*inside, *(domain * number for number in domains)) if size <= most]


def _tensors(problem: ServingProblem, machine: Machine) -> list[int]:
    """Tensor-parallel degrees of the attention."""
    pinned = problem.pinned.of(Role.DECODE).get("tensor_parallel")
    heads = problem.shape.num_attention_heads
    free = [2**power for power in range(machine.domain_size.bit_length())]
    return [one for one in (free if pinned is None else [pinned]) if one <= machine.domain_size and heads % one == 0]


def _misses(quantization: Quantization, own: Machine, other: Machine) -> bool:
    """Whether a side lacks arithmetic units for the formats of its own part."""
    attention = replace(quantization, mlp=quantization.attention, experts=quantization.attention)
    experts = replace(quantization, attention=quantization.experts)
    return bool(attention.missing_on(own.device) or experts.missing_on(other.device))
