"""The shape of a model as Megatron-LM flags, or the reason why it has none.

A :class:`ModelShape` holds what costs time and memory. What it does not hold, such as the activation function, the
base of the rotary positions or the scoring of a router, is looked up by model family in the tables below; a family
that is not listed gets the field's commonest choice, and the emitted README says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.training.megatron.hybrid import has_pattern, hybrid_flags, missing_part

# Families whose layers Megatron-LM 0.19.2 has no flag for, with what is missing.
_FAMILIES_WITHOUT_FLAGS = {
    "bloom": "ALiBi positions",
    "mpt": "ALiBi positions",
    "falcon": "a parallel attention-MLP block",
    "gpt_neox": "a parallel attention-MLP block",
    "gptj": "a parallel attention-MLP block",
    "phi": "a parallel attention-MLP block",
    "cohere": "a parallel attention-MLP block",
    "cohere2": "a parallel attention-MLP block",
    "opt": "the ReLU activation",
    "gemma": "the GeGLU activation",
    "gemma2": "the GeGLU activation and four norms per layer",
    "gemma3": "the GeGLU activation and four norms per layer",
    "gemma3_text": "the GeGLU activation and four norms per layer",
    "llama4": "layers that alternate chunked attention with no positions",
    "llama4_text": "layers that alternate chunked attention with no positions",
}
# Hybrids whose attention knows no positions: Nemotron-H (arXiv:2504.03624, §2), Granite 4 (position_embedding_type).
_FAMILIES_WITHOUT_POSITIONS = ("nemotron_h", "granitemoehybrid")
_PRE_POST_NORMS = 2
_QUICK_GEGLU_CLAMP = "7.0"

# Base of the rotary positions, from each family's published config.json ("rope_theta").
_ROTARY_BASES = {
    "deepseek_v2": 10_000,
    "deepseek_v3": 10_000,
    "gpt_oss": 150_000,
    "mistral": 1_000_000,
    "mixtral": 1_000_000,
    "qwen2": 1_000_000,
    "qwen2_moe": 1_000_000,
    "qwen3": 1_000_000,
    "qwen3_moe": 1_000_000,
}
_DEFAULT_ROTARY_BASE = 10_000
_LLAMA_3_ROTARY_BASE = 500_000
_LLAMA_3_VOCAB_SIZE = 128_256  # Llama 3 and Llama 2 share their family name

# How far Llama's published checkpoints stretch their positions ("rope_scaling" of config.json: type llama3, factor).
_ROPE_SCALING = {"llama-3.1-": "8.0", "llama-3.2-": "32.0", "llama-3.3-": "8.0"}

# Routers that are not "softmax over the top k", from the papers: DeepSeek-V3, arXiv:2412.19437, §2.1.2 and §4.2.
_ROUTER_FLAGS = {
    "deepseek_v3": (
        ("--moe-router-score-function", "sigmoid"),
        ("--moe-router-enable-expert-bias",),
        ("--moe-router-topk-scaling-factor", "2.5"),
    ),
    "qwen2_moe": (("--moe-shared-expert-gate",),),
}

Flag = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inexpressible:
    """What Megatron-LM cannot express of a model, and the nearest that it can."""

    what: str
    nearest: str


def inexpressible_shape(shape: ModelShape) -> Inexpressible | None:
    """Why Megatron-LM cannot train ``shape``; None where it can."""
    if shape.encoder is not None:
        return Inexpressible(what="the encoder in front", nearest="plans for accelerate or deepspeed")
    if shape.bidirectional or shape.pooling is not None:
        return Inexpressible(what="a text encoder or a classifier", nearest="a language model")
    if shape.family in _FAMILIES_WITHOUT_FLAGS:
        missing = _FAMILIES_WITHOUT_FLAGS[shape.family]
        return Inexpressible(what=f"{missing} (family {shape.family!r})", nearest="a model of another family")
    if missing := missing_part(shape):
        return Inexpressible(what=missing, nearest="a target with a script of your own")
    if shape.norms_per_layer != _PRE_POST_NORMS and not has_pattern(shape):
        return Inexpressible(what=f"{shape.norms_per_layer} norms in a layer", nearest="2 norms in a layer")
    biases = _biases(shape)
    if biases not in {(True, True, True), (False, False, False), (True, False, False)}:
        return Inexpressible(
            what=f"biases on query-key-value, output and MLP of {biases}",
            nearest="biases on all three, on query-key-value alone, or on none",
        )
    windows = {window for window in shape.sliding_windows if window is not None}
    if len(windows) > 1:
        return Inexpressible(
            what=f"sliding windows of {len(windows)} sizes ({sorted(windows)})", nearest="windows of one size"
        )
    return None


def model_flags(shape: ModelShape) -> tuple[Flag, ...]:
    """Megatron-LM's flags for ``shape``, one tuple a flag."""
    # A pattern of blocks states their number.
    flags: list[Flag] = [] if has_pattern(shape) else [("--num-layers", str(shape.num_hidden_layers))]
    flags += [
        ("--hidden-size", str(shape.hidden_size)),
        ("--ffn-hidden-size", str(shape.intermediate_size)),
        ("--num-attention-heads", str(shape.num_attention_heads)),
        *_attention(shape),
        *_positions(shape),
        ("--normalization", "LayerNorm" if shape.norm_bias else "RMSNorm"),
        *_activation(shape),
        *_bias_flags(shape),
    ]
    if not shape.tie_word_embeddings:
        flags.append(("--untie-embeddings-and-output-weights",))
    flags += [*_windows(shape), *_experts(shape), *hybrid_flags(shape), *_linear_layers(shape)]
    if shape.num_nextn_predict_layers:
        flags.append(("--mtp-num-layers", str(shape.num_nextn_predict_layers)))
    # Dropout is a hyper-parameter of old; Megatron's default of 0.1 would also keep masks that no estimate counts.
    flags += [("--attention-dropout", "0.0"), ("--hidden-dropout", "0.0")]
    return tuple(flags)


def checkpoint_flags(shape: ModelShape) -> tuple[Flag, ...]:
    """What a published checkpoint was trained with beyond the sizes of its model; empty where no more is known."""
    factor = next((factor for prefix, factor in _ROPE_SCALING.items() if shape.slug.startswith(prefix)), None)
    return () if factor is None else (("--use-rope-scaling",), ("--rope-scaling-factor", factor))


def model_notes(shape: ModelShape, *, is_fine_tuned: bool = False) -> tuple[str, ...]:
    """What was assumed because the shape does not hold it."""
    notes = []
    is_known = is_fine_tuned and bool(checkpoint_flags(shape))
    if not is_known and not shape.num_position_embeddings and shape.family not in _FAMILIES_WITHOUT_POSITIONS:
        notes.append(
            f"Rotary base {rotary_base(shape)} and no RoPE scaling: set --rotary-base, --use-rope-scaling "
            "or --rope-type yourself when you continue from a checkpoint."
        )
    if shape.moe is not None and shape.family not in _ROUTER_FLAGS:
        notes.append("The router is a softmax over the top k without auxiliary loss (--moe-aux-loss-coeff 0).")
    return tuple(notes)


def rotary_base(shape: ModelShape) -> int:
    """Base of the rotary positions of the family."""
    if shape.family == "llama" and shape.vocab_size == _LLAMA_3_VOCAB_SIZE:
        return _LLAMA_3_ROTARY_BASE
    return _ROTARY_BASES.get(shape.family, _DEFAULT_ROTARY_BASE)


def _attention(shape: ModelShape) -> list[Flag]:
    if shape.latent is not None:
        latent = shape.latent
        sizes: list[Flag] = [
            ("--multi-latent-attention",),
            ("--kv-lora-rank", str(latent.kv_lora_rank)),
            ("--qk-head-dim", str(latent.qk_nope_head_dim)),
            ("--qk-pos-emb-head-dim", str(latent.qk_rope_head_dim)),
            ("--v-head-dim", str(latent.v_head_dim)),
            ("--kv-channels", str(latent.v_head_dim)),
            ("--qk-layernorm",),  # DeepSeek-V2 §2.1.2: norms on both low-rank factors
            # Plain rotary positions, as in pre-training; Megatron fuses only YaRN with latent attention.
            ("--rope-type", "rope"),
            ("--no-rope-fusion",),
        ]
        return sizes if latent.q_lora_rank is None else [*sizes, ("--q-lora-rank", str(latent.q_lora_rank))]
    flags: list[Flag] = [("--kv-channels", str(shape.head_dim))]
    if shape.num_key_value_heads != shape.num_attention_heads:
        flags += [("--group-query-attention",), ("--num-query-groups", str(shape.num_key_value_heads))]
    if shape.qk_norm:
        flags.append(("--qk-layernorm",))
    if shape.family == "gpt_oss":
        flags.append(("--softmax-type", "learnable"))
    return flags


def _positions(shape: ModelShape) -> list[Flag]:
    if shape.num_position_embeddings:
        return [("--position-embedding-type", "learned_absolute")]
    if shape.family in _FAMILIES_WITHOUT_POSITIONS:
        return [("--position-embedding-type", "none")]
    return [("--position-embedding-type", "rope"), ("--rotary-base", str(rotary_base(shape)))]


def _activation(shape: ModelShape) -> list[Flag]:
    if shape.family == "gpt_oss":
        return [
            ("--quick-geglu",),
            ("--glu-linear-offset", "1.0"),
            ("--activation-func-clamp-value", _QUICK_GEGLU_CLAMP),
        ]
    if shape.gated_mlp:
        return [("--swiglu",)]
    if shape.family in ("nemotron", "nemotron_h"):
        return [("--squared-relu",)]
    # GELU is the default. Its fusion adds the bias, so it needs one.
    return [] if shape.mlp_bias else [("--no-bias-gelu-fusion",)]


def _biases(shape: ModelShape) -> tuple[bool, bool, bool]:
    """(query-key-value, attention output, MLP); for experts their own bias."""
    mlp = shape.mlp_bias if shape.moe is None else shape.moe.expert_bias
    return shape.attention_bias, shape.attention_output_bias, mlp


def _bias_flags(shape: ModelShape) -> list[Flag]:
    query_key_value, output, _ = _biases(shape)
    if output:
        return []
    disabled: list[Flag] = [("--disable-bias-linear",)]
    return [*disabled, ("--add-qkv-bias",)] if query_key_value else disabled


def _windows(shape: ModelShape) -> list[Flag]:
    windows = [window for window in shape.sliding_windows if window is not None]
    if not windows:
        return []
    # Megatron counts the tokens to the left of the own one; 1 marks a layer with a window.
    pattern = run_lengths([shape.window(layer) is not None for layer in range(shape.num_hidden_layers)])
    return [("--window-size", f"{windows[0] - 1},0"), ("--window-attn-skip-freq", pattern)]


def _linear_layers(shape: ModelShape) -> list[Flag]:
    """Which layers have linear attention (1), where they are not letters of a pattern."""
    if not shape.num_recurrent_layers or has_pattern(shape):
        return []
    marks = [shape.has_recurrent(layer) for layer in range(shape.num_hidden_layers)]
    return [("--linear-attention-freq", run_lengths(marks))]


def _experts(shape: ModelShape) -> list[Flag]:
    moe = shape.moe
    if moe is None:
        return []
    flags: list[Flag] = [
        ("--num-experts", str(moe.num_experts)),
        ("--moe-router-topk", str(moe.num_experts_per_token)),
        ("--moe-ffn-hidden-size", str(moe.expert_intermediate_size)),
        ("--moe-router-dtype", "fp32"),
        ("--moe-grouped-gemm",),
        *_ROUTER_FLAGS.get(shape.family, ()),
    ]
    if moe.limits_groups:
        flags.append(("--moe-router-num-groups", str(moe.num_expert_groups)))
        flags.append(("--moe-router-group-topk", str(moe.num_groups_per_token)))
    if moe.num_experts_per_token == 1:
        flags.append(("--moe-router-pre-softmax",))  # a softmax over one score would have no gradient
    if moe.shared_intermediate_size:
        flags.append(("--moe-shared-expert-intermediate-size", str(moe.shared_intermediate_size)))
    if moe.shared_expert_gate and shape.family not in _ROUTER_FLAGS:
        flags.append(("--moe-shared-expert-gate",))
    if moe.latent_size is not None:
        flags.append(("--moe-latent-size", str(moe.latent_size)))
    if not all(moe.moe_layers) and not has_pattern(shape):
        flags.append(("--moe-layer-freq", run_lengths(moe.moe_layers)))
    return flags


def run_lengths(marks: Sequence[bool]) -> str:
    """A list of 0 and 1 as Megatron's list expression, without spaces.

    >>> run_lengths([False] * 3 + [True] * 58)
    '([0]*3+[1]*58)'
    """
    runs = [(mark, len(list(group))) for mark, group in groupby(marks)]
    return "(" + "+".join(f"[{int(mark)}]*{length}" for mark, length in runs) + ")"
