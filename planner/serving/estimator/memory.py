"""Device memory of a serving worker: weights, workspace, and the number of KV cache tokens that fit in the rest.

- Weights of one device of a stage: attention / (t·pipeline), dense MLP and shared experts / (t·pipeline), routed
  experts / (expert × expert-tensor × pipeline), embedding and LM head / t, each in its scheme's bytes. Key/value heads
  that are fewer than the tensor-parallel devices are replicated. Experts are held as the engine pads them.
- KV cache of one token on one device: 2·⌈k/t⌉·d·bytes a layer; latent attention keeps (r_kv + d_rope)·bytes, the same
  on every tensor-parallel device (DeepSeek-V2, arXiv:2405.04434, §2.1). Layers with a sliding window keep at most the
  window. Context parallelism divides it. Cross-attention keeps what a request's encoder read, an indexer one key a
  token, recurrent layers a state a request. A model whose tokens attend to those after them has none: keys and values
  live as long as the layer that makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.encoders.sound import cross_cache_bytes, cross_parameters
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.expert_routing import Dispatch, ExpertRouting, copies_of
from meshplan.planner.serving.problem.quantization import NO_PADDING, SCHEMES, ExpertPadding, Quantization

# Communicators and buffers of one process inside the engine's fraction of the memory. vLLM 0.15.1 on H100 printed so
# many blocks of KV cache that at most 0.4 GiB remain beside weights and activations (five servers of the sim-to-real
# validation of BLIS, 2026-02); its captured graphs lie beyond the fraction.
FIXED_BYTES = 0.3 * 2**30
# Live tensors of a forward pass, in hidden-size elements of one token: residual, norm, attention in and out.
LIVE_HIDDEN_TENSORS = 6.0
LOGITS_BYTES = 4.0
# Tokens that a worker without a KV cache may hold: more than any limit of an engine allows.
NO_CACHE_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """What drafts take of one device (:mod:`.draft_memory`).

    Args:
        weights_bytes: of what makes them.
        kv_bytes_per_token: of each token that the model's cache holds.
    """

    weights_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0


NO_DRAFTS = DraftMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Memory of the fullest device of a worker.

    Args:
        weights_bytes: weights.
        workspace_bytes: activations of the largest iteration, logits, graphs, context.
        kv_bytes_per_token: cache of one token on one device of the rank that holds it.
        budget_bytes: memory that the engine may use.
        kv_capacity_tokens: tokens of cache that the whole worker holds; 0 where the weights do not fit.
    """

    weights_bytes: float
    workspace_bytes: float
    kv_bytes_per_token: float
    budget_bytes: float
    kv_capacity_tokens: int

    @property
    def fits(self) -> bool:
        """Weights and workspace leave room for a cache."""
        return self.kv_capacity_tokens > 0


def state_bytes_per_request(shape: ModelShape, *, tensor_parallel: int = 1) -> float:
    """What one request holds on one tensor-parallel device whatever its length, all layers, bytes.

    Recurrent states, and the windows of layers with compressed attention (16 bits, assumed; one head, hence whole).
    """
    if shape.blocks is None:
        return 0.0
    windows = BYTES_16_BIT * sum(count * form.kept_elements for form, _, count in shape.attention_forms)
    return shape.num_recurrent_layers * shape.blocks.recurrent_state_bytes / tensor_parallel + windows


def kv_bytes_per_token(shape: ModelShape, quantization: Quantization, *, tensor_parallel: int = 1) -> float:
    """KV cache of one token on one tensor-parallel device, all layers, full attention, bytes.

    Llama-3.1-70B in 16 bits: 2·8·128·2·80 = 327,680 bytes over all devices.
    """
    if forms := shape.attention_forms:
        elements = sum(count * form.cached_elements_per_token(tensor_parallel) for form, _, count in forms)
        return elements * quantization.kv_bytes
    if shape.latent is not None:
        per_layer = (shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim) * quantization.kv_bytes
    else:
        heads = -(-shape.num_key_value_heads // tensor_parallel)
        per_layer = 2.0 * heads * shape.head_dim * quantization.kv_bytes
    indexer = None if shape.blocks is None else shape.blocks.indexer
    indexed = 0.0 if indexer is None else indexer.cache_bytes_per_token * shape.num_indexed_layers
    return per_layer * shape.num_attention_layers + indexed


def weights_bytes(
    shape: ModelShape,
    quantization: Quantization,
    layout: Layout,
    *,
    expert_copies: int = 0,
    padding: ExpertPadding = NO_PADDING,
) -> float:
    """Weights on one device of a worker, bytes; stages are taken as equal, the ends hold embedding or head.

    ``expert_copies`` are those of a layer beyond one of each expert, over all devices that hold its experts, which the
    engine pads to ``padding``.
    """
    attention = SCHEMES[quantization.attention].weight_bytes * attention_parameters(shape, layout.tensor_parallel)
    mlp = SCHEMES[quantization.mlp].weight_bytes
    total = shape.num_attention_layers * attention
    recurrent = SCHEMES[quantization.attention].weight_bytes * recurrent_parameters(shape, layout.tensor_parallel)
    total += shape.num_recurrent_layers * recurrent
    total += SCHEMES[quantization.attention].weight_bytes * sum(cross_parameters(shape, layout.tensor_parallel))
    total += shape.num_dense_layers * mlp * shape.dense_mlp_parameters / layout.tensor_parallel
    if shape.moe is not None:
        spread = layout.expert_parallel * layout.expert_tensor_parallel
        held = shape.moe.num_experts + expert_copies
        width = shape.moe.expert_intermediate_size / layout.expert_tensor_parallel
        stored = shape.expert_parameters * padding.growth(shape.expert_hidden_size, width)
        routed = SCHEMES[quantization.experts].weight_bytes * held * stored / spread
        shared = mlp * shape.shared_expert_parameters / layout.tensor_parallel
        total += shape.num_moe_layers * (routed + shared + BYTES_16_BIT * shape.router_parameters)
    stored = SCHEMES[quantization.ends].weight_bytes
    ends = stored * (shape.embedding_parameters + shape.lm_head_parameters) / layout.tensor_parallel
    encoder = 0.0 if shape.encoder is None else weights_bytes(shape.encoder, quantization, layout)
    return total / layout.pipeline_parallel + ends / min(layout.pipeline_parallel, 2) + encoder


def attention_parameters(shape: ModelShape, tensor_parallel: int) -> float:
    """Parameters of one attention block on one tensor-parallel device, mean over the layers that have one."""
    if forms := shape.attention_forms:
        held = sum(count * form.parameters_on_device(tensor_parallel) for form, _, count in forms)
        return held / shape.num_attention_layers
    indexer = shape.indexer_parameters  # on every device
    indexed = indexer * shape.num_indexed_layers / shape.num_attention_layers if indexer else 0.0
    if shape.latent is not None:  # and so are the low-rank input projections
        latent = shape.latent
        down = shape.hidden_size * ((latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim)
        return indexed + down + (shape.attention_parameters - indexer - down) / tensor_parallel
    h, d = shape.hidden_size, shape.head_dim
    kv_heads = max(shape.num_key_value_heads / tensor_parallel, 1.0)
    queries = (2.0 + shape.has_output_gate) * shape.num_attention_heads / tensor_parallel
    return indexed + h * d * (queries + 2.0 * kv_heads)


def recurrent_parameters(shape: ModelShape, tensor_parallel: int) -> float:
    """Parameters of one recurrent mixer on one tensor-parallel device."""
    recurrent = None if shape.blocks is None else shape.blocks.recurrent
    if recurrent is None:
        return 0.0
    copied = shape.hidden_size * recurrent.copied_outputs
    return copied + (shape.recurrent_parameters - copied) / tensor_parallel


def worker_memory(
    shape: ModelShape,
    device: Device,
    layout: Layout,
    limits: EngineLimits,
    quantization: Quantization,
    *,
    context: float,
    experts: ExpertRouting | None = None,
    encoder_bytes: float = 0.0,
    padding: ExpertPadding = NO_PADDING,
    drafts: DraftMemory = NO_DRAFTS,
) -> WorkerMemory:
    """Memory of one worker.

    Args:
        shape: the model.
        device: the accelerator.
        layout: degrees of parallelism of the worker.
        limits: limits of its scheduler; ``memory_fraction`` of the device's usable memory is its budget.
        quantization: formats of weights and cache.
        context: mean tokens held by a request, which determines the effect of sliding windows.
        experts: their copies, and whether every device holds the cache of all requests.
        encoder_bytes: weights of the vision encoder on a device of the first stage.
        padding: of experts, by the engine on this device
            (:meth:`~meshplan.planner.serving.problem.engines.rules.EngineRules.expert_padding`).
        drafts: what makes them, beside the model.
    """
    copies = copies_of(experts, layout)
    weights = encoder_bytes + drafts.weights_bytes
    weights += weights_bytes(shape, quantization, layout, expert_copies=copies, padding=padding)
    t, workspace = layout.tensor_parallel, _workspace_bytes(shape, layout, limits)
    budget = limits.memory_fraction * device.usable_memory_bytes
    if shape.bidirectional:
        fits = weights + workspace <= budget
        return WorkerMemory(
            weights_bytes=weights,
            workspace_bytes=workspace,
            kv_bytes_per_token=0.0,
            budget_bytes=budget,
            kv_capacity_tokens=NO_CACHE_TOKENS if fits else 0,
        )
    full = kv_bytes_per_token(shape, quantization, tensor_parallel=t)
    # A request of the mean context also holds its recurrent states, and keys and values of what its encoder read: they
    # count as so many bytes of each of its tokens.
    states = state_bytes_per_request(shape, tensor_parallel=t) + cross_cache_bytes(
        shape, quantization, tensor_parallel=t
    )
    states /= max(context, 1.0)
    kept = full * window_share(shape, context) / layout.context_parallel + states
    per_token = kept / layout.pipeline_parallel + drafts.kv_bytes_per_token / layout.context_parallel
    rank_tokens = max(budget - weights - workspace, 0.0) / per_token
    return WorkerMemory(
        weights_bytes=weights,
        workspace_bytes=workspace,
        kv_bytes_per_token=per_token,
        budget_bytes=budget,
        kv_capacity_tokens=int(rank_tokens * caches(experts, layout)),
    )


def _workspace_bytes(shape: ModelShape, layout: Layout, limits: EngineLimits) -> float:
    """Activations of the largest iteration, logits, and what a process holds besides."""
    width = max(shape.intermediate_size, _expert_width(shape)) / layout.tensor_parallel
    tokens = min(limits.max_batched_tokens, 2**16)
    live = BYTES_16_BIT * tokens * (LIVE_HIDDEN_TENSORS * shape.hidden_size + shape.mlp_matrices * width)
    running = limits.max_num_seqs / layout.attention_data_parallel
    return FIXED_BYTES + live + LOGITS_BYTES * running * shape.output_columns / layout.tensor_parallel


def share_of_device(memory: WorkerMemory, share: float, of: str) -> float:
    """An engine's share as one of the memory that weights, workspace and KV cache take together, at most 1.

    Args:
        memory: of the worker, with the whole device as its budget.
        share: as the engine counts it.
        of: ``total``: that share itself; ``static``: of weights and KV cache; ``free``: of KV cache, over what weights
            and workspace leave.
    """
    taken = memory.weights_bytes + memory.workspace_bytes
    if of == "free":
        share += (1.0 - share) * min(taken / memory.budget_bytes, 1.0)
    elif of == "static":
        share += memory.workspace_bytes / memory.budget_bytes
    return min(share, 1.0)


def caches(experts: ExpertRouting | None, layout: Layout) -> int:
    """Caches of a worker that hold different requests: its attention data-parallel ranks' unless tokens stay with
    their experts, where every device holds all requests.
    """
    stays = experts is not None and experts.dispatch is Dispatch.STAYS and layout.expert_parallel > 1
    return 1 if stays else layout.attention_data_parallel


def window_share(shape: ModelShape, context: float) -> float:
    """KV cache with sliding windows relative to full attention, for requests of ``context`` tokens."""
    if not shape.sliding_windows:
        return 1.0
    windows = [
        (window, 1.0 if (form := shape.attention_form(layer)) is None else form.cached_elements_per_token())
        for layer, window in enumerate(shape.sliding_windows)
        if shape.has_attention(layer)
    ]
    kept = [(1.0 if window is None else min(window / max(context, 1.0), 1.0)) * size for window, size in windows]
    return sum(kept) / sum(size for _, size in windows)


def _expert_width(shape: ModelShape) -> int:
    if shape.moe is None:
        return 0
    return shape.moe.num_experts_per_token * shape.moe.expert_intermediate_size + shape.moe.shared_intermediate_size
