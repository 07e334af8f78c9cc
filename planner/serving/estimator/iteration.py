"""Iteration times of one worker: from model, device, layout and formats to the tables of a :class:`StepCost`.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.attention import ATTENTION_KERNELS, SoftmaxAttention, attended_pairs
from meshplan.planner.serving.estimator.collectives import Exchange
from meshplan.planner.serving.estimator.encoders.sound import CrossAttention, frames
from meshplan.planner.serving.estimator.encoders.vision import encode_s
from meshplan.planner.serving.estimator.expert_traffic import ExpertTraffic, expert_traffic, staying_s
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token
from meshplan.planner.serving.estimator.mixers import NORM_ELEMENTS, Mixers
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.estimator.step_cost import Slowdown, StepCost, with_draft
from meshplan.planner.serving.estimator.table import Table, token_knots
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Role, Speculation
from meshplan.planner.serving.problem.expert_routing import ExpertRouting
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization
from meshplan.planner.serving.problem.requests import Images

# Memory-bound kernels of the MLP half of a layer.
MLP_KERNELS = 2.0
# Tokens of an iteration at which work turns from memory-bound to compute-bound: ridge points of A100 to B200 in 8 and
# 16 bits lie between 150 and 600 tokens.
MEMORY_BOUND_TOKENS, COMPUTE_BOUND_TOKENS = 256.0, 2048.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRange:
    """Context lengths between which attention time is linearised, tokens.

    Args:
        prompt: prompt tokens of a request.
        least: context of a decoding request at its first token.
        most: context at its last token.
    """

    prompt: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Device seconds of one traversal of all stages, at the knots of the tables.

    Args:
        knots: [K] tokens of one batch.
        dense_s: [K] weights, norms, tensor-parallel collectives.
        together: [G] tokens of all ranks of a stage.
        experts_s: [G] routed experts and their exchange.
        seqs: [N] requests of one batch.
        head_s: [N] LM head and sampling.
        decode_fixed_s: [N] decode attention at no context.
        decode_context_s: [N] its growth per cached token of the batch.
        prefill_pair_s: prefill attention per attended pair.
        prefill_fixed_s: prefill attention at no attended pair.
    """

    knots: FloatArray
    dense_s: FloatArray
    together: FloatArray
    experts_s: FloatArray
    seqs: FloatArray
    head_s: FloatArray
    decode_fixed_s: FloatArray
    decode_context_s: FloatArray
    prefill_pair_s: float
    prefill_fixed_s: float


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker: every method returns seconds.

    Args:
        shape: the model.
        machine: device and links.
        engine: whose kernels are priced.
        layout: degrees of parallelism.
        limits: limits of its scheduler.
        quantization: formats.
        constants: calibrated.
        contexts: context lengths of the workload.
        role: prefill workers run no decodes.
        speculation: None without a draft.
        all_reduce: engine whose all-reduce kernels are called; empty for its own.
        experts: routing and the places of experts; None prices the skew that kernels were timed with.
        slowdown: under a power limit; None at full clocks.
        graphed_tokens: an iteration with prompts is replayed from graphs where a batch has at most so many tokens, and
            at most two for each request that may run.
        one_batch: stages are passed by one batch at a time, not by a batch each.
        images: of each prompt; None: text alone.
    """

    shape: ModelShape
    machine: Machine
    engine: str
    layout: Layout
    limits: EngineLimits
    quantization: Quantization
    constants: ServingConstants
    contexts: ContextRange
    role: Role = Role.MIXED
    speculation: Speculation | None = None
    all_reduce: str = ""
    experts: ExpertRouting | None = None
    slowdown: Slowdown | None = None
    graphed_tokens: int = 0
    one_batch: bool = False
    images: Images | None = None

    @property
    def micro_batches(self) -> int:
        """Parts into which an iteration is split so that every stage has one at work."""
        return 1 if self.one_batch else self.layout.pipeline_parallel

    @property
    def concurrent_batches(self) -> int:
        """Batches in flight at once."""
        return self.micro_batches * self.layout.attention_data_parallel

    @cached_property
    def operators(self) -> Operators:
        """Operator times of the device."""
        return Operators(device=self.machine.device, engine=self.engine)

    @cached_property
    def mixers(self) -> Mixers:
        """Recurrent mixers and indexer of the model, where it has them."""
        return Mixers(
            shape=self.shape,
            operators=self.operators,
            scheme=self.quantization.attention,
            tensor_parallel=self.layout.tensor_parallel,
            context_parallel=self.layout.context_parallel,
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
        price = partial(
            self.operators.experts_s,
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

    def expert_exchange_s(self, tokens: FloatArray) -> FloatArray:
        """Dispatch and combine of one layer; ``tokens`` of all ranks of a stage."""
        moe, layout = self.shape.moe, self.layout
        ranks = layout.attention_data_parallel
        if moe is None or ranks == 1:
            return np.zeros_like(tokens)  # attention and experts share their devices: the all-reduce suffices
        group, hidden = layout.expert_parallel * layout.expert_tensor_parallel, self.shape.expert_hidden_size
        sent_bytes = SCHEMES[self.quantization.experts].activation_bytes
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
        return product + self.operators.memory_op_s(4.0 * 3.0 * sequences * columns, kernels=3.0)

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
        own = self.attention.prefill_s(prompt)
        return own if self.shape.encoder is None else own + self.cross.attention_s(prompt)

    def host_s(self, tokens: FloatArray) -> FloatArray:
        """Time of an iteration of ``tokens`` on what lies beside the devices, at peak rates; here: none."""
        return np.zeros_like(tokens)

    def own_resources(self, running: FloatArray) -> dict[str, FloatArray] | None:
        """Resource → [N] seconds that a request takes it where they are not those of one of its devices; here: None."""
        return None

    # --- tables -------------------------------------------------------------------------------------------------------

    def scale(self, tokens: FloatArray) -> FloatArray:
        """Factor on device time at ``tokens`` per batch: calibrated, see :func:`scale`, and of the clocks."""
        return scale(self.constants, tokens) * self.slower(tokens)

    def slower(self, tokens: FloatArray) -> FloatArray:
        """Device time at ``tokens`` per batch over that at full clocks."""
        return np.ones_like(tokens) if self.slowdown is None else self.slowdown.at(tokens)

    @property
    def _verified_tokens(self) -> int:
        return 1 if self.speculation is None else self.speculation.verified_tokens

    @cached_property
    def encode_s(self) -> float:
        """Time of the images of one prompt on the first stage, or of its window of sound; 0 for text alone."""
        if self.shape.encoder is not None:
            encoder, read = replace(self, shape=self.shape.encoder), np.array([float(frames(self.shape))])
            layers = sum(encoder.dense_parts_s(read).values()) + encoder.attention.prefill_s(read)
            return float((layers + self.cross.around_encoder_s(read))[0])
        if self.images is None or self.shape.vision is None:
            return 0.0
        return encode_s(
            self.shape.vision,
            self.images,
            operators=self.operators,
            exchange=self.exchange,
            tensor_parallel=self.layout.tensor_parallel,
        )

    @cached_property
    def device_times(self) -> DeviceTimes:
        """Times from kernels and links alone, before calibration."""
        batch_seqs = -(-self.limits.max_num_seqs // self.concurrent_batches)
        most = self.limits.max_batched_tokens + batch_seqs * self._verified_tokens
        knots = token_knots(most)
        together = token_knots(most * self.layout.attention_data_parallel)
        routed = self.shape.num_moe_layers * (self.routed_s(together) + self.expert_exchange_s(together))
        seqs = token_knots(batch_seqs + 1)
        fixed, slope = self._decode_line(seqs)
        pair_s, prefill_fixed_s = self._prefill_line()
        return DeviceTimes(
            knots=knots,
            dense_s=np.asarray(sum(self.dense_parts_s(knots).values())),
            together=together,
            experts_s=np.broadcast_to(routed, together.shape),
            seqs=seqs,
            head_s=self.head_s(seqs),
            decode_fixed_s=fixed,
            decode_context_s=slope,
            prefill_pair_s=pair_s + self._encode_pair_s(),
            prefill_fixed_s=prefill_fixed_s,
        )

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest batch with prompts that is replayed from graphs: they are captured up to twice the
        requests of a batch, and not at all where the engine is started without them, or an encoder comes before (vLLM
        0.33.0: config/vllm.py, FULL_DECODE_ONLY).
        """
        if self.shape.encoder is not None:
            return 0
        most = 2 * self.limits.max_num_seqs // self.layout.attention_data_parallel
        return min(self.graphed_tokens, most) if self.limits.cuda_graphs else 0

    def step_cost(self, constants: ServingConstants | None = None) -> StepCost:
        """The tables; see :class:`StepCost`.

        Args:
            constants: replace the worker's own in fits, so that kernels are priced only once.
        """
        use, times, batches = constants or self.constants, self.device_times, self.concurrent_batches
        launch, has_graphs = use.launch_s_per_layer * self.shape.num_hidden_layers, self.limits.cuda_graphs
        host = use.host_step_s if has_graphs else use.host_step_s + launch
        ranks, prefill = self.layout.attention_data_parallel, use.prefill_factor * float(self.slower(times.knots)[-1])

        def factor(tokens: FloatArray) -> FloatArray:
            return scale(use, tokens) * self.slower(tokens)

        decodes = self.slower(times.seqs * self._verified_tokens)
        fixed, slope = (
            self._by_request(times.seqs, use.decode_factor * decodes * values)
            for values in (times.decode_fixed_s, times.decode_context_s / batches)
        )
        cost = StepCost(
            concurrent_batches=batches,
            pipeline_parallel=self.micro_batches,
            dense_s=Table(times.knots, host + factor(times.knots) * times.dense_s, int(times.knots[-1])),
            experts_s=Table(times.together, factor(times.together / ranks) * times.experts_s, int(times.together[-1])),
            outputs_s=Table(times.seqs, decodes * times.head_s + use.host_s_per_seq * times.seqs, int(times.seqs[-1])),
            decode_fixed_s=fixed,
            decode_context_s=slope,
            prefill_fixed_s=prefill * times.prefill_fixed_s,
            prefill_pair_s=prefill * times.prefill_pair_s,
            prefill_least_s=use.host_step_s + launch,
            graphed_tokens=self.captured_tokens,
            admission_steps=use.first_token_steps,
            tokens_per_step=1.0 if self.speculation is None else self.speculation.tokens_per_step,
            verified_tokens=self._verified_tokens,
        )
        return cost if self.speculation is None else with_draft(cost, self.speculation)

    def _by_request(self, batch_seqs: FloatArray, values: FloatArray) -> list[float]:
        """Values by requests of one batch as a list by requests of the whole worker; 0 for none."""
        counts = np.arange(1, self.limits.max_num_seqs + 1)
        return [0.0, *np.interp(-(-counts // self.concurrent_batches), batch_seqs, values).tolist()]

    def _decode_line(self, seqs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Attention for the n decodes of a batch: its value at no context and its growth per cached token."""
        least = np.full_like(seqs, max(self.contexts.least, 1.0))
        most = np.maximum(np.full_like(seqs, self.contexts.most), least + 1.0)
        low, high = (np.maximum.accumulate(self.decode_attention_s(seqs, held)) for held in (least, most))
        per_token = np.maximum((high - low) / ((most - least) * seqs), 0.0)
        return np.maximum(low - per_token * seqs * least, 0.0), per_token

    def _encode_pair_s(self) -> float:
        """Time of a prompt's images, spread over the pairs that the whole prompt attends to: however it is cut into
        chunks, these add up to p·(p + 1)/2. The first stage encodes all prompts, whose pairs are split over the stages.
        """
        pairs = float(attended_pairs(np.array([self.contexts.prompt]), None)[0])
        return self.layout.pipeline_parallel * self.encode_s / max(pairs, 1.0)

    def _prefill_line(self) -> tuple[float, float]:
        """Prefill attention per attended pair, and its value at no pair."""
        prompt = np.array([max(self.contexts.prompt / 2.0, 1.0), max(self.contexts.prompt, 2.0)])
        seconds, pairs = self.prefill_attention_s(prompt), attended_pairs(prompt, None)
        slope = max(float((seconds[1] - seconds[0]) / (pairs[1] - pairs[0])), 0.0)
        return slope, max(float(seconds[1] - slope * pairs[1]), 0.0)


def scale(constants: ServingConstants, tokens: FloatArray) -> FloatArray:
    """Calibrated factor on device time: of decode for few tokens, of prefill for many, log-linear between."""
    span = np.log(COMPUTE_BOUND_TOKENS / MEMORY_BOUND_TOKENS)
    share = np.clip(np.log(np.maximum(tokens, 1.0) / MEMORY_BOUND_TOKENS) / span, 0.0, 1.0)
    return np.asarray(constants.decode_factor ** (1.0 - share) * constants.prefill_factor**share)
