"""The facts of a model family that its ``config.json`` does not say, as one :class:`Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshplan.catalogs.models.families import dialects as config_dialects
from meshplan.catalogs.models.families.dialects import Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A yes-or-no fact of an architecture.

    Args:
        default: its value where the configuration is silent.
        key: the configuration key that decides; None where the architecture leaves no choice.
        negated: the key says the opposite (``no_bias``).
    """

    default: bool
    key: str | None = None
    negated: bool = False


NO = Switch(default=False)
YES = Switch(default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingRule:
    """Which layers attend to a window only, where the configuration does not list them (``layer_types``).

    Args:
        enabled: whether ``sliding_window`` is in force at all.
        default_window: window in tokens where the key is absent (an explicit null means full attention).
        full_every: every so many layers one has full attention, the last of its group; 0 when no layer has.
        first_layer_key: key that holds the first layer with a window (Qwen's ``max_window_layers``).
    """

    enabled: Switch = YES
    default_window: int | None = None
    full_every: int = 0
    first_layer_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The facts of one family; the defaults are Llama's.

    Args:
        gated_mlp: three MLP matrices; None where the activation (``hidden_act``) decides.
        tie_word_embeddings: embedding and LM head share a matrix where the configuration is silent.
        query_bias: biases on queries, keys and values.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases on the MLP.
        lm_head_bias: bias on the LM head.
        norm_bias: norms have a bias.
        norm_weight: norms have a weight.
        norms_per_layer: norms over h in each layer.
        num_outer_norms: norms over h outside the layers.
        qk_norm: queries and keys are normalised with learned weights.
        qk_norm_full_width: … over all heads together.
        head_dim: head size where the configuration is silent; None: h / a.
        mlp_ratio: MLP width over h where the configuration is silent; None: the width must be given.
        position_offset: learned positions are the context plus so many rows; None where positions are not learned.
        sliding: which layers have an attention window.
        attention_sinks: a learned softmax sink for each head.
        expert_bias: experts and router carry biases.
        shared_expert_gate: shared experts are scaled by a learned gate.
        output_gate: attention's output is scaled by a gate of its own width.
        parallel_mixers: each layer has attention and a recurrent mixer side by side.
        bidirectional: tokens attend to those after them, too.
        is_encoder: a text encoder: no LM head follows.
        has_pooler: … but a layer h → h over its first token.
        defaults: sizes that published configurations leave out.
        dialect: rewrites the family's own spelling into the common keys.
    """

    gated_mlp: bool | None = True
    tie_word_embeddings: bool = False
    query_bias: Switch = Switch(default=False, key="attention_bias")
    output_bias: Switch = Switch(default=False, key="attention_bias")
    mlp_bias: Switch = Switch(default=False, key="mlp_bias")
    lm_head_bias: Switch = NO
    norm_bias: Switch = NO
    norm_weight: bool = True
    norms_per_layer: int = 2
    num_outer_norms: int = 1
    qk_norm: Switch = NO
    qk_norm_full_width: bool = False
    head_dim: int | None = None
    mlp_ratio: int | None = None
    position_offset: int | None = None
    sliding: SlidingRule = SlidingRule(enabled=NO)
    attention_sinks: bool = False
    expert_bias: bool = False
    shared_expert_gate: bool = False
    output_gate: Switch = Switch(default=False, key="attn_output_gate")
    parallel_mixers: bool = False
    bidirectional: Switch = Switch(default=False, key="is_causal", negated=True)
    is_encoder: bool = False
    has_pooler: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    dialect: Dialect = config_dialects.common


# Layers of the first transformers, GPT-2's and BERT's: no gate, biases everywhere, the embedding tied.
PLAIN = Family(gated_mlp=False, tie_word_embeddings=True, query_bias=YES, output_bias=YES, mlp_bias=YES, norm_bias=YES)
