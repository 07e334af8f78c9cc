"""What vLLM, SGLang and TensorRT-LLM allow, and what they do unless told.

The sources were read in the named release; tests/conformance runs the parsers of vLLM and SGLang over what the rules
let pass. A rule is listed where the engine refuses, raises at run time although its parser accepts, or has no word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.serving.problem import engine_layouts as layouts
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role, ServingConfig
from meshplan.planner.serving.problem.engine_layouts import rule
from meshplan.planner.serving.problem.quantization import Quantization

_GIB = 2**30
_MIB = 2**20

# Formats of the checkpoints that these families are published in; all others come in 16 bits. Model cards of
# deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct and openai/gpt-oss-120b (quantization_config of config.json).
PUBLISHED_SCHEMES: Mapping[str, str] = {
    "deepseek_v3": "fp8_block",
    "deepseek_v32": "fp8_block",
    "gpt_oss": "mxfp4",
    "kimi_k2": "fp8_block",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTier:
    """Limits that an engine picks on devices of a size.

    Args:
        memory_bytes: least device memory.
        limits: what it picks.
        not_on: parts of device slugs that take the next tier.
    """

    memory_bytes: float
    limits: EngineLimits
    not_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """A serving engine as the planner sees it.

    Args:
        name: as in ``ServingConfig.engine``.
        version: the release that was read and run.
        rules: over one layout, or columns of layouts.
        scheme_rules: further rules over the layout where a scheme is used.
        schemes: weight formats that it serves; by checkpoint or by :attr:`online`.
        online: schemes that it makes itself from a 16-bit checkpoint.
        kv_caches: dtypes of the KV cache.
        tiers: limits by device memory, the largest first, the last for any.
        limits_source: where the tiers were read.
        block_size: tokens of one block of the KV cache (the engine may choose another for some kernels).
        uneven_layers: stages may differ by a layer.
        prefix_caching_on_decode: decode workers keep a prefix cache under prefill/decode disaggregation.
        pipeline_on_decode: what stages a decode worker may have: ``one``, ``any``, or ``one_or_prefill``.
        whole_context_on_transfer: pools that hand their cache over split tokens over the whole attention group or not
            at all: tensor_parallel or context_parallel is 1.
        speculation_with_stages: speculative decoding runs with several pipeline stages.
        kv_stores: places beside the devices that mixed workers keep prefixes in, with a word of their own for it.
        notes: traps that no rule expresses.
    """

    name: str
    version: str
    rules: tuple[LegalityRule, ...]
    schemes: tuple[str, ...]
    online: tuple[str, ...]
    kv_caches: tuple[str, ...]
    tiers: tuple[LimitTier, ...]
    limits_source: str
    block_size: int
    pipeline_on_decode: str
    scheme_rules: Mapping[str, tuple[LegalityRule, ...]] = field(default_factory=dict)
    uneven_layers: bool = True
    prefix_caching_on_decode: bool = True
    whole_context_on_transfer: bool = False
    speculation_with_stages: bool = False
    kv_stores: tuple[str, ...] = ("host",)
    notes: tuple[str, ...] = ()

    def allowed(self, shape: ModelShape, layout: Layout | Any, quantization: Quantization | None = None) -> Any:
        """Whether every layout rule holds: bool, or a column of bools for columns of layouts."""
        verdict: Any = True
        for one in self.layout_rules(quantization):
            verdict = verdict & one.holds(shape, layout)
        return verdict

    def layout_rules(self, quantization: Quantization | None = None) -> tuple[LegalityRule, ...]:
        """The rules over a layout; those of the formats in use among them."""
        used = () if quantization is None else dict.fromkeys(_schemes(quantization))
        return (*self.rules, *(one for scheme in used for one in self.scheme_rules.get(scheme, ())))

    def broken_pool(self, shape: ModelShape, pool: Pool) -> tuple[str, ...]:
        """What is wrong with ONE pool, in words with their sources; empty when the engine takes it."""
        wrong = [
            f"{one.message} ({one.source})"
            for one in self.layout_rules(pool.quantization)
            if not one.holds(shape, pool.layout)
        ]
        wrong += [
            f"weights in {scheme} have no word: one of {', '.join(self.schemes)}"
            for scheme in dict.fromkeys(_schemes(pool.quantization))
            if scheme not in self.schemes
        ]
        if pool.quantization.kv_cache not in self.kv_caches:
            wrong.append(f"a KV cache in {pool.quantization.kv_cache} has no word: one of {', '.join(self.kv_caches)}")
        if pool.kv_tier is not None and pool.kv_tier.store not in self.kv_stores:
            wrong.append(f"a KV tier on {pool.kv_tier.store} has no word: one of {', '.join(self.kv_stores)}")
        return (*wrong, *_broken_limits(pool), *_broken_tier(pool))

    def broken(self, shape: ModelShape, config: ServingConfig) -> tuple[str, ...]:
        """What is wrong with a whole configuration, pool by pool and between them."""
        wrong = [f"{pool.role.value}: {text}" for pool in config.pools for text in self.broken_pool(shape, pool)]
        if config.speculation is not None and not self.speculation_with_stages:
            wrong += [
                f"{pool.role.value}: speculation needs pipeline_parallel = 1"
                for pool in config.pools
                if pool.layout.pipeline_parallel > 1
            ]
        if config.is_disaggregated:
            wrong += self._broken_pair(config.pool(Role.PREFILL), config.pool(Role.DECODE))
        return tuple(wrong)

    def _broken_pair(self, prefill: Pool, decode: Pool) -> list[str]:
        wrong = []
        first, second = layouts.group(prefill.layout), layouts.group(decode.layout)
        if first % second and second % first:
            wrong.append(
                f"tensor_parallel × context_parallel of prefill ({first}) and decode ({second}) must divide one another"
            )
        own, other = decode.layout.pipeline_parallel, prefill.layout.pipeline_parallel
        allowed = {"one": {1}, "one_or_prefill": {1, other}, "any": {own}}[self.pipeline_on_decode]
        if own not in allowed:
            wrong.append(f"decode: pipeline_parallel must be {' or '.join(map(str, sorted(allowed)))}, not {own}")
        if prefill.layout.context_parallel not in {1, decode.layout.context_parallel}:
            wrong.append("prefill: context_parallel must be 1 or that of decode")
        wrong += [
            f"{pool.role.value}: tensor_parallel or context_parallel must be 1 where the cache is handed over "
            f"({self.name} {self.version}: NIXL transfer parallel size)"
            for pool in (prefill, decode)
            if self.whole_context_on_transfer and min(pool.layout.tensor_parallel, pool.layout.context_parallel) > 1
        ]
        if prefill.quantization.kv_cache != decode.quantization.kv_cache:
            wrong.append("prefill and decode must keep the KV cache in one dtype: blocks are copied as they are")
        if decode.limits.prefix_caching and not self.prefix_caching_on_decode:
            wrong.append("decode: prefix_caching is switched off by the engine")
        return wrong

    def default_limits(self, device: Device | None) -> EngineLimits:
        """What the engine picks when it is not told (:attr:`limits_source`)."""
        for tier in self.tiers[:-1]:
            excepted = device is None or any(part in device.slug for part in tier.not_on)
            if device is not None and not excepted and device.memory_bytes >= tier.memory_bytes:
                return tier.limits
        return self.tiers[-1].limits


def _schemes(quantization: Quantization) -> tuple[str, str, str]:
    return quantization.attention, quantization.mlp, quantization.experts


def _broken_limits(pool: Pool) -> tuple[str, ...]:
    """Limits that no engine can be told as they are; each counts requests by attention-data rank in the end."""
    limits, ranks = pool.limits, pool.layout.attention_data_parallel
    wrong = []
    if limits.max_num_seqs < ranks or limits.max_num_seqs % ranks:
        nearest = max(1, round(limits.max_num_seqs / ranks)) * ranks
        wrong.append(
            f"max_num_seqs {limits.max_num_seqs} must be a multiple of attention_data_parallel {ranks} "
            f"(nearest: {nearest})"
        )
    if not 0.0 < limits.memory_fraction <= 1.0:
        wrong.append(f"memory_fraction {limits.memory_fraction} must lie in (0, 1]")
    if limits.max_batched_tokens < limits.max_num_seqs // ranks:
        wrong.append(
            f"max_batched_tokens {limits.max_batched_tokens} must be at least the requests of one rank, "
            f"{limits.max_num_seqs // ranks}"
        )
    return tuple(wrong)


def _broken_tier(pool: Pool) -> tuple[str, ...]:
    """What no engine can do with a tier of KV cache."""
    tier, wrong = pool.kv_tier, []
    if tier is None:
        return ()
    if pool.role is not Role.MIXED:
        wrong.append("kv_tier: of mixed workers only: the connector that hands the cache over would have to keep it")
    if not pool.limits.prefix_caching:
        wrong.append("kv_tier keeps prefixes: it needs prefix_caching")
    if not (tier.bytes_per_device > 0.0 and tier.bytes_per_s_per_device > 0.0):
        wrong.append("kv_tier: bytes_per_device and bytes_per_s_per_device must be above 0")
    return tuple(wrong)


_ARITHMETIC = "arithmetic of the layout: the planner's own rule"
_VLLM = "vllm 0.33.0"
_SGLANG = "sglang 0.5.23"
_TRTLLM = "tensorrt-llm 1.2.1"

_COMMON = (
    rule(
        "pipeline_at_most_layers",
        layouts.stages,
        "pipeline_parallel must not exceed the layers",
        "run time",
        f"{_ARITHMETIC}; vllm 0.33.0 accepts more",
    ),
    rule(
        "attention_data_parallel_needs_experts",
        layouts.data_ranks,
        "attention_data_parallel > 1 needs a mixture of experts: copies of a dense model are workers of their own",
        "run time",
        f"{_VLLM}: config/parallel.py, data_parallel_external_lb",
    ),
    rule(
        "expert_groups_are_the_stage",
        layouts.expert_groups,
        "expert_parallel × expert_tensor_parallel must be tensor × attention-data × context parallel",
        "process groups",
        _ARITHMETIC,
    ),
)


VLLM = EngineRules(
    name="vllm",
    version="0.33.0",
    rules=(
        *_COMMON,
        layouts.heads_rule(f"{_VLLM}: config/model.py, verify_with_parallel_config"),
        layouts.kv_heads_rule(f"{_VLLM}: model_executor/models/llama.py, LlamaAttention"),
        layouts.context_rule(f"{_VLLM}: config/model.py, verify_with_parallel_config"),
        layouts.experts_rule(f"{_ARITHMETIC}; fused_moe/expert_map_manager.py would deal them unevenly"),
        rule(
            "experts_whole_or_split",
            layouts.whole_experts_or_none,
            "experts are spread over all devices of a stage (--enable-expert-parallel) or all are split: "
            "expert_parallel or expert_tensor_parallel must be 1",
            "parser",
            f"{_VLLM}: config/parallel.py, enable_expert_parallel",
        ),
        layouts.expert_width_rule(f"{_VLLM}: model_executor/layers/fused_moe/config.py"),
        layouts.mlp_rule(
            layouts.group,
            "tensor × context parallel",
            f"{_VLLM}: layers/linear.py, ColumnParallelLinear",
        ),
    ),
    scheme_rules={"fp8_block": layouts.block_rules(layouts.group, f"{_VLLM}: layers/quantization/utils/fp8_utils.py")},
    schemes=("bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "int8", "w8a16", "w4a16"),
    online=("fp8", "fp8_block", "mxfp8", "w8a16"),
    kv_caches=("bf16", "fp16", "fp8", "nvfp4"),
    tiers=(
        LimitTier(
            memory_bytes=160 * _GIB,
            limits=EngineLimits(max_num_seqs=1024, max_batched_tokens=16384, memory_fraction=0.92, prefix_caching=True),
        ),
        LimitTier(
            memory_bytes=70 * _GIB,
            limits=EngineLimits(max_num_seqs=1024, max_batched_tokens=8192, memory_fraction=0.92, prefix_caching=True),
            not_on=("a100", "gb10"),
        ),
        LimitTier(
            memory_bytes=0.0,
            limits=EngineLimits(max_num_seqs=256, max_batched_tokens=2048, memory_fraction=0.92, prefix_caching=True),
        ),
    ),
    limits_source=f"{_VLLM}: engine/arg_utils.py, get_batch_defaults; config/cache.py",
    block_size=16,
    pipeline_on_decode="one",
    whole_context_on_transfer=True,
    notes=(
        "max_num_seqs and max_batched_tokens are counted by attention-data rank; the emitter divides the former.",
        "Decode context parallelism reuses the tensor-parallel ranks: --tensor-parallel-size is tensor × context.",
        "kv_offloading_size is GiB over all devices of one attention-data rank.",
    ),
)

# Static memory is weights and KV pool; SGLang keeps 512 MiB, 1.5 MiB for each token of a chunk and 1/8 GiB a device
# aside, at least 10 GiB above 60 GiB (arg_groups/memory_hook.py). Graphs come on top; they are not counted here.
_SGLANG_RESERVED_MIB = 512
_SGLANG_MIB_PER_TOKEN = 1.5
_SGLANG_LEAST_MIB = 10 * 1024
_SGLANG_LARGE_MIB = 60 * 1024
_SGLANG_MIB_PER_DEVICE = 1024 / 8


def _sglang_tier(memory_mib: int, tokens: int) -> LimitTier:
    """A tier of SGLang's own table; running requests are estimated from memory, between 2048 and 4096."""
    reserved_mib = _SGLANG_RESERVED_MIB + tokens * _SGLANG_MIB_PER_TOKEN + _SGLANG_MIB_PER_DEVICE
    reserved_mib = max(reserved_mib, _SGLANG_LEAST_MIB if memory_mib > _SGLANG_LARGE_MIB else 0)
    limits = EngineLimits(
        max_num_seqs=2048,
        max_batched_tokens=tokens,
        chunked_prefill=False,  # chunks run between decode iterations unless --enable-mixed-chunk is given
        memory_fraction=round(1.0 - reserved_mib / memory_mib, 3),
        prefix_caching=True,
    )
    return LimitTier(memory_bytes=memory_mib * _MIB, limits=limits)


SGLANG = EngineRules(
    name="sglang",
    version="0.5.23",
    rules=(
        *_COMMON,
        layouts.heads_rule(f"{_SGLANG}: models/llama.py, LlamaAttention (the parser accepts)"),
        layouts.kv_heads_rule(f"{_SGLANG}: models/llama.py, LlamaAttention"),
        layouts.context_rule(f"{_SGLANG}: configs/model_config.py, get_num_kv_heads; layers/dcp/comm.py"),
        layouts.experts_rule(f"{_SGLANG}: layers/moe/fused_moe_triton/layer.py, FusedMoE (the parser accepts)"),
        layouts.expert_width_rule(f"{_SGLANG}: layers/moe/fused_moe_triton/layer.py, FusedMoE"),
        layouts.mlp_rule(
            layouts.stage_unless_all_to_all,
            "the devices of a stage (unless attention is data parallel and every device has whole experts)",
            f"{_SGLANG}: layers/linear.py; --moe-dense-tp-size",
        ),
    ),
    scheme_rules={
        "fp8_block": layouts.block_rules(layouts.stage_unless_all_to_all, f"{_SGLANG}: layers/quantization/fp8.py")
    },
    schemes=("bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "int8", "w4a16"),
    online=("fp8", "mxfp8"),
    kv_caches=("bf16", "fp8", "nvfp4"),
    tiers=(
        _sglang_tier(160 * 1024, 16384),
        _sglang_tier(60 * 1024, 8192),
        _sglang_tier(20 * 1024, 4096),
        replace(_sglang_tier(15 * 1024, 2048), memory_bytes=0.0),
    ),
    limits_source=f"{_SGLANG}: arg_groups/memory_hook.py; model_executor/pool_configurator.py",
    block_size=1,
    pipeline_on_decode="one_or_prefill",
    prefix_caching_on_decode=False,
    notes=(
        "tp_size is all devices of a stage: attention_data_parallel is inside it, never on top.",
        "chunked_prefill_size is divided by attention_data_parallel; the emitter multiplies.",
        "mem_fraction_static leaves activations and graphs out.",
        "hicache_size is in whole GB of each rank, and must be above what the device's own cache takes.",
    ),
)

TRTLLM = EngineRules(
    name="trtllm",
    version="1.2.1",
    rules=(
        *_COMMON,
        layouts.heads_rule(f"{_TRTLLM}: tensorrt_llm/_torch/modules/attention.py (not read)"),
        layouts.kv_heads_rule(f"{_TRTLLM}: tensorrt_llm/_torch/modules/attention.py (not read)"),
        layouts.experts_rule(f"{_TRTLLM}: tensorrt_llm/_torch/modules/fused_moe/interface.py (not read)"),
        layouts.expert_width_rule(f"{_TRTLLM}: tensorrt_llm/_torch/modules/fused_moe/interface.py (not read)"),
        layouts.mlp_rule(
            layouts.stage_unless_data_parallel,
            "the devices of a stage (unless attention is data parallel)",
            f"{_TRTLLM}: tensorrt_llm/_torch/models/modeling_deepseekv3.py (not read)",
        ),
        rule(
            "no_context_parallel",
            layouts.one_context_rank,
            "context_parallel must be 1: helix parallelism has restrictions that were not checked",
            "run time",
            f"{_TRTLLM}: llmapi/llm_args.py, CpConfig",
        ),
        rule(
            "attention_data_parallel_on_all_or_none",
            layouts.attention_all_data,
            "enable_attention_dp makes attention data parallel on all devices of a stage: "
            "tensor_parallel or attention_data_parallel must be 1",
            "parser",
            f"{_TRTLLM}: llmapi/llm_args.py, enable_attention_dp",
        ),
    ),
    scheme_rules={
        "fp8_block": layouts.block_rules(
            layouts.stage_unless_data_parallel, f"{_TRTLLM}: quantization of 128 × 128 blocks (not run)"
        )
    },
    schemes=("bf16", "fp16", "fp8", "fp8_block", "nvfp4", "mxfp4", "w8a16", "w4a16"),
    online=(),
    kv_caches=("bf16", "fp8", "nvfp4"),
    tiers=(
        LimitTier(
            memory_bytes=0.0,
            limits=EngineLimits(
                max_num_seqs=2048,
                max_batched_tokens=8192,
                chunked_prefill=False,
                memory_fraction=0.9,
                prefix_caching=True,
            ),
        ),
    ),
    limits_source=f"{_TRTLLM}: llmapi/llm_args.py, max_batch_size, max_num_tokens, KvCacheConfig",
    block_size=32,
    pipeline_on_decode="any",
    notes=("free_gpu_memory_fraction is a share of what is free after the weights are loaded.",),
)

ENGINES: Mapping[str, EngineRules] = {engine.name: engine for engine in (VLLM, SGLANG, TRTLLM)}
