"""Compute time of one layer on one device: matrix products, attention, memory-bound operators.

Notation: T tokens of one micro-batch on one device (micro_batch_size·sequence/context_parallel), t = tensor_parallel,
h hidden size, a heads, k key/value heads, d head dimension, f MLP width, V vocabulary.

- Matrix products: :mod:`.operators.products`. Backward = input gradient (m, k, n) + weight gradient (n, k, m).
- Attention: forward FLOPs 4·T·c·a·d/t with c the mean context of a token (s/2 when causal), at the rate of the
  framework's kernels (:mod:`.operators.attention`). Without them the whole square of scores is computed as batched
  products (backward 2 ×) and passes through memory.
- Memory-bound operators: bytes moved over the calibrated share of the memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.attention_kernels import TILE_KEYS, UNTIMED
from meshplan.catalogs.constants.training import Calibration, Constant
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.catalogs.surfaces.recurrent import PREFILL, SCAN_SHARE, recurrent_kernel
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import Candidates, LayerKind
from meshplan.planner.training.estimator.exchange.context_parallel import causal_imbalance
from meshplan.planner.training.estimator.flops import attended_context, attention_width, indexer_multiply_adds
from meshplan.planner.training.estimator.operators.attention import FLASH_BACKWARD_RATIO, fused_attention
from meshplan.planner.training.estimator.operators.memory_bound import (
    EAGER,
    FUSED,
    ROW_SCALING_EXTRA_BYTES,
    OperatorTraffic,
)
from meshplan.planner.training.estimator.operators.products import (
    BYTES_32_BIT,
    ELEMENT_BYTES,
    LOW_PRECISION,
    Cost,
    activation_bytes,
    attention_peak_flops_per_s,
    gemm_curve,
    gemm_s,
    peak_flops_per_s,
)
from meshplan.planner.training.estimator.states import DEQUANTISE_BYTES, GPTQ_UNPACK_BYTES, is_quantised
from meshplan.planner.training.problem.expert_load import arriving_load, leaving_load
from meshplan.planner.training.problem.problem import TrainingWorkload

PLAIN_BACKWARD_RATIO = 2.0
# Passes over the attention scores that unfused attention makes forward: the first product writes them; scale, mask and
# softmax read and write them, at once in 16 bits (Megatron's fused kernel), in two steps in fp32; dropout reads and
# writes; the second product reads.
PLAIN_ATTENTION_PASSES = {BYTES_16_BIT: 6.0, BYTES_32_BIT: 8.0}
# The same where one kernel does all between the products (OneFlow's fused_scale_tril_softmax_dropout): written, read,
# written, read.
FUSED_SOFTMAX_PASSES = 4.0
# Times that each routed token copy (h elements) is read or written in the forward of an expert layer: sorted by expert
# before dispatch and after arrival, and both undone.
ROUTED_HIDDEN_PASSES = 8.0
# The same where the dispatcher's kernels write arriving tokens in the order of the experts.
FUSED_HIDDEN_PASSES = 4.0
# The clamped activation of experts with biases (gpt-oss) has no fused kernel: tensors of expert width that its
# forward reads and writes (two clamps 4, scaled sigmoid 4, its product 3, +1 2, the gate's product 3, the router's
# weight 3).
CLAMPED_ACTIVATION_PASSES = 19.0
# Weight products of one expert forward: the joined input matrices and the output matrix.
PRODUCTS_PER_EXPERT = 2.0
# Blocks with a residual connection in the layer of a transformer: attention and MLP.
BLOCKS_OF_A_LAYER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Compute times of a batch of candidates.

    Args:
        shape: the model.
        device: the accelerator.
        workload: sequence length, precision, phase.
        candidates: the batch.
        calibration: the constants.
    """

    shape: ModelShape
    device: Device
    workload: TrainingWorkload
    candidates: Candidates
    calibration: Calibration

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element of the activations."""
        return activation_bytes(self.workload)

    @property
    def _traffic(self) -> OperatorTraffic:
        return EAGER if self.workload.is_eager else FUSED

    @property
    def tokens(self) -> FloatArray:
        """T, tokens of a micro-batch on one device, [n]."""
        batch = self.candidates
        return batch.micro_batch_size * self.workload.decoder_length / batch.context_parallel

    @property
    def of_encoder(self) -> ComputeModel:
        """The same of the layers of the encoder in front."""
        if self.shape.encoder is None:
            raise AssertionError(f"{self.shape.name} has no encoder")
        return replace(self, shape=self.shape.encoder, workload=self.workload.of_encoder)

    @property
    def sharded_tokens(self) -> FloatArray:
        """Tokens that one device normalises: T/t with sequence parallelism, else T, [n]."""
        batch = self.candidates
        return self.tokens / np.where(batch.sequence_parallel, batch.tensor_parallel, 1)

    def gemm(
        self,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        *,
        precision: str | None = None,
        factor: Constant = 1.0,
        whole: bool = False,
        is_trained: bool = False,
    ) -> Cost:
        """Forward and backward of one weight matrix; weights frozen beside adapters have no weight gradient.

        4-bit weights are dequantised first (:mod:`.states`), unless the matrix is a ``whole`` 16-bit one. One that
        ``is_trained`` has a weight gradient even so.
        """
        name = precision or self.workload.precision
        constants = self.calibration.time
        efficiency = constants.gemm_efficiency * factor
        if name in LOW_PRECISION:
            efficiency = efficiency * constants.low_precision_efficiency
        curve, width = gemm_curve(self.device, name), ELEMENT_BYTES[name]
        forward = gemm_s(curve, m, n, k, efficiency=efficiency, element_bytes=width)
        backward = gemm_s(curve, m, k, n, efficiency=efficiency, element_bytes=width)
        if is_trained or not self.workload.phase.has_adapters:
            backward = backward + gemm_s(curve, n, k, m, efficiency=efficiency, element_bytes=width)
        cost = Cost(forward_s=forward, backward_s=backward)
        if is_quantised(self.workload) and not whole:
            cost = cost + self._dequantisation(n * k)
        if name in LOW_PRECISION and self.workload.scales_rows:
            cost = cost + self._row_scaling(m, n, k)
        return cost

    def _dequantisation(self, parameters: FloatArray) -> Cost:
        """Cost of bringing a matrix of frozen 4-bit weights to 16 bits (:mod:`.states`)."""
        if self.workload.frozen_weights == "gptq":
            return self.memory_op(GPTQ_UNPACK_BYTES * parameters, backward_ratio=0.0)
        return self.memory_op(DEQUANTISE_BYTES * parameters, backward_ratio=1.0)

    def _row_scaling(self, m: FloatArray, n: FloatArray, k: FloatArray) -> Cost:
        """Cost of per-row scales for one weight matrix: inputs and weights forward, output gradients backward."""
        forward = self.memory_op(ROW_SCALING_EXTRA_BYTES * (m * k + n * k), backward_ratio=0.0)
        gradients = self.memory_op(ROW_SCALING_EXTRA_BYTES * m * n, backward_ratio=1.0)
        return Cost(forward_s=forward.forward_s, backward_s=gradients.backward_s)

    def memory_op(self, forward_bytes: FloatArray, *, backward_ratio: float = 2.0) -> Cost:
        """A memory-bound operator that moves ``forward_bytes`` in its forward."""
        rate = self.device.memory_bandwidth_bytes_per_s * self.calibration.time.memory_op_efficiency
        return Cost(forward_s=forward_bytes / rate, backward_s=backward_ratio * forward_bytes / rate)

    @property
    def _fuses_attention(self) -> bool:
        return self.workload.practice.fuses_attention(self.calibration.recipe.flash_attention)

    # --- attention ------------------------------------------------------------------------------------------------

    def attention_core(self, kind: LayerKind) -> Cost:
        """What mixes the tokens of one layer: attention scores and weighted values, or the scan of a recurrence."""
        mixed = self._scan() if kind.has_recurrent else self._no_work
        if kind.has_cross_attention:
            mixed = mixed + self._cross_attention()
        return mixed + self._softmax_attention(kind) if kind.has_attention else mixed

    @property
    def _no_work(self) -> Cost:
        return Cost(forward_s=np.zeros_like(self.tokens), backward_s=np.zeros_like(self.tokens))

    def _scan(self) -> Cost:
        """The recurrence of a recurrent mixer in chunks; its backward computes the chunks again, as attention's does.

        Gated delta rules run flash-linear-attention's kernel (megatron-core 0.19.2, core/ssm/gated_delta_net), which
        SGLang runs, too: its forward pass as timed there. Other scans reach :data:`SCAN_SHARE` of the matrix units'
        peak; where they multiply no matrices, attention's share of the vector units' in fp32. No backward was timed.
        """
        recurrent = None if self.shape.blocks is None else self.shape.blocks.recurrent
        if recurrent is None:
            return self._no_work
        tokens = self.tokens / self.candidates.tensor_parallel
        kernel = recurrent_kernel(self.device.slug, recurrent.kind, "sglang", PREFILL)
        if kernel is not None:
            forward_s = tokens * recurrent.state_elements / kernel.elements_per_s
        elif recurrent.multiplies_matrices:
            peak = attention_peak_flops_per_s(self.device, self.workload)
            forward_s = tokens * recurrent.scan_flops_per_token / (SCAN_SHARE * peak)
        else:
            share = UNTIMED.forward_share * self.calibration.time.attention_kernel_efficiency
            rate = share * peak_flops_per_s(self.device, "fp32")
            forward_s = tokens * recurrent.scan_flops_per_token / rate
        return Cost(forward_s=forward_s, backward_s=FLASH_BACKWARD_RATIO * forward_s)

    def _softmax_attention(self, kind: LayerKind) -> Cost:
        if not self._fuses_attention:
            return self._plain_attention(float(self.workload.decoder_length), kind.form)
        length, documents = self.workload.decoder_length, self.workload.documents
        context = attended_context(self.shape, length, kind.window, documents, form=kind.form)
        scored = context * attention_width(self.shape, kind.form)
        if kind.has_indexer or kind.form is not None:
            scored += indexer_multiply_adds(self.shape, length, documents, form=kind.form)
        scored += TILE_KEYS * attention_width(self.shape, kind.form)
        flops = 2.0 * self.tokens * scored / self.candidates.tensor_parallel
        if (imbalance := causal_imbalance(self.candidates, self.calibration.recipe)) is not None:
            flops = flops * imbalance
        return self._fused_attention(flops)

    def _fused_attention(self, flops: FloatArray) -> Cost:
        return fused_attention(flops, self.shape, self.device, self.workload, self.calibration)

    def _cross_attention(self) -> Cost:
        """Attention of the decoder's tokens to all that the encoder read: no mask leaves any out."""
        read = float(self.workload.sequence_length)
        if not self._fuses_attention:
            return self._plain_attention(read)
        flops = 2.0 * self.tokens * read * attention_width(self.shape) / self.candidates.tensor_parallel
        return self._fused_attention(flops)

    def _plain_attention(self, sequence: float, form: AttentionForm | None = None) -> Cost:
        """Unfused attention to ``sequence`` keys: two batched products over all scores, which are written to and read
        from memory.
        """
        precision = "bf16" if self.workload.precision in LOW_PRECISION else self.workload.precision
        curve = gemm_curve(self.device, precision)
        rate = curve.rate_flops_per_s * self.calibration.time.gemm_efficiency
        t = self.candidates.tensor_parallel
        # Half of the products contract over the short head dimension.
        stretch = 1.0 + 0.5 * curve.inner_saturation / self.shape.head_dim
        forward = 2.0 * self.tokens * sequence * attention_width(self.shape, form) / t * stretch / rate
        products = Cost(forward_s=forward, backward_s=PLAIN_BACKWARD_RATIO * forward)
        scores = self.tokens * sequence * self.shape.num_attention_heads / t
        passes = PLAIN_ATTENTION_PASSES[self.activation_bytes]
        if self.calibration.recipe.fused_softmax:
            passes = FUSED_SOFTMAX_PASSES
        return products + self.memory_op(passes * self.activation_bytes * scores)

    def mixer_products(self, kind: LayerKind) -> Cost:
        """Weight products of the mixers of one layer."""
        products = self.attention_projections(kind) if kind.has_attention else self._no_work
        if kind.has_cross_attention:
            products = products + self._cross_projections()
        return products + self.recurrent_products() if kind.has_recurrent else products

    def _cross_projections(self) -> Cost:
        """Queries and outputs of the decoder's tokens; keys and values of the encoder's output, in every layer."""
        shape, t, read = self.shape, self.candidates.tensor_parallel, self.of_encoder.tokens
        h = np.full_like(self.tokens, float(shape.hidden_size))
        queries = shape.num_attention_heads * shape.head_dim / t
        cost = self.gemm(self.tokens, queries, h) + self.gemm(self.tokens, h, queries)
        return cost + self.gemm(read, 2.0 * shape.num_key_value_heads * shape.head_dim / t, h)

    def recurrent_products(self) -> Cost:
        """Input, inner and output projections of a recurrent mixer."""
        recurrent = None if self.shape.blocks is None else self.shape.blocks.recurrent
        if recurrent is None:
            return self._no_work
        t, tokens, h = self.candidates.tensor_parallel, self.tokens, float(self.shape.hidden_size)
        hidden = np.full_like(tokens, h)
        cost = self.gemm(tokens, recurrent.split_outputs / t + recurrent.copied_outputs, hidden)
        if recurrent.inner_weights:
            inner = recurrent.inner_weights / recurrent.inner_inputs
            cost = cost + self.gemm(tokens, inner / t, np.full_like(tokens, float(recurrent.inner_inputs)))
        return cost + self.gemm(tokens, hidden, recurrent.output_inputs / t)

    def attention_projections(self, kind: LayerKind) -> Cost:
        """Query, key, value, gate and output projections of one layer, and those of an indexer."""
        if kind.form is not None:
            return self._form_products(kind.form)
        cost = self._attention_matrices()
        indexer = None if self.shape.blocks is None else self.shape.blocks.indexer
        if indexer is None or not kind.has_indexer:
            return cost
        tokens, ones = self.tokens, np.ones_like(self.tokens)
        cost = cost + self.gemm(tokens, float(indexer.num_heads * indexer.head_dim) * ones, indexer.query_inputs * ones)
        return cost + self.gemm(
            tokens, float(indexer.head_dim + indexer.num_heads) * ones, self.shape.hidden_size * ones
        )

    def _form_products(self, form: AttentionForm) -> Cost:
        """Weight products of attention with its own form."""
        cost, t, ones = self._no_work, self.candidates.tensor_parallel, np.ones_like(self.tokens)
        for matrix in form.matrices:
            parts = np.minimum(t, matrix.at_most) if matrix.at_most else t
            columns = matrix.outputs * ones / (parts if matrix.divides == "outputs" else 1.0)
            rows = matrix.inputs * ones / (parts if matrix.divides == "inputs" else 1.0)
            cost = cost + self.gemm(self.tokens, columns, rows).scaled(
                matrix.count * ones / (parts if matrix.divides == "count" else 1.0)
            )
        return cost

    def _attention_matrices(self) -> Cost:
        shape, t = self.shape, self.candidates.tensor_parallel
        h, a, tokens = float(shape.hidden_size), shape.num_attention_heads, self.tokens
        ones = np.ones_like(tokens)
        if shape.latent is None:
            width = ((1 + shape.has_output_gate) * a + 2 * shape.num_key_value_heads) * shape.head_dim / t
            inputs = self.gemm(tokens, width, h * ones)
            return inputs + self.gemm(tokens, h * ones, a * shape.head_dim / t)
        latent = shape.latent
        if latent.q_lora_rank is None:
            query_width = a * (latent.qk_nope_head_dim + latent.qk_rope_head_dim) / t
            cost = self.gemm(tokens, query_width, h * ones)
        else:
            rank = float(latent.q_lora_rank) * ones
            cost = self.gemm(tokens, rank, h * ones)
        cost = cost + self.gemm(tokens, (latent.kv_lora_rank + latent.qk_rope_head_dim) * ones, h * ones)
        return cost + self.latent_expansion() + self.gemm(tokens, h * ones, a * latent.v_head_dim / t)

    def latent_expansion(self) -> Cost:
        """The products of latent attention that expand compressed queries, keys and values."""
        latent, tokens = self.shape.latent, self.tokens
        if latent is None:
            return Cost(forward_s=np.zeros_like(tokens), backward_s=np.zeros_like(tokens))
        ones, heads = np.ones_like(tokens), self.shape.num_attention_heads / self.candidates.tensor_parallel
        expanded = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        cost = self.gemm(tokens, expanded, latent.kv_lora_rank * ones)
        if latent.q_lora_rank is None:
            return cost
        query_width = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        return cost + self.gemm(tokens, query_width, latent.q_lora_rank * ones)

    # --- MLP and experts --------------------------------------------------------------------------------------------

    def mlp(self, width: int) -> Cost:
        """A dense (or shared-expert) MLP of ``width``, split over the tensor-parallel devices."""
        shape, t = self.shape, self.candidates.tensor_parallel
        h = np.full_like(self.tokens, float(shape.hidden_size))
        inputs = shape.mlp_matrices - 1
        return self.gemm(self.tokens, inputs * width / t, h) + self.gemm(self.tokens, h, width / t)

    def experts(self, moe: MixtureOfExperts) -> Cost:
        """The routed experts of one MoE layer on the most loaded device (:func:`.arriving_load`)."""
        return self._expert_products(moe, self.shape.mlp_matrices)

    def _expert_products(self, moe: MixtureOfExperts, matrices: int) -> Cost:
        """The last ``matrices`` of the products of the routed experts.

        A device with a single expert has nothing to group: its products are those of an MLP (Transformer Engine's
        GroupedLinear of one, Megatron-LM's SequentialMLP).
        """
        batch = self.candidates
        received = self.tokens / batch.tensor_parallel * moe.num_experts_per_token * batch.expert_tensor_parallel
        received = received * arriving_load(self.workload, moe, batch.expert_parallel)
        local = moe.num_experts / batch.expert_parallel
        h = np.full_like(received, float(self.shape.expert_hidden_size))
        width = moe.expert_intermediate_size / batch.expert_tensor_parallel
        factor = np.where(local > 1.0, self.calibration.time.expert_gemm_efficiency, 1.0)
        each, inputs = self.gemm(received / local, h, width, factor=factor), matrices - 1
        if inputs:
            each = each + self.gemm(received / local, inputs * width, h, factor=factor)
        launches = min(matrices, PRODUCTS_PER_EXPERT) * self.calibration.time.expert_product_s * np.ones_like(local)
        each = each + Cost(forward_s=launches, backward_s=2.0 * launches)
        return each.scaled(local)

    def closing_product(self, kind: LayerKind) -> Cost:
        """The last weight product of a layer, whose result the backward pass does not read."""
        shape, t = self.shape, self.candidates.tensor_parallel
        hidden = np.full_like(self.tokens, float(shape.hidden_size))
        if kind.is_moe and shape.moe is not None:
            return self._expert_products(shape.moe, 1)
        if kind.has_mlp:
            return self.gemm(self.tokens, hidden, shape.intermediate_size / t)
        recurrent = None if shape.blocks is None else shape.blocks.recurrent
        if kind.has_recurrent and recurrent is not None:
            return self.gemm(self.tokens, hidden, recurrent.output_inputs / t)
        return self.gemm(self.tokens, hidden, shape.num_attention_heads * shape.head_dim / t)

    def latent_experts(self, moe: MixtureOfExperts) -> Cost:
        """The products that bring tokens to the width of latent experts and back."""
        if moe.latent_size is None:
            return self._no_work
        h, latent = (np.full_like(self.tokens, float(n)) for n in (self.shape.hidden_size, moe.latent_size))
        return self.gemm(self.tokens, latent, h) + self.gemm(self.tokens, h, latent)

    # --- memory-bound -----------------------------------------------------------------------------------------------

    def elementwise(self, kind: LayerKind) -> Cost:
        """Norms, residuals, rotary embedding, activation function, expert permutation of one layer."""
        shape, t = self.shape, self.candidates.tensor_parallel
        traffic = self._traffic
        # Traffic of the norms and residuals is that of two blocks.
        elements = traffic.hidden * shape.hidden_size * self.sharded_tokens * (kind.num_blocks / BLOCKS_OF_A_LAYER)
        inside = 0.0
        if kind.form is not None:
            elements = elements + kind.form.streamed_elements * self.sharded_tokens
            inside += traffic.rotary * (kind.form.num_heads + kind.form.num_key_value_heads) * kind.form.key_dim
        elif kind.has_attention:
            inside += traffic.rotary * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        if kind.has_recurrent and shape.blocks is not None and shape.blocks.recurrent is not None:
            inside += shape.blocks.recurrent.streamed_elements
        plain = self.memory_op(self.activation_bytes * (elements + inside * self.tokens / t))
        if not kind.has_mlp:
            return plain
        if kind.is_moe and shape.moe is not None:
            shared = self.activation(shape.moe.shared_intermediate_size / t)
            return plain + self.expert_operators() + shared
        return plain + self.activation(shape.intermediate_size / t)

    def activation(self, width: FloatArray | float) -> Cost:
        """Activation function of an MLP of ``width`` elements a token on this device."""
        passes = self._traffic.activation(self.shape.mlp_matrices)
        return self.memory_op(self.activation_bytes * self.tokens * passes * width)

    def expert_operators(self) -> Cost:
        """Activation function of the routed experts, and the sorting of their tokens."""
        shape, batch, moe = self.shape, self.candidates, self.shape.moe
        if moe is None:
            return self.memory_op(np.zeros_like(self.tokens))
        routed = self.tokens / batch.tensor_parallel * moe.num_experts_per_token * batch.expert_tensor_parallel
        passes = CLAMPED_ACTIVATION_PASSES if moe.expert_bias else self._traffic.activation(shape.mlp_matrices)
        activated = passes * moe.expert_intermediate_size / batch.expert_tensor_parallel
        load = arriving_load(self.workload, moe, batch.expert_parallel)
        passes = FUSED_HIDDEN_PASSES if self.workload.practice.fused_dispatch else ROUTED_HIDDEN_PASSES
        sorted_twice = 0.5 * (leaving_load(self.workload) + load) * passes * shape.expert_hidden_size
        return self.memory_op(self.activation_bytes * routed * (load * activated + sorted_twice))

    def embedding(self) -> Cost:
        """Input embedding: lookup, and accumulation of its gradient; of an encoder–decoder for both sequences."""
        own = self.memory_op(2.0 * self.activation_bytes * self.tokens * self.shape.hidden_size)
        return own if self.shape.encoder is None else own + self.of_encoder.embedding()

    def head(self, vocabulary_share: float = 1.0) -> Cost:
        """LM head and loss: a product with V/t columns in 16 bits, then softmax over the logits.

        Args:
            vocabulary_share: part of the columns that the stage computes.
        """
        columns = vocabulary_share * self.shape.vocab_size / self.candidates.tensor_parallel
        precision = self.workload.precision if self.workload.precision in ("fp16", "fp32") else "bf16"
        product = self.gemm(
            self.tokens,
            columns,
            np.full_like(self.tokens, float(self.shape.hidden_size)),
            precision=precision,
            whole=True,
            is_trained=self.workload.trains_vocabulary,
        )
        moved = self._traffic.loss_bytes / 2.0 * self.tokens * columns
        return product + self.memory_op(moved, backward_ratio=1.0)
