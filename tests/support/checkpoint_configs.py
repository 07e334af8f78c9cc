"""``config.json`` files that engines' parsers read: the sizes of a shape under the keys of its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def write_config(shape: ModelShape, folder: Path) -> Path:
    """``folder/slug`` with a ``config.json``."""
    path = folder / shape.slug
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_keys(shape)))
    return path


def config_keys(shape: ModelShape) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "num_hidden_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_sequence_length,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    if shape.family == "mixtral" and shape.moe is not None:
        keys |= {"num_local_experts": shape.moe.num_experts, "num_experts_per_tok": shape.moe.num_experts_per_token}
    if shape.family == "deepseek_v3" and shape.moe is not None and shape.latent is not None:
        keys |= {
            "n_routed_experts": shape.moe.num_experts,
            "num_experts_per_tok": shape.moe.num_experts_per_token,
            "moe_intermediate_size": shape.moe.expert_intermediate_size,
            "n_shared_experts": 1,
            "n_group": shape.moe.num_expert_groups,
            "topk_group": shape.moe.num_groups_per_token,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "first_k_dense_replace": shape.moe.moe_layers.index(True),
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": shape.num_nextn_predict_layers,
            "q_lora_rank": shape.latent.q_lora_rank,
            "kv_lora_rank": shape.latent.kv_lora_rank,
            "qk_nope_head_dim": shape.latent.qk_nope_head_dim,
            "qk_rope_head_dim": shape.latent.qk_rope_head_dim,
            "v_head_dim": shape.latent.v_head_dim,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        }
        keys.pop("head_dim")
    return keys


# The least that a configuration of a Llama says.
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
