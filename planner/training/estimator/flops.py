"""Model FLOPs per token, independent of the plan: the numerator of MFU.

Causal attention is counted half, recompute not at all (recompute counts in HFU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshplan.catalogs.models.layers.attention_form import AttentionForm
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.lengths.packing import PackedDocuments

FLOPS_PER_MULTIPLY_ADD = 2.0
TRAINING_PASSES = 3.0  # forward, input gradient, weight gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Forward FLOPs of one token; of an encoder–decoder of one token of its input, the target's share included.

    Args:
        matrix: weight matrices of the layers; of the experts only those that the token visits.
        experts: the part of ``matrix`` in routed experts.
        attention: scores and weighted values over the mean causal context.
        head: LM head.
    """

    matrix: float
    experts: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """Matrices, attention and LM head."""
        return self.matrix + self.attention + self.head


def attention_width(shape: ModelShape, form: AttentionForm | None = None) -> float:
    """Multiply-adds per query-key pair: score and value widths over all heads, of a layer with its own ``form``."""
    if form is not None:
        return float(form.attention_width)
    if shape.latent is None:
        per_head = 2.0 * shape.head_dim
    else:
        per_head = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim + float(shape.latent.v_head_dim)
    return shape.num_attention_heads * per_head


def mean_context(sequence_length: int, window: int | None) -> float:
    """Keys that a token attends to on average: s/2 when causal, w − w²/2s within a window of w.

    >>> mean_context(8192, None)
    4096.0
    """
    reach = float(sequence_length if window is None else min(window, sequence_length))
    return reach - reach**2 / (2.0 * sequence_length)


def attended_context(
    shape: ModelShape,
    sequence_length: int,
    window: int | None,
    documents: PackedDocuments | None = None,
    *,
    form: AttentionForm | None = None,
) -> float:
    """Keys that softmax attention multiplies on average: of the context, the window, or what the indexer selects.

    The context is that of the token's document where there are ``documents``, else of the sequence; all of it where
    tokens attend to those after them. Compressed attention (a ``form`` of its own) sees its window, and one entry for
    several tokens of the rest.
    """
    if shape.bidirectional:
        return float(sequence_length if window is None else min(window, sequence_length))

    def mean(reach: int | None) -> float:
        return mean_context(sequence_length, reach) if documents is None else documents.mean_context(reach)

    if form is not None and form.compression > 1:
        return mean(form.window) + mean(form.top_k * form.compression or None) / form.compression
    indexer = None if shape.blocks is None else shape.blocks.indexer
    return mean(window if indexer is None else indexer.top_k)


def indexer_multiply_adds(
    shape: ModelShape,
    sequence_length: int,
    documents: PackedDocuments | None = None,
    *,
    form: AttentionForm | None = None,
) -> float:
    """Multiply-adds of a layer's indexer per token: its heads score the whole causal context; 0 without."""
    indexer = None if shape.blocks is None else shape.blocks.indexer
    if indexer is None and form is None:
        return 0.0
    context = mean_context(sequence_length, None) if documents is None else documents.mean_context(None)
    if form is not None:
        return context / form.compression * form.index_heads * form.index_dim
    return 0.0 if indexer is None else context * indexer.num_heads * indexer.head_dim


def mixing_multiply_adds(
    shape: ModelShape, sequence_length: int, layer: int, documents: PackedDocuments | None = None
) -> float:
    """Multiply-adds per token that mix the tokens of a layer: scores and values, indexer, recurrence."""
    mixed = 0.0
    if shape.has_attention(layer):
        form = shape.attention_form(layer)
        context = attended_context(shape, sequence_length, shape.window(layer), documents, form=form)
        mixed += context * attention_width(shape, form)
        if form is not None or (shape.blocks is not None and shape.blocks.has_indexer(layer)):
            mixed += indexer_multiply_adds(shape, sequence_length, documents, form=form)
    if shape.has_recurrent(layer) and shape.blocks is not None and shape.blocks.recurrent is not None:
        mixed += shape.blocks.recurrent.scan_flops_per_token / FLOPS_PER_MULTIPLY_ADD
    return mixed


def forward_flops_per_token(
    shape: ModelShape,
    sequence_length: int,
    documents: PackedDocuments | None = None,
    *,
    decoder_length: int | None = None,
) -> TokenFlops:
    """Forward FLOPs of one token at a sequence length.

    Args:
        shape: the model.
        sequence_length: tokens.
        documents: what lies in a sequence; None: one document.
        decoder_length: tokens of the target, of an encoder–decoder; None: as many.
    """
    if shape.encoder is None:
        return _stack_flops(shape, sequence_length, documents)
    written = decoder_length or sequence_length
    encoder, decoder = _stack_flops(shape.encoder, sequence_length), _stack_flops(shape, written)
    share, layers = written / sequence_length, shape.num_hidden_layers
    # Of the four matrices of cross-attention two are applied to the target's tokens, two to the encoder's output.
    per_side = FLOPS_PER_MULTIPLY_ADD * layers * shape.cross_attention_parameters / 2.0
    crossed = FLOPS_PER_MULTIPLY_ADD * layers * sequence_length * attention_width(shape)
    return TokenFlops(
        matrix=encoder.matrix + per_side + share * (decoder.matrix + per_side),
        experts=0.0,
        attention=encoder.attention + share * (decoder.attention + crossed),
        head=share * decoder.head,
    )


@lru_cache(maxsize=64)  # every price of a plan and of its alternatives asks for the same
def _stack_flops(shape: ModelShape, sequence_length: int, documents: PackedDocuments | None = None) -> TokenFlops:
    """Forward FLOPs of one token of one stack of layers, without cross-attention."""
    active, routed = 0.0, 0.0
    scores = 0.0
    for layer in range(shape.num_hidden_layers):
        active += shape.layer_attention_parameters(layer)
        active += shape.has_recurrent(layer) * shape.recurrent_parameters
        if shape.moe is not None and shape.is_moe_layer(layer):
            routed += shape.moe.num_experts_per_token * shape.expert_parameters
            active += shape.shared_expert_parameters + shape.router_parameters
        elif shape.has_mlp(layer):
            active += shape.dense_mlp_parameters
        scores += mixing_multiply_adds(shape, sequence_length, layer, documents)
    predicted = 1 + shape.num_nextn_predict_layers
    extra = shape.num_nextn_predict_layers / shape.num_hidden_layers
    return TokenFlops(
        matrix=FLOPS_PER_MULTIPLY_ADD * (active + routed) * (1.0 + extra),
        experts=FLOPS_PER_MULTIPLY_ADD * routed * (1.0 + extra),
        attention=FLOPS_PER_MULTIPLY_ADD * scores * (1.0 + extra),
        head=FLOPS_PER_MULTIPLY_ADD * predicted * shape.vocab_size * shape.hidden_size,
    )


def model_flops_per_step(
    shape: ModelShape,
    sequence_length: int,
    global_batch_size: int,
    *,
    frozen_weights: bool = False,
    documents: PackedDocuments | None = None,
    decoder_length: int | None = None,
) -> float:
    """FLOPs of one optimizer step, without recompute.

    Args:
        shape: the model.
        sequence_length: tokens of one sequence.
        global_batch_size: sequences per step.
        frozen_weights: the weights get no gradient (LoRA; the FLOPs of the adapters are left out): two passes over the
            matrices instead of three; attention is unchanged.
        documents: what lies in a sequence; padding is no work of the model.
        decoder_length: tokens of one target, of an encoder–decoder.
    """
    tokens = sequence_length * global_batch_size
    flops = forward_flops_per_token(shape, sequence_length, documents, decoder_length=decoder_length)
    matrix_passes = TRAINING_PASSES - 1.0 if frozen_weights else TRAINING_PASSES
    matrices = (flops.matrix + flops.head) * (1.0 if documents is None else documents.filled)
    return tokens * (matrix_passes * matrices + TRAINING_PASSES * flops.attention)
