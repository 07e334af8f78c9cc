"""A serving plan as ``trtllm-serve`` commands with an options file each, and the server that leads them.

``--tp_size`` counts all devices of a stage; ``enable_attention_dp`` makes attention data parallel on all of them.
TensorRT-LLM cannot be imported without its CUDA libraries: words are from the documentation of 1.2.1 and its
``llm_args.py``, no parser has judged them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import Artifact, commented, stamp
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
)
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Pool, Role, Router
from meshplan.planner.serving.problem.engines import TRTLLM

TARGET = "trtllm"
_READ = "not machine-checked: from the documentation of 1.2.1"
_KV_CACHE = {"bf16": "auto", "fp8": "fp8", "nvfp4": "nvfp4"}
_ROUTERS: Mapping[Router, Mapping[str, Any]] = {
    Router.ROUND_ROBIN: {"type": "round_robin"},
    Router.LEAST_LOADED: {"type": "load_balancing", "args": {"use_tokens": True}},
    Router.PREFIX_AWARE: {"type": "kv_cache_aware"},
}
_NGINX_METHODS = {Router.ROUND_ROBIN: "", Router.LEAST_LOADED: "    least_conn;\n"}
_DISAGGREGATED_FILE = "disaggregated.yaml"
_NGINX_FILE = "nginx.conf"
_ROLES = {Role.PREFILL: "context_servers", Role.DECODE: "generation_servers"}
_NGINX = """\
# One connection a request is what least_conn counts; answers stream, so nothing is buffered.
daemon off;
pid /tmp/meshplan-nginx.pid;
error_log stderr;
events {{ worker_connections 65536; }}
http {{
  access_log off;
  client_max_body_size 0;
  upstream workers {{
{method}{servers}  }}
  server {{
    listen {port};
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_read_timeout 3600s;
    }}
  }}
}}
"""


def free_fraction(request: ServingRequest, pool: Pool) -> float:
    """Share of the memory left by weights and activations that the KV cache takes.

    (memory_fraction·M − weights − activations) / (M − weights − activations); memory_fraction itself where the plan
    does not tell the parts.

    Raises:
        CannotExpressError: nothing is left for the cache.
    """
    fraction = pool.limits.memory_fraction
    device = request.host_type(pool.node_type).device
    if device is None or pool.role not in request.memory:
        return fraction
    parts = request.memory[pool.role]
    taken_bytes = parts.weights_bytes + parts.activations_bytes
    left_bytes = fraction * device.memory_bytes - taken_bytes
    if left_bytes <= 0:
        raise CannotExpressError(
            TARGET,
            f"a KV cache of no bytes: weights and activations take {taken_bytes / 1e9:.1f} GB of "
            f"{fraction:g} × {device.memory_bytes / 1e9:.1f} GB",
            "more devices a worker, or a larger memory_fraction",
        )
    return float(left_bytes / (device.memory_bytes - taken_bytes))


TERMS = (
    ServingTerm(
        name="tensor_parallel",
        words=lambda _, pool: {"--tp_size": str(pool.layout.devices_per_stage)},
        said_by="--tp_size (all devices of a stage)",
        verified_by=_READ,
    ),
    ServingTerm(
        name="pipeline_parallel",
        words=lambda _, pool: {"--pp_size": str(pool.layout.pipeline_parallel)},
        said_by="--pp_size",
        verified_by=_READ,
    ),
    ServingTerm(
        name="expert_parallel",
        words=lambda _, pool: above_one("--ep_size", pool.layout.expert_parallel),
        said_by="--ep_size; moe_tensor_parallel_size in the options file",
        verified_by=_READ,
    ),
    ServingTerm(
        name="max_num_seqs",
        words=lambda _, pool: {
            "--max_batch_size": str(pool.limits.max_num_seqs // pool.layout.attention_data_parallel)
        },
        said_by="--max_batch_size (of one attention-data rank)",
        verified_by=_READ,
    ),
    ServingTerm(
        name="max_batched_tokens",
        words=lambda _, pool: {"--max_num_tokens": str(pool.limits.max_batched_tokens)},
        said_by="--max_num_tokens",
        verified_by=_READ,
    ),
    ServingTerm(
        name="memory_fraction",
        words=lambda request, pool: {"--kv_cache_free_gpu_memory_fraction": f"{free_fraction(request, pool):.3f}"},
        said_by="--kv_cache_free_gpu_memory_fraction (share of what weights and activations leave)",
        verified_by=_READ,
    ),
    ServingTerm(
        name="max_sequence_length",
        words=lambda request, _: (
            {} if request.max_sequence_length is None else {"--max_seq_len": str(request.max_sequence_length)}
        ),
        said_by="--max_seq_len",
        verified_by=_READ,
    ),
)
_OPTIONS = {
    "attention_data_parallel": "enable_attention_dp (all devices of a stage or none)",
    "chunked_prefill": "enable_chunked_prefill",
    "prefix_caching": "kv_cache_config.enable_block_reuse",
    "kv_tier": "kv_cache_config.host_cache_size (bytes of one rank)",
    "cuda_graphs": "cuda_graph_config",
    "custom_all_reduce": "allreduce_strategy (off: NCCL)",
    "quantization": "kv_cache_config.dtype; formats of weights come with the checkpoint",
    "speculation": "speculative_config (MTP, DraftTarget)",
    "roles": "cache_transceiver_config; trtllm-serve disaggregated",
}


def arguments(request: ServingRequest, pool: Pool) -> tuple[tuple[str, ...], ...]:
    """Every flag that the plan decides for one pool.

    Raises:
        CannotExpressError: TensorRT-LLM has no words for the plan.
    """
    refuse_serving(TRTLLM, request)
    return flags_of(TERMS, request, pool)


def options(request: ServingRequest, pool: Pool) -> dict[str, Any]:
    """What the command line cannot say: the content of ``--extra_llm_api_options``."""
    layout, limits = pool.layout, pool.limits
    one_scheme(TRTLLM, request, pool)
    said: dict[str, Any] = {
        "backend": "pytorch",
        "enable_attention_dp": layout.attention_data_parallel > 1,
        "enable_chunked_prefill": limits.chunked_prefill,
        "kv_cache_config": {
            "enable_block_reuse": limits.prefix_caching,
            "dtype": _KV_CACHE[pool.quantization.kv_cache],
        },
        "cuda_graph_config": None,
    }
    if pool.kv_tier is not None:
        said["kv_cache_config"]["host_cache_size"] = int(pool.kv_tier.bytes_per_device)
    if not limits.custom_all_reduce:
        said["allreduce_strategy"] = "NCCL"
    if limits.cuda_graphs:
        largest = limits.max_num_seqs // layout.attention_data_parallel
        said["cuda_graph_config"] = {"enable_padding": True, "max_batch_size": largest}
    if request.shape.moe is not None:
        said["moe_tensor_parallel_size"] = layout.expert_tensor_parallel
    if pool.role is not Role.MIXED:
        said["cache_transceiver_config"] = {"backend": "DEFAULT"}
        # Context servers hand their cache over at the end of a step: they do not overlap steps (disaggregated guide).
        said["disable_overlap_scheduler"] = pool.role is Role.PREFILL
    return said | _speculation(request)


def _speculation(request: ServingRequest) -> dict[str, Any]:
    speculation = request.config.speculation
    if speculation is None:
        return {}
    tokens = speculation.num_draft_tokens
    if request.draft_model:
        said = {"decoding_type": "DraftTarget", "max_draft_len": tokens, "speculative_model_dir": request.draft_model}
        return {"speculative_config": said}
    if not request.shape.num_nextn_predict_layers:
        raise CannotExpressError(
            TARGET, "speculation without a draft", "a draft_model, or a model with prediction layers of its own"
        )
    return {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": tokens}}


def job(request: ServingRequest) -> ServingJob:
    """Servers of every pool, and the server or nginx that leads them."""
    config = request.config
    programs = tuple(_program(request, pool) for pool in config.pools)
    router: RouterOf | None = None
    if config.is_disaggregated:
        router = _leader(request)
    elif config.pools[0].num_workers > 1:
        router = _nginx(request)
    notes = []
    if any(pool.role not in request.memory for pool in config.pools):
        notes.append("The cache's share is of free memory; the plan's is of all: it is larger than it has to be.")
    return ServingJob(
        target=TARGET,
        request=request,
        verified=None,
        programs=programs,
        router=router,
        health_path="/health",
        files=tuple(_options_file(request, pool) for pool in config.pools),
        notes=(*notes, "No parser has judged these files: TensorRT-LLM cannot be imported without CUDA."),
    )


def options_path(pool: Pool) -> PurePosixPath:
    """File with the options of a pool."""
    return PurePosixPath(f"{pool.role.value}_options.yaml")


def _options_file(request: ServingRequest, pool: Pool) -> Artifact:
    head = commented(stamp(request.plan, None))
    body = yaml.safe_dump(options(request, pool), sort_keys=False, width=120)
    return Artifact(path=options_path(pool), content=head + body)


def _program(request: ServingRequest, pool: Pool) -> PoolProgram:
    flags = arguments(request, pool)
    num_nodes = nodes_per_worker(request, pool, target=TARGET)
    before: tuple[Word, ...] = ("trtllm-serve", request.model)
    if num_nodes > 1:
        ranks = str(pool.layout.num_devices)
        before = (
            *("mpirun", "-n", ranks, "--host", Slot(text="{mpi_hosts}"), "-x", "CUDA_VISIBLE_DEVICES"),
            *("trtllm-llmapi-launch", *before),
        )
    return PoolProgram(
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=before,
        head=(
            *("--extra_llm_api_options", Slot(text=f"{{files}}/{options_path(pool)}")),
            *("--host", EVERY_INTERFACE, "--port", Slot(text="{port}")),
        ),
        environment={},
    )


def _leader(request: ServingRequest) -> RouterOf:
    """``trtllm-serve disaggregated``: sends a request to a context server, then to a generation server."""
    rule = _ROUTERS[request.config.router]

    def words(addresses: Mapping[Role, Sequence[Word]]) -> RouterProgram:
        lines = [f"hostname: {EVERY_INTERFACE}\nport: {request.port}\nbackend: pytorch\n"]
        for role, section in _ROLES.items():
            router = yaml.safe_dump({"router": dict(rule)}, default_flow_style=None, sort_keys=False, width=120)
            urls = "".join(f'    - "{_text(address)}"\n' for address in addresses[role])
            escaped = "".join(f"  {line}\n" for line in router.replace("{", "{{").replace("}", "}}").splitlines())
            lines.append(f"{section}:\n  num_instances: {len(addresses[role])}\n{escaped}  urls:\n{urls}")
        file = (_DISAGGREGATED_FILE, Slot(text="".join(lines)))
        return RouterProgram(words=("trtllm-serve", "disaggregated", "-c", Slot(text="{router_file}")), file=file)

    return words


def _nginx(request: ServingRequest) -> RouterOf:
    if request.config.router not in _NGINX_METHODS:
        raise CannotExpressError(
            TARGET, f"a router that is {request.config.router.value} before whole workers", "router least_loaded"
        )
    method = _NGINX_METHODS[request.config.router]

    def words(addresses: Mapping[Role, Sequence[Word]]) -> RouterProgram:
        servers = "".join(f"    server {_text(address)};\n" for address in addresses[Role.MIXED])
        text = _NGINX.replace("{method}", method).replace("{servers}", servers).replace("{port}", str(request.port))
        return RouterProgram(words=("nginx", "-c", Slot(text="{router_file}")), file=(_NGINX_FILE, Slot(text=text)))

    return words


def _text(address: Word) -> str:
    return address.text if isinstance(address, Slot) else address


def degrees(words: Sequence[str], said: Mapping[str, Any]) -> dict[str, int]:
    """Our degrees, read back from an argument file and its options."""
    flags = {flag: value for flag, value in zip(words, [*words[1:], ""], strict=True) if flag.startswith("--")}
    stage = int(flags["--tp_size"])
    data = stage if said["enable_attention_dp"] else 1
    return {
        "tensor_parallel": stage // data,
        "context_parallel": 1,
        "pipeline_parallel": int(flags["--pp_size"]),
        "attention_data_parallel": data,
        "expert_parallel": int(flags.get("--ep_size", "1")),
    }


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        *term_rows(TERMS),
        *(Feature(name=name, expressed_by=words, verified_by=_READ) for name, words in _OPTIONS.items()),
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
    )
