"""Bytes and multiplications of an iteration on one device, as seconds at the device's peak rates.

For n decoding requests that read C tokens of KV cache and p prompt tokens, with pp pipeline stages, a attention
data-parallel ranks and B micro-batches that traverse a stage in one iteration, 1 ≤ B ≤ pp::

    bytes = B·(dense weights of the stage + experts hit by a micro-batch's tokens) + C·KV bytes of a token/(pp·cp·a)
            + logits that are sampled·bytes that sampling moves for each
    FLOP  = 2·parameters of the device·tokens that it sees + attention over C and over the prompts' own tokens

Experts hit are those of even, independent routing. Every device samples from all logits. Attention ranks that are
padded to the fullest see as many tokens as it has, and send as many to the experts. Activations are left out: they
move a tenth of the bytes or less. All that an iteration with prompts multiplies has many rows. Divided by the time of
the iteration these are the utilisations that power depends on (``energy``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.catalogs.surfaces.experts import distinct_experts
from meshplan.planner.cluster.power import DeviceWork
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.encoders.sound import cross_cache_bytes, cross_parameters, encode_flops, frames
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.memory import (
    attention_parameters,
    kv_bytes_per_token,
    recurrent_parameters,
    state_bytes_per_request,
    window_share,
)
from meshplan.planner.serving.estimator.mixing.attention import compressed_entries
from meshplan.planner.serving.estimator.operators import peak_flops_per_s
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.quantization import SCHEMES


def iteration_work(
    worker: Worker,
    *,
    decodes: FloatArray,
    cached_tokens: FloatArray,
    prompt_tokens: FloatArray,
    num_prompts: FloatArray | None = None,
) -> DeviceWork:
    """Work of a device in iterations of the whole worker, mean over its devices; arrays of one shape.

    Args:
        worker: whose iterations they are. A draft model's work is not counted.
        decodes: n, decoding requests.
        cached_tokens: C, tokens of KV cache that they read.
        prompt_tokens: p, new prompt tokens.
        num_prompts: of how many prompts they are: a rank computes those of its own, and where ranks are padded each as
            many tokens as the fullest. None: evenly spread over the ranks.
    """
    layout, device = worker.layout, worker.machine.device
    verified = 1 if worker.speculation is None else worker.speculation.verified_tokens
    tokens = decodes * verified + prompt_tokens * _padding(worker, num_prompts)
    ranks, stages = layout.attention_data_parallel, layout.pipeline_parallel
    batches = np.clip(np.ceil((decodes + (prompt_tokens > 0)) / ranks), 1.0, worker.micro_batches)
    by_width = {False: np.zeros_like(tokens), True: np.zeros_like(tokens)}
    compute = _attention_s(worker, cached_tokens * verified, prompt_tokens)
    for scheme, parameters in _dense_parameters(worker):
        each = SCHEMES[scheme].weight_bytes
        by_width[each < BYTES_16_BIT] += batches * each * parameters / stages
        compute = compute + 2.0 * tokens / ranks * parameters / stages / _peak(worker, scheme)
    columns = worker.shape.output_columns * worker.shape.hidden_size / layout.tensor_parallel / stages
    head = worker.quantization.ends
    by_width[SCHEMES[head].weight_bytes < BYTES_16_BIT] += batches * SCHEMES[head].weight_bytes * columns
    compute = compute + 2.0 * (decodes * verified + (prompt_tokens > 0)) / ranks * columns / _peak(worker, head)
    shape = worker.shape
    if shape.moe is not None:
        moved, computed_s = _experts_work(worker, shape.moe, tokens, batches)
        by_width[SCHEMES[worker.quantization.experts].weight_bytes < BYTES_16_BIT] += moved
        compute = compute + computed_s
    by_width[False] += cached_tokens * _cache_bytes(worker)
    states = state_bytes_per_request(shape, tensor_parallel=layout.tensor_parallel) / stages
    by_width[False] += 2.0 * decodes / ranks * states
    if worker.sampling is not None:
        sampled = (decodes * verified + (prompt_tokens > 0)) / ranks / stages * shape.vocab_size
        by_width[False] += worker.sampling.moved_bytes_per_logit * sampled
    if shape.encoder is not None:
        read = cross_cache_bytes(shape, worker.quantization, tensor_parallel=layout.tensor_parallel)
        by_width[False] += decodes / ranks * read
        windows = prompt_tokens / max(worker.contexts.prompt, 1.0)
        encoded = windows * encode_flops(shape, layout.tensor_parallel) + tokens * _crossed_flops(worker)
        compute = compute + encoded / ranks / _peak(worker, worker.quantization.attention)
    return DeviceWork(
        wide_s=by_width[False] / device.memory_bandwidth_bytes_per_s,
        narrow_s=by_width[True] / device.memory_bandwidth_bytes_per_s,
        compute_s=compute,
        bulk_s=np.where(prompt_tokens > 0, compute, 0.0),
    )


def _experts_work(
    worker: Worker, moe: MixtureOfExperts, tokens: FloatArray, batches: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Bytes of the routed experts that a device reads, those that the tokens of its batches hit, and the seconds of
    their products at its peak.
    """
    layout, shape, scheme = worker.layout, worker.shape, worker.quantization.experts
    spread = layout.expert_parallel * layout.expert_tensor_parallel * layout.pipeline_parallel
    held = shape.num_moe_layers * shape.expert_parameters / spread
    hit = distinct_experts(tokens / batches, top_k=moe.num_experts_per_token, num_experts=moe.num_experts)
    rows = worker.expert_rows(tokens / batches, multiplied=True)
    visits = tokens * moe.num_experts_per_token
    visits = visits if rows is None else rows * batches * layout.expert_parallel
    return batches * SCHEMES[scheme].weight_bytes * hit * held, 2.0 * visits * held / _peak(worker, scheme)


def _padding(worker: Worker, num_prompts: FloatArray | None) -> FloatArray | float:
    """Tokens that are computed for each token of prompts, where attention ranks are padded to the fullest."""
    ranks = worker.layout.attention_data_parallel
    if num_prompts is None or not worker.pads_ranks:
        return 1.0
    return np.asarray(ranks / np.clip(num_prompts, 1.0, ranks))


def request_work(worker: Worker, running: FloatArray, *, cached: float = 0.0, padded: bool = False) -> DeviceWork:
    """Work of a device for one request in a steady state: the more requests run, the more share its iterations.

    Args:
        worker: whose steady state it is.
        running: [N] requests that run at once.
        cached: prompt tokens that the prefix cache holds.
        padded: with what attention ranks compute that are padded to the fullest, which no request needs: as many
            prompts share an iteration as requests end in one, at least this one.
    """
    contexts, role = worker.contexts, worker.role
    speed = 1.0 if worker.speculation is None else worker.speculation.tokens_per_step
    steps = 0.0 if role is Role.PREFILL else (contexts.most - contexts.least - 1.0) / speed
    prompt = np.full_like(running, 0.0 if role is Role.DECODE else max(contexts.prompt - cached, 1.0))
    if steps > 0.0:
        iterations, decodes = steps / running, running
    else:
        iterations, decodes = np.ceil(prompt / worker.limits.max_batched_tokens), np.zeros_like(running)
    held = decodes * (contexts.least + contexts.most) / 2.0
    together = np.maximum(running / steps, 1.0) if steps > 0.0 else np.ones_like(running)
    one = iteration_work(
        worker,
        decodes=decodes,
        cached_tokens=held,
        prompt_tokens=prompt / np.maximum(iterations, 1.0),  # a decode worker of one-token answers has no iteration
        num_prompts=together if padded else None,
    )
    whole = one.times(iterations)
    if not steps > 0.0 or role is Role.DECODE:
        return whole
    # Of a request's iterations only those with its prompt have products of many rows: one for each chunk.
    alone = iteration_work(worker, decodes=decodes, cached_tokens=held, prompt_tokens=np.zeros_like(prompt))
    without = np.maximum(iterations - np.ceil(prompt / worker.limits.max_batched_tokens), 0.0)
    return replace(whole, bulk_s=whole.compute_s - without * alone.compute_s)


def _dense_parameters(worker: Worker) -> list[tuple[str, float]]:
    """(scheme, parameters of all stages on one tensor-parallel device) that every token uses, without the LM head."""
    shape, formats, tensor = worker.shape, worker.quantization, worker.layout.tensor_parallel
    shared = 0.0 if shape.moe is None else shape.num_moe_layers * shape.shared_expert_parameters / tensor
    dense = shape.num_dense_layers * shape.dense_mlp_parameters / tensor
    mixers = shape.num_attention_layers * attention_parameters(shape, tensor)
    mixers += shape.num_recurrent_layers * recurrent_parameters(shape, tensor) + cross_parameters(shape, tensor)[0]
    return [
        (formats.attention, mixers),
        (formats.mlp, dense + shared),
        ("bf16", float(shape.num_moe_layers * shape.router_parameters)),
    ]


def _attention_s(worker: Worker, cached_tokens: FloatArray, prompt_tokens: FloatArray) -> FloatArray:
    """Attention over the cache of decodes and over whole prompts: each prompt token sees half of its prompt."""
    shape, layout = worker.shape, worker.layout
    heads = shape.num_attention_heads / layout.tensor_parallel
    if shape.attention_forms:
        width = _seen_width(shape, _context(worker)) / layout.tensor_parallel / shape.num_attention_layers
        decode = prefill = 2.0 * width
    elif shape.latent is None:
        decode = prefill = 4.0 * heads * shape.head_dim
    else:  # absorbed in the low rank for decodes, expanded for prompts
        latent = shape.latent
        decode = 2.0 * heads * (2.0 * latent.kv_lora_rank + latent.qk_rope_head_dim)
        prefill = 2.0 * heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
    prompt = worker.contexts.prompt
    share = 1.0 if shape.attention_forms else window_share(shape, _context(worker))
    pairs = decode * cached_tokens + prefill * prompt_tokens * (prompt + 1.0) / 2.0
    split = layout.attention_data_parallel * layout.pipeline_parallel * layout.context_parallel
    return shape.num_attention_layers * share * pairs / split / _peak(worker, "bf16")


def _crossed_flops(worker: Worker) -> float:
    """Attention of one token to what its request's encoder read, all layers."""
    shape = worker.shape
    width = shape.num_attention_heads * shape.head_dim / worker.layout.tensor_parallel
    return 4.0 * shape.num_hidden_layers * frames(shape) * width


def _seen_width(shape: ModelShape, context: float) -> float:
    """Multiply-adds of attention for each token of a context, all layers, where it has several forms."""
    total = 0.0
    for form, window, count in shape.attention_forms:
        seen = min(context, window) if window is not None else float(compressed_entries(form, np.array(context)))
        total += count * form.attention_width * seen / max(context, 1.0)
    return total


def _cache_bytes(worker: Worker) -> float:
    """KV cache of one token that one device holds, mean over the worker's devices."""
    layout = worker.layout
    full = kv_bytes_per_token(worker.shape, worker.quantization, tensor_parallel=layout.tensor_parallel)
    split = layout.pipeline_parallel * layout.context_parallel * layout.attention_data_parallel
    return full * window_share(worker.shape, _context(worker)) / split


def _context(worker: Worker) -> float:
    return (worker.contexts.least + worker.contexts.most) / 2.0


def _peak(worker: Worker, scheme: str) -> float:
    return peak_flops_per_s(worker.machine.device, SCHEMES[scheme].peak_dtype)
