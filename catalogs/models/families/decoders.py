"""Families of decoders: language models whose tokens attend to those before them.

Source: the configuration and modelling files of Hugging Face transformers 5.23.0 (Apache-2.0), folder
``src/transformers/models/<family>``; for families that transformers does not carry (``qwen``, ``internlm``,
``chatglm``), the modelling file beside the published weights. tests/catalogs/models/test_config.py compares the
parameter counts that follow with published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.catalogs.models.families import dialects as config_dialects
from meshplan.catalogs.models.families.facts import NO, PLAIN, YES, Family, SlidingRule, Switch

_EVERY_LAYER = SlidingRule()
_QWEN_WINDOWS = SlidingRule(
    enabled=Switch(default=False, key="use_sliding_window"), default_window=4096, first_layer_key="max_window_layers"
)
_LLAMA = Family()
_MISTRAL = Family(sliding=SlidingRule(default_window=4096))
_QWEN2 = Family(query_bias=YES, output_bias=NO, sliding=_QWEN_WINDOWS)
_QWEN3 = Family(qk_norm=YES, head_dim=128, sliding=_QWEN_WINDOWS)
_QWEN3_MOE = Family(qk_norm=YES, sliding=_QWEN_WINDOWS)
_QWEN3_NEXT = Family(
    qk_norm=YES,
    head_dim=256,
    shared_expert_gate=True,
    output_gate=Switch(default=True, key="attn_output_gate"),
    dialect=config_dialects.qwen3_next,
)
_GPT2 = replace(PLAIN, mlp_ratio=4, position_offset=0)
_GPTJ = Family(
    gated_mlp=False,
    query_bias=NO,
    output_bias=NO,
    mlp_bias=YES,
    lm_head_bias=YES,
    norm_bias=YES,
    norms_per_layer=1,
    mlp_ratio=4,
)
_COHERE = Family(
    tie_word_embeddings=True,
    norms_per_layer=1,
    qk_norm=Switch(default=False, key="use_qk_norm"),
    qk_norm_full_width=True,
)
_OLMO2 = Family(qk_norm=YES, qk_norm_full_width=True)
_MINIMAX_M3 = Family(qk_norm=YES, dialect=config_dialects.minimax_m3)
_ENABLE_BIAS = Switch(default=True, key="enable_bias")
_NO_BIAS = Switch(default=False, key="no_bias", negated=True)  # MPT: no_bias is true unless stated
_USE_BIAS = Switch(default=False, key="use_bias")
_STARCODER_BIAS = Switch(default=True, key="use_bias")
_BIAS = Switch(default=False, key="bias")
_NEOX_BIAS = Switch(default=True, key="attention_bias")

DECODERS: Mapping[str, Family] = {
    # Llama and what copies it.
    "llama": _LLAMA,
    "granite": _LLAMA,
    "baichuan": _LLAMA,
    "aquila": _LLAMA,
    "arcee": Family(gated_mlp=False),
    "bitnet": _LLAMA,
    "smollm3": Family(tie_word_embeddings=True),
    "internlm": Family(query_bias=_BIAS, output_bias=_BIAS),
    "internlm2": Family(query_bias=_BIAS, output_bias=_BIAS),
    "seed_oss": Family(
        query_bias=Switch(default=True, key="attention_bias"),
        output_bias=Switch(default=False, key="attention_out_bias"),
        head_dim=128,
    ),
    "llama4": Family(
        sliding=SlidingRule(default_window=8192, full_every=4), head_dim=128, dialect=config_dialects.llama4
    ),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "mistral3": _MISTRAL,
    "mixtral": Family(sliding=_EVERY_LAYER),
    "phi3": Family(sliding=_EVERY_LAYER),
    "phimoe": Family(lm_head_bias=Switch(default=False, key="lm_head_bias"), norm_bias=YES, sliding=_EVERY_LAYER),
    "nemotron": Family(gated_mlp=False, norm_bias=YES),
    "stablelm": Family(
        query_bias=Switch(default=False, key="use_qkv_bias"),
        output_bias=NO,
        norm_bias=YES,
        qk_norm=Switch(default=False, key="qk_layernorm"),
        qk_norm_full_width=True,
        dialect=config_dialects.stablelm,
    ),
    # Qwen.
    "qwen": Family(query_bias=YES, output_bias=NO, dialect=config_dialects.qwen1),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_moe": Family(
        query_bias=Switch(default=True, key="qkv_bias"), output_bias=NO, shared_expert_gate=True, sliding=_QWEN_WINDOWS
    ),
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": _QWEN3_MOE,
    # Gemma.
    "gemma": Family(tie_word_embeddings=True, head_dim=256),
    "gemma2": Family(
        tie_word_embeddings=True,
        head_dim=256,
        norms_per_layer=4,
        sliding=SlidingRule(default_window=4096, full_every=2),
    ),
    "gemma3": Family(
        tie_word_embeddings=True,
        head_dim=256,
        norms_per_layer=4,
        qk_norm=YES,
        sliding=SlidingRule(default_window=4096, full_every=6),
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
    ),
    "gemma4": Family(
        tie_word_embeddings=True,
        head_dim=256,
        norms_per_layer=4,
        sliding=SlidingRule(default_window=512, full_every=6),
        dialect=config_dialects.gemma4,
    ),
    # Latent attention and many experts.
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _LLAMA,
    "kimi_k2": _LLAMA,
    "dots1": Family(qk_norm=YES),
    "glm": Family(query_bias=Switch(default=True, key="attention_bias"), output_bias=NO, head_dim=128),
    "glm4": Family(
        query_bias=Switch(default=True, key="attention_bias"), output_bias=NO, head_dim=128, norms_per_layer=4
    ),
    "glm4_moe": Family(
        query_bias=Switch(default=False, key="attention_bias"),
        output_bias=NO,
        qk_norm=Switch(default=False, key="use_qk_norm"),
        defaults={"first_k_dense_replace": 1},
    ),
    "chatglm": Family(
        query_bias=Switch(default=False, key="add_qkv_bias"), output_bias=NO, dialect=config_dialects.chatglm
    ),
    "gpt_oss": Family(
        query_bias=Switch(default=True, key="attention_bias"),
        output_bias=Switch(default=True, key="attention_bias"),
        attention_sinks=True,
        expert_bias=True,
        head_dim=64,
        sliding=SlidingRule(default_window=128, full_every=2),
    ),
    "minimax_m2": Family(qk_norm=Switch(default=True, key="use_qk_norm"), qk_norm_full_width=True, head_dim=128),
    "ernie4_5": Family(
        tie_word_embeddings=True, query_bias=_USE_BIAS, output_bias=_USE_BIAS, mlp_bias=_USE_BIAS, head_dim=128
    ),
    "ernie4_5_moe": Family(tie_word_embeddings=True, query_bias=_USE_BIAS, output_bias=_USE_BIAS, mlp_bias=_USE_BIAS),
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "dbrx": Family(query_bias=NO, output_bias=NO, dialect=config_dialects.dbrx),
    # Hybrids of attention with recurrent layers, and attention with an indexer.
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_NEXT,
    "kimi_linear": _LLAMA,
    "minimax": Family(dialect=config_dialects.minimax),
    "minimax_text_01": _LLAMA,
    "minimax_m1": _LLAMA,
    "nemotron_h": Family(gated_mlp=False, norms_per_layer=1, dialect=config_dialects.nemotron_h),
    "granitemoehybrid": Family(dialect=config_dialects.granite_hybrid),
    "bamba": Family(dialect=config_dialects.state_space),
    "falcon_h1": Family(parallel_mixers=True, dialect=config_dialects.falcon_h1),
    "jamba": Family(dialect=config_dialects.jamba),
    "lfm2": Family(tie_word_embeddings=True, qk_norm=YES, dialect=config_dialects.lfm2),
    "lfm2_moe": Family(tie_word_embeddings=True, qk_norm=YES, defaults={"num_dense_layers": 2}),
    "olmo_hybrid": Family(qk_norm=YES, qk_norm_full_width=True, dialect=config_dialects.olmo_hybrid),
    "deepseek_v32": _LLAMA,
    "glm_moe_dsa": _LLAMA,
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    # Attention of several forms in one model.
    "deepseek_v4": Family(dialect=config_dialects.deepseek_v4),
    "mimo_v2_flash": Family(dialect=config_dialects.mimo_v2),
    # OLMo, Cohere, EXAONE, Apertus.
    "olmo": Family(norm_weight=False),
    "olmo2": _OLMO2,
    "olmo3": Family(qk_norm=YES, qk_norm_full_width=True, sliding=SlidingRule(default_window=4096, full_every=4)),
    "olmoe": _OLMO2,
    "cohere": _COHERE,
    "cohere2": Family(
        tie_word_embeddings=True, norms_per_layer=1, sliding=SlidingRule(default_window=4096, full_every=4)
    ),
    "exaone4": Family(qk_norm=YES, sliding=SlidingRule(default_window=4096, full_every=4)),
    "apertus": Family(gated_mlp=False, qk_norm=YES),
    # GPT-2 and its kin: LayerNorm, two-matrix MLP, biases.
    "gpt2": _GPT2,
    "gpt_bigcode": Family(
        gated_mlp=False,
        tie_word_embeddings=True,
        query_bias=YES,
        output_bias=YES,
        mlp_bias=YES,
        norm_bias=YES,
        mlp_ratio=4,
        position_offset=0,
        dialect=config_dialects.gpt_bigcode,
    ),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_neox": Family(gated_mlp=False, query_bias=_NEOX_BIAS, output_bias=_NEOX_BIAS, mlp_bias=YES, norm_bias=YES),
    "phi": Family(
        gated_mlp=False,
        query_bias=YES,
        output_bias=YES,
        mlp_bias=YES,
        lm_head_bias=YES,
        norm_bias=YES,
        norms_per_layer=1,
    ),
    "starcoder2": Family(
        gated_mlp=False,
        tie_word_embeddings=True,
        query_bias=_STARCODER_BIAS,
        output_bias=_STARCODER_BIAS,
        mlp_bias=_STARCODER_BIAS,
        norm_bias=YES,
        sliding=_EVERY_LAYER,
    ),
    "opt": Family(
        gated_mlp=False,
        tie_word_embeddings=True,
        query_bias=_ENABLE_BIAS,
        output_bias=_ENABLE_BIAS,
        mlp_bias=_ENABLE_BIAS,
        norm_bias=YES,
        position_offset=2,
        dialect=config_dialects.opt,
    ),
    "bloom": replace(PLAIN, num_outer_norms=2, mlp_ratio=4),
    "mpt": Family(
        gated_mlp=False,
        tie_word_embeddings=True,
        query_bias=_NO_BIAS,
        output_bias=_NO_BIAS,
        mlp_bias=_NO_BIAS,
        norm_bias=_NO_BIAS,
        qk_norm=Switch(default=False, key="qk_ln"),
        qk_norm_full_width=True,
        mlp_ratio=4,
        dialect=config_dialects.mpt,
    ),
    "falcon": Family(
        gated_mlp=False,
        tie_word_embeddings=True,
        query_bias=_BIAS,
        output_bias=_BIAS,
        mlp_bias=_BIAS,
        norm_bias=YES,
        mlp_ratio=4,
        defaults={"max_sequence_length": 2048},
        dialect=config_dialects.falcon,
    ),
}
