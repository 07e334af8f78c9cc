"""Weights in host memory as the search and the estimator ask for them: placements, workers, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.units import format_bandwidth
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import WorkerMemory, weights_bytes
from meshplan.planner.serving.problem.config import Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.weight_tiers import Way
from meshplan.planner.serving.search.layouts import PlacedWorker, layouts
from meshplan.planner.serving.tiers.host import Host
from meshplan.planner.serving.tiers.layers import HostLayers, layered_memory
from meshplan.planner.serving.tiers.popularity import Popularity
from meshplan.planner.serving.tiers.split import Split, fits_host, is_legal
from meshplan.planner.serving.tiers.worker import HostExperts, StreamedWeights, expert_bytes, with_less


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
                    if not fits_host(problem.rules, layout, machine) or not is_legal(problem, layout, quantization):
                        continue
                    split = Split(
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
        if tiers.way is Way.LAYERS_ON_HOST:
            return HostLayers(**given, host=host, popularity=self.popularity, tiers=tiers)
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
        if tiers.way is Way.LAYERS_ON_HOST:
            return layered_memory(memory, shape, pool)
        on_host, extra = tiers.streamed_bytes_per_device, 0.0
        if tiers.way is Way.EXPERTS_ON_HOST and shape.moe is not None:
            each = expert_bytes(shape, pool.quantization) / pool.layout.num_devices
            on_host = shape.num_moe_layers * (shape.moe.num_experts - tiers.device_experts) * each
            # Experts that come for a prefill are copied into room for one layer's.
            extra = (shape.moe.num_experts - tiers.device_experts) * each if tiers.device_prefill_tokens else 0.0
        return with_less(memory, on_host, extra)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is assumed and was not measured."""
        hosts = {host.processor.name: host for host in self.hosts.values()}
        found = [
            f"weights in host memory: 40 published decode rates err by 12 % in the median; here one host reads "
            f"{format_bandwidth(host.read_bytes_per_s)} of its {format_bandwidth(host.bandwidth_bytes_per_s)}"
            + (", an assumption: say cluster.host_processor or host_memory_bandwidth" if host.is_assumed else "")
            for host in hosts.values()
        ]
        found += [
            f"weights on drives: {format_bandwidth(host.drives_bytes_per_s)} are assumed of their data sheets, and "
            "what the page cache keeps is not known: the interval reaches from all that fits to nothing"
            for host in hosts.values()
            if host.drives_bytes_per_s is not None
        ]
        return tuple(found)

    def document(self) -> dict[str, Any]:
        """The hosts as plain JSON."""
        hosts = {name: {**asdict(host), "processor": asdict(host.processor)} for name, host in self.hosts.items()}
        for host in hosts.values():
            rates = host["processor"]["matrix_flops_per_s"]
            host["processor"]["matrix_flops_per_s"] = {str(size): rate for size, rate in rates.items()}
        return {"hosts": hosts, "popularity": None if self.popularity is None else self.popularity.source}
