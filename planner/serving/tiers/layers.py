"""Iteration times of a worker of llama.cpp with layers on its host, and what lies where.

The processor computes what lies in its memory while the devices wait, and the other way round. Of a mixture of experts
(``--n-cpu-moe``) h of M MoE layers have their routed experts on the host; with T tokens of one batch::

    experts(T) = (M − h)·device(T) + h·host(T)
    host(T) = round trip + max(hit(T)·bytes / B, 2·T·top_k·parameters / F)         where T < 32
            = device(T) + hit(T)·bytes / link                                      where T ≥ 32

because from 32 tokens on the weights are copied to a device first, of experts those that are hit. Of a dense model
(``--gpu-layers``) h of L layers lie on the host whole, with their KV cache::

    layers(T) = (L − h)·device(T) + h·bytes / B                                    where T < 32
              = L·device(T) + h·bytes / link                                       where T ≥ 32
    attention = (L − h)/L·device + h/L·C·KV bytes of a token / B

*Weights beyond the host's memory* (``--load-mode mmap``, llama.cpp's default) stay on its drives: of x bytes d have no
room in the page cache. Which of them are still there when an iteration asks again nobody states. At best the cache
keeps x − d, at worst none, because it drops what was read longest ago and a dense model is read in a circle::

    seconds a byte = sqrt(best · worst),    best = (1 − d/x)/B + (d/x)/D,    worst = 1/D

with D what the drives attain; the interval reaches from one to the other.

Sources: ggml-backend.cpp and ggml-cuda.cu (``offload_op``: batches of at least GGML_OP_OFFLOAD_MIN_BATCH tokens, 32);
pull request 15346 of llama.cpp (of experts only those in use are copied); tools/server/README.md.

Assumes: of a host with several sockets the memory of one is read at a time. llama.cpp places weights without regard to
which socket computes with them; KTransformers' tutorial prints 4.51 tokens/s for it on two sockets of 307 GB/s each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import (
    WorkerMemory,
    kv_bytes_per_token,
    weights_bytes,
)
from meshplan.planner.serving.problem.config import Layout, Pool
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization
from meshplan.planner.serving.problem.weight_tiers import WeightTiers
from meshplan.planner.serving.tiers.host import LINK_SHARE, Host
from meshplan.planner.serving.tiers.popularity import Popularity
from meshplan.planner.serving.tiers.worker import expert_bytes, with_less

# Tokens of a batch from which host weights are copied to a device (GGML_OP_OFFLOAD_MIN_BATCH, ggml-cuda.cu).
OFFLOAD_TOKENS = 32
# Bytes of a weight as llama.cpp multiplies it on processors: block formats by 8-bit activations (ggml-cpu, vec_dot).
_PRODUCT_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class HostLayers(Worker):
    """A worker with layers on its host.

    Args:
        host: where they lie.
        popularity: how tokens choose experts; None for dense models.
        tiers: how many of them.
    """

    host: Host
    popularity: Popularity | None
    tiers: WeightTiers

    @property
    def read_bytes_per_s(self) -> float:
        """Rate at which the processor reads weights: that of one socket, slower where some lie on drives."""
        return self._with_drives(socket_bytes_per_s(self.host))

    @property
    def link_bytes_per_s(self) -> float:
        """Rate at which a device reads host memory; one at a time does."""
        return self._with_drives(self.host.link_bytes_per_s(self.machine.device, 1))

    def _with_drives(self, bytes_per_s: float) -> float:
        best, worst = page_cache_s_per_byte(self.host, self.tiers, bytes_per_s)
        return float(1.0 / np.sqrt(best * worst))

    @property
    def host_share(self) -> float:
        """Layers on the host over all that may be there."""
        return self.tiers.host_layers / slot_layers(self.shape)

    # --- a mixture of experts -----------------------------------------------------------------------------------------

    def routed_s(self, tokens: FloatArray) -> FloatArray:
        """Routed experts of one layer, mean over those on devices and on the host."""
        devices = super().routed_s(tokens)
        moe = self.shape.moe
        if moe is None or self.popularity is None:
            return devices
        tokens = np.asarray(tokens, dtype=np.float64)
        each = expert_bytes(self.shape, self.quantization)
        hit = each * self.popularity.on_host(0).hits(tokens)
        flops = 2.0 * tokens * moe.num_experts_per_token * self.shape.expert_parameters
        rows = 2.0 * BYTES_16_BIT * tokens * self.shape.hidden_size / self.link_bytes_per_s
        computed = np.maximum(hit / self.read_bytes_per_s, flops / self.host.flops_per_s(_PRODUCT_BYTES))
        # Factors of the fit describe devices; the host's constants were fitted without them.
        on_host = (self.host.round_trip_s + rows + computed) / self.scale(tokens)
        copied = devices + hit / self.link_bytes_per_s / self.scale(tokens)
        share = self.host_share
        return (1.0 - share) * devices + share * np.where(tokens < OFFLOAD_TOKENS, on_host, copied)

    # --- a dense model ------------------------------------------------------------------------------------------------

    def dense_parts_s(self, tokens: FloatArray) -> Mapping[str, FloatArray]:
        """The parts on the devices, and under ``mlp`` what the host computes or hands over."""
        parts = dict(super().dense_parts_s(tokens))
        if self.shape.moe is not None:
            return parts
        few, share = tokens < OFFLOAD_TOKENS, self.host_share
        stored = self.tiers.host_layers * layer_bytes(self.shape, self.quantization)
        for name in ("attention projections", "mlp"):
            parts[name] = np.where(few, 1.0 - share, 1.0) * parts[name]
        flops = 2.0 * tokens * self.tiers.host_layers * _layer_parameters(self.shape)
        computed = np.maximum(stored / self.read_bytes_per_s, flops / self.host.flops_per_s(_PRODUCT_BYTES))
        seconds = np.where(few, self.host.round_trip_s + computed, stored / self.link_bytes_per_s)
        parts["mlp"] = parts["mlp"] + seconds / self.scale(tokens)
        return parts

    def decode_attention_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Attention of decodes, that of host layers over their cache in host memory."""
        devices = super().decode_attention_s(sequences, context)
        if self.shape.moe is not None:
            return devices
        read = sequences * context * kv_bytes_per_token(self.shape, self.quantization) / self.read_bytes_per_s
        return (1.0 - self.host_share) * devices + self.host_share * read / self.constants.decode_factor

    def host_s(self, tokens: FloatArray) -> FloatArray:
        """Reading of the host's weights that are hit, at the peak of its memory or of the link."""
        if self.popularity is None or self.shape.moe is None:
            read = np.full_like(tokens, layer_bytes(self.shape, self.quantization))
        else:
            each = expert_bytes(self.shape, self.quantization)
            read = each * self.popularity.on_host(0).hits(tokens)
        link = self.host.link_bytes_per_s(self.machine.device, 1)
        peak = np.where(tokens < OFFLOAD_TOKENS, self.host.bandwidth_bytes_per_s, link / LINK_SHARE)
        return np.asarray(self.tiers.host_layers * read / peak)


def socket_bytes_per_s(host: Host) -> float:
    """Attained rate at which the processor of one socket reads its host's memory."""
    return host.read_share * host.bandwidth_bytes_per_s / host.sockets


def page_cache_s_per_byte(host: Host, tiers: WeightTiers, bytes_per_s: float) -> tuple[float, float]:
    """Least and most seconds a byte of the host's weights, where its memory reads at a rate; see the module's text."""
    drives, memory = host.drives_bytes_per_s, 1.0 / bytes_per_s
    if not tiers.drive_bytes or drives is None:
        return memory, memory
    missing = tiers.drive_bytes / tiers.host_bytes
    return (1.0 - missing) * memory + missing / drives, max(1.0 / drives, memory)


# --- what lies where --------------------------------------------------------------------------------------------------


def slot_layers(shape: ModelShape) -> int:
    """Layers that may lie on the host: MoE layers for their experts, all layers of a dense model."""
    return shape.num_moe_layers if shape.moe is not None else shape.num_hidden_layers


def layer_bytes(shape: ModelShape, quantization: Quantization) -> float:
    """What one layer on the host keeps there: its routed experts, or all its weights."""
    if shape.moe is not None:
        return shape.moe.num_experts * expert_bytes(shape, quantization)
    ends = SCHEMES[quantization.ends].weight_bytes * (shape.embedding_parameters + shape.lm_head_parameters)
    return (weights_bytes(shape, quantization, Layout()) - ends) / shape.num_hidden_layers


def host_bytes_of(shape: ModelShape, quantization: Quantization, number: int, *, cached_tokens: float = 0.0) -> float:
    """Host memory of ``number`` layers, with their share of the KV cache of a dense model."""
    cache = 0.0
    if shape.moe is None:
        cache = cached_tokens * kv_bytes_per_token(shape, quantization) / shape.num_hidden_layers
    return number * (layer_bytes(shape, quantization) + cache)


def layered_memory(memory: WorkerMemory, shape: ModelShape, pool: Pool) -> WorkerMemory:
    """Memory of the fullest device without the layers on the host, and with room for one that is copied.

    Stages hold whole layers: the fullest device has ⌈(all − host)/stages⌉ of them, and of a mixture of experts, whose
    host layers are spread over all of them, perhaps one more.
    """
    tiers, stages = pool.weight_tiers, pool.layout.pipeline_parallel
    if tiers is None:
        raise AssertionError("only pools with layers on the host are asked for")
    slots, each = slot_layers(shape), layer_bytes(shape, pool.quantization)
    kept = -(-(slots - tiers.host_layers) // stages)
    if shape.moe is not None and stages > 1 and tiers.host_layers < slots:
        kept = min(kept + 1, -(-slots // stages))
    less = with_less(memory, each * (slots / stages - kept), each)
    if shape.moe is not None:
        return less
    # The cache lies with the layers: each token takes so much less of a device.
    share = kept * stages / slots
    if share == 0.0:
        return less
    room = less.kv_capacity_tokens * memory.kv_bytes_per_token
    per_token = memory.kv_bytes_per_token * share
    return WorkerMemory(
        weights_bytes=less.weights_bytes,
        workspace_bytes=less.workspace_bytes,
        kv_bytes_per_token=per_token,
        budget_bytes=less.budget_bytes,
        kv_capacity_tokens=int(room / per_token),
    )


def _layer_parameters(shape: ModelShape) -> float:
    return (shape.num_parameters - shape.embedding_parameters - shape.lm_head_parameters) / shape.num_hidden_layers
