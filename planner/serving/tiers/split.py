"""Where the weights of a worker lie that fits no device alone: every split over devices and host that an engine runs.

Of a layout with experts on the host, N routed experts of each MoE layer stay in device memory: every N is looked at,
from none to as many as leave room for one request, because an expert more takes the room of cached tokens; of those
that hold as many requests the largest N is priced. The same holds for the number of layers that llama.cpp keeps on
the host. Of a layout that streams, each device keeps all that leaves room for 1, 2, 4 … requests. Only mixed workers
on one host, without data-parallel attention: no engine documents the others together with weights on the host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.units import format_bytes
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.serving.estimator.encoders.vision import encoder_bytes
from meshplan.planner.serving.estimator.memory import WorkerMemory, worker_memory
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.estimator.table import token_knots
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.engines.rules import EngineRules
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.weight_tiers import Way, WeightTiers
from meshplan.planner.serving.search.layouts import PlacedWorker, default_limits, tokens_held
from meshplan.planner.serving.tiers.host import Host
from meshplan.planner.serving.tiers.kernels import device_misses, kernel_of
from meshplan.planner.serving.tiers.layers import (
    OFFLOAD_TOKENS,
    host_bytes_of,
    page_cache_s_per_byte,
    slot_layers,
    socket_bytes_per_s,
)
from meshplan.planner.serving.tiers.popularity import Popularity
from meshplan.planner.serving.tiers.worker import HostExperts, expert_bytes

# Share of device memory for weights, cache and activations with experts on the host: that of KTransformers' own example
# on RTX 4090 (kt-kernel_intro.md); SGLang's table reserves more on small devices than the chunk of the example takes.
HYBRID_MEMORY_FRACTION = 0.92


def fits_host(rules: EngineRules, layout: Layout, machine: Machine) -> bool:
    """On one host, every expert split over all devices of a stage; stages only where devices hold whole layers."""
    if Way.LAYERS_ON_HOST.value not in rules.weight_ways and layout.pipeline_parallel > 1:
        return False
    rest = (layout.attention_data_parallel, layout.context_parallel, layout.expert_parallel)
    return rest == (1, 1, 1) and layout.num_devices <= machine.devices_per_host


def is_legal(problem: ServingProblem, layout: Layout, quantization: Quantization) -> bool:
    """Whether the engine accepts the layout."""
    return all(rule.holds(problem.shape, layout) for rule in problem.rules.layout_rules(quantization))


class HostWeights(Protocol):
    """What a split asks of the question's weights in host memory (:class:`.placement.HostTiering`)."""

    @property
    def popularity(self) -> Popularity | None:
        """How tokens choose experts; None for dense models."""

    @property
    def pinned_experts(self) -> int | None:
        """Experts of each layer that the spec pins to devices."""

    def memory(self, memory: WorkerMemory, shape: ModelShape, pool: Pool) -> WorkerMemory:
        """Memory of a device without what lies on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The placements of one layout in one format."""

    problem: ServingProblem
    host: Host
    node_type: str
    machine: Machine
    layout: Layout
    quantization: Quantization
    tiering: HostWeights

    def found(self, rejected: Counter[str]) -> list[PlacedWorker]:
        """Placements that fit devices and host, in the ways that the engine has words for."""
        ways = self.problem.rules.weight_ways
        shape = self.problem.shape
        found: list[PlacedWorker] = []
        if Way.LAYERS_ON_HOST.value in ways:
            return self._layers(rejected)
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
        limits = self._hybrid_limits if self._is_hybrid else self.limits
        problem = self.problem
        return worker_memory(
            problem.shape,
            self.machine.device,
            self.layout,
            limits,
            self.quantization,
            context=tokens_held(problem, Role.MIXED),
            encoder_bytes=encoder_bytes(problem.shape, problem.workload.images, self.layout),
            padding=problem.rules.expert_padding(self.quantization, self.machine.device),
        )

    @property
    def limits(self) -> EngineLimits:
        """The engine's limits of the worker."""
        return default_limits(self.problem, Role.MIXED, self.machine.device, self.layout)

    @property
    def _hybrid_limits(self) -> EngineLimits:
        """The same where the host computes experts: the share of that example's, unless one is pinned."""
        is_pinned = self.problem.pinned.memory_fraction(Role.MIXED) is not None
        return self.limits if is_pinned else replace(self.limits, memory_fraction=HYBRID_MEMORY_FRACTION)

    @property
    def _is_hybrid(self) -> bool:
        return Way.EXPERTS_ON_HOST.value in self.problem.rules.weight_ways and self.problem.shape.moe is not None

    def _placed(self, tiers: WeightTiers, memory: WorkerMemory) -> PlacedWorker | None:
        held = tokens_held(self.problem, Role.MIXED)
        most = int(memory.kv_capacity_tokens / held)
        if most < 1:
            return None
        limits = self._hybrid_limits if tiers.way is Way.EXPERTS_ON_HOST else self.limits
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
        each = shape.num_moe_layers * expert_bytes(shape, self.quantization)
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

    # --- whole layers on the host -------------------------------------------------------------------------------------

    def _layers(self, rejected: Counter[str]) -> list[PlacedWorker]:
        """Every number of layers that a host may keep, the fewest first."""
        whole, shape, fitting = self.whole, self.problem.shape, list[PlacedWorker]()
        held = tokens_held(self.problem, Role.MIXED)
        for number in range(1, slot_layers(shape) + 1):
            tiers = self._layered(number)
            placed = self._placed(tiers, self.tiering.memory(whole, shape, self._pool(tiers)))
            if placed is None:
                continue
            tokens = held * placed.limits.max_num_seqs
            on_host = host_bytes_of(shape, self.quantization, number, cached_tokens=tokens)
            beyond = on_host - self.host.usable_bytes
            if beyond > 0.0:
                if self.host.drives_bytes_per_s is None or beyond > tiers.host_bytes:
                    usable = format_bytes(self.host.usable_bytes)
                    rejected[
                        f"layers for the host exceed its usable memory, {usable}, and no cluster.drive is named"
                    ] += 1
                    break
                placed = replace(placed, weight_tiers=self._on_drives(tiers, beyond))
            fitting.append(placed)
        if not fitting:
            rejected["what is no routed expert does not fit the devices beside one request's KV cache"] += 1
        most_running = self.problem.workload.concurrency or self.limits.max_num_seqs
        if self.problem.workload.prefix_hit_rate > 0.0 or not self._host_is_slower():
            return fitting
        return _undominated(fitting[::-1], most_running)

    def _layered(self, number: int) -> WeightTiers:
        return WeightTiers(
            way=Way.LAYERS_ON_HOST,
            host_bytes=host_bytes_of(self.problem.shape, self.quantization, number),
            host_layers=number,
            threads=self.host.sockets * self.host.processor.cores,
            numa_nodes=self.host.sockets,
            device_prefill_tokens=OFFLOAD_TOKENS,
        )

    def _on_drives(self, tiers: WeightTiers, beyond: float) -> WeightTiers:
        """Layers on the host of which some bytes lie on its drives, with what that leaves in doubt."""
        part = replace(tiers, drive_bytes=beyond)
        best, worst = page_cache_s_per_byte(self.host, part, socket_bytes_per_s(self.host))
        return replace(part, drive_doubt=float(np.log(worst / best) / 2.0))

    def _host_is_slower(self) -> bool:
        """No iteration is shorter where one layer more lies on the host: what each table changes at least, summed.

        All tables are linear in the number of layers, so that two neighbours stand for any.
        """
        few, more = (
            pool_worker(self.problem.site, self._pool(self._layered(number)), self.problem.workload).step_cost()
            for number in (1, 2)
        )
        tokens, requests = token_knots(len(few.experts_s) - 1), token_knots(few.max_num_seqs)

        def least_change(name: str, knots: FloatArray) -> float:
            return min(getattr(more, name)[int(n)] - getattr(few, name)[int(n)] for n in knots)

        rest = least_change("dense_s", tokens) + least_change("experts_s", tokens)
        fixed = min(least_change("decode_fixed_s", requests), 0.0)
        return rest + fixed >= 0.0 and least_change("decode_context_s", requests) >= 0.0

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

    Proof: an expert (a layer) more in device memory leaves the host fewer to read, so no iteration is slower; the rest
    of a worker depends on how many requests its cache holds, of which no more than ``most_running`` ever run.
    """
    kept: dict[int, PlacedWorker] = {}
    for placed in reversed(placements):
        kept.setdefault(min(placed.limits.max_num_seqs, most_running), placed)
    return list(kept.values())
