"""Compute time of one layer on one device: matrix products, attention, memory-bound operators.

Notation: T tokens of one micro-batch on one device (micro_batch_size·sequence/context_parallel), t = tensor_parallel,
h hidden size, a heads, k key/value heads, d head dimension, f MLP width, V vocabulary.

Built on what one operator takes (:mod:`.operators.costs`) and what mixes the tokens of a layer
(:mod:`.operators.mixing`): here are the products of a layer's mixers, MLP and experts, and what passes through memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.estimator.candidates import LayerKind
from meshplan.planner.training.estimator.operators.einsum_dispatch import einsum_dispatch
from meshplan.planner.training.estimator.operators.memory_bound import EAGER, FUSED, OperatorTraffic
from meshplan.planner.training.estimator.operators.mixing import MixingCosts
from meshplan.planner.training.estimator.operators.products import Cost
from meshplan.planner.training.estimator.operators.recurrent import copied_elements
from meshplan.planner.training.problem.expert_load import arriving_load, leaving_load

# Times that each routed token copy (h elements) is read or written in the forward of an expert layer: sorted by expert
# before dispatch and after arrival, and both undone.
ROUTED_HIDDEN_PASSES = 8.0
# The same where the dispatcher's kernels write arriving tokens in the order of the experts.
FUSED_HIDDEN_PASSES = 4.0
# The same where masks deal tokens out: products by group of tokens and by expert in turn, so that what goes to the
# experts and what comes from them is transposed.
EINSUM_HIDDEN_PASSES = 4.0
# The clamped activation of experts with biases (gpt-oss) has no fused kernel: tensors of expert width that its
# forward reads and writes (two clamps 4, scaled sigmoid 4, its product 3, +1 2, the gate's product 3, the router's
# weight 3).
CLAMPED_ACTIVATION_PASSES = 19.0
# Weight products of one expert forward: the joined input matrices and the output matrix.
PRODUCTS_PER_EXPERT = 2.0
# Blocks with a residual connection in the layer of a transformer: attention and MLP.
BLOCKS_OF_A_LAYER = 2.0


@dataclass(frozen=True, kw_only=True)
class ComputeModel(MixingCosts):
    """Compute times of the layers of a batch of candidates."""

    @property
    def _traffic(self) -> OperatorTraffic:
        return EAGER if self.workload.is_eager else FUSED

    # --- projections ------------------------------------------------------------------------------------------------

    def mixer_products(self, kind: LayerKind) -> Cost:
        """Weight products of the mixers of one layer."""
        products = self.attention_projections(kind) if kind.has_attention else self.no_work
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
            return self.no_work
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
        cost, t, ones = self.no_work, self.candidates.tensor_parallel, np.ones_like(self.tokens)
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
            return inputs + self.attention_output()
        latent = shape.latent
        if latent.q_lora_rank is None:
            query_width = a * (latent.qk_nope_head_dim + latent.qk_rope_head_dim) / t
            cost = self.gemm(tokens, query_width, h * ones)
        else:
            rank = float(latent.q_lora_rank) * ones
            cost = self.gemm(tokens, rank, h * ones)
        cost = cost + self.gemm(tokens, (latent.kv_lora_rank + latent.qk_rope_head_dim) * ones, h * ones)
        return cost + self.latent_expansion() + self.gemm(tokens, h * ones, a * latent.v_head_dim / t)

    def attention_output(self) -> Cost:
        """The product that brings the heads of plain attention back to the hidden size."""
        width = self.shape.num_attention_heads * self.shape.head_dim / self.candidates.tensor_parallel
        return self.gemm(self.tokens, np.full_like(self.tokens, float(self.shape.hidden_size)), width)

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
        products, group_size = self._expert_products(moe, self.shape.mlp_matrices), self._expert_group_size
        if not group_size:
            return products
        return products + einsum_dispatch(self, moe, self.tokens / self.candidates.tensor_parallel, group_size)

    @property
    def _expert_group_size(self) -> int:
        """Tokens that masks deal out to experts together; 0 where they are sorted."""
        return self.workload.practice.expert_group_size

    def _expert_products(self, moe: MixtureOfExperts, matrices: int) -> Cost:
        """The last ``matrices`` of the products of the routed experts.

        A device with a single expert has nothing to group: its products are those of an MLP (Transformer Engine's
        GroupedLinear of one, Megatron-LM's SequentialMLP). Experts whose tokens masks deal out are one batched product.
        """
        batch = self.candidates
        received = self.tokens / batch.tensor_parallel * moe.num_experts_per_token * batch.expert_tensor_parallel
        received = received * arriving_load(self.workload, moe, batch.expert_parallel)
        local = moe.num_experts / batch.expert_parallel
        h = np.full_like(received, float(self.shape.expert_hidden_size))
        width = moe.expert_intermediate_size / batch.expert_tensor_parallel
        grouped = 0.0 if self._expert_group_size else 1.0
        factor = np.where(local * grouped > 1.0, self.calibration.time.expert_gemm_efficiency, 1.0)
        each, inputs = self.gemm(received / local, h, width, factor=factor), matrices - 1
        if inputs:
            each = each + self.gemm(received / local, inputs * width, h, factor=factor)
        launches = min(matrices, PRODUCTS_PER_EXPERT) * self.calibration.time.expert_product_s * np.ones_like(local)
        launches = launches * grouped
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
        return self.attention_output()

    def joined_prediction(self) -> Cost:
        """The product that joins a hidden state and the next token's embedding for a further prediction, 2h to h."""
        h = np.full_like(self.tokens, float(self.shape.hidden_size))
        return self.gemm(self.tokens, h, 2.0 * h)

    def latent_experts(self, moe: MixtureOfExperts) -> Cost:
        """The products that bring tokens to the width of latent experts and back."""
        if moe.latent_size is None:
            return self.no_work
        h, latent = (np.full_like(self.tokens, float(n)) for n in (self.shape.hidden_size, moe.latent_size))
        return self.gemm(self.tokens, latent, h) + self.gemm(self.tokens, h, latent)

    # --- memory-bound -----------------------------------------------------------------------------------------------

    def elementwise(self, kind: LayerKind) -> Cost:
        """Norms, residuals, rotary embedding, activation function, expert permutation of one layer."""
        shape, t = self.shape, self.candidates.tensor_parallel
        traffic = self._traffic
        streamed = traffic.norm * shape.norms_per_block + traffic.residual
        elements = streamed * shape.hidden_size * self.sharded_tokens * kind.num_blocks
        # torch.compile makes one pass of the norm of queries and keys and their rotation.
        compiled = self.calibration.recipe.is_fsdp and not self.workload.is_eager
        normed = kind.has_attention and kind.form is None and not compiled
        inside = traffic.norm * shape.normed_elements * normed
        if kind.form is not None:
            elements = elements + kind.form.streamed_elements * self.sharded_tokens
            inside += traffic.rotary * (kind.form.num_heads + kind.form.num_key_value_heads) * kind.form.key_dim
        elif kind.has_attention:
            inside += traffic.rotary * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        if kind.has_recurrent and shape.blocks is not None and shape.blocks.recurrent is not None:
            inside += shape.blocks.recurrent.streamed_elements + copied_elements(shape.blocks.recurrent)
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
        if self._expert_group_size:
            passes = EINSUM_HIDDEN_PASSES
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
