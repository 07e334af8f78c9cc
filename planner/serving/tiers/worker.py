"""Iteration times of a worker whose weights lie on devices and host.

*Experts on the host* (KTransformers; MoE-Lens, arXiv:2504.09345). Attention, shared experts and N routed experts of
each MoE layer are in device memory, the others are computed where they lie while the devices compute theirs. T
tokens::

    layer(T) = max(devices(T·s), P(T)·round trip + max(hit(T)·bytes / B, 2·T·m·parameters / F))

with m choices of a token on the host, s = 1 − m/top_k of them on devices, hit(T) distinct experts of the host and
P(T) that there is one (:mod:`.popularity`). From some number of tokens on, copying the host's experts to the devices
is faster::

    layer(T) = devices(T) + (E − N)·bytes / (devices · link)

*Streamed* (vLLM's and SGLang's ``--cpu-offload-gb``). Each device holds a share f of its weights in host memory and
reads them over its link in every iteration, of experts only those that are hit::

    added(T) = f·(dense bytes + expert bytes·distinct(T)/E) / link

Assumes: a product reads each weight once over the link (long prompts may read more), and what it reads over the link it
does not read from its own memory: that time is kept, a few per cent too slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.surfaces.experts import distinct_experts
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import WorkerMemory, weights_bytes
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization
from meshplan.planner.serving.problem.weight_tiers import WeightTiers
from meshplan.planner.serving.tiers.host import LINK_SHARE, Host
from meshplan.planner.serving.tiers.kernels import KERNELS
from meshplan.planner.serving.tiers.popularity import OnHost, Popularity


@dataclass(frozen=True, kw_only=True)
class HostExperts(Worker):
    """A worker with routed experts on its host.

    Args:
        host: where they lie.
        popularity: how tokens choose them.
        tiers: which of them.
    """

    host: Host
    popularity: Popularity
    tiers: WeightTiers

    @property
    def expert_bytes(self) -> float:
        """One routed expert, bytes."""
        return SCHEMES[self.quantization.experts].weight_bytes * self.shape.expert_parameters

    @property
    def on_host(self) -> OnHost:
        """The experts that are not in device memory."""
        return self.popularity.on_host(self.tiers.device_experts, by_popularity=self.tiers.by_popularity)

    def routed_s(self, tokens: FloatArray) -> FloatArray:
        """Routed experts of one layer, devices and host side by side."""
        moe, tiers = self.shape.moe, self.tiers
        if moe is None or tiers.device_experts >= moe.num_experts:
            return super().routed_s(tokens)
        together = self._together_s(np.asarray(tokens, dtype=np.float64))
        if not tiers.device_prefill_tokens:
            return together
        return np.where(tokens >= tiers.device_prefill_tokens, self.on_devices_s(tokens), together)

    def host_s(self, tokens: FloatArray) -> FloatArray:
        """Reading of the host's experts that are hit, at the peak of its memory."""
        read = self.on_host.hits(tokens) * self.expert_bytes
        return self.shape.num_moe_layers * read / self.host.bandwidth_bytes_per_s

    def _together_s(self, tokens: FloatArray) -> FloatArray:
        moe, on_host = self.shape.moe, self.on_host
        if moe is None:
            raise AssertionError("only mixtures of experts have routed experts")
        missed = on_host.copies
        on_devices = tokens * (1.0 - missed / moe.num_experts_per_token)
        devices = np.where(on_devices > 0.0, super().routed_s(np.maximum(on_devices, 1.0)), 0.0)
        read = on_host.hits(tokens) * self.expert_bytes / self.host.read_bytes_per_s
        rate = self.host.flops_per_s(KERNELS[self.tiers.kernel].product_bytes)
        product = 2.0 * tokens * missed * self.shape.expert_parameters / rate
        rows = 2.0 * BYTES_16_BIT * tokens * self.shape.hidden_size / self.link_bytes_per_s
        waits = self.host.round_trip_s * on_host.any_hit(tokens)
        # Factors of the fit describe devices; the host's constants were fitted without them.
        return np.maximum(devices, (waits + rows + np.maximum(read, product)) / self.scale(tokens))

    def on_devices_s(self, tokens: FloatArray) -> FloatArray:
        """The same with the host's experts copied to the devices first."""
        moe = self.shape.moe
        left = 0 if moe is None else moe.num_experts - self.tiers.device_experts
        copied = left * self.expert_bytes / (self.layout.num_devices * self.link_bytes_per_s)
        return super().routed_s(np.asarray(tokens, dtype=np.float64)) + copied / self.scale(np.asarray(tokens))

    @property
    def link_bytes_per_s(self) -> float:
        """Rate at which each device reads host memory while all do."""
        return self.host.link_bytes_per_s(self.machine.device, self.layout.num_devices)


@dataclass(frozen=True, kw_only=True)
class StreamedWeights(Worker):
    """A worker whose devices read a share of their weights from the host.

    Args:
        host: where they lie.
        share: of each device's weights.
    """

    host: Host
    share: float

    @property
    def link_bytes_per_s(self) -> float:
        """Rate at which each device reads host memory while all do."""
        return self.host.link_bytes_per_s(self.machine.device, self.layout.num_devices)

    @property
    def expert_bytes_per_device(self) -> float:
        """Routed experts of one device, bytes."""
        return routed_bytes_per_device(self)

    def dense_parts_s(self, tokens: FloatArray) -> Mapping[str, FloatArray]:
        """The parts, and the reading of all weights but routed experts; those of all stages, one after the other."""
        parts = dict(super().dense_parts_s(tokens))
        whole = weights_bytes(self.shape, self.quantization, self.layout) - self.expert_bytes_per_device
        seconds = self.layout.pipeline_parallel * self.share * whole / self.link_bytes_per_s
        parts["mlp"] = parts["mlp"] + seconds / self.scale(tokens)
        return parts

    def host_s(self, tokens: FloatArray) -> FloatArray:
        """Reading over the link of what every iteration needs, at its peak."""
        whole = weights_bytes(self.shape, self.quantization, self.layout) - self.expert_bytes_per_device
        return np.full_like(tokens, self.share * whole / (self.link_bytes_per_s / LINK_SHARE))

    def routed_s(self, tokens: FloatArray) -> FloatArray:
        """Routed experts of one layer with the reading of those that are hit."""
        moe = self.shape.moe
        if moe is None:
            return super().routed_s(tokens)
        hit = distinct_experts(tokens, top_k=moe.num_experts_per_token, num_experts=moe.num_experts) / moe.num_experts
        each = self.layout.pipeline_parallel * self.expert_bytes_per_device / self.shape.num_moe_layers
        return super().routed_s(tokens) + self.share * hit * each / self.link_bytes_per_s / self.scale(tokens)


def routed_bytes_per_device(worker: Worker) -> float:
    """Routed experts of one device of a worker, all of its layers, bytes; 0 for dense models."""
    return routed_bytes(worker, worker.layout)


def routed_bytes(worker: Worker, layout: Layout) -> float:
    """The same under a layout."""
    shape = worker.shape
    if shape.moe is None:
        return 0.0
    spread = layout.expert_parallel * layout.expert_tensor_parallel * layout.pipeline_parallel
    return shape.num_moe_layers * shape.moe.num_experts * expert_bytes(shape, worker.quantization) / spread


def with_less(memory: WorkerMemory, on_host: float, extra: float) -> WorkerMemory:
    """The memory with fewer weights and some more workspace, and the cache that then fits."""
    weights, workspace = memory.weights_bytes - on_host, memory.workspace_bytes + extra
    room = max(memory.budget_bytes - weights - workspace, 0.0)
    return replace(
        memory,
        weights_bytes=weights,
        workspace_bytes=workspace,
        kv_capacity_tokens=int(room / memory.kv_bytes_per_token),
    )


def expert_bytes(shape: ModelShape, quantization: Quantization) -> float:
    """One routed expert, bytes."""
    return SCHEMES[quantization.experts].weight_bytes * shape.expert_parameters
