"""A serving plan as ``sglang.launch_server`` commands, one server per worker, and sglang-router in front of them.

``--tp-size`` counts all devices of a stage: attention-data, context and expert ranks lie inside it. SGLang divides the
token budget of a chunk by the attention-data ranks, so it is multiplied here. tests/conformance/engines runs its
parser, ``resolve_once`` and ``check_server_args``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import Artifact, ParserVerified
from meshplan.planner.emit.expert_maps import expert_map
from meshplan.planner.emit.serving import terms
from meshplan.planner.emit.serving.engine import POLICIES_TEXT, SERVE_ON, Engine, router_program, transfer_notes
from meshplan.planner.emit.serving.job import Argument, Flags, PoolProgram, RouterOf, Template
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.serving.tiers import kv_stores, weight_tiers
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, count, stated
from meshplan.planner.expert_placement.problem.maps import sound_map
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.engines.table import SGLANG

VERIFIED = ParserVerified(
    framework="sglang",
    version=SGLANG.version,
    mode="prepare_server_args, resolve_once, check_server_args with stand-ins for kernels and GPU; no server starts",
)
ROUTER_VERIFIED = ParserVerified(
    framework="sglang-router", version="0.3.2", mode="its own argument parser; no router starts"
)
_PARSER = "parser, resolve_once, check_server_args"
_rows = terms.ServingRows(_PARSER)
_KV_CACHE = {"bf16": "bfloat16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_LEAST_FRACTION = 0.1
_GB = 1e9
_CONTEXT = "--dcp-size"
_ATTENTION_DATA = "--attn-dp-size"
# Replicas of the server, or ranks of data-parallel attention where that is switched on.
_DATA = ("--dp-size", "--data-parallel-size", "--dp")
_DATA_IS_ATTENTION = "--enable-dp-attention"
_EXPERTS = ("--ep-size", "--expert-parallel-size", "--ep")
_CHUNK = "--chunked-prefill-size"
_MEMORY = "--mem-fraction-static"
# sglang 0.5.23, environ.py: tokens of a rank that DeepEP's low-latency kernels have room for.
_DISPATCHED, _DISPATCHED_BY_DEFAULT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", 128
_NO_GRAPHS, _LARGEST_GRAPH = "--disable-cuda-graph", "--cuda-graph-max-bs-decode"
# Model families whose classes in SGLang 0.5.23 have get_model_config_for_expert_location; for others (mixtral, olmoe)
# the engine passes over the map without a word.
MAPPED_FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "kimi_k2", "minimax_m2", "qwen2_moe", "qwen3_moe"),
)


def _attention_data(arguments: Arguments) -> int | None:
    flags = (*_DATA, _ATTENTION_DATA) if _DATA_IS_ATTENTION in arguments else (_ATTENTION_DATA,)
    return count(arguments, *flags)


def _attention_ranks(arguments: Arguments) -> int:
    return _attention_data(arguments) or 1


def _graphs(_: ServingRequest, pool: Pool) -> Arguments:
    """Decodes run from graphs as planned: left to itself, SGLang captures 8 to 512 requests by memory and devices."""
    if not pool.limits.cuda_graphs:
        return {_NO_GRAPHS: ""}
    if pool.role is Role.PREFILL:
        return {}
    running = pool.limits.max_num_seqs // pool.layout.attention_data_parallel
    return {_LARGEST_GRAPH: str(min(running, engine_recipes()[SGLANG.name].largest_decode_graph))}


def uses_all_to_all(layout: Layout) -> bool:
    """Whether tokens are sent to whole experts: attention is data parallel and every device has experts of its own."""
    return layout.attention_data_parallel > 1 and layout.expert_parallel == layout.devices_per_stage


def _dispatched(request: ServingRequest, pool: Pool) -> dict[str, Argument]:
    """Room for as many tokens of a rank as decode at once: DeepEP's low-latency kernels stop at more than that.

    Raises:
        CannotExpressError: more decode than its kernels can send.
    """
    if pool.role is Role.PREFILL or not uses_all_to_all(pool.layout):
        return {}
    speculation = request.config.speculation
    tokens = -(-pool.limits.max_num_seqs // pool.layout.attention_data_parallel)
    tokens *= 1 if speculation is None else speculation.verified_tokens
    if tokens > SGLANG.most_sent:
        raise CannotExpressError(
            SGLANG.name,
            f"{tokens} tokens of an attention data-parallel rank that decode at once through DeepEP",
            f"at most {SGLANG.most_sent}: pin a smaller max_num_seqs",
        )
    return {_DISPATCHED: str(tokens)} if tokens > _DISPATCHED_BY_DEFAULT else {}


def _experts(_: ServingRequest, pool: Pool) -> Arguments:
    degree = pool.layout.expert_parallel
    arguments = {_EXPERTS[0]: str(degree)} if degree > 1 else {}
    if uses_all_to_all(pool.layout):
        arguments |= {"--moe-a2a-backend": "deepep", "--moe-dense-tp-size": "1"}
    return arguments


def _tokens(request: ServingRequest, pool: Pool) -> Arguments:
    if request.is_encoder:  # prompts are not cut
        return {_CHUNK: "-1", "--max-prefill-tokens": str(pool.limits.max_batched_tokens)}
    limits, ranks = pool.limits, pool.layout.attention_data_parallel
    return {_CHUNK: str(limits.max_batched_tokens * ranks), "--max-prefill-tokens": str(limits.max_batched_tokens)}


def _read_tokens(arguments: Arguments) -> Mapping[str, Any]:
    tokens = count(arguments, _CHUNK)
    return {} if tokens is None else {"max_batched_tokens": max(1, tokens // _attention_ranks(arguments))}


def _mixed(request: ServingRequest, pool: Pool) -> Arguments:
    """Chunks and decodes in one iteration; SGLang's default, and its only way with speculation, is to alternate."""
    mixes = pool.limits.chunked_prefill and pool.role is Role.MIXED and request.config.speculation is None
    return {"--enable-mixed-chunk": ""} if mixes else {}


def _memory(request: ServingRequest, pool: Pool) -> Arguments:
    """Weights and KV cache over memory; SGLang leaves activations out of its share."""
    fraction = pool.limits.memory_fraction
    device = request.host_type(pool.node_type).device
    if device is not None and request.pool_name(pool) in request.memory:
        fraction -= request.memory[request.pool_name(pool)].activations_bytes / device.memory_bytes
    if fraction < _LEAST_FRACTION:
        raise CannotExpressError(
            SGLANG.name,
            f"a static share of {fraction:.3f} of memory",
            "fewer batched tokens, or a larger memory_fraction",
        )
    return {_MEMORY: f"{fraction:.3f}"}


def _formats(request: ServingRequest, pool: Pool) -> Arguments:
    formats = pool.quantization
    dtype = terms.activations(request, pool)
    is_plain = formats.kv_cache == "bf16" and dtype == "float16"  # the cache is in 16 bits of the server's own type
    arguments = {"--dtype": dtype, "--kv-cache-dtype": "auto" if is_plain else _KV_CACHE[formats.kv_cache]}
    scheme = terms.one_scheme(SGLANG, request, pool)
    return arguments if scheme is None else {**arguments, "--quantization": scheme}


_ALGORITHMS = {"eagle3": "EAGLE3"}


def _speculation(request: ServingRequest, _: Pool) -> Arguments:
    speculation = request.config.speculation
    if speculation is None:
        return {}
    if terms.drafts_from_text(request):
        drafted = str(speculation.num_draft_tokens + 1)
        return {"--speculative-algorithm": "NGRAM", "--speculative-num-draft-tokens": drafted}
    own = terms.uses_own_layers(SGLANG, request)
    if not own and any(pool.layout.attention_data_parallel > 1 for pool in request.config.pools):
        raise CannotExpressError(
            SGLANG.name, "a draft model beside data-parallel attention", "a model with prediction layers of its own"
        )
    model = {"--speculative-algorithm": "NEXTN" if own else _ALGORITHMS.get(speculation.method, "STANDALONE")}
    if not own:
        model["--speculative-draft-model-path"] = request.draft_model
    return {
        **model,
        "--speculative-num-steps": str(speculation.num_draft_tokens),
        "--speculative-eagle-topk": "1",
        # A chain of steps and the token that the model itself adds.
        "--speculative-num-draft-tokens": str(speculation.num_draft_tokens + 1),
    }


def _task(request: ServingRequest, _: Pool) -> Arguments:
    """Vectors and scores in place of tokens; of encoders alone Triton's kernels attend both ways."""
    if not request.task.is_pooled:
        return {}
    return {"--is-embedding": "", **({"--attention-backend": "triton"} if request.is_encoder else {})}


def _roles(request: ServingRequest, pool: Pool) -> Arguments:
    if pool.role is Role.MIXED:
        return {}
    moved = request.config.kv_connector.value
    return {"--disaggregation-mode": pool.role.value, "--disaggregation-transfer-backend": moved}


def _kv_tier(_: ServingRequest, pool: Pool) -> Arguments:
    if pool.kv_tier is None:
        return {}
    if pool.kv_tier.store != "host":
        return kv_stores.sglang_flags(pool)
    return {"--enable-hierarchical-cache": "", "--hicache-size": str(max(int(pool.kv_tier.bytes_per_device / _GB), 1))}


def _expert_copies(request: ServingRequest, pool: Pool) -> Arguments:
    """Slots of a layer beyond one for each expert; the map itself is a file, see :func:`_expert_files`."""
    moe, lies = request.shape.moe, request.config.expert_map
    if moe is None or lies is None or pool.layout.expert_parallel == 1:
        return {}
    if request.shape.family not in MAPPED_FAMILIES:
        raise CannotExpressError(
            SGLANG.name,
            f"a map of experts: {SGLANG.version} passes over it for {request.shape.name}",
            f"a plan without experts.placement; a map is loaded for {', '.join(MAPPED_FAMILIES)}",
        )
    if len(lies) != request.shape.num_moe_layers:
        raise CannotExpressError(
            SGLANG.name,
            f"a map of {len(lies)} of the model's {request.shape.num_moe_layers} MoE layers",
            "a map of all of them",
        )
    if len(lies[0]) % pool.layout.expert_parallel:
        raise CannotExpressError(
            SGLANG.name,
            f"{len(lies[0])} slots of experts on {pool.layout.expert_parallel} devices",
            "a map whose slots divide over them",
        )
    return {"--ep-num-redundant-experts": str(len(lies[0]) - moe.num_experts)}


def _map_path(request: ServingRequest, pool: Pool) -> str:
    return f"{request.pool_name(pool)}_expert_location.json"


def _expert_files(request: ServingRequest, pool: Pool) -> tuple[Artifact, ...]:
    """The map, a row for every layer of the model: SGLang counts dense layers, too, and does not look at their rows."""
    moe, lies = request.shape.moe, request.config.expert_map
    if moe is None or lies is None or pool.layout.expert_parallel == 1:
        return ()
    rows = iter(lies)
    in_order = [slot % moe.num_experts for slot in range(len(lies[0]))]
    every = np.array([next(rows) if is_moe else in_order for is_moe in moe.moe_layers])
    sound_map(every, num_experts=moe.num_experts, where=_map_path(request, pool))
    text = expert_map(SGLANG.name, every, num_experts=moe.num_experts, num_devices=pool.layout.expert_parallel)
    return (Artifact(path=PurePosixPath(_map_path(request, pool)), content=text),)


TERMS = (
    _rows.tensor(
        "--tp-size",
        "--tensor-parallel-size",
        "--tp",
        ranks_of=lambda pool: pool.layout.devices_per_stage,
        inside={_CONTEXT: terms.ranks_of_flags(_CONTEXT), _ATTENTION_DATA: _attention_ranks},
        note=" (all devices of a stage)",
        verified_by=f"{_PARSER}; heads by our own rule",
    ),
    _rows.degree(_CONTEXT, name="context_parallel", note=" (inside the stage)"),
    _rows.degree(
        "--pp-size",
        "--pipeline-parallel-size",
        "--pp",
        name="pipeline_parallel",
        always=True,
        verified_by=f"{_PARSER}; stages ≤ layers by our own rule",
    ),
    _rows.term(
        "attention_data_parallel",
        lambda _, pool: (
            {_ATTENTION_DATA: str(pool.layout.attention_data_parallel)}
            if pool.layout.attention_data_parallel > 1
            else {}
        ),
        lambda arguments: stated(attention_data_parallel=_attention_data(arguments)),
        _ATTENTION_DATA,
        *_DATA,
        _DATA_IS_ATTENTION,
        expressed_by=f"{_ATTENTION_DATA} (inside the stage; 0.5.23 has no other lasting flag)",
    ),
    _rows.term(
        "expert_parallel",
        _experts,
        lambda arguments: stated(expert_parallel=count(arguments, *_EXPERTS)),
        *_EXPERTS,
        expressed_by=f"{_EXPERTS[0]}; --moe-a2a-backend deepep, --moe-dense-tp-size 1 where attention is data parallel",
        verified_by=f"{_PARSER}; divisibility by our own rule",
    ),
    _rows.write_only(
        "expert_map",
        _expert_copies,
        f"--init-expert-location, --ep-num-redundant-experts ({', '.join(MAPPED_FAMILIES)})",
        verified_by=f"{_PARSER}; the map by the engine's own reader of it",
    ),
    _rows.max_num_seqs("--max-running-requests", note=" (of all attention-data ranks)"),
    _rows.term(
        "max_batched_tokens",
        _tokens,
        _read_tokens,
        _CHUNK,
        expressed_by=f"{_CHUNK} (× attention_data_parallel), --max-prefill-tokens",
    ),
    _rows.stream_interval("--stream-interval"),
    _rows.covered("api_servers", "refused: one for each worker"),
    _rows.write_only("chunked_prefill", _mixed, "--enable-mixed-chunk"),
    _rows.memory(
        _memory,
        _MEMORY,
        of="static",
        expressed_by=f"{_MEMORY} (less the activations, where the plan tells them)",
        verified_by=f"{_PARSER}; at most 1 by our own rule",
    ),
    _rows.off_switch("prefix_caching", "--disable-radix-cache"),
    _rows.write_only(
        "kv_tier",
        _kv_tier,
        "--enable-hierarchical-cache, --hicache-size (GB of one rank); NVMe and other hosts' memory: "
        "--hicache-storage-backend file or mooncake",
        verified_by=f"{_PARSER} for host memory; others: documented argument list",
    ),
    _rows.write_only(
        "weight_tiers",
        weight_tiers.expert_flags,
        f"{', '.join(weight_tiers.KT_FLAGS)} (with kt-kernel); {weight_tiers.OFFLOAD}",
        verified_by="documented argument list",
    ),
    _rows.off_switch("custom_all_reduce", "--disable-custom-all-reduce"),
    _rows.term(
        "cuda_graphs",
        _graphs,
        lambda arguments: {"cuda_graphs": False} if _NO_GRAPHS in arguments else {},
        _NO_GRAPHS,
        _LARGEST_GRAPH,
        "--cuda-graph-max-bs",
        expressed_by=f"{_NO_GRAPHS}; {_LARGEST_GRAPH} (requests of a rank)",
    ),
    _rows.write_only(
        "quantization",
        _formats,
        "--dtype, --kv-cache-dtype, --quantization (made from 16 bits: fp8, mxfp8); others come with the checkpoint",
    ),
    _rows.write_only(
        "speculation",
        _speculation,
        "--speculative-algorithm NEXTN, STANDALONE, EAGLE3 or NGRAM, --speculative-num-steps",
        verified_by=f"{_PARSER} for prediction layers; others: flags only",
    ),
    _rows.write_only(
        "task",
        _task,
        "--is-embedding; --attention-backend triton (encoders)",
        verified_by="documented argument list",
    ),
    _rows.remote_code("--trust-remote-code"),
    _rows.write_only("roles", _roles, "--disaggregation-mode, --disaggregation-transfer-backend nixl or mooncake"),
    _rows.max_sequence_length("--context-length"),
)
# Replicas are servers of their own in what is emitted; a command line may have one server start them all.
REPLICAS = _rows.term(
    "num_workers",
    lambda *_: {},
    lambda arguments: {} if _DATA_IS_ATTENTION in arguments else stated(num_workers=count(arguments, *_DATA)),
    *_DATA,
    expressed_by="one server per worker",
)


def _program(request: ServingRequest, pool: Pool, flags: Flags, num_nodes: int) -> PoolProgram:
    _check_nodes(pool, num_nodes)
    node: list[Argument] = [*SERVE_ON]
    if _expert_files(request, pool):
        node += ["--init-expert-location", Template(text=f"{{files}}/{_map_path(request, pool)}")]
    node += weight_tiers.weight_path(request, pool)
    if pool.role is Role.PREFILL:
        node += ["--disaggregation-bootstrap-port", Template(text="{bootstrap_port}")]
    if num_nodes > 1:
        node += ["--nnodes", str(num_nodes), "--node-rank", Template(text="{node_rank}")]
        node += ["--dist-init-addr", Template(text="{head}:{internal_port}")]
    return PoolProgram(
        name=request.pool_name(pool),
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=("python3", "-m", "sglang.launch_server", "--model-path", request.model),
        head=tuple(node),
        follower=tuple(node) if num_nodes > 1 else (),
        environment={**kv_stores.sglang_environment(pool), **_dispatched(request, pool)},
    )


def _check_nodes(pool: Pool, num_nodes: int) -> None:
    """Each pipeline stage must fill whole hosts, or each host must hold whole stages."""
    stages = pool.layout.pipeline_parallel
    if num_nodes % stages and stages % num_nodes:
        raise CannotExpressError(
            SGLANG.name,
            f"{stages} stages on {num_nodes} hosts",
            "stages that fill hosts, or hosts that hold whole stages",
        )


def _router(request: ServingRequest) -> RouterOf | None:
    command = ("python3", "-m", "sglang_router.launch_router")
    flags = ("--pd-disaggregation",)
    return router_program(request, *command, disaggregated=flags, verified=ROUTER_VERIFIED, bootstraps=True)


def _notes(request: ServingRequest) -> Sequence[str]:
    notes = []
    if any(request.pool_name(pool) not in request.memory for pool in request.config.pools):
        notes.append(
            "SGLang's memory share excludes activations, the plan's includes them: lower it if memory runs out."
        )
    if any(uses_all_to_all(pool.layout) for pool in request.config.pools):
        notes.append("Experts exchange tokens through DeepEP, which has to be installed.")
    return [*notes, *transfer_notes(request), *kv_stores.notes(request), *weight_tiers.notes(request)]


ENGINE = Engine(
    rules=SGLANG,
    terms=TERMS,
    verified=VERIFIED,
    program=_program,
    router=_router,
    notes=_notes,
    files=_expert_files,
    more_features=(
        Feature(name="router", expressed_by=f"sglang-router {POLICIES_TEXT}", verified_by=str(ROUTER_VERIFIED)),
        Feature(
            name="hosts",
            expressed_by="--nnodes, --node-rank, --dist-init-addr; CUDA_VISIBLE_DEVICES of each worker",
            verified_by=_PARSER,
        ),
    ),
)
arguments, job, features = ENGINE.arguments, ENGINE.job, ENGINE.features
