"""Rules and defaults of vLLM, SGLang, TensorRT-LLM and llama.cpp.

The sources were read in the named release; tests/conformance runs the parsers of vLLM and SGLang over configurations
that the rules accept. There is a rule where the parser rejects, where the engine raises at run time although its
parser accepts, or where it has no flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.catalogs.hardware import Device
from meshplan.planner.serving.problem.config import KV_STORES, EngineLimits, KvConnector
from meshplan.planner.serving.problem.engines import layouts
from meshplan.planner.serving.problem.engines.layouts import rule
from meshplan.planner.serving.problem.engines.rules import EngineRules, LimitTier
from meshplan.planner.serving.problem.quantization import GGUF_SCHEMES, NO_PADDING, ExpertPadding, Quantization

_GIB = 2**30
_MIB = 2**20

_ARITHMETIC = "arithmetic of the layout: the planner's own rule"
_VLLM = "vllm 0.33.0"
_SGLANG = "sglang 0.5.23"
_TRTLLM = "tensorrt-llm 1.2.1"
_LLAMA_CPP_COMMIT = "00dc8057"  # the commit whose documents were read; releases are single builds, several a day
_LLAMA_CPP = f"llama.cpp at {_LLAMA_CPP_COMMIT}, tools/server/README.md"

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
        "attention_data_parallel > 1 needs a mixture of experts: copies of a dense model are separate workers",
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
    rule(
        "recurrent_heads_divisible_by_tensor_parallel",
        layouts.recurrent_heads,
        "the heads of the recurrent layers must be a multiple of tensor_parallel, and context_parallel 1",
        "run time",
        f"{_ARITHMETIC}: a device holds whole heads and their states (engines not read)",
    ),
    rule(
        "encoders_need_one_stage",
        layouts.whole_encoder,
        "a model whose tokens attend to those after them, or to an encoder's, has pipeline_parallel and "
        "context_parallel 1",
        "run time",
        "models/bert.py of both engines and models/whisper.py of vLLM declare no pipeline support (not run)",
    ),
)


# vllm 0.33.0, layers/fused_moe/oracle/mxfp4.py (the order of backends, and
# mxfp4_round_up_hidden_size_and_intermediate_size): Triton's kernels on compute capability 9, Marlin's below it and on
# 12, TensorRT-LLM's on 10, padded like Marlin's; AITER's on AMD, for gpt-oss's activation.
_MARLIN, _AITER = ExpertPadding(hidden=256, width=128), ExpertPadding(hidden=256, width=256)
_VLLM_PADS = {
    **dict.fromkeys(("ampere", "ada", "blackwell"), _MARLIN),
    "hopper": ExpertPadding(width=64),
    **dict.fromkeys(("cdna3", "cdna4"), _AITER),
}
# sglang 0.5.23, layers/quantization/mxfp4.py, create_weights: FlashInfer's kernels on Blackwell, AITER's on AMD,
# Triton's elsewhere (where they are not installed, experts are expanded to 16 bits; not counted).
_SGLANG_PADS = {
    "blackwell": ExpertPadding(hidden=128, width=128),
    **dict.fromkeys(("ampere", "ada", "hopper"), ExpertPadding(width=64)),
    **dict.fromkeys(("cdna3", "cdna4"), _AITER),
}


def _vllm_tier(memory_gib: int, max_num_seqs: int, tokens: int, *, not_on: tuple[str, ...] = ()) -> LimitTier:
    limits = EngineLimits(
        max_num_seqs=max_num_seqs, max_batched_tokens=tokens, memory_fraction=0.92, prefix_caching=True
    )
    return LimitTier(memory_bytes=memory_gib * _GIB, limits=limits, not_on=not_on)


# Units of vLLM's flags: max_num_seqs and max_batched_tokens count per attention data-parallel rank (the emitter divides
# the former); --tensor-parallel-size is tensor × decode-context parallel; kv_offloading_size is GiB over all devices of
# one attention data-parallel rank.
VLLM = EngineRules(
    name="vllm",
    version="0.33.0",
    routes_by_prefix=True,
    kv_stores=KV_STORES,
    rules=(
        *_COMMON,
        layouts.heads_rule(f"{_VLLM}: config/model.py, verify_with_parallel_config"),
        layouts.kv_heads_rule(f"{_VLLM}: model_executor/models/llama.py, LlamaAttention"),
        layouts.context_rule(f"{_VLLM}: config/model.py, verify_with_parallel_config"),
        layouts.experts_rule(f"{_ARITHMETIC}; fused_moe/expert_map_manager.py would split them unevenly"),
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
        _vllm_tier(160, 1024, 16384),
        _vllm_tier(70, 1024, 8192, not_on=("a100", "gb10")),
        _vllm_tier(0, 256, 2048),
    ),
    limits_source=f"{_VLLM}: engine/arg_utils.py, get_batch_defaults; config/cache.py",
    most_running=1024,  # its own default on boards of 70 GiB; A100 and smaller ones start with 256
    block_size=16,
    # docs.vllm.ai, features/quantization: Volta has no Marlin, "Turing does not support Marlin MXFP4".
    schemes_not_on={"volta": ("mxfp4",), "turing": ("mxfp4",)},
    mxfp4_padding=_VLLM_PADS,
    scales_api_servers=True,  # entrypoints/cli/serve.py; SGLang's --tokenizer-worker-num leaves one detokenizer
    weight_ways=("streamed",),
    pipeline_on_decode="one",
    whole_context_on_transfer=True,
    # distributed/kv_transfer/kv_connector/v1/nixl: pull_worker.py reads from (0, rank); base_worker.py asserts that the
    # layers of both match. mooncake/mooncake_connector.py: allow_partial_layers.
    one_prefill_stage=(KvConnector.NIXL,),
    decode_reads_prompt=True,  # vllm-project/vllm, issue 25373
    kv_connectors=tuple(KvConnector),
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


# Units of SGLang's flags: tp_size counts all devices of a stage, attention_data_parallel included; chunked_prefill_size
# is divided by attention_data_parallel (the emitter multiplies); mem_fraction_static excludes activations and graphs;
# hicache_size is in whole GB per rank and must exceed the device's own cache.
SGLANG = EngineRules(
    name="sglang",
    version="0.5.23",
    routes_by_prefix=True,
    kv_stores=KV_STORES,
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
    weight_ways=("experts_on_host", "streamed"),
    pipeline_on_decode="one_or_prefill",
    prefix_caching_on_decode=False,
    mxfp4_padding=_SGLANG_PADS,
    most_sent=1024,  # layers/moe/token_dispatcher/deepep.py: DeepEP's FINISHED_SUM_TAG
    prefill_holds_slots=True,  # disaggregation/prefill.py: release_kv_cache where the sender's poll says Success
    kv_connectors=tuple(KvConnector),
)

# free_gpu_memory_fraction of TensorRT-LLM is a share of the memory that is free after the weights are loaded.
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
)

# llama.cpp leaves 1 GiB of each device free (--fit-target).
_LLAMA_FREE_GIB = 1.0


def _llama_tier(memory_gib: int) -> LimitTier:
    limits = EngineLimits(
        max_num_seqs=256,
        max_batched_tokens=2048,
        memory_fraction=1.0 - _LLAMA_FREE_GIB / memory_gib,
        prefix_caching=True,
    )
    return LimitTier(memory_bytes=memory_gib * _GIB, limits=limits)


# One process; its devices hold layers one after the other (--split-mode layer), and one batch passes them all. The
# cache is reserved at the start: --ctx-size is that of all slots together.
LLAMA_CPP = EngineRules(
    name="llama.cpp",
    version=_LLAMA_CPP_COMMIT,
    rules=(
        *_COMMON,
        rule(
            "whole_layers_on_devices",
            layouts.whole_layers,
            "devices hold whole layers: tensor, context, attention-data and expert parallelism are 1 (--split-mode row "
            "and tensor were not priced)",
            "parser",
            f"{_LLAMA_CPP}: --split-mode layer",
        ),
    ),
    schemes=("bf16", "fp16", "mxfp4", *GGUF_SCHEMES),
    online=(),
    kv_caches=("bf16", "fp16", "q8_0", "q4_0"),
    tiers=(*map(_llama_tier, (160, 80, 48, 24, 16)), replace(_llama_tier(8), memory_bytes=0.0)),
    limits_source=f"{_LLAMA_CPP}: --batch-size, --fit-target; src/llama-cparams.h, LLAMA_MAX_SEQ",
    block_size=1,
    pipeline_on_decode="any",
    disaggregates=False,
    streams_in_intervals=False,
    one_host=True,
    weight_ways=("layers_on_host",),
)

ENGINES: Mapping[str, EngineRules] = {engine.name: engine for engine in (VLLM, SGLANG, TRTLLM, LLAMA_CPP)}

# Engines with flags for models that answer with a vector or a score: --runner pooling (vLLM), --is-embedding (SGLang).
POOLING_ENGINES = (VLLM.name, SGLANG.name)
# Engines whose scheduling of encoders of sound was read. SGLang 0.5.23 has Whisper too (srt/models/whisper.py).
SOUND_ENGINES = (VLLM.name,)


def expert_padding(engine: str, quantization: Quantization, device: Device) -> ExpertPadding:
    """How an engine pads a model's experts on a device; engines without rules of their own are taken to pad nothing."""
    return ENGINES[engine].expert_padding(quantization, device) if engine in ENGINES else NO_PADDING
