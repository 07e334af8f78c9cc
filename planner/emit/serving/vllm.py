"""A serving plan as ``vllm serve`` commands, one server a worker, and a router before them.

vLLM's ``--data-parallel-size`` multiplies devices (tensor × pipeline × data), and its limits are those of one
data-parallel rank. tests/conformance/engines runs its parser up to ``create_engine_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import ParserVerified
from meshplan.planner.emit.serving.hosts import nodes_per_worker
from meshplan.planner.emit.serving.job import (
    EVERY_INTERFACE,
    PoolProgram,
    RouterOf,
    RouterProgram,
    ServingJob,
    ServingTerm,
    Slot,
    Word,
    above_one,
    flags_of,
    one_scheme,
    refuse_serving,
    term_rows,
    url,
)
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Pool, Role, Router
from meshplan.planner.serving.problem.engines import VLLM

TARGET = "vllm"
VERIFIED = ParserVerified(
    framework="vllm",
    version=VLLM.version,
    mode="vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts",
)
ROUTER_VERIFIED = ParserVerified(
    framework="vllm-router", version="0.1.17", mode="its own argument parser; no router starts"
)
_PARSER = "parser and create_engine_config"
_ONLINE = {
    "fp8": "fp8_per_tensor",
    "fp8_block": "fp8_per_block",
    "mxfp8": "mxfp8",
    "w8a16": "int8_per_channel_weight_only",
}
_KV_CACHE = {"bf16": "auto", "fp16": "auto", "fp8": "fp8", "nvfp4": "nvfp4"}
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
_POLICIES = {
    Router.ROUND_ROBIN: "round_robin",
    Router.LEAST_LOADED: "power_of_two",
    Router.PREFIX_AWARE: "cache_aware",
}
LEAST_LOADED_NOTE = (
    "The router takes the less loaded of two workers drawn at random; the plan counts on the least loaded of all."
)


_GIB = 2.0**30


def _on(flag: str, wanted: bool) -> Mapping[str, str]:
    return {f"--{flag}": ""} if wanted else {f"--no-{flag}": ""}


def _chunks(request: ServingRequest, pool: Pool) -> Mapping[str, str]:
    if pool.limits.chunked_prefill:
        return _on("enable-chunked-prefill", True)
    longest = request.max_sequence_length
    if longest is None or pool.limits.max_batched_tokens < longest:
        raise CannotExpressError(
            TARGET,
            f"whole prompts with max_batched_tokens {pool.limits.max_batched_tokens}: "
            "without chunked prefill a prompt of the longest sequence has to fit",
            f"max_batched_tokens of at least the longest sequence ({longest or 'max_sequence_length is not given'})",
        )
    return _on("enable-chunked-prefill", False)


def _formats(request: ServingRequest, pool: Pool) -> Mapping[str, str]:
    formats = pool.quantization
    weights = "fp16" if "fp16" in {formats.attention, formats.mlp} else "bf16"
    if formats.kv_cache in {"bf16", "fp16"} and formats.kv_cache != weights:
        raise CannotExpressError(TARGET, f"a KV cache in {formats.kv_cache} beside {weights}", f"kv_cache {weights}")
    said = {
        "--dtype": {"bf16": "bfloat16", "fp16": "float16"}[weights],
        "--kv-cache-dtype": _KV_CACHE[formats.kv_cache],
    }
    scheme = one_scheme(VLLM, request, pool)
    return said if scheme is None else {**said, "--quantization": _ONLINE[scheme]}


def _speculation(request: ServingRequest, _: Pool) -> Mapping[str, str]:
    speculation = request.config.speculation
    if speculation is None:
        return {}
    said: dict[str, object] = {"num_speculative_tokens": speculation.num_draft_tokens}
    if request.draft_model:
        said = {"method": "draft_model", "model": request.draft_model, **said}
    elif request.shape.num_nextn_predict_layers:
        said = {"method": "mtp", **said}
    else:
        raise CannotExpressError(
            TARGET, "speculation without a draft", "a draft_model, or a model with prediction layers of its own"
        )
    return {"--speculative-config": json.dumps(said, separators=(",", ":"))}


def _transfer(_: ServingRequest, pool: Pool) -> Mapping[str, str]:
    if pool.role not in _KV_ROLES:
        return {}
    said = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[pool.role]}
    return {"--kv-transfer-config": json.dumps(said, separators=(",", ":"))}


def _kv_tier(_: ServingRequest, pool: Pool) -> Mapping[str, str]:
    tier, layout = pool.kv_tier, pool.layout
    if tier is None:
        return {}
    devices = layout.num_devices // layout.attention_data_parallel
    return {"--kv-offloading-size": f"{tier.bytes_per_device * devices / _GIB:g}", "--kv-offloading-backend": "native"}


TERMS = (
    ServingTerm(
        name="tensor_parallel",
        words=lambda _, pool: {
            "--tensor-parallel-size": str(pool.layout.tensor_parallel * pool.layout.context_parallel)
        },
        said_by="--tensor-parallel-size (× context_parallel)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="context_parallel",
        words=lambda _, pool: above_one("--decode-context-parallel-size", pool.layout.context_parallel),
        said_by="--decode-context-parallel-size (reuses the tensor-parallel ranks)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="pipeline_parallel",
        words=lambda _, pool: {"--pipeline-parallel-size": str(pool.layout.pipeline_parallel)},
        said_by="--pipeline-parallel-size",
        verified_by=f"{_PARSER}; stages ≤ layers by our own rule",
    ),
    ServingTerm(
        name="attention_data_parallel",
        words=lambda _, pool: above_one("--data-parallel-size", pool.layout.attention_data_parallel),
        said_by="--data-parallel-size",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="expert_parallel",
        words=lambda _, pool: {"--enable-expert-parallel": ""} if pool.layout.expert_parallel > 1 else {},
        said_by="--enable-expert-parallel (over tensor × data parallel ranks); expert_tensor_parallel: without it",
        verified_by=f"{_PARSER}; divisibility by our own rule",
    ),
    ServingTerm(
        name="max_num_seqs",
        words=lambda _, pool: {"--max-num-seqs": str(pool.limits.max_num_seqs // pool.layout.attention_data_parallel)},
        said_by="--max-num-seqs (of one data-parallel rank)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="max_batched_tokens",
        words=lambda _, pool: {"--max-num-batched-tokens": str(pool.limits.max_batched_tokens)},
        said_by="--max-num-batched-tokens",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="chunked_prefill",
        words=_chunks,
        said_by="--enable-chunked-prefill, --no-enable-chunked-prefill",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="memory_fraction",
        words=lambda _, pool: {"--gpu-memory-utilization": f"{pool.limits.memory_fraction:g}"},
        said_by="--gpu-memory-utilization",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="prefix_caching",
        words=lambda _, pool: _on("enable-prefix-caching", pool.limits.prefix_caching),
        said_by="--enable-prefix-caching, --no-enable-prefix-caching",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="kv_tier",
        words=_kv_tier,
        said_by="--kv-offloading-size (GiB of one data-parallel rank), --kv-offloading-backend native",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="custom_all_reduce",
        words=lambda _, pool: {} if pool.limits.custom_all_reduce else {"--disable-custom-all-reduce": ""},
        said_by="--disable-custom-all-reduce",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="cuda_graphs",
        words=lambda _, pool: {} if pool.limits.cuda_graphs else {"--enforce-eager": ""},
        said_by="--enforce-eager (off; compilation goes too)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="quantization",
        words=_formats,
        said_by="--dtype, --kv-cache-dtype, --quantization (made from 16 bits: fp8, fp8_block, mxfp8, w8a16); "
        "others come with the checkpoint",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="speculation",
        words=_speculation,
        said_by="--speculative-config (mtp, draft_model)",
        verified_by=f"{_PARSER} for prediction layers; draft_model: flag and JSON only",
    ),
    ServingTerm(name="roles", words=_transfer, said_by="--kv-transfer-config NixlConnector", verified_by=_PARSER),
    ServingTerm(
        name="max_sequence_length",
        words=lambda request, _: (
            {} if request.max_sequence_length is None else {"--max-model-len": str(request.max_sequence_length)}
        ),
        said_by="--max-model-len",
        verified_by=_PARSER,
    ),
)


def arguments(request: ServingRequest, pool: Pool) -> tuple[tuple[str, ...], ...]:
    """Every flag that the plan and the model decide for one pool.

    Raises:
        CannotExpressError: vLLM has no words for the plan.
    """
    refuse_serving(VLLM, request)
    return flags_of(TERMS, request, pool)


def job(request: ServingRequest) -> ServingJob:
    """Servers of every pool, and a router where there are several."""
    config = request.config
    programs = tuple(_program(request, pool) for pool in config.pools)
    several = config.is_disaggregated or config.pools[0].num_workers > 1
    notes = [LEAST_LOADED_NOTE] if several and config.router is Router.LEAST_LOADED else []
    if any(not pool.limits.cuda_graphs for pool in config.pools):
        notes.append("--enforce-eager switches compilation off as well as CUDA graphs.")
    return ServingJob(
        target=TARGET,
        request=request,
        verified=VERIFIED,
        programs=programs,
        router=_router(request) if several else None,
        health_path="/health",
        notes=tuple(notes),
    )


def _program(request: ServingRequest, pool: Pool) -> PoolProgram:
    flags = arguments(request, pool)
    num_nodes = nodes_per_worker(request, pool, target=TARGET)
    _check_nodes(pool, num_nodes)
    head: list[Word] = ["--host", EVERY_INTERFACE, "--port", Slot(text="{port}")]
    follower: list[Word] = []
    if num_nodes > 1:
        place: list[Word] = ["--nnodes", str(num_nodes), "--node-rank", Slot(text="{node_rank}")]
        place += ["--master-addr", Slot(text="{head}"), "--master-port", Slot(text="{internal_port}")]
        if pool.layout.attention_data_parallel > 1:
            place += ["--data-parallel-rpc-port", Slot(text="{rpc_port}")]
        head += place
        follower = [*place, "--headless"]
    environment: dict[str, Word] = {}
    if pool.role in _KV_ROLES:
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": Slot(text="{own}"),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": Slot(text="{side_port}"),
        }
    return PoolProgram(
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=("vllm", "serve", request.model),
        head=tuple(head),
        follower=tuple(follower),
        environment=environment,
    )


def _check_nodes(pool: Pool, num_nodes: int) -> None:
    """A data-parallel rank lies on whole hosts, or a host holds whole ranks."""
    rank = pool.layout.num_devices // pool.layout.attention_data_parallel
    on_host = pool.layout.num_devices // num_nodes
    if num_nodes > 1 and rank % on_host and on_host % rank:
        raise CannotExpressError(
            TARGET,
            f"data-parallel ranks of {rank} devices on hosts that hold {on_host} of the worker",
            "ranks that fill hosts, or hosts that hold whole ranks",
        )


def _router(request: ServingRequest) -> RouterOf:
    policy = _POLICIES[request.config.router]

    def words(addresses: Mapping[Role, Sequence[Word]]) -> RouterProgram:
        said: list[Word] = ["vllm-router", "--host", EVERY_INTERFACE, "--port", str(request.port)]
        said += ["--policy", policy]
        if Role.MIXED in addresses:
            said += ["--worker-urls", *map(url, addresses[Role.MIXED])]
        else:
            said += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
            for role, flag in ((Role.PREFILL, "--prefill"), (Role.DECODE, "--decode")):
                for address in addresses[role]:
                    said += [flag, url(address)]
        return RouterProgram(words=tuple(said), verified=ROUTER_VERIFIED)

    return words


def degrees(words: Sequence[str]) -> dict[str, int]:
    """Our degrees, read back from the words of an argument file."""
    said = {flag: value for flag, value in zip(words, [*words[1:], ""], strict=True) if flag.startswith("--")}
    tensor, context = (int(said.get(f"--{name}-parallel-size", "1")) for name in ("tensor", "decode-context"))
    data = int(said.get("--data-parallel-size", "1"))
    return {
        "tensor_parallel": tensor // context,
        "context_parallel": context,
        "pipeline_parallel": int(said["--pipeline-parallel-size"]),
        "attention_data_parallel": data,
        "expert_parallel": tensor * data if "--enable-expert-parallel" in said else 1,
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        *term_rows(TERMS),
        Feature(
            name="router",
            expressed_by="vllm-router --policy round_robin, power_of_two (least loaded), cache_aware",
            verified_by=str(ROUTER_VERIFIED),
        ),
        Feature(
            name="hosts",
            expressed_by="--nnodes, --node-rank, --master-addr, --headless; CUDA_VISIBLE_DEVICES of each worker",
            verified_by=_PARSER,
        ),
    )
