"""A serving plan as ``sglang.launch_server`` commands, one server a worker, and sglang-router before them.

``--tp-size`` counts all devices of a stage: attention-data, context and expert ranks lie inside it. The budget of a
chunk is divided by the attention-data ranks, so it is multiplied here. tests/conformance/engines runs the parser,
``resolve_once`` and ``check_server_args``.
"""

from __future__ import annotations

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
from meshplan.planner.serving.problem.config import Layout, Pool, Role, Router
from meshplan.planner.serving.problem.engines import SGLANG

TARGET = "sglang"
VERIFIED = ParserVerified(
    framework="sglang",
    version=SGLANG.version,
    mode="prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts",
)
ROUTER_VERIFIED = ParserVerified(
    framework="sglang-router", version="0.3.2", mode="its own argument parser; no router starts"
)
_PARSER = "parser, resolve_once, check_server_args"
_KV_CACHE = {"bf16": "bfloat16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_POLICIES = {
    Router.ROUND_ROBIN: "round_robin",
    Router.LEAST_LOADED: "power_of_two",
    Router.PREFIX_AWARE: "cache_aware",
}
_LEAST_FRACTION = 0.1
BOOTSTRAP = Slot(text="{bootstrap_port}")


_GB = 1e9


def _devices_per_stage(pool: Pool) -> str:
    return str(pool.layout.devices_per_stage)


def uses_all_to_all(layout: Layout) -> bool:
    """Whether tokens are sent to whole experts: attention is data parallel and every device has experts of its own."""
    return layout.attention_data_parallel > 1 and layout.expert_parallel == layout.devices_per_stage


def _experts(_: ServingRequest, pool: Pool) -> Mapping[str, str]:
    said = dict(above_one("--ep-size", pool.layout.expert_parallel))
    if uses_all_to_all(pool.layout):
        said |= {"--moe-a2a-backend": "deepep", "--moe-dense-tp-size": "1"}
    return said


def _tokens(_: ServingRequest, pool: Pool) -> Mapping[str, str]:
    limits, ranks = pool.limits, pool.layout.attention_data_parallel
    return {
        "--chunked-prefill-size": str(limits.max_batched_tokens * ranks),
        "--max-prefill-tokens": str(limits.max_batched_tokens),
    }


def _mixed(request: ServingRequest, pool: Pool) -> Mapping[str, str]:
    """Chunks and decodes in one iteration; SGLang alternates them unless told, and always with speculation."""
    mixes = pool.limits.chunked_prefill and pool.role is Role.MIXED and request.config.speculation is None
    return {"--enable-mixed-chunk": ""} if mixes else {}


def _memory(request: ServingRequest, pool: Pool) -> Mapping[str, str]:
    """Weights and KV cache over memory; SGLang leaves activations out of its share."""
    fraction = pool.limits.memory_fraction
    device = request.host_type(pool.node_type).device
    if device is not None and pool.role in request.memory:
        fraction -= request.memory[pool.role].activations_bytes / device.memory_bytes
    if fraction < _LEAST_FRACTION:
        raise CannotExpressError(
            TARGET, f"a static share of {fraction:.3f} of memory", "fewer batched tokens, or a larger memory_fraction"
        )
    return {"--mem-fraction-static": f"{fraction:.3f}"}


def _formats(request: ServingRequest, pool: Pool) -> Mapping[str, str]:
    formats = pool.quantization
    weights = "float16" if "fp16" in {formats.attention, formats.mlp} else "bfloat16"
    said = {"--dtype": weights, "--kv-cache-dtype": _KV_CACHE[formats.kv_cache]}
    scheme = one_scheme(SGLANG, request, pool)
    return said if scheme is None else {**said, "--quantization": scheme}


def _speculation(request: ServingRequest, _: Pool) -> Mapping[str, str]:
    speculation = request.config.speculation
    if speculation is None:
        return {}
    said = {
        "--speculative-num-steps": str(speculation.num_draft_tokens),
        "--speculative-eagle-topk": "1",
        # A chain of steps and the token that the model itself adds.
        "--speculative-num-draft-tokens": str(speculation.num_draft_tokens + 1),
    }
    if request.draft_model:
        if any(pool.layout.attention_data_parallel > 1 for pool in request.config.pools):
            raise CannotExpressError(
                TARGET, "a draft model beside data-parallel attention", "a model with prediction layers of its own"
            )
        model = {"--speculative-algorithm": "STANDALONE", "--speculative-draft-model-path": request.draft_model}
        return {**model, **said}
    if not request.shape.num_nextn_predict_layers:
        raise CannotExpressError(
            TARGET, "speculation without a draft", "a draft_model, or a model with prediction layers of its own"
        )
    return {"--speculative-algorithm": "NEXTN", **said}


def _roles(_: ServingRequest, pool: Pool) -> Mapping[str, str]:
    if pool.role is Role.MIXED:
        return {}
    return {"--disaggregation-mode": pool.role.value, "--disaggregation-transfer-backend": "nixl"}


def _kv_tier(_: ServingRequest, pool: Pool) -> Mapping[str, str]:
    if pool.kv_tier is None:
        return {}
    return {"--enable-hierarchical-cache": "", "--hicache-size": str(max(int(pool.kv_tier.bytes_per_device / _GB), 1))}


TERMS = (
    ServingTerm(
        name="tensor_parallel",
        words=lambda _, pool: {"--tp-size": _devices_per_stage(pool)},
        said_by="--tp-size (all devices of a stage)",
        verified_by=f"{_PARSER}; heads by our own rule",
    ),
    ServingTerm(
        name="context_parallel",
        words=lambda _, pool: above_one("--dcp-size", pool.layout.context_parallel),
        said_by="--dcp-size (inside the stage)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="pipeline_parallel",
        words=lambda _, pool: {"--pp-size": str(pool.layout.pipeline_parallel)},
        said_by="--pp-size",
        verified_by=f"{_PARSER}; stages ≤ layers by our own rule",
    ),
    ServingTerm(
        name="attention_data_parallel",
        words=lambda _, pool: above_one("--attn-dp-size", pool.layout.attention_data_parallel),
        said_by="--attn-dp-size (inside the stage; 0.5.23 has no other lasting word)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="expert_parallel",
        words=_experts,
        said_by="--ep-size; --moe-a2a-backend deepep, --moe-dense-tp-size 1 where attention is data parallel",
        verified_by=f"{_PARSER}; divisibility by our own rule",
    ),
    ServingTerm(
        name="max_num_seqs",
        words=lambda _, pool: {"--max-running-requests": str(pool.limits.max_num_seqs)},
        said_by="--max-running-requests (of all attention-data ranks)",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="max_batched_tokens",
        words=_tokens,
        said_by="--chunked-prefill-size (× attention_data_parallel), --max-prefill-tokens",
        verified_by=_PARSER,
    ),
    ServingTerm(name="chunked_prefill", words=_mixed, said_by="--enable-mixed-chunk", verified_by=_PARSER),
    ServingTerm(
        name="memory_fraction",
        words=_memory,
        said_by="--mem-fraction-static (less the activations, where the plan tells them)",
        verified_by=f"{_PARSER}; at most 1 by our own rule",
    ),
    ServingTerm(
        name="prefix_caching",
        words=lambda _, pool: {} if pool.limits.prefix_caching else {"--disable-radix-cache": ""},
        said_by="--disable-radix-cache",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="kv_tier",
        words=_kv_tier,
        said_by="--enable-hierarchical-cache, --hicache-size (GB of one rank)",
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
        words=lambda _, pool: {} if pool.limits.cuda_graphs else {"--disable-cuda-graph": ""},
        said_by="--disable-cuda-graph",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="quantization",
        words=_formats,
        said_by="--dtype, --kv-cache-dtype, --quantization (made from 16 bits: fp8, mxfp8); others come with the "
        "checkpoint",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="speculation",
        words=_speculation,
        said_by="--speculative-algorithm NEXTN or STANDALONE, --speculative-num-steps",
        verified_by=f"{_PARSER} for prediction layers; STANDALONE: flags only",
    ),
    ServingTerm(
        name="roles",
        words=_roles,
        said_by="--disaggregation-mode, --disaggregation-transfer-backend nixl",
        verified_by=_PARSER,
    ),
    ServingTerm(
        name="max_sequence_length",
        words=lambda request, _: (
            {} if request.max_sequence_length is None else {"--context-length": str(request.max_sequence_length)}
        ),
        said_by="--context-length",
        verified_by=_PARSER,
    ),
)


def arguments(request: ServingRequest, pool: Pool) -> tuple[tuple[str, ...], ...]:
    """Every flag that the plan and the model decide for one pool.

    Raises:
        CannotExpressError: SGLang has no words for the plan.
    """
    refuse_serving(SGLANG, request)
    return flags_of(TERMS, request, pool)


def job(request: ServingRequest) -> ServingJob:
    """Servers of every pool, and a router where there are several."""
    config = request.config
    programs = tuple(_program(request, pool) for pool in config.pools)
    several = config.is_disaggregated or config.pools[0].num_workers > 1
    notes = []
    if any(pool.role not in request.memory for pool in config.pools):
        notes.append("SGLang's memory share leaves activations out, the plan's includes them: lower it if memory ends.")
    if any(uses_all_to_all(pool.layout) for pool in config.pools):
        notes.append("Experts exchange tokens through DeepEP, which has to be installed.")
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
    if pool.role is Role.PREFILL:
        head += ["--disaggregation-bootstrap-port", BOOTSTRAP]
    if num_nodes > 1:
        head += ["--nnodes", str(num_nodes), "--node-rank", Slot(text="{node_rank}")]
        head += ["--dist-init-addr", Slot(text="{head}:{internal_port}")]
    return PoolProgram(
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=("python3", "-m", "sglang.launch_server", "--model-path", request.model),
        head=tuple(head),
        follower=tuple(head) if num_nodes > 1 else (),
        environment={},
    )


def _check_nodes(pool: Pool, num_nodes: int) -> None:
    """A stage lies on whole hosts, or a host holds whole stages."""
    stages = pool.layout.pipeline_parallel
    if num_nodes % stages and stages % num_nodes:
        raise CannotExpressError(
            TARGET,
            f"{stages} stages on {num_nodes} hosts",
            "stages that fill hosts, or hosts that hold whole stages",
        )


def _router(request: ServingRequest) -> RouterOf:
    policy = _POLICIES[request.config.router]

    def words(addresses: Mapping[Role, Sequence[Word]]) -> RouterProgram:
        said: list[Word] = ["python3", "-m", "sglang_router.launch_router", "--host", EVERY_INTERFACE]
        said += ["--port", str(request.port), "--policy", policy]
        if Role.MIXED in addresses:
            said += ["--worker-urls", *map(url, addresses[Role.MIXED])]
        else:
            said.append("--pd-disaggregation")
            for number, address in enumerate(addresses[Role.PREFILL]):
                said += ["--prefill", url(address), Slot(text=f"{{bootstrap_port_{number}}}")]
            for address in addresses[Role.DECODE]:
                said += ["--decode", url(address)]
        return RouterProgram(words=tuple(said), verified=ROUTER_VERIFIED)

    return words


def degrees(words: Sequence[str]) -> dict[str, int]:
    """Our degrees, read back from the words of an argument file."""
    said = {flag: value for flag, value in zip(words, [*words[1:], ""], strict=True) if flag.startswith("--")}
    context, data = int(said.get("--dcp-size", "1")), int(said.get("--attn-dp-size", "1"))
    return {
        "tensor_parallel": int(said["--tp-size"]) // context // data,
        "context_parallel": context,
        "pipeline_parallel": int(said["--pp-size"]),
        "attention_data_parallel": data,
        "expert_parallel": int(said.get("--ep-size", "1")),
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        *term_rows(TERMS),
        Feature(
            name="router",
            expressed_by="sglang-router --policy round_robin, power_of_two (least loaded), cache_aware",
            verified_by=str(ROUTER_VERIFIED),
        ),
        Feature(
            name="hosts",
            expressed_by="--nnodes, --node-rank, --dist-init-addr; CUDA_VISIBLE_DEVICES of each worker",
            verified_by=_PARSER,
        ),
    )
