"""What mixes the tokens of a layer on a device: attention, fused or not, cross-attention, the scan of a recurrence.

Notation as in :mod:`..compute`. Attention: forward FLOPs 4·T·c·a·d/t with c the mean context of a token (s/2 when
causal), at the rate of the framework's kernels (:mod:`.attention`). Without them the whole square of scores is computed
as batched products (backward 2 ×) and passes through memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.constants.attention_kernels import TILE_KEYS, UNTIMED
from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.surfaces.recurrent import DELTA_BACKWARD_RATIO, PREFILL, recurrent_kernel, scan_flops_per_s
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.training.estimator.candidates import LayerKind
from meshplan.planner.training.estimator.exchange.context_parallel import causal_imbalance
from meshplan.planner.training.estimator.flops import attended_context, attention_width, indexer_multiply_adds
from meshplan.planner.training.estimator.operators.attention import (
    FLASH_BACKWARD_RATIO,
    fused_attention,
    window_is_mask,
)
from meshplan.planner.training.estimator.operators.costs import OperatorCosts
from meshplan.planner.training.estimator.operators.products import (
    BYTES_32_BIT,
    LOW_PRECISION,
    Cost,
    attention_peak_flops_per_s,
    gemm_curve,
    peak_flops_per_s,
)

PLAIN_BACKWARD_RATIO = 2.0
# Passes over the attention scores that unfused attention makes forward: the first product writes them; scale, mask and
# softmax read and write them, at once in 16 bits (Megatron's fused kernel), in two steps in fp32; dropout reads and
# writes; the second product reads.
PLAIN_ATTENTION_PASSES = {BYTES_16_BIT: 6.0, BYTES_32_BIT: 8.0}
# The same where one kernel does all between the products (OneFlow's fused_scale_tril_softmax_dropout): written, read,
# written, read.
FUSED_SOFTMAX_PASSES = 4.0


@dataclass(frozen=True, kw_only=True)
class MixingCosts(OperatorCosts):
    """Mixers of tokens of a batch of candidates, besides single operators."""

    def attention_core(self, kind: LayerKind) -> Cost:
        """What mixes the tokens of one layer: attention scores and weighted values, or the scan of a recurrence."""
        mixed = self._scan() if kind.has_recurrent else self.no_work
        if kind.has_cross_attention:
            mixed = mixed + self._cross_attention()
        return mixed + self._softmax_attention(kind) if kind.has_attention else mixed

    def _scan(self) -> Cost:
        """The recurrence of a recurrent mixer in chunks; its backward computes the chunks again, as attention's does.

        Gated delta rules run flash-linear-attention's kernel (megatron-core 0.19.2, core/ssm/gated_delta_net), which
        SGLang runs, too: its forward pass as timed there, its backward pass :data:`DELTA_BACKWARD_RATIO` of that. Other
        scans run at :func:`scan_flops_per_s`; where they multiply no matrices, at attention's share of the vector
        units' peak in fp32. Their backward passes, which nobody timed, take attention's multiple.
        """
        recurrent = None if self.shape.blocks is None else self.shape.blocks.recurrent
        if recurrent is None:
            return self.no_work
        tokens = self.tokens / self.candidates.tensor_parallel
        kernel = recurrent_kernel(self.device.slug, recurrent.kind, "sglang", PREFILL)
        if kernel is not None:
            forward_s = tokens * recurrent.state_elements / kernel.elements_per_s
            return Cost(forward_s=forward_s, backward_s=DELTA_BACKWARD_RATIO * forward_s)
        if recurrent.multiplies_matrices:
            peak = attention_peak_flops_per_s(self.device, self.workload)
            forward_s = tokens * recurrent.scan_flops_per_token / scan_flops_per_s(peak)
        else:
            share = UNTIMED.forward_share * self.calibration.time.attention_kernel_efficiency
            rate = share * peak_flops_per_s(self.device, "fp32")
            forward_s = tokens * recurrent.scan_flops_per_token / rate
        return Cost(forward_s=forward_s, backward_s=FLASH_BACKWARD_RATIO * forward_s)

    def _softmax_attention(self, kind: LayerKind) -> Cost:
        if not self._fuses_attention:
            return self._plain_attention(float(self.workload.decoder_length), kind.form)
        length, documents = self.workload.decoder_length, self.workload.documents
        if window_is_mask(self.calibration.recipe, kind.window, length):
            return self._masked_attention(length, kind.form)
        context = attended_context(self.shape, length, kind.window, documents, form=kind.form)
        scored = context * attention_width(self.shape, kind.form)
        if kind.has_indexer or kind.form is not None:
            scored += indexer_multiply_adds(self.shape, length, documents, form=kind.form)
        scored += TILE_KEYS * attention_width(self.shape, kind.form)
        flops = 2.0 * self.tokens * scored / self.candidates.tensor_parallel
        if (imbalance := causal_imbalance(self.candidates, self.calibration.recipe)) is not None:
            flops = flops * imbalance
        return self._fused_attention(flops)

    def _masked_attention(self, length: int, form: AttentionForm | None) -> Cost:
        """Attention to all ``length`` keys with a mask that every head reads in both passes."""
        scores = self.tokens * length / self.candidates.tensor_parallel
        flops = 2.0 * scores * attention_width(self.shape, form)
        heads = self.shape.num_attention_heads if form is None else form.num_heads
        read = self.memory_op(self.activation_bytes * scores * heads, backward_ratio=1.0)
        return self._fused_attention(flops, is_masked=True) + read

    def _fused_attention(self, flops: FloatArray, *, is_masked: bool = False) -> Cost:
        return fused_attention(flops, self.shape, self.device, self.workload, self.calibration, is_masked=is_masked)

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

    @property
    def _fuses_attention(self) -> bool:
        return self.workload.practice.fuses_attention(self.calibration.recipe.flash_attention)
