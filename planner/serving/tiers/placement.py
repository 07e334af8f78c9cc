"""Where the weights of a worker lie that fits no device alone: every split over devices and host that an engine runs.

Of a layout with experts on the host, N routed experts of each MoE layer stay in device memory: every N is looked at,
from none to as many as leave room for one request, because an expert more takes the room of cached tokens; of those
that hold as many requests the largest N is priced. Of a layout that streams, each device keeps all that leaves room
for 1, 2, 4 … requests. Only mixed workers on one host, without pipelines or data-parallel attention: no engine
documents the others together with weights on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.units import format_bandwidth, format_bytes
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import WorkerMemory, weights_bytes, worker_memory
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization
from meshplan.planner.serving.problem.weight_tiers import Way, WeightTiers
from meshplan.planner.serving.search.layouts import PlacedWorker, default_limits, layouts, tokens_held
from meshplan.planner.serving.tiers.host import Host
from meshplan.planner.serving.tiers.kernels import device_misses, kernel_of
from meshplan.planner.serving.tiers.popularity import Popularity
from meshplan.planner.serving.tiers.worker import HostExperts, StreamedWeights

# Share of device memory for weights, cache and activations with experts on the host: that of KTransformers' own example
# on RTX 4090 (kt-kernel_intro.md); SGLang's table reserves more on small devices than the chunk of the example takes.
HYBRID_MEMORY_FRACTION = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTiering:
    """A question's host memory, and what may be kept there.

    Args:
        hosts: node type → its host.
        popularity: of the model's experts; None for dense models.
        pinned_experts: routed experts of a layer in device memory, as the user fixed them.
    """

    hosts: dict[str, Host]
    popularity: Popularity | None = None
    pinned_experts: int | None = None

    # --- what the search asks -----------------------------------------------------------------------------------------

    @property
    def is_asked(self) -> bool:
        """The user pinned the experts in device memory."""
        return self.pinned_experts is not None

    def placements(self, problem: ServingProblem, role: Role, rejected: Counter[str]) -> Iterator[PlacedWorker]:
        """Workers with weights on the host; see the module's text."""
        if role is not Role.MIXED:
            rejected["weights on the host: only of workers that prefill and decode"] += 1
            return
        for node_type, host in self.hosts.items():
            machine = problem.machines[node_type]
            for quantization in problem.quantizations:
                if quantization.missing_on(machine.device):
                    continue
                for layout in layouts(problem, machine, role):
                    if not _is_simple(layout, machine) or not _is_legal(problem, layout, quantization):
                        continue
                    split = _Split(
                        problem=problem,
                        host=host,
                        node_type=node_type,
                        machine=machine,
                        layout=layout,
                        quantization=quantization,
                        tiering=self,
                    )
                    for placed in split.found(rejected):
                        yield from (replace(placed, power_cap_w=cap) for cap in problem.caps_of(machine.device))

    # --- what the estimator asks --------------------------------------------------------------------------------------

    def worker(self, worker: Worker, pool: Pool) -> Worker:
        """The worker of a pool with its weights where :class:`WeightTiers` says."""
        tiers, host = pool.weight_tiers, self.hosts[pool.node_type]
        if tiers is None:
            return worker
        given = {one.name: getattr(worker, one.name) for one in fields(Worker)}
        if tiers.way is Way.STREAMED:
            whole = weights_bytes(worker.shape, worker.quantization, worker.layout)
            return StreamedWeights(**given, host=host, share=tiers.streamed_bytes_per_device / whole)
        if self.popularity is None:
            raise AssertionError("experts on the host need a mixture of experts")
        return HostExperts(**given, host=host, popularity=self.popularity, tiers=tiers)

    def memory(self, memory: WorkerMemory, shape: ModelShape, pool: Pool) -> WorkerMemory:
        """Memory of a pool's fullest device without what lies on the host."""
        tiers = pool.weight_tiers
        if tiers is None:
            return memory
        on_host, extra = tiers.streamed_bytes_per_device, 0.0
        if tiers.way is Way.EXPERTS_ON_HOST and shape.moe is not None:
            each = _expert_bytes(shape, pool.quantization) / pool.layout.num_devices
            on_host = shape.num_moe_layers * (shape.moe.num_experts - tiers.device_experts) * each
            # Experts that come for a prefill are copied into room for one layer's.
            extra = (shape.moe.num_experts - tiers.device_experts) * each if tiers.device_prefill_tokens else 0.0
        return _with_less(memory, on_host, extra)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is assumed and was not measured."""
        hosts = {host.processor.name: host for host in self.hosts.values()}
        found = [
            f"weights in host memory: times follow one published table and nine published runs; here one host reads "
            f"{format_bandwidth(host.read_bytes_per_s)} of its {format_bandwidth(host.bandwidth_bytes_per_s)}"
            + (", an assumption: say cluster.host_processor or host_memory_bandwidth" if host.is_assumed else "")
            for host in hosts.values()
        ]
        return tuple(found)

    def document(self) -> dict[str, Any]:
        """The hosts as plain JSON."""
        hosts = {name: {**asdict(host), "processor": asdict(host.processor)} for name, host in self.hosts.items()}
        for host in hosts.values():
            rates = host["processor"]["matrix_flops_per_s"]
            host["processor"]["matrix_flops_per_s"] = {str(size): rate for size, rate in rates.items()}
        return {"hosts": hosts, "popularity": None if self.popularity is None else self.popularity.source}


def _with_less(memory: WorkerMemory, on_host: float, extra: float) -> WorkerMemory:
    """The memory with fewer weights and some more workspace, and the cache that then fits."""
    weights, workspace = memory.weights_bytes - on_host, memory.workspace_bytes + extra
    room = max(memory.budget_bytes - weights - workspace, 0.0)
    return replace(
        memory,
        weights_bytes=weights,
        workspace_bytes=workspace,
        kv_capacity_tokens=int(room / memory.kv_bytes_per_token),
    )


def _is_simple(layout: Layout, machine: Machine) -> bool:
    """One stage on one host, every expert split over all devices."""
    rest = (layout.pipeline_parallel, layout.attention_data_parallel, layout.context_parallel, layout.expert_parallel)
    return rest == (1, 1, 1, 1) and layout.num_devices <= machine.devices_per_host


def _is_legal(problem: ServingProblem, layout: Layout, quantization: Quantization) -> bool:
    return all(rule.holds(problem.shape, layout) for rule in problem.rules.layout_rules(quantization))


def _expert_bytes(shape: ModelShape, quantization: Quantization) -> float:
    return SCHEMES[quantization.experts].weight_bytes * shape.expert_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The placements of one layout in one format."""

    problem: ServingProblem
    host: Host
    node_type: str
    machine: Machine
    layout: Layout
    quantization: Quantization
    tiering: HostTiering

    def found(self, rejected: Counter[str]) -> list[PlacedWorker]:
        """Placements that fit devices and host, in the ways that the engine has words for."""
        ways = self.problem.rules.weight_ways
        shape = self.problem.shape
        found: list[PlacedWorker] = []
        if Way.EXPERTS_ON_HOST.value in ways and shape.moe is not None:
            missing = device_misses(self.machine.device)
            if missing:
                rejected[missing] += 1
            else:
                found = self._experts(rejected)
            # Streaming every expert is no way where the host can compute them.
            if not missing:
                return found
        if Way.STREAMED.value in ways and self.tiering.pinned_experts is None:
            found = self._streamed(rejected)
        if not ways:
            rejected[f"{self.problem.rules.name}: no flag keeps weights in host memory"] += 1
        return found

    @property
    def whole(self) -> WorkerMemory:
        """Memory with all weights on the devices."""
        limits = self.limits
        if self._is_hybrid:
            limits = replace(limits, memory_fraction=HYBRID_MEMORY_FRACTION)
        problem = self.problem
        held = tokens_held(problem, Role.MIXED)
        return worker_memory(problem.shape, self.machine.device, self.layout, limits, self.quantization, context=held)

    @property
    def limits(self) -> Any:
        """The engine's limits of the worker."""
        return default_limits(self.problem, Role.MIXED, self.machine.device, self.layout)

    @property
    def _is_hybrid(self) -> bool:
        return Way.EXPERTS_ON_HOST.value in self.problem.rules.weight_ways and self.problem.shape.moe is not None

    def _placed(self, tiers: WeightTiers, memory: WorkerMemory) -> PlacedWorker | None:
        held = tokens_held(self.problem, Role.MIXED)
        most = int(memory.kv_capacity_tokens / held)
        if most < 1:
            return None
        limits = self.limits
        if tiers.way is Way.EXPERTS_ON_HOST:
            limits = replace(limits, memory_fraction=HYBRID_MEMORY_FRACTION)
        if "max_num_seqs" not in self.problem.pinned.of(Role.MIXED):
            limits = replace(limits, max_num_seqs=max(min(limits.max_num_seqs, most), 1))
        return PlacedWorker(
            role=Role.MIXED,
            node_type=self.node_type,
            machine=self.machine,
            layout=self.layout,
            quantization=self.quantization,
            limits=limits,
            memory=memory,
            weight_tiers=tiers,
        )

    def _pool(self, tiers: WeightTiers) -> Pool:
        return Pool(
            role=Role.MIXED,
            layout=self.layout,
            num_workers=1,
            limits=self.limits,
            quantization=self.quantization,
            node_type=self.node_type,
            weight_tiers=tiers,
        )

    # --- experts on the host ------------------------------------------------------------------------------------------

    def _experts(self, rejected: Counter[str]) -> list[PlacedWorker]:
        shape = self.problem.shape
        if shape.moe is None or self.tiering.popularity is None:
            return []
        each = shape.num_moe_layers * _expert_bytes(shape, self.quantization)
        fitting: list[PlacedWorker] = []
        pinned, most = self.tiering.pinned_experts, shape.moe.num_experts
        numbers = range(most) if pinned is None else [min(pinned, most)]
        whole = self.whole
        model = self._tiers(0, 0.0)
        for number in numbers:
            on_host = (most - number) * each
            if on_host > self.host.usable_bytes:
                rejected[f"experts for the host exceed its usable memory, {format_bytes(self.host.usable_bytes)}"] += 1
                continue
            tiers = replace(model, device_experts=number, host_bytes=on_host)
            placed = self._placed(tiers, self.tiering.memory(whole, shape, self._pool(tiers)))
            if placed is None:
                break  # each expert more takes more room
            fitting.append(placed)
        caches_prefixes = self.problem.workload.prefix_hit_rate > 0.0  # then room beyond requests counts too
        most_running = self.problem.workload.concurrency or self.limits.max_num_seqs
        return fitting[::-1] if caches_prefixes else _undominated(fitting, most_running)

    def _tiers(self, number: int, on_host: float) -> WeightTiers:
        """Experts on the host with the kernel that fits, and the tokens from which devices prefill alone."""
        kernel = kernel_of(self.quantization.experts, self.host.processor)
        tiers = WeightTiers(
            way=Way.EXPERTS_ON_HOST,
            host_bytes=on_host,
            device_experts=number,
            by_popularity=self.tiering.popularity is not None and self.tiering.popularity.is_known,
            kernel=kernel.name,
            threads=self.host.sockets * self.host.processor.cores,
            numa_nodes=self.host.sockets,
        )
        if not kernel.prefills_on_devices:
            return tiers
        return replace(tiers, device_prefill_tokens=self._crossing(tiers))

    def _crossing(self, tiers: WeightTiers) -> int:
        """Tokens of an iteration from which copying the host's experts is faster than computing there; 0 for none."""
        worker = pool_worker(self.problem.site, self._pool(tiers), self.problem.workload)
        if not isinstance(worker, HostExperts):
            raise AssertionError("a pool with experts on the host makes such a worker")
        tokens = 2.0 ** np.arange(4, int(np.log2(self.limits.max_batched_tokens)) + 1)
        faster = worker.on_devices_s(tokens) < worker.routed_s(tokens)
        return int(tokens[np.argmax(faster)]) if faster.any() else 0

    # --- streamed -----------------------------------------------------------------------------------------------------

    def _streamed(self, rejected: Counter[str]) -> list[PlacedWorker]:
        whole, held = self.whole, tokens_held(self.problem, Role.MIXED)
        limits, found, requests = self.limits, [], 1
        while requests <= limits.max_num_seqs:
            cache = requests * held * whole.kv_bytes_per_token
            room = whole.budget_bytes - whole.workspace_bytes - cache
            on_host = max(whole.weights_bytes - room, 0.0)
            if room < 0.0 or on_host > whole.weights_bytes:
                break
            if on_host * self.layout.num_devices > self.host.usable_bytes:
                usable = format_bytes(self.host.usable_bytes)
                rejected[f"weights for the host exceed its usable memory, {usable}"] += 1
                break
            # Whole 0.1 GiB, upwards: what the flag says is what is freed.
            streamed = min(np.ceil(on_host / _STREAM_STEP) * _STREAM_STEP, whole.weights_bytes)
            tiers = WeightTiers(
                way=Way.STREAMED,
                host_bytes=float(streamed) * self.layout.num_devices,
                streamed_bytes_per_device=float(streamed),
            )
            placed = self._placed(tiers, self.tiering.memory(whole, self.problem.shape, self._pool(tiers)))
            if placed is not None:
                found.append(placed)
            requests *= 2
        return found


_STREAM_STEP = 0.1 * 2**30


def _undominated(placements: list[PlacedWorker], most_running: int) -> list[PlacedWorker]:
    """Of placements that hold as many requests the one with most experts on devices, which is first.

    Proof: an expert more in device memory leaves the host fewer to read, so no iteration is slower; the rest of a
    worker depends on how many requests its cache holds, of which no more than ``most_running`` ever run.
    """
    kept: dict[int, PlacedWorker] = {}
    for placed in reversed(placements):
        kept.setdefault(min(placed.limits.max_num_seqs, most_running), placed)
    return list(kept.values())
