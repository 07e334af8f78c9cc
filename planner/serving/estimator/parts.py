"""What one worker computes for the tokens of one batch, by part: seconds of kernels and links before calibration.

For the T tokens of one batch (of one attention data-parallel rank), per layer and device, with h hidden size, a heads,
k key/value heads, d head size, f MLP width, V vocabulary and t tensor-parallel devices:

- attention: matrix products (T, (a + 2⌈k/t⌉t)·d/t, h) and (T, h, a·d/t); latent attention: its low-rank factors with
  the absorbed products; norms, rotary embedding and cache write as memory-bound kernels; an all-reduce of T·h where t >
  1;
- dense MLP: (T, 2f/t, h) and (T, h, f/t), activation; an all-reduce;
- MoE layer: router and shared experts on the rank's tokens; routed experts and their exchange on all ranks' tokens;
- the LM head (n, V/t, h) for the sequences that yield a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.encoders.sound import CrossAttention
from meshplan.planner.serving.estimator.exchange.collectives import Exchange
from meshplan.planner.serving.estimator.exchange.expert_traffic import ExpertTraffic, expert_traffic, staying_s
from meshplan.planner.serving.estimator.grouped_rows import (
    GROUPED_SCHEME,
    MULTIPLIED_ROWS,
    SKIPPING,
    most_rows,
    used_rows,
)
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token
from meshplan.planner.serving.estimator.mixing.attention import ATTENTION_KERNELS, SoftmaxAttention
from meshplan.planner.serving.estimator.mixing.mixers import NORM_ELEMENTS, Mixers
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.estimator.sampling import SamplingCost
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.expert_routing import ExpertRouting
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization

# Memory-bound kernels of the MLP half of a layer.
MLP_KERNELS = 2.0


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """The work of one worker by part: every method returns seconds.

    Args:
        shape: the model.
        machine: device and links.
        engine: whose kernels are priced.
        layout: degrees of parallelism.
        limits: limits of its scheduler.
        quantization: formats.
        all_reduce: engine whose all-reduce kernels are called; empty for its own.
        experts: routing and the places of experts; None prices the skew that kernels were timed with.
        state_updates_per_s: elements of Mamba-2's states that the engine's kernel updates a second at most.
        expert_kernels: surfaces of fused experts that were timed with the engine's release; empty: none were.
        expert_block_rows: rows of a block of the engine's grouped product of experts; 0: kernels as they were timed.
        block_flops_per_s: of products in fp8 blocks at most, where the library that is called is slower than timed.
        gathers_tokens: the engine's attention data-parallel ranks exchange tokens by all-gather and reduce-scatter; in
            16 bits where they are multiplied in 8.
        sends_to_whole_experts: where experts are whole and attention is data parallel, the engine's kernels multiply
            the tokens that a device was sent.
        sampling: how tokens are drawn; None: every token is the likeliest one.
    """

    shape: ModelShape
    machine: Machine
    engine: str
    layout: Layout
    limits: EngineLimits
    quantization: Quantization
    all_reduce: str = ""
    experts: ExpertRouting | None = None
    state_updates_per_s: float = math.inf
    expert_kernels: str = ""
    expert_block_rows: int = 0
    block_flops_per_s: float = math.inf
    gathers_tokens: bool = False
    sends_to_whole_experts: bool = False
    sampling: SamplingCost | None = None

    @cached_property
    def operators(self) -> Operators:
        """Operator times of the device."""
        return Operators(**self.kernels)

    @property
    def kernels(self) -> dict[str, Any]:
        """What decides which kernels are priced: the fields of :class:`Operators`."""
        return {
            "device": self.machine.device,
            "engine": self.engine,
            "expert_kernels": self.expert_kernels,
            "block_flops_per_s": self.block_flops_per_s,
        }

    @cached_property
    def mixers(self) -> Mixers:
        """Recurrent mixers and indexer of the model, where it has them."""
        return Mixers(
            shape=self.shape,
            operators=self.operators,
            scheme=self.quantization.attention,
            tensor_parallel=self.layout.tensor_parallel,
            context_parallel=self.layout.context_parallel,
            state_updates_per_s=self.state_updates_per_s,
        )

    @cached_property
    def cross(self) -> CrossAttention:
        """Attention to what an encoder of sound read."""
        return CrossAttention(
            shape=self.shape,
            operators=self.operators,
            scheme=self.quantization.attention,
            kv_bytes=self.quantization.kv_bytes,
            tensor_parallel=self.layout.tensor_parallel,
        )

    @cached_property
    def exchange(self) -> Exchange:
        """Collective times of the machine."""
        return Exchange(
            machine=self.machine,
            engine=self.all_reduce or self.engine,
            custom_all_reduce=self.limits.custom_all_reduce,
            world_size=self.layout.num_devices,
        )

    @cached_property
    def traffic(self) -> ExpertTraffic | None:
        """Loads of the expert-parallel devices, and the ways of tokens between them; None where nothing is said."""
        if self.shape.moe is None:
            return None
        top_k, domain = self.shape.moe.num_experts_per_token, self.machine.domain_size
        return expert_traffic(self.experts, self.layout, top_k=top_k, domain_size=domain)

    # --- by part ------------------------------------------------------------------------------------------------------

    def attention_linear_s(self, tokens: FloatArray) -> FloatArray:
        """Projections, norms and rotary embedding of one layer, mean over the layers with attention."""
        shape, t, scheme = self.shape, self.layout.tensor_parallel, self.quantization.attention
        if forms := shape.attention_forms:
            parts = (count * self.attention.form_linear_s(form, scheme, tokens) for form, _, count in forms)
            return np.asarray(sum(parts)) / shape.num_attention_layers
        h, a, gemm = shape.hidden_size, shape.num_attention_heads, self.operators.gemm_s
        if shape.latent is None:
            kv_heads = -(-shape.num_key_value_heads // t)
            width = ((1 + shape.has_output_gate) * a / t + 2 * kv_heads) * shape.head_dim
            seconds = gemm(scheme, tokens, width, h) + gemm(scheme, tokens, h, a * shape.head_dim / t)
        else:
            latent = shape.latent
            query = a / t * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
            cached = latent.kv_lora_rank + latent.qk_rope_head_dim
            if latent.q_lora_rank is None:
                seconds = gemm(scheme, tokens, query + cached, h)
            else:
                seconds = gemm(scheme, tokens, latent.q_lora_rank + cached, h)
                seconds = seconds + gemm(scheme, tokens, query, latent.q_lora_rank)
            absorbed = a / t * (latent.qk_nope_head_dim + latent.v_head_dim)
            seconds = seconds + gemm("bf16", tokens, absorbed, latent.kv_lora_rank)
            seconds = seconds + gemm(scheme, tokens, h, a / t * latent.v_head_dim)
            width = query + cached
        moved = BYTES_16_BIT * tokens * (NORM_ELEMENTS * h + 3.0 * width)
        return seconds + self.operators.memory_op_s(moved, kernels=ATTENTION_KERNELS)

    def mlp_s(self, tokens: FloatArray, width: float) -> FloatArray:
        """A dense MLP of ``width`` (already divided) on one device."""
        h, inputs, scheme = self.shape.hidden_size, self.shape.mlp_matrices - 1, self.quantization.mlp
        products = self.operators.gemm_s(scheme, tokens, inputs * width, h)
        products = products + self.operators.gemm_s(scheme, tokens, h, width)
        moved = BYTES_16_BIT * tokens * (NORM_ELEMENTS * h + self.shape.mlp_matrices * width)
        return products + self.operators.memory_op_s(moved, kernels=MLP_KERNELS)

    def all_reduce_s(self, tokens: FloatArray) -> FloatArray:
        """One all-reduce of a batch's hidden states."""
        return self.exchange.all_reduce_s(tokens * self.shape.hidden_size * BYTES_16_BIT, self.layout.tensor_parallel)

    def routed_s(self, tokens: FloatArray) -> FloatArray:
        """Routed experts of one layer on the most loaded device; ``tokens`` of all ranks of a stage."""
        moe, layout, traffic = self.shape.moe, self.layout, self.traffic
        if moe is None:
            return np.zeros_like(tokens)
        slots = moe.num_experts if traffic is None else traffic.num_slots
        sends, rows = self.sends_tokens, self.expert_rows(tokens) if traffic is None else None
        price = partial(
            self.operators.sent_experts_s if sends else partial(self.operators.experts_s, rows=rows),
            self.quantization.experts,
            tokens,
            hidden=self.shape.expert_hidden_size,
            width=moe.expert_intermediate_size / layout.expert_tensor_parallel,
            matrices=self.shape.mlp_matrices,
            top_k=moe.num_experts_per_token,
            num_experts=slots,
            local_experts=slots / layout.expert_parallel,
        )
        return price() if traffic is None else traffic.mean_over_layers(lambda factor: price(load_factor=factor))

    @property
    def sends_tokens(self) -> bool:
        """Whether experts' kernels see the tokens alone that are sent to their device."""
        layout = self.layout
        is_whole = layout.attention_data_parallel > 1 and layout.expert_parallel == layout.devices_per_stage
        return self.sends_to_whole_experts and not self.gathers_tokens and is_whole

    def expert_rows(self, tokens: FloatArray, *, multiplied: bool = False) -> FloatArray | None:
        """Rows of grouped products of one layer that take time on a device, or that it multiplies; None where kernels
        are as they were timed.
        """
        moe, block = self.shape.moe, self.expert_block_rows
        if moe is None or not block or self.quantization.experts != GROUPED_SCHEME:
            return None
        if moe.expert_intermediate_size % (block * self.layout.expert_tensor_parallel):
            return None  # a product that cannot be cut into such blocks runs as it was timed
        top_k, local = moe.num_experts_per_token, moe.num_experts / self.layout.expert_parallel
        if self.machine.device.architecture != SKIPPING:
            return most_rows(tokens, top_k=top_k, local_experts=local, block_rows=block)
        unit = MULTIPLIED_ROWS if multiplied else block
        return used_rows(tokens, top_k=top_k, num_experts=moe.num_experts, local_experts=local, unit_rows=unit)

    def expert_exchange_s(self, tokens: FloatArray) -> FloatArray:
        """Dispatch and combine of one layer; ``tokens`` of all ranks of a stage.

        No all-to-all serves experts that several devices split: all ranks' tokens are gathered then, by every engine
        (TensorRT-LLM: select_alltoall_method_type in fused_moe_trtllm_gen.py, which quantises them before).
        """
        moe, layout = self.shape.moe, self.layout
        ranks = layout.attention_data_parallel
        if moe is None or ranks == 1:
            return np.zeros_like(tokens)  # attention and experts share their devices: the all-reduce suffices
        group, hidden = layout.expert_parallel * layout.expert_tensor_parallel, self.shape.expert_hidden_size
        sent_bytes = SCHEMES[self.quantization.experts].activation_bytes
        if self.gathers_tokens and sent_bytes >= 1.0:
            sent_bytes = BYTES_16_BIT
        if self.traffic is not None and self.traffic.staying is not None:
            kv_bytes = kv_bytes_per_token(self.shape, self.quantization) / max(self.shape.num_attention_layers, 1)
            ways = partial(staying_s, self.exchange, self.traffic.staying, group=group, hidden=hidden)
            return ways(tokens, activation_bytes=sent_bytes, kv_bytes=kv_bytes)
        price = partial(
            self.exchange.experts_s,
            tokens / ranks,
            group=group,
            ranks=ranks,
            hidden=hidden,
            top_k=moe.num_experts_per_token,
            activation_bytes=sent_bytes,
            gathers=self.gathers_tokens or layout.expert_tensor_parallel > 1,
        )
        if self.traffic is None:
            return price()
        return price(near=self.traffic.near[:, None], far=self.traffic.far[:, None]).mean(axis=0)

    def head_s(self, sequences: FloatArray) -> FloatArray:
        """LM head and sampling for ``sequences`` of one batch; the layers over a pooled answer, on every device."""
        if self.shape.pooling is not None:
            outputs, h = self.shape.output_columns, self.shape.hidden_size
            return self.operators.gemm_s("bf16", sequences, outputs, h) if outputs else np.zeros_like(sequences)
        columns = self.shape.vocab_size / self.layout.tensor_parallel
        product = self.operators.gemm_s(self.quantization.ends, sequences, columns, self.shape.hidden_size)
        chosen = product + self.operators.memory_op_s(4.0 * 3.0 * sequences * columns, kernels=3.0)
        if self.sampling is None:
            return chosen
        return chosen + self.sampling.seconds(self.operators, sequences, self.shape.vocab_size)

    def dense_parts_s(self, tokens: FloatArray) -> Mapping[str, FloatArray]:
        """Work of all layers on the tokens of one batch, without attention and routed experts, by part."""
        shape, t = self.shape, self.layout.tensor_parallel
        moe_layers = shape.num_moe_layers
        attention = shape.num_attention_layers * self.attention_linear_s(tokens)
        if shape.blocks is not None:
            attention = attention + self.mixers.linear_s(tokens)
        if shape.encoder is not None:
            attention = attention + self.cross.linear_s(tokens)
        mlp = np.zeros_like(tokens)
        if shape.num_dense_layers:
            mlp = shape.num_dense_layers * self.mlp_s(tokens, shape.intermediate_size / t)
        if shape.moe is not None:
            each = self.operators.gemm_s("bf16", tokens, shape.moe.num_experts, shape.hidden_size)
            if shape.moe.latent_size is not None:
                each = each + self.operators.gemm_s("bf16", tokens, shape.moe.latent_size, shape.hidden_size)
                each = each + self.operators.gemm_s("bf16", tokens, shape.hidden_size, shape.moe.latent_size)
            if shape.moe.shared_intermediate_size:
                each = each + self.mlp_s(tokens, shape.moe.shared_intermediate_size / t)
            mlp = mlp + moe_layers * each
        hops = self.exchange.pipeline_s(
            tokens * shape.hidden_size * BYTES_16_BIT / t, self.layout.pipeline_parallel, self.layout.devices_per_stage
        )
        reduced = float(shape.num_blocks) * self.all_reduce_s(tokens)
        return {"attention projections": attention, "mlp": mlp, "tensor-parallel exchange": reduced + hops}

    # --- attention over the cache -------------------------------------------------------------------------------------

    @cached_property
    def attention(self) -> SoftmaxAttention:
        """Softmax attention over the cache, by phase."""
        return SoftmaxAttention(
            shape=self.shape,
            operators=self.operators,
            mixers=self.mixers,
            kv_bytes=self.quantization.kv_bytes,
            tensor_parallel=self.layout.tensor_parallel,
            context_parallel=self.layout.context_parallel,
        )

    def decode_attention_s(self, sequences: FloatArray, context: FloatArray) -> FloatArray:
        """Attention of all layers for the decodes of one batch over ``context`` tokens each, and recurrent states."""
        own = self.attention.decode_s(sequences, context) + self.mixers.decode_s(sequences, context)
        return own if self.shape.encoder is None else own + self.cross.attention_s(sequences)

    def prefill_attention_s(self, prompt: FloatArray) -> FloatArray:
        """Attention of all layers for whole prompts of ``prompt`` tokens, one prompt at a time."""
        own = self.attention.prefill_s(prompt) + self.mixers.prefill_start_s
        return own if self.shape.encoder is None else own + self.cross.attention_s(prompt)
