"""A serving plan as ``vllm serve`` commands, one server per worker, and a router in front of them.

vLLM's ``--data-parallel-size`` multiplies devices (tensor × pipeline × data), and its limits are those of one
data-parallel rank. tests/conformance/engines runs its parser up to ``create_engine_config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import ParserVerified
from meshplan.planner.emit.releases import is_older
from meshplan.planner.emit.serving import terms
from meshplan.planner.emit.serving.engine import POLICIES_TEXT, SERVE_ON, Engine, router_program, transfer_notes
from meshplan.planner.emit.serving.job import Argument, Flags, PoolProgram, RouterOf, Template
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.serving.tiers import kv_stores, weight_tiers
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, Term
from meshplan.planner.serving.estimator.host.graphs import Graphs
from meshplan.planner.serving.problem.config import KvConnector, Pool, Role, Router
from meshplan.planner.serving.problem.engines.table import VLLM
from meshplan.planner.serving.problem.requests import Task

VERIFIED = ParserVerified(
    framework="vllm",
    version=VLLM.version,
    mode="vllm serve's parser and create_engine_config on a CPU that answers for a GPU; no worker starts",
)
ROUTER_VERIFIED = ParserVerified(
    framework="vllm-router", version="0.1.17", mode="its own argument parser; no router starts"
)
_PARSER = "parser and create_engine_config"
_rows = terms.ServingRows(_PARSER)
_ONLINE = {
    "fp8": "fp8_per_tensor",
    "fp8_block": "fp8_per_block",
    "mxfp8": "mxfp8",
    "w8a16": "int8_per_channel_weight_only",
}
_KV_CACHE = {"bf16": "auto", "fp16": "auto", "fp8": "fp8", "nvfp4": "nvfp4"}
_CONNECTORS = {KvConnector.NIXL: "NixlConnector", KvConnector.MOONCAKE: "MooncakeConnector"}
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
LEAST_LOADED_NOTE = (
    "The router takes the less loaded of two workers drawn at random; the plan assumes the least loaded of all."
)
_GIB = 2.0**30
# The first release that serves with one thread of the host by itself (vllm 0.28.0: utils/torch_utils.py,
# set_torch_threads_for_runtime, absent in 0.27.0; vllm-project/vllm, pull request 49919).
_HOLDS_ONE_THREAD_SINCE = "0.28.0"
_TENSOR = ("--tensor-parallel-size", "-tp")
_CONTEXT = ("--decode-context-parallel-size", "-dcp")
_DATA = ("--data-parallel-size", "-dp")
_EXPERTS = "--enable-expert-parallel"
_NO_GRAPHS, _LARGEST_GRAPH = "--enforce-eager", "--max-cudagraph-capture-size"
# Plans are priced with a size of their own from this release on (`raises_graphs_to` of engines.yaml).
_RAISES_GRAPHS_SINCE = "0.21.0"
_MEMORY, _REMOTE_CODE = "--gpu-memory-utilization", "--trust-remote-code"
_data_ranks = terms.ranks_of_flags(*_DATA)


def _read_experts(arguments: Arguments) -> Mapping[str, Any]:
    if _EXPERTS not in arguments:
        return {}
    return {"expert_parallel": terms.ranks_of_flags(*_TENSOR)(arguments) * _data_ranks(arguments)}


def _pair_term(name: str, *, write: Any = None) -> Term:
    """A limit behind a pair of flags that switch it on and off."""
    on, off = (f"--{prefix}enable-{name.replace('_', '-')}" for prefix in ("", "no-"))

    def read(arguments: Arguments) -> Mapping[str, Any]:
        return {name: True} if on in arguments else {name: False} if off in arguments else {}

    return _rows.term(
        name,
        write or (lambda _, pool: {on if getattr(pool.limits, name) else off: ""}),
        read,
        on,
        off,
        expressed_by=f"{on}, {off}",
    )


def _chunks(request: ServingRequest, pool: Pool) -> Arguments:
    if pool.limits.chunked_prefill:
        return {"--enable-chunked-prefill": ""}
    longest = request.max_sequence_length
    if longest is None or pool.limits.max_batched_tokens < longest:
        raise CannotExpressError(
            VLLM.name,
            f"whole prompts with max_batched_tokens {pool.limits.max_batched_tokens}: "
            "without chunked prefill a prompt of the longest sequence has to fit",
            f"max_batched_tokens of at least the longest sequence ({longest or 'max_sequence_length is not given'})",
        )
    return {"--no-enable-chunked-prefill": ""}


def _formats(request: ServingRequest, pool: Pool) -> Arguments:
    formats = pool.quantization
    dtype = terms.activations(request, pool)
    if formats.kv_cache == "fp16" and dtype != "float16":
        raise CannotExpressError(VLLM.name, "a KV cache in fp16 beside bf16", "kv_cache bf16")
    arguments = {"--dtype": dtype, "--kv-cache-dtype": _KV_CACHE[formats.kv_cache]}
    scheme = terms.one_scheme(VLLM, request, pool)
    return arguments if scheme is None else {**arguments, "--quantization": _ONLINE[scheme]}


def _task(request: ServingRequest, _: Pool) -> Arguments:
    """Vectors and scores in place of tokens; a language model's own class is converted to give them."""
    if not request.task.is_pooled:
        return {}
    convert = {"--convert": "embed" if request.task is Task.EMBED else "classify"}
    return {"--runner": "pooling", **({} if request.is_encoder else convert)}


def _read_task(arguments: Arguments) -> Mapping[str, Any]:
    """What a converted language model gives; otherwise the checkpoint decides between vectors and scores."""
    if arguments.get("--runner") != "pooling":
        return {}
    return {"task": {"embed": "embed", "classify": "rerank"}.get(str(arguments.get("--convert")), terms.POOLED)}


def _images(request: ServingRequest, _: Pool) -> Arguments:
    """Room for the images that a request has; the encoder is split as it was priced (--mm-encoder-tp-mode weights).

    A model that sees and is planned for text gets none: a server keeps memory for the largest images otherwise, which
    the plan does not count.
    """
    images = (request.plan.spec.get("workload") or {}).get("images")
    if images is None:
        return {} if request.shape.vision is None else {"--language-model-only": ""}
    most = json.dumps({"image": images.get("per_request", 1)}, separators=(",", ":"))
    return {"--limit-mm-per-prompt": most}


def _speculation(request: ServingRequest, _: Pool) -> Arguments:
    speculation = request.config.speculation
    if speculation is None:
        return {}
    method: dict[str, object] = {"method": speculation.method or "draft_model", "model": request.draft_model}
    if terms.drafts_from_text(request):
        method = {"method": "ngram"}
    elif terms.uses_own_layers(VLLM, request):
        method = {"method": "mtp"}
    config = {**method, "num_speculative_tokens": speculation.num_draft_tokens}
    return {"--speculative-config": json.dumps(config, separators=(",", ":"))}


def _transfer(request: ServingRequest, pool: Pool) -> Arguments:
    if pool.role not in _KV_ROLES:
        return {}
    config = {"kv_connector": _CONNECTORS[request.config.kv_connector], "kv_role": _KV_ROLES[pool.role]}
    return {"--kv-transfer-config": json.dumps(config, separators=(",", ":"))}


def _kv_tier(_: ServingRequest, pool: Pool) -> Arguments:
    tier, layout = pool.kv_tier, pool.layout
    if tier is None:
        return {}
    if tier.store != "host":
        return kv_stores.vllm_flags(pool)
    devices = layout.num_devices // layout.attention_data_parallel
    return {"--kv-offloading-size": f"{tier.bytes_per_device * devices / _GIB:g}", "--kv-offloading-backend": "native"}


def _graphs(request: ServingRequest, pool: Pool) -> Arguments:
    """Decodes run from graphs as planned: left to itself, vLLM launches those of more than 512 requests without any."""
    if not pool.limits.cuda_graphs:
        return {_NO_GRAPHS: ""}
    device = request.host_type(pool.node_type).device
    if device is None or is_older(VLLM.name, request.framework_version, _RAISES_GRAPHS_SINCE):
        return {}
    raises = pool.role is not Role.PREFILL and request.config.speculation is None
    graphs = Graphs.of(engine_recipes()[VLLM.name], request.shape, device, raises=raises)
    size = graphs.raised_size(pool.layout, pool.limits)
    return {_LARGEST_GRAPH: str(size)} if size else {}


TERMS = (
    _rows.tensor(
        *_TENSOR,
        ranks_of=lambda pool: pool.layout.tensor_parallel * pool.layout.context_parallel,
        inside={_CONTEXT[0]: terms.ranks_of_flags(*_CONTEXT)},
        note=" (× context_parallel)",
    ),
    _rows.degree(*_CONTEXT, name="context_parallel", note=" (reuses the tensor-parallel ranks)"),
    _rows.degree(
        "--pipeline-parallel-size",
        "-pp",
        name="pipeline_parallel",
        always=True,
        verified_by=f"{_PARSER}; stages ≤ layers by our own rule",
    ),
    _rows.degree(*_DATA, name="attention_data_parallel"),
    _rows.term(
        "expert_parallel",
        lambda _, pool: {_EXPERTS: ""} if pool.layout.expert_parallel > 1 else {},
        _read_experts,
        _EXPERTS,
        expressed_by=f"{_EXPERTS} (over tensor × data parallel ranks); expert_tensor_parallel: without it",
        verified_by=f"{_PARSER}; divisibility by our own rule",
    ),
    _rows.write_only(
        "expert_map",
        terms.map_refused(VLLM, f"{VLLM.version} loads none: its EPLB starts with experts in order and moves them"),
        f"refused: {VLLM.version} loads no map",
    ),
    _rows.max_num_seqs("--max-num-seqs", ranks=_data_ranks, note=" (of one data-parallel rank)"),
    _rows.max_batched_tokens("--max-num-batched-tokens"),
    _rows.stream_interval("--stream-interval"),
    _rows.api_servers("--api-server-count"),
    _pair_term("chunked_prefill", write=_chunks),
    _rows.memory(
        lambda _, pool: {_MEMORY: f"{pool.fraction_of_device:g}"},
        _MEMORY,
        of="total",
        expressed_by=f"{_MEMORY}, of the whole device",
    ),
    _pair_term("prefix_caching"),
    _rows.write_only(
        "kv_tier",
        _kv_tier,
        "--kv-offloading-size (GiB of one data-parallel rank), --kv-offloading-backend native; NVMe, memory of other "
        "hosts: --kv-transfer-config LMCacheConnectorV1, MooncakeStoreConnector",
        verified_by=f"{_PARSER} for host memory; others: documented argument list",
    ),
    _rows.write_only(
        "weight_tiers",
        weight_tiers.offload_flags,
        f"{weight_tiers.OFFLOAD} (GiB of one device)",
        verified_by="documented argument list",
    ),
    _rows.off_switch("custom_all_reduce", "--disable-custom-all-reduce"),
    _rows.term(
        "cuda_graphs",
        _graphs,
        lambda arguments: {"cuda_graphs": False} if _NO_GRAPHS in arguments else {},
        _NO_GRAPHS,
        _LARGEST_GRAPH,
        expressed_by=f"{_NO_GRAPHS} (off; compilation goes too); {_LARGEST_GRAPH} (where more requests of a rank may "
        "decode than are captured by default)",
    ),
    _rows.write_only(
        "quantization",
        _formats,
        "--dtype, --kv-cache-dtype, --quantization (made from 16 bits: fp8, fp8_block, mxfp8, w8a16); "
        "others come with the checkpoint",
    ),
    _rows.write_only(
        "speculation",
        _speculation,
        "--speculative-config (mtp, draft_model, eagle3, ngram)",
        verified_by=f"{_PARSER} for prediction layers; others: flag and JSON only",
    ),
    _rows.term(
        "task",
        _task,
        _read_task,
        "--runner",
        "--convert",
        expressed_by="--runner pooling, --convert embed or classify (decoders)",
        verified_by="documented argument list",
    ),
    _rows.write_only(
        "images",
        _images,
        "--limit-mm-per-prompt (as many images as a request has), --language-model-only (none)",
        verified_by=f"{_PARSER} for none; documented argument list",
    ),
    _rows.remote_code(_REMOTE_CODE),
    _rows.write_only("roles", _transfer, "--kv-transfer-config NixlConnector or MooncakeConnector"),
    _rows.max_sequence_length("--max-model-len"),
)


def _program(request: ServingRequest, pool: Pool, flags: Flags, num_nodes: int) -> PoolProgram:
    _check_nodes(pool, num_nodes)
    node: list[Argument] = []
    if num_nodes > 1:
        node += ["--nnodes", str(num_nodes), "--node-rank", Template(text="{node_rank}")]
        node += ["--master-addr", Template(text="{head}"), "--master-port", Template(text="{internal_port}")]
        if pool.layout.attention_data_parallel > 1:
            node += ["--data-parallel-rpc-port", Template(text="{rpc_port}")]
    environment: dict[str, Argument] = {**kv_stores.vllm_environment(pool)}
    if pool.role in _KV_ROLES:
        environment = _meeting_point(request.config.kv_connector, pool)
    if _fans_out(request, pool):
        environment["OMP_NUM_THREADS"] = "1"
    return PoolProgram(
        name=request.pool_name(pool),
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=("vllm", "serve", request.model),
        head=(*SERVE_ON, *node),
        follower=(*node, "--headless") if node else (),
        environment=environment,
    )


def _fans_out(request: ServingRequest, pool: Pool) -> bool:
    """Whether operations of the host would run on as many threads as it has cores.

    Where a process has one device, older releases leave PyTorch's threads as they are: operations on more than 32,768
    elements (penalties, grammars) fan out and wait for each other, 2 to 6 times fewer tokens a second in a container
    (pull request 49919). Processes of several devices are held to one thread (v1/executor/multiproc_executor.py).
    Pictures and sound are made ready by threads of the same process, which one would slow down (pull request 45124
    asks for four): they keep the release's own choice.
    """
    sees = (request.plan.spec.get("workload") or {}).get("images") is not None or request.shape.encoder is not None
    is_one_device = pool.layout.num_devices == pool.layout.attention_data_parallel
    return is_one_device and not sees and is_older(VLLM.name, request.framework_version, _HOLDS_ONE_THREAD_SINCE)


def _meeting_point(connector: KvConnector, pool: Pool) -> dict[str, Argument]:
    """Where the other role's workers ask for a cache (vllm/envs.py)."""
    if connector is KvConnector.NIXL:
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": Template(text="{own}"),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": Template(text="{side_port}"),
        }
    return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": Template(text="{bootstrap_port}")} if pool.role is Role.PREFILL else {}


def _check_nodes(pool: Pool, num_nodes: int) -> None:
    """Each data-parallel rank must fill whole hosts, or each host must hold whole ranks."""
    rank = pool.layout.num_devices // pool.layout.attention_data_parallel
    on_host = pool.layout.num_devices // num_nodes
    if num_nodes > 1 and rank % on_host and on_host % rank:
        raise CannotExpressError(
            VLLM.name,
            f"data-parallel ranks of {rank} devices on hosts that hold {on_host} of the worker",
            "ranks that fill hosts, or hosts that hold whole ranks",
        )


def _router(request: ServingRequest) -> RouterOf | None:
    connector = request.config.kv_connector
    return router_program(
        request,
        "vllm-router",
        disaggregated=("--vllm-pd-disaggregation", "--kv-connector", connector.value),
        verified=ROUTER_VERIFIED,
        bootstraps=connector is KvConnector.MOONCAKE,
    )


def _notes(request: ServingRequest) -> Sequence[str]:
    config = request.config
    notes = []
    if config.router is Router.LEAST_LOADED and _router(request) is not None:
        notes.append(LEAST_LOADED_NOTE)
    notes += transfer_notes(request)
    if request.task is Task.RERANK and not request.is_encoder:
        notes.append(
            "A decoder that was trained to say yes or no (Qwen3-Reranker) needs --hf-overrides with the architecture "
            "...ForSequenceClassification and classifier_from_token: see vLLM's page on pooling models."
        )
    if request.shape.encoder is not None:
        notes.append(
            "Clients send sound to /v1/audio/transcriptions (multipart: file, model, language); vLLM cuts what is "
            "longer than a window. It needs the packages of vllm[audio]."
        )
    if any(_fans_out(request, pool) for pool in config.pools):
        notes.append(
            f"OMP_NUM_THREADS=1: before {_HOLDS_ONE_THREAD_SINCE} a server of one device runs operations of the host "
            "on every core (pull request 49919). It loads weights with one thread, too."
        )
    if any(not pool.limits.cuda_graphs for pool in config.pools):
        notes.append("--enforce-eager switches compilation off as well as CUDA graphs.")
    return [*notes, *kv_stores.notes(request), *weight_tiers.notes(request)]


ENGINE = Engine(
    rules=VLLM,
    terms=TERMS,
    verified=VERIFIED,
    program=_program,
    router=_router,
    notes=_notes,
    more_features=(
        Feature(name="router", expressed_by=f"vllm-router {POLICIES_TEXT}", verified_by=str(ROUTER_VERIFIED)),
        Feature(
            name="hosts",
            expressed_by="--nnodes, --node-rank, --master-addr, --headless; CUDA_VISIBLE_DEVICES of each worker",
            verified_by=_PARSER,
        ),
    ),
)
arguments, job, features = ENGINE.arguments, ENGINE.job, ENGINE.features
