"""The engines' rules: cases that their users met, columns against single layouts, defaults as their sources say."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest
from emit_cases import B200, DEEPSEEK_V3, GPT_OSS_20B, H100, LLAMA_70B, MIXTRAL, SHAPES

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.models.shapes import MixtureOfExperts
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.problem.config import (
    EngineLimits,
    KvConnector,
    Layout,
    Pool,
    Role,
    ServingConfig,
    Speculation,
)
from meshplan.planner.serving.problem.engines.table import ENGINES, LLAMA_CPP, SGLANG, TRTLLM, VLLM
from meshplan.planner.serving.problem.quantization import NO_PADDING, SCHEMES, Quantization

DEGREES = (1, 2, 3, 8, 16)
FIELDS = tuple(Layout.__dataclass_fields__)
BLOCKS = Quantization.uniform("fp8_block")
SPLITTING = (VLLM, SGLANG, TRTLLM)  # llama.cpp gives devices whole layers


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1, expert: int = 1, **further: int) -> Layout:
    split = further.pop("expert_tensor_parallel", tensor * data * further.get("context_parallel", 1) // expert)
    return Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        attention_data_parallel=data,
        expert_parallel=expert,
        expert_tensor_parallel=split,
        **further,
    )


def pool(of: Layout, role: Role = Role.MIXED, **fields) -> Pool:
    limits = fields.pop("limits", EngineLimits())
    quantization = fields.pop("quantization", Quantization.uniform("bf16"))
    return Pool(
        role=role, layout=of, num_workers=1, limits=limits, quantization=quantization, node_type="any", **fields
    )


def allowed(engine, shape, of: Layout | SimpleNamespace, quantization: Quantization | None = None):
    """Whether every layout rule holds: bool, or a column of bools for columns of layouts."""
    return reduce(operator.and_, (rule.holds(shape, of) for rule in engine.layout_rules(quantization)))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.slug)
def test_columns_answer_as_single_layouts_do(engine, shape) -> None:
    grid = np.array(list(itertools.product(DEGREES, repeat=len(FIELDS))))
    rows = grid[np.random.default_rng(3).choice(len(grid), 400, replace=False)]
    columns = SimpleNamespace(**dict(zip(FIELDS, rows.T, strict=True)))
    verdict = np.broadcast_to(allowed(engine, shape, columns, BLOCKS), len(rows))
    single = [
        bool(allowed(engine, shape, Layout(**dict(zip(FIELDS, map(int, row), strict=True))), BLOCKS)) for row in rows
    ]
    assert verdict.tolist() == single


def broken(engine, shape, of: Layout, quantization: Quantization | None = None) -> set[str]:
    return {rule.name for rule in engine.layout_rules(quantization) if not rule.holds(shape, of)}


@pytest.mark.parametrize("engine", SPLITTING, ids=lambda engine: engine.name)
def test_usual_layouts_are_allowed(engine) -> None:
    assert allowed(engine, LLAMA_70B, layout(8))
    assert allowed(engine, LLAMA_70B, layout(16, 2))
    assert allowed(engine, DEEPSEEK_V3, layout(8), BLOCKS)
    assert allowed(engine, DEEPSEEK_V3, layout(data=8, expert=8), BLOCKS)
    assert allowed(
        engine, DEEPSEEK_V3, layout(data=32, expert=32), BLOCKS
    )  # 2412.19437: decode with EP over many nodes
    assert allowed(engine, GPT_OSS_20B, layout(8, expert=8))


@pytest.mark.parametrize("engine", SPLITTING, ids=lambda engine: engine.name)
def test_layouts_that_engines_refuse(engine) -> None:
    assert broken(engine, LLAMA_70B, layout(5)) >= {"heads_divisible_by_tensor_parallel"}
    assert broken(engine, LLAMA_70B, layout(1, 81)) == {"pipeline_at_most_layers"}
    assert broken(engine, LLAMA_70B, layout(2, data=2)) >= {"attention_data_parallel_needs_experts"}
    assert "experts_divisible_by_expert_parallel" in broken(engine, MIXTRAL, layout(16, expert=16))
    assert "expert_groups_are_the_stage" in broken(engine, MIXTRAL, layout(8, expert=4, expert_tensor_parallel=1))


def test_blocks_of_qwen3_235b_do_not_survive_tensor_parallel_8() -> None:
    """vllm-project/vllm issue 17569: 1536 / 8 = 192 is not divisible by block_n = 128."""
    moe = MixtureOfExperts(
        num_experts=128,
        num_experts_per_token=8,
        expert_intermediate_size=1536,
        shared_intermediate_size=0,
        moe_layers=(True,) * 94,
    )
    qwen = replace(LLAMA_70B, moe=moe, num_attention_heads=64, num_key_value_heads=4, num_hidden_layers=94)
    for engine in SPLITTING:
        assert broken(engine, qwen, layout(8), BLOCKS) == {"fp8_blocks_stay_whole"}
        assert not broken(engine, qwen, layout(4), BLOCKS)
        assert not broken(engine, qwen, layout(8, expert=8), BLOCKS)
        assert not broken(engine, qwen, layout(8), Quantization.uniform("fp8"))


def test_what_sets_the_engines_apart() -> None:
    partly = layout(2, data=4, expert=8)
    assert allowed(VLLM, DEEPSEEK_V3, partly)
    assert allowed(SGLANG, DEEPSEEK_V3, partly)
    assert broken(TRTLLM, DEEPSEEK_V3, partly) == {"attention_data_parallel_on_all_or_none"}
    mixed = layout(8, expert=4)
    assert broken(VLLM, MIXTRAL, mixed) == {"experts_whole_or_split"}
    assert allowed(SGLANG, MIXTRAL, mixed)
    spread = layout(8, context_parallel=2)
    assert allowed(VLLM, LLAMA_70B, spread)
    assert broken(VLLM, LLAMA_70B, layout(4, context_parallel=2)) == {"context_parallel_over_copied_kv_heads"}
    assert allowed(VLLM, DEEPSEEK_V3, layout(1, context_parallel=8, expert=8))
    assert broken(TRTLLM, LLAMA_70B, spread) == {"no_context_parallel"}


def test_llama_cpp_has_stages_alone() -> None:
    assert allowed(LLAMA_CPP, LLAMA_70B, layout(1, 8))
    assert broken(LLAMA_CPP, LLAMA_70B, layout(2, 4)) == {"whole_layers_on_devices"}
    split = pair(layout(), layout(), "llama.cpp")
    assert any("prefill or decode only" in text for text in LLAMA_CPP.broken(LLAMA_70B, split))


def test_nixl_reads_one_stage_of_a_prefill_worker_of_vllm() -> None:
    """0.33.0 asserts that as many layers are cached on both sides; SGLang and Mooncake ask every stage."""
    stages = pair(layout(2, 2), layout(4), "vllm")
    (text,) = VLLM.broken(LLAMA_70B, stages)
    assert "pipeline_parallel must be 1 where nixl moves the cache" in text
    assert "kv_connector: mooncake" in text
    assert not VLLM.broken(LLAMA_70B, replace(stages, kv_connector=KvConnector.MOONCAKE))
    assert not SGLANG.broken(LLAMA_70B, pair(layout(2, 2), layout(4), "sglang"))


def test_limits_are_counted_by_rank() -> None:
    of = layout(data=8, expert=8)
    (text,) = VLLM.broken_pool(DEEPSEEK_V3, pool(of, limits=EngineLimits(max_num_seqs=100)))
    assert "max_num_seqs 100 must be a multiple of attention_data_parallel 8 (nearest: 96)" in text
    assert not VLLM.broken_pool(DEEPSEEK_V3, pool(of, limits=EngineLimits(max_num_seqs=96)))
    narrow = EngineLimits(max_num_seqs=256, max_batched_tokens=64, memory_fraction=1.7)
    assert len(VLLM.broken_pool(LLAMA_70B, pool(layout(8), limits=narrow))) == 2


def test_formats_without_a_flag_are_refused() -> None:
    assert all(set(engine.schemes) <= set(SCHEMES) for engine in ENGINES.values())
    assert all(set(engine.online) <= set(engine.schemes) for engine in ENGINES.values())
    (text,) = SGLANG.broken_pool(LLAMA_70B, pool(layout(8), quantization=Quantization.uniform("w8a16")))
    assert text.startswith("no flag for weights in w8a16")
    (text,) = SGLANG.broken_pool(LLAMA_70B, pool(layout(8), quantization=Quantization.uniform("bf16", kv_cache="int8")))
    assert text.startswith("no flag for a KV cache in int8")


def pair(prefill: Layout, decode: Layout, engine: str, **fields) -> ServingConfig:
    return ServingConfig(engine=engine, pools=(pool(prefill, Role.PREFILL), pool(decode, Role.DECODE)), **fields)


def test_prefill_and_decode_workers_pair_as_each_engine_allows() -> None:
    staged = pair(layout(4, 2), layout(8), "vllm", kv_connector=KvConnector.MOONCAKE)
    assert not VLLM.broken(LLAMA_70B, staged)
    assert VLLM.broken(LLAMA_70B, pair(layout(8), layout(4, 2), "vllm")) == (
        "decode: pipeline_parallel must be 1, not 2",
    )
    assert not SGLANG.broken(LLAMA_70B, pair(layout(4, 2), layout(4, 2), "sglang"))
    (text,) = SGLANG.broken(LLAMA_70B, pair(layout(4, 2), layout(2, 4), "sglang"))
    assert text == "decode: pipeline_parallel must be 1 or 2, not 4"
    (text,) = VLLM.broken(LLAMA_70B, pair(layout(8), layout(8, context_parallel=2), "vllm"))
    assert text.startswith("decode: tensor_parallel or context_parallel must be 1 where the cache is transferred")
    moved = {engine: pair(layout(4), layout(8), engine, kv_connector=KvConnector.MOONCAKE) for engine in ENGINES}
    assert not VLLM.broken(LLAMA_70B, moved["vllm"])
    assert not SGLANG.broken(LLAMA_70B, moved["sglang"])
    assert TRTLLM.broken(LLAMA_70B, moved["trtllm"]) == (
        "trtllm has no flag for caches moved by mooncake (it has nixl)",
    )
    drafts = Speculation(num_draft_tokens=2, acceptance=0.7)
    guessing = pair(layout(8, 2), layout(8), "vllm", kv_connector=KvConnector.MOONCAKE, speculation=drafts)
    assert VLLM.broken(LLAMA_70B, guessing) == ("prefill: speculation needs pipeline_parallel = 1",)


def test_default_limits_are_those_of_the_engine_on_the_device() -> None:
    assert VLLM.default_limits(H100).max_batched_tokens == 8192
    assert VLLM.default_limits(replace(H100, slug="a100-sxm-80gb")).max_batched_tokens == 2048
    assert VLLM.default_limits(replace(B200, memory_bytes=180 * 10**9)).max_num_seqs == 1024
    assert VLLM.default_limits(None).max_num_seqs == 256
    assert SGLANG.default_limits(H100).max_batched_tokens == 8192
    assert SGLANG.default_limits(replace(H100, memory_bytes=16 * 10**9)).max_batched_tokens == 2048
    assert not TRTLLM.default_limits(H100).chunked_prefill


GPT_OSS_EXPERTS = Quantization(attention="bf16", mlp="bf16", experts="mxfp4")


@pytest.mark.parametrize(
    ("engine", "slug", "tensor", "stored"),
    [
        (VLLM, "a100-sxm-80gb", 1, 3072 * 2944),  # Marlin
        (VLLM, "b200-sxm-180gb", 2, 3072 * 2 * 1536),  # TensorRT-LLM's
        (VLLM, "h100-sxm-80gb", 1, 2880 * 2880),  # Triton
        (VLLM, "h100-sxm-80gb", 4, 2880 * 4 * 768),
        (VLLM, "mi300x", 1, 3072 * 3072),
        (SGLANG, "gb200", 2, 2944 * 2 * 1536),
        (SGLANG, "h100-sxm-80gb", 8, 2880 * 8 * 384),
        (TRTLLM, "h100-sxm-80gb", 8, 2880 * 2880),  # not read
    ],
)
def test_experts_are_held_as_their_kernels_want_them(catalog: Catalog, engine, slug, tensor, stored) -> None:
    """gpt-oss's matrices of 2,880 × 2,880, by hand, split over tensor-parallel devices."""
    shape, device = catalog.model_shape("gpt-oss-120b"), catalog.device(slug)
    split = layout(tensor)
    published, held = (
        weights_bytes(shape, GPT_OSS_EXPERTS, split, padding=padding)
        for padding in (NO_PADDING, engine.expert_padding(GPT_OSS_EXPERTS, device))
    )
    elements = 36 * 128 * 3 * (stored - 2880 * 2880) / tensor
    assert held - published == pytest.approx(SCHEMES["mxfp4"].weight_bytes * elements, rel=1e-3)  # and biases
    assert engine.expert_padding(BLOCKS, device) == NO_PADDING
    spread = layout(tensor, expert=tensor)
    whole = weights_bytes(shape, GPT_OSS_EXPERTS, spread, padding=engine.expert_padding(GPT_OSS_EXPERTS, device))
    assert whole <= held
