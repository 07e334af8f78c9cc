"""A serving plan as ``trtllm-serve`` commands with an options file each, and the server that leads them.

``--tp_size`` counts all devices of a stage; ``enable_attention_dp`` makes attention data parallel on all of them.
TensorRT-LLM cannot be imported without its CUDA libraries: flags and options are from the documentation of 1.2.1 and
its ``llm_args.py``, no parser has checked them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.untrusted.quoting import yaml_text
from meshplan.planner.emit.artifact import Artifact, commented, stamp
from meshplan.planner.emit.serving import terms
from meshplan.planner.emit.serving.engine import SERVE_ON, Engine
from meshplan.planner.emit.serving.job import (
    EVERY_INTERFACE,
    Argument,
    Flags,
    PoolProgram,
    RouterOf,
    RouterProgram,
    Template,
)
from meshplan.planner.emit.serving.nginx import NGINX_METHODS, address_text, nginx_router, router_program_of
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, Term, count, nested, write_all
from meshplan.planner.serving.problem.config import Pool, Role, Router
from meshplan.planner.serving.problem.engines.table import TRTLLM

_READ = "not machine-checked: from the documentation of 1.2.1"
_rows = terms.ServingRows(_READ)
_KV_CACHE = {"bf16": "auto", "fp8": "fp8", "nvfp4": "nvfp4"}
_ROUTERS: Mapping[Router, Mapping[str, Any]] = {
    Router.ROUND_ROBIN: {"type": "round_robin"},
    Router.LEAST_LOADED: {"type": "load_balancing", "args": {"use_tokens": True}},
    Router.PREFIX_AWARE: {"type": "kv_cache_aware"},
}
_DISAGGREGATED_FILE = "disaggregated.yaml"
_ROLES = {Role.PREFILL: "context_servers", Role.DECODE: "generation_servers"}
_STAGE = "--tp_size"
_ATTENTION_DATA = "enable_attention_dp"
_GRAPHS = "cuda_graph_config"
# The flag, and the key of the file of options that says the same.
_MEMORY = ("--kv_cache_free_gpu_memory_fraction", "kv_cache_config.free_gpu_memory_fraction")
_FINE_UP_TO, _GRAPH_STEP = 128, 64  # requests: graphs of every eighth size up to it, coarser ones beyond
_REDUCE = "allreduce_strategy"
_NCCL = "NCCL"


def free_fraction(request: ServingRequest, pool: Pool) -> float:
    """Share of the memory left by weights and activations that the KV cache takes.

    (memory_fraction·M − weights − activations) / (M − weights − activations); memory_fraction itself where the plan
    does not state the parts.

    Raises:
        CannotExpressError: nothing is left for the cache.
    """
    fraction = pool.limits.memory_fraction
    device = request.host_type(pool.node_type).device
    if device is None or request.pool_name(pool) not in request.memory:
        return fraction
    parts = request.memory[request.pool_name(pool)]
    taken_bytes = parts.weights_bytes + parts.activations_bytes
    left_bytes = fraction * device.memory_bytes - taken_bytes
    if left_bytes <= 0:
        raise CannotExpressError(
            TRTLLM.name,
            f"a KV cache of no bytes: weights and activations take {taken_bytes / 1e9:.1f} GB of "
            f"{fraction:g} × {device.memory_bytes / 1e9:.1f} GB",
            "more devices per worker, or a larger memory_fraction",
        )
    return float(left_bytes / (device.memory_bytes - taken_bytes))


def _attention_ranks(arguments: Arguments) -> int:
    """Attention is data parallel over all devices of a stage or none."""
    return (count(arguments, _STAGE) or 1) if arguments.get(_ATTENTION_DATA) is True else 1


def _switch_term(name: str, key: str) -> Term:
    """A limit behind one option that is on or off."""
    return _rows.term(
        name,
        lambda _, pool: {key: getattr(pool.limits, name)},
        lambda arguments: {name: arguments[key]} if key in arguments else {},
        key,
    )


def _graphs(_: ServingRequest, pool: Pool) -> Arguments:
    if not pool.limits.cuda_graphs:
        return {_GRAPHS: None}
    largest = pool.limits.max_num_seqs // pool.layout.attention_data_parallel
    graphs = {f"{_GRAPHS}.enable_padding": True, f"{_GRAPHS}.max_batch_size": largest}
    if largest <= _FINE_UP_TO:
        return graphs
    return {**graphs, f"{_GRAPHS}.batch_sizes": _graph_sizes(largest)}


def _graph_sizes(largest: int) -> list[int]:
    """Batches that have a graph, where 1.2.1 by itself captures powers of two above 128 and pads 300 requests to 512.

    Steps of 64 above it are newer releases' own: up to 1.3 times the throughput for 260 MB more of graphs
    (NVIDIA/TensorRT-LLM, pull requests 12895 and 13393).

    >>> _graph_sizes(300)[-5:]
    [120, 128, 192, 256, 300]
    """
    fine = [1, 2, 4, *range(8, _FINE_UP_TO + 1, 8)]
    return [*fine, *range(_FINE_UP_TO + _GRAPH_STEP, largest, _GRAPH_STEP), largest]


def _formats(request: ServingRequest, pool: Pool) -> Arguments:
    terms.one_scheme(TRTLLM, request, pool)
    return {"kv_cache_config.dtype": _KV_CACHE[pool.quantization.kv_cache]}


def _kv_tier(_: ServingRequest, pool: Pool) -> Arguments:
    return {} if pool.kv_tier is None else {"kv_cache_config.host_cache_size": int(pool.kv_tier.bytes_per_device)}


def _expert_tensor(request: ServingRequest, pool: Pool) -> Arguments:
    return {} if request.shape.moe is None else {"moe_tensor_parallel_size": pool.layout.expert_tensor_parallel}


def _roles(_: ServingRequest, pool: Pool) -> Arguments:
    if pool.role is Role.MIXED:
        return {}
    # Context servers send their cache at the end of a step: they do not overlap steps (disaggregated guide).
    return {
        "cache_transceiver_config.backend": "DEFAULT",
        "disable_overlap_scheduler": pool.role is Role.PREFILL,
    }


def _speculation(request: ServingRequest, _: Pool) -> Arguments:
    speculation = request.config.speculation
    if speculation is None:
        return {}
    tokens = speculation.num_draft_tokens
    config: dict[str, object]
    if terms.drafts_from_text(request):
        config = {"decoding_type": "NGram", "max_draft_len": tokens}
    elif terms.uses_own_layers(TRTLLM, request):
        config = {"decoding_type": "MTP", "num_nextn_predict_layers": tokens}
    else:
        draft = request.draft_model
        kind = "Eagle" if speculation.method == "eagle3" else "DraftTarget"
        config = {"decoding_type": kind, "max_draft_len": tokens, "speculative_model_dir": draft}
    return {f"speculative_config.{key}": value for key, value in config.items()}


# Flags of the command first, then options of the file in the order in which it lists them.
TERMS = (
    _rows.tensor(
        _STAGE,
        ranks_of=lambda pool: pool.layout.devices_per_stage,
        inside={_ATTENTION_DATA: _attention_ranks},
        note=" (all devices of a stage)",
    ),
    _rows.degree("--pp_size", name="pipeline_parallel", always=True),
    _rows.degree("--ep_size", name="expert_parallel"),
    _rows.write_only(
        "expert_map",
        terms.map_refused(TRTLLM, "its load balancer needs the WIDEEP backend, whose kernels were not priced"),
        "refused: only its WIDEEP backend loads a map",
    ),
    _rows.max_num_seqs("--max_batch_size", ranks=_attention_ranks, note=" (of one attention-data rank)"),
    _rows.max_batched_tokens("--max_num_tokens"),
    _rows.memory(
        lambda request, pool: {_MEMORY[0]: f"{free_fraction(request, pool):.3f}"},
        *_MEMORY,
        of="free",
        expressed_by=f"{_MEMORY[0]} (share of what weights and activations leave)",
    ),
    _rows.max_sequence_length("--max_seq_len"),
    _rows.remote_code("--trust_remote_code"),
    _rows.term(
        "attention_data_parallel",
        lambda _, pool: {_ATTENTION_DATA: pool.layout.attention_data_parallel > 1},
        lambda arguments: (
            {"attention_data_parallel": _attention_ranks(arguments)} if _ATTENTION_DATA in arguments else {}
        ),
        _ATTENTION_DATA,
        expressed_by=f"{_ATTENTION_DATA} (all devices of a stage or none)",
    ),
    _switch_term("chunked_prefill", "enable_chunked_prefill"),
    _rows.stream_interval("stream_interval"),
    _rows.covered("api_servers", "refused: one for each worker"),
    _switch_term("prefix_caching", "kv_cache_config.enable_block_reuse"),
    _rows.write_only("quantization", _formats, "kv_cache_config.dtype; formats of weights come with the checkpoint"),
    _rows.write_only("kv_tier", _kv_tier, "kv_cache_config.host_cache_size (bytes of one rank)"),
    _rows.term(
        "cuda_graphs",
        _graphs,
        lambda arguments: {"cuda_graphs": False} if arguments.get(_GRAPHS, True) is None else {},
        _GRAPHS,
        f"{_GRAPHS}.enable_padding",
        f"{_GRAPHS}.max_batch_size",
        f"{_GRAPHS}.batch_sizes",
        expressed_by=_GRAPHS,
    ),
    _rows.term(
        "custom_all_reduce",
        lambda _, pool: {} if pool.limits.custom_all_reduce else {_REDUCE: _NCCL},
        lambda arguments: {"custom_all_reduce": False} if arguments.get(_REDUCE) == _NCCL else {},
        _REDUCE,
        expressed_by=f"{_REDUCE} (off: {_NCCL})",
    ),
    _rows.write_only("expert_tensor_parallel", _expert_tensor, "moe_tensor_parallel_size"),
    _rows.write_only("roles", _roles, "cache_transceiver_config; trtllm-serve disaggregated"),
    _rows.write_only("speculation", _speculation, "speculative_config (MTP, DraftTarget, Eagle, NGram)"),
)


def options(request: ServingRequest, pool: Pool) -> dict[str, Any]:
    """What the command line cannot express: the content of ``--extra_llm_api_options``."""
    written = write_all(TERMS, request, pool)
    keys = {key: value for key, value in written.items() if not key.startswith("--")}
    return {"backend": "pytorch", **nested(keys)}


def options_path(request: ServingRequest, pool: Pool) -> PurePosixPath:
    """File of the options of a pool's servers."""
    return PurePosixPath(f"{request.pool_name(pool)}_options.yaml")


def _options_file(request: ServingRequest, pool: Pool) -> tuple[Artifact, ...]:
    head = commented(stamp(request.plan, None))
    body = yaml_text(options(request, pool), default_flow_style=None, width=120)
    return (Artifact(path=options_path(request, pool), content=head + body),)


def _program(request: ServingRequest, pool: Pool, flags: Flags, num_nodes: int) -> PoolProgram:
    before: tuple[Argument, ...] = ("trtllm-serve", request.model)
    if num_nodes > 1:
        ranks = str(pool.layout.num_devices)
        before = (
            *("mpirun", "-n", ranks, "--host", Template(text="{mpi_hosts}"), "-x", "CUDA_VISIBLE_DEVICES"),
            *("trtllm-llmapi-launch", *before),
        )
    return PoolProgram(
        name=request.pool_name(pool),
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=before,
        head=("--extra_llm_api_options", Template(text=f"{{files}}/{options_path(request, pool)}"), *SERVE_ON),
        environment={},
    )


def _router(request: ServingRequest) -> RouterOf | None:
    if request.config.is_disaggregated:
        return _leader(request)
    if request.config.num_workers == 1:
        return None
    if request.config.router not in NGINX_METHODS:
        raise CannotExpressError(
            TRTLLM.name, f"a router that is {request.config.router.value} before whole workers", "router least_loaded"
        )
    return nginx_router(request)


def _leader(request: ServingRequest) -> RouterOf:
    """``trtllm-serve disaggregated``: sends a request to a context server, then to a generation server."""
    rule = _ROUTERS[request.config.router]

    def router(addresses: Mapping[Role, Sequence[Argument]]) -> RouterProgram:
        lines = [f"hostname: {EVERY_INTERFACE}\nport: {request.port}\nbackend: pytorch\n"]
        for role, section in _ROLES.items():
            block = yaml_text({"router": dict(rule)}, default_flow_style=None, width=120)
            urls = "".join(f'    - "{address_text(address)}"\n' for address in addresses[role])
            escaped = "".join(f"  {line}\n" for line in block.replace("{", "{{").replace("}", "}}").splitlines())
            lines.append(f"{section}:\n  num_instances: {len(addresses[role])}\n{escaped}  urls:\n{urls}")
        return router_program_of(("trtllm-serve", "disaggregated"), _DISAGGREGATED_FILE, "".join(lines))

    return router


def _notes(request: ServingRequest) -> Sequence[str]:
    notes = ["No parser has checked these files: TensorRT-LLM cannot be imported without CUDA."]
    if any(request.pool_name(pool) not in request.memory for pool in request.config.pools):
        notes.insert(
            0, "TensorRT-LLM's KV-cache share is of free memory, the plan's of all memory: it is larger than intended."
        )
    return notes


ENGINE = Engine(
    rules=TRTLLM,
    terms=TERMS,
    verified=None,
    program=_program,
    router=_router,
    notes=_notes,
    files=_options_file,
    more_features=(
        Feature(
            name="router",
            expressed_by="trtllm-serve disaggregated (round_robin, load_balancing, kv_cache_aware); nginx before "
            "whole workers (round robin, least_conn)",
            verified_by=_READ,
        ),
        Feature(
            name="hosts",
            expressed_by="mpirun, trtllm-llmapi-launch; CUDA_VISIBLE_DEVICES of each worker",
            verified_by=_READ,
        ),
    ),
)
arguments, job, features = ENGINE.arguments, ENGINE.job, ENGINE.features
