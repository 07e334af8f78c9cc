"""A serving plan as ``llama-server`` commands, one server per worker, and nginx in front of several.

Source: llama.cpp's argument list (tools/server/README.md, generated from its parser; the commit is the version in its
rules, read 2026-11-25). No parser has checked the flags: it is compiled into the program. Layers are counted as
llama.cpp counts them: ``--gpu-layers`` keeps the last of them on devices and counts the LM head as one more
(src/llama-model.cpp, ``i_gpu_start``), ``--n-cpu-moe`` counts from the first layer, dense ones included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.serving import terms
from meshplan.planner.emit.serving.engine import SERVE_ON, Engine
from meshplan.planner.emit.serving.job import Argument, Flags, PoolProgram, RouterOf
from meshplan.planner.emit.serving.nginx import NGINX_METHODS, nginx_router
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.terms import Arguments, count, stated
from meshplan.planner.serving.problem.config import Pool
from meshplan.planner.serving.problem.engines.table import LLAMA_CPP
from meshplan.planner.serving.problem.quantization import GGUF_SCHEMES
from meshplan.planner.serving.problem.weight_tiers import Way

_READ = "documented argument list"
_rows = terms.ServingRows(_READ)
_MIB, _GIB = 2.0**20, 2.0**30
_SPLIT = ("--tensor-split", "-ts")
_SLOTS = ("--parallel", "-np")
_BATCH = ("--batch-size", "-b")
# A 16-bit cache is llama.cpp's own f16, whichever 16 bits the plan names: its size is the same.
_KV_CACHE = {"bf16": "f16", "fp16": "f16", "q8_0": "q8_0", "q4_0": "q4_0"}
_QUANT = re.compile(r"(?<![A-Za-z0-9])(I?Q\d_[A-Z0-9]+(?:_[A-Z]+)?|MXFP4|BF16|F16)(?![A-Za-z0-9])", re.IGNORECASE)
# Names of formats in GGUF files → the scheme of a plan.
_NAMED = {**{name.upper(): name for name in GGUF_SCHEMES}, "MXFP4": "mxfp4", "BF16": "bf16", "F16": "fp16"}


def _split(_: ServingRequest, pool: Pool) -> Arguments:
    stages = pool.layout.pipeline_parallel
    return {"--split-mode": "layer", _SPLIT[0]: ",".join(["1"] * stages)} if stages > 1 else {"--split-mode": "none"}


def _read_split(arguments: Arguments) -> Mapping[str, Any]:
    """Devices are told by the number of shares alone: without them llama.cpp takes all that it sees."""
    shares = next((str(arguments[flag]) for flag in _SPLIT if flag in arguments), "")
    if str(arguments.get("--split-mode", arguments.get("-sm", ""))) == "none":
        return {"pipeline_parallel": 1}
    return stated(pipeline_parallel=len([one for one in re.split(r"[,/]", shares) if one.strip()]) or None)


def _context(request: ServingRequest, pool: Pool) -> Arguments:
    """The cache of all slots together, tokens: each has the longest request, as far as the plan has room for it."""
    longest = request.max_sequence_length or request.shape.max_sequence_length or 0
    asked = pool.limits.max_num_seqs * longest
    if not asked:
        raise CannotExpressError(
            LLAMA_CPP.name,
            f"a cache of no stated size: {request.shape.name} states no longest sequence",
            "a plan whose workload gives input_length and output_length",
        )
    room = _kv_capacity(request, pool)
    return {"--ctx-size": str(min(asked, room) if room else asked), "--kv-unified": ""}


def _kv_capacity(request: ServingRequest, pool: Pool) -> int:
    """Tokens that the plan has room for in one worker; 0 where it does not say."""
    name = request.pool_name(pool)
    rows = (request.plan.memory or {}).get("pools", ())
    return next((int(row["kv_capacity_tokens"]) for row in rows if row.get("pool", row["role"]) == name), 0)


def _tokens(_: ServingRequest, pool: Pool) -> Arguments:
    """Host weights are copied once for each physical batch: it is as large as the logical one."""
    return dict.fromkeys((_BATCH[0], "--ubatch-size"), str(pool.limits.max_batched_tokens))


def _layers(request: ServingRequest, pool: Pool) -> Arguments:
    """Which layers lie on the host; without any, all lie on the devices."""
    tiers, shape = pool.weight_tiers, request.shape
    number = 0 if tiers is None or tiers.way is not Way.LAYERS_ON_HOST else tiers.host_layers
    if shape.moe is None or not number:
        return {"--gpu-layers": str(shape.num_hidden_layers + 1 - number), **_threads(pool)}
    return {"--gpu-layers": str(shape.num_hidden_layers + 1), **_experts(shape, pool, number), **_threads(pool)}


def _experts(shape: ModelShape, pool: Pool, number: int) -> Arguments:
    """Routed experts of ``number`` MoE layers on the host: the first ones, or spread evenly where there are stages."""
    slots = [layer for layer in range(shape.num_hidden_layers) if shape.is_moe_layer(layer)]
    if number == len(slots):
        return {"--cpu-moe": ""}
    if pool.layout.pipeline_parallel == 1:
        return {"--n-cpu-moe": str(slots[number - 1] + 1)}
    # Every stage gives up as many layers, so that none is left with more than the plan counted.
    chosen = sorted({slots[(2 * index + 1) * len(slots) // (2 * number)] for index in range(number)})
    return {"--override-tensor": rf"blk\.({'|'.join(map(str, chosen))})\.ffn_(up|down|gate)_exps=CPU"}


def _threads(pool: Pool) -> Arguments:
    """Physical cores, where the plan knows the host."""
    tiers = pool.weight_tiers
    if tiers is None or not tiers.threads:
        return {}
    numa = {"--numa": "distribute"} if tiers.numa_nodes > 1 else {}
    return {"--threads": str(tiers.threads), **numa}


def _formats(_: ServingRequest, pool: Pool) -> Arguments:
    cache = _KV_CACHE[pool.quantization.kv_cache]
    # A quantised cache of values needs flash attention.
    return {"--cache-type-k": cache, "--cache-type-v": cache, "--flash-attn": "on"}


def _kv_tier(_: ServingRequest, pool: Pool) -> Arguments:
    """Prompts that leave their slot are kept in host memory, MiB; 0 where the plan counts none."""
    size = 0.0 if pool.kv_tier is None else pool.kv_tier.bytes_per_device * pool.layout.num_devices
    return {"--cache-ram": str(int(size / _MIB))}


def _refused(what: str, fix: str) -> CannotExpressError:
    return CannotExpressError(LLAMA_CPP.name, what, fix)


def _graphs(_: ServingRequest, pool: Pool) -> Arguments:
    if not pool.limits.cuda_graphs:
        raise _refused("decoding without CUDA graphs", "a plan with cuda_graphs: they are compiled in")
    return {}


def _speculation(request: ServingRequest, _: Pool) -> Arguments:
    if request.config.speculation is not None:
        raise _refused("speculative decoding, which was not priced for it", "a plan without speculation")
    return {}


TERMS = (
    _rows.term(
        "pipeline_parallel",
        _split,
        _read_split,
        *_SPLIT,
        "--split-mode",
        "-sm",
        expressed_by="--split-mode layer, --tensor-split (as many equal shares as devices)",
    ),
    *(
        _rows.covered(name, "refused: devices hold whole layers")
        for name in ("tensor_parallel", "attention_data_parallel", "expert_parallel", "context_parallel")
    ),
    _rows.covered("custom_all_reduce", "none: devices exchange nothing but activations"),
    _rows.term(
        "max_num_seqs",
        lambda _, pool: {_SLOTS[0]: str(pool.limits.max_num_seqs)},
        lambda arguments: stated(max_num_seqs=count(arguments, *_SLOTS)),
        *_SLOTS,
        expressed_by=f"{_SLOTS[0]} (slots)",
    ),
    _rows.term(
        "max_batched_tokens",
        _tokens,
        lambda arguments: stated(max_batched_tokens=count(arguments, *_BATCH)),
        *_BATCH,
        expressed_by=f"{_BATCH[0]}, --ubatch-size",
    ),
    _rows.covered("stream_interval", "refused: every token is sent by itself"),
    _rows.covered("api_servers", "refused: one for each worker"),
    _rows.write_only("max_sequence_length", _context, "--ctx-size (of all slots together), --kv-unified"),
    _rows.write_only("weight_tiers", _layers, "--gpu-layers, --n-cpu-moe, --cpu-moe, --override-tensor, --threads"),
    _rows.write_only("quantization", _formats, "--cache-type-k, --cache-type-v; formats of weights come with the GGUF"),
    _rows.write_only("memory_fraction", lambda *_: {"--fit": "off"}, "--fit off: nothing is changed to fit"),
    _rows.write_only("kv_tier", _kv_tier, "--cache-ram (MiB of one worker)"),
    _rows.off_switch("prefix_caching", "--no-cache-prompt"),
    _rows.covered("chunked_prefill", "always on (--batch-size)"),
    _rows.write_only("cuda_graphs", _graphs, "compiled in; refused where off"),
    _rows.write_only("speculation", _speculation, "refused: not priced"),
    _rows.write_only(
        "expert_map", terms.map_refused(LLAMA_CPP, "devices hold whole layers"), "refused: devices hold whole layers"
    ),
)


def weights(request: ServingRequest, pool: Pool) -> tuple[str, str]:
    """The flag and the GGUF that it loads: a file, or a repository of the hub with a format after a colon.

    Raises:
        CannotExpressError: no GGUF is named, or its name tells another format than the plan's.
    """
    name, planned = request.model_path, pool.quantization.experts if request.shape.moe else pool.quantization.mlp
    formats = [_NAMED.get(found.upper(), found) for found in _QUANT.findall(name)]
    if formats and planned not in formats:
        raise _refused(f"weights in {planned} from {name}", f"a GGUF in {planned.upper()}, or a plan in {formats[-1]}")
    if name.lower().endswith(".gguf"):
        return "--model", name
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) and "gguf" in name.lower():
        return "--hf-repo", name if ":" in name else f"{name}:{planned.upper()}"
    raise _refused(
        f"weights in {planned} from {name or 'the published checkpoint'}, which is no GGUF",
        f"--model-path FILE.gguf, or ORGANISATION/MODEL-GGUF:{planned.upper()}",
    )


def _program(request: ServingRequest, pool: Pool, flags: Flags, num_nodes: int) -> PoolProgram:
    if num_nodes > 1:
        raise _refused(f"a worker on {num_nodes} hosts", "workers within one host")
    head: tuple[Argument, ...] = SERVE_ON
    return PoolProgram(
        name=request.pool_name(pool),
        pool=pool,
        num_nodes=num_nodes,
        flags=flags,
        before=("llama-server", *weights(request, pool)),
        head=head,
        follower=(),
        environment={},
    )


def _router(request: ServingRequest) -> RouterOf | None:
    if request.config.num_workers == 1:
        return None
    if request.config.router not in NGINX_METHODS:
        raise _refused(f"a router that is {request.config.router.value} before whole workers", "router least_loaded")
    return nginx_router(request)


def _notes(request: ServingRequest) -> Sequence[str]:
    notes = [f"No parser has checked these flags: they are those of llama.cpp's argument list at {LLAMA_CPP.version}."]
    for pool in request.config.pools:
        tiers = pool.weight_tiers
        if tiers is None:
            continue
        notes.append(f"{tiers.host_bytes / _GIB:.0f} GiB of weights lie in host memory: leave it to them.")
        if tiers.drive_bytes:
            notes.append(
                f"{tiers.drive_bytes / _GIB:.0f} GiB of these have no room in it and are read from drives in every "
                "iteration: leave --load-mode at its default (mmap), and the GGUF on the drives that the plan names."
            )
        if not tiers.threads:
            notes.append("Say --threads (physical cores) of the host, and --numa distribute where it has two sockets.")
    return notes


ENGINE = Engine(
    rules=LLAMA_CPP,
    terms=TERMS,
    verified=None,
    program=_program,
    router=_router,
    notes=_notes,
    more_features=(
        Feature(name="router", expressed_by="nginx (round robin, least_conn)", verified_by="golden only"),
        Feature(name="hosts", expressed_by="one host a worker; CUDA_VISIBLE_DEVICES of each", verified_by=_READ),
    ),
)
arguments, job, features = ENGINE.arguments, ENGINE.job, ENGINE.features
