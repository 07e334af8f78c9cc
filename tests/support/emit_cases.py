"""Models, devices and plans that the tests of the emitters share (plain data; no fixtures)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.attention import AttentionKind, LatentAttention
from meshplan.catalogs.models.shapes import MixtureOfExperts, ModelShape
from meshplan.planner.core.plan import Interval, Plan
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.training.problem.problem import TrainingConfig

H100 = Device(
    slug="h100-sxm-80gb",
    name="NVIDIA H100 SXM 80GB",
    vendor="nvidia",
    architecture="hopper",
    memory_bytes=80 * 10**9,
    usable_memory_bytes=79 * 2**30,
    memory_bandwidth_bytes_per_s=3.35e12,
    peak_flops_per_s={"bf16": 989e12},
)
B200 = replace(H100, slug="b200-sxm-180gb", name="NVIDIA B200", architecture="blackwell")

LLAMA_70B = ModelShape(
    slug="llama-3.1-70b",
    name="Llama-3.1-70B",
    family="llama",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    gated_mlp=True,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=False,
    max_sequence_length=131072,
)
MIXTRAL = ModelShape(
    slug="mixtral-8x7b",
    name="Mixtral-8x7B",
    family="mixtral",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    gated_mlp=True,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_sequence_length=32768,
    moe=MixtureOfExperts(
        num_experts=8,
        num_experts_per_token=2,
        expert_intermediate_size=14336,
        shared_intermediate_size=0,
        moe_layers=(True,) * 32,
    ),
)
DEEPSEEK_V3 = ModelShape(
    slug="deepseek-v3",
    name="DeepSeek-V3",
    family="deepseek_v3",
    num_hidden_layers=61,
    hidden_size=7168,
    intermediate_size=18432,
    gated_mlp=True,
    num_attention_heads=128,
    num_key_value_heads=128,
    head_dim=192,
    vocab_size=129280,
    tie_word_embeddings=False,
    attention=AttentionKind.MULTI_HEAD_LATENT,
    latent=LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    moe=MixtureOfExperts(
        num_experts=256,
        num_experts_per_token=8,
        expert_intermediate_size=2048,
        shared_intermediate_size=2048,
        moe_layers=(False,) * 3 + (True,) * 58,
        num_expert_groups=8,
        num_groups_per_token=4,
    ),
    max_sequence_length=163840,
    num_nextn_predict_layers=1,
)
GPT2_XL = ModelShape(
    slug="gpt2-xl",
    name="GPT-2 XL",
    family="gpt2",
    num_hidden_layers=48,
    hidden_size=1600,
    intermediate_size=6400,
    gated_mlp=False,
    num_attention_heads=25,
    num_key_value_heads=25,
    head_dim=64,
    vocab_size=50257,
    tie_word_embeddings=True,
    num_position_embeddings=1024,
    max_sequence_length=1024,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    norm_bias=True,
)
QWEN3_4B = ModelShape(
    slug="qwen3-4b",
    name="Qwen3-4B",
    family="qwen3",
    num_hidden_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    gated_mlp=True,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_sequence_length=40960,
    qk_norm=True,
)
GPT_OSS_20B = ModelShape(
    slug="gpt-oss-20b",
    name="gpt-oss-20b",
    family="gpt_oss",
    num_hidden_layers=24,
    hidden_size=2880,
    intermediate_size=2880,
    gated_mlp=True,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=201088,
    tie_word_embeddings=False,
    moe=MixtureOfExperts(
        num_experts=32,
        num_experts_per_token=4,
        expert_intermediate_size=2880,
        shared_intermediate_size=0,
        moe_layers=(True,) * 24,
        expert_bias=True,
    ),
    sliding_windows=(128, None) * 12,
    max_sequence_length=131072,
    attention_bias=True,
    attention_output_bias=True,
)
SHAPES = (LLAMA_70B, MIXTRAL, DEEPSEEK_V3, GPT2_XL, QWEN3_4B, GPT_OSS_20B)


def even_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, the first chunks taking the remainder."""
    share, left = divmod(num_layers, num_chunks)
    return tuple(share + (chunk < left) for chunk in range(num_chunks))


def config_for(shape: ModelShape, **choices: Any) -> TrainingConfig:
    """A configuration of one device per replica, changed by ``choices``; derived fields follow unless given."""
    chosen: dict[str, Any] = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "virtual_pipeline_stages": 1,
        "context_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "zero_stage": 1,
        "activation_recompute": "none",
        "micro_batch_size": 1,
        "num_microbatches": 8,
        "sequence_length": min(4096, shape.max_sequence_length or 4096),
        "precision": "bf16",
        **choices,
    }
    stages, virtual = chosen["pipeline_parallel"], chosen["virtual_pipeline_stages"]
    derived: dict[str, Any] = {
        "data_parallel_shard": chosen["data_parallel"] if chosen["zero_stage"] else 1,
        "sequence_parallel": chosen["tensor_parallel"] > 1,
        "pipeline_schedule": "none" if stages == 1 else "1f1b" if virtual == 1 else "interleaved",
        "layers_per_chunk": even_layers(shape.num_hidden_layers, stages * virtual),
        "global_batch_size": chosen["micro_batch_size"] * chosen["num_microbatches"] * chosen["data_parallel"],
    }
    return TrainingConfig(**{**derived, **chosen})


def plan_for(shape: ModelShape, config: TrainingConfig, **fields: Any) -> Plan:
    """A plan of ``config`` on hosts of 8 devices, ranks in order."""
    defaults: Mapping[str, Any] = {
        "kind": "training",
        "spec": {"kind": "training", "model": shape.slug},
        "spec_digest": "0" * 64,
        "catalog_digest": "1" * 64,
        "config": config.choices,
        "predicted": {"step_time_s": Interval(value=1.0, low=0.9, high=1.1)},
        "solution": {"status": "optimal", "solver": "enumeration", "wall_s": 0.1, "cpu_s": 0.1},
        "rank_table": tuple(divmod(rank, 8) for rank in range(config.world_size)),
    }
    return Plan(**{**defaults, **fields})


def request_for(shape: ModelShape, config: TrainingConfig, **fields: Any) -> TrainingRequest:
    """What the emitters take, on H100 hosts called ``node-0`` …"""
    plan = fields.pop("plan", None) or plan_for(shape, config)
    num_hosts = -(-config.world_size // 8)
    defaults: dict[str, Any] = {"device": H100, "hosts": tuple(f"node-{host}" for host in range(num_hosts))}
    return TrainingRequest(plan=plan, shape=shape, **{**defaults, **fields})


LLAMA_70B_ON_64 = config_for(
    LLAMA_70B,
    tensor_parallel=8,
    pipeline_parallel=4,
    data_parallel=2,
    sequence_length=8192,
    num_microbatches=256,
    activation_recompute="selective",
)
MIXTRAL_ON_64 = config_for(
    MIXTRAL,
    tensor_parallel=2,
    pipeline_parallel=2,
    context_parallel=2,
    data_parallel=8,
    expert_parallel=8,
    expert_tensor_parallel=1,
    virtual_pipeline_stages=2,
    num_microbatches=16,
    layers_per_chunk=(9, 8, 8, 7),
)
