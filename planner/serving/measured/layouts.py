"""The configuration of a measured serving run: number formats, degrees and limits of each pool of workers.

Batch limits, token budget and memory fraction are the documented defaults of the engine's release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.constants.serving_benchmarks import (
    BenchmarkRun,
    expert_parallel,
    num_waiting,
    settings_of,
    spreads_attention,
    started_as,
)
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.memory import WorkerMemory, share_of_device, worker_memory
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.engines.table import expert_padding
from meshplan.planner.serving.problem.quantization import (
    KV_CACHE_BYTES,
    SCHEMES,
    Quantization,
    checkpoint_formats,
    named,
    published_formats,
)
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload
from meshplan.planner.validation.fields import Section, UnsupportedError, shown

# Limits of the scheduler that a row may state under ``workload``, by their names there → as fields of EngineLimits.
STATED_LIMITS = {"max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_batched_tokens"}
# Formats that sources call fp8: one scale for a tensor or a channel, or one for each block of weights.
FP8 = ("fp8", "fp8_block")
# Keys of ``parallelism``, or of a pool's part of it.
DEGREES = frozenset(
    {"tensor_parallel", "pipeline_parallel", "data_parallel", "attention_data_parallel", "context_parallel"}
    | {"expert_parallel", "expert_tensor_parallel", "num_workers", "max_batch_size", "prefill", "decode"}
)


def refuse_misnamed_degrees(degrees: Section, *others: Section) -> None:
    """Refuse a row whose degrees have the names of flags, or lie in other sections: unread they would count as 1.

    Raises:
        UnsupportedError: ``parallelism.tensor_parallel_size``, say, or ``workload.tp``.
    """
    if not any(map(degrees.states, ("prefill", "decode"))):
        degrees.refuse_misplaced(DEGREES, *others)
    parts = [Section(degrees.values, name, required=False) for name in ("prefill", "decode")]
    for section in (degrees, *parts):
        section.refuse_misnamed(DEGREES)


def stated_limits(asked: Section) -> dict[str, int]:
    """The limits of the scheduler that a row states."""
    return {name: asked.whole(name) for name in STATED_LIMITS if asked.states(name)}


def stated_memory_share(asked: Section) -> float | None:
    """Share of a device's memory that the row says its server was given (vLLM); None where it does not say."""
    if not asked.states("gpu_memory_utilization"):
        return None
    share = asked.number("gpu_memory_utilization")
    if share > 1.0:
        raise asked.wrong("gpu_memory_utilization", "a share of the device's memory, at most 1")
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What all pools of a measured run share.

    Args:
        shape: the model.
        machine: device and links.
        workload: requests that were sent.
        recipe: the engine and release.
        quantization: number formats.
        benchmark: the run as the benchmark's launch scripts know it.
        stated: limits of the scheduler that the row states, by the keys of :data:`STATED_LIMITS`.
        memory_share: of :func:`stated_memory_share`.
    """

    shape: ModelShape
    machine: Machine
    workload: ServingWorkload
    recipe: EngineRecipe
    quantization: Quantization
    benchmark: BenchmarkRun
    stated: Mapping[str, int] = field(default_factory=dict)
    memory_share: float | None = None


def observed_formats(
    row: Mapping[str, Any], asked: Section, shape: ModelShape, recipe: EngineRecipe
) -> tuple[Quantization, tuple[str, ...]]:
    """Number formats of a row, and those that it leaves out.

    A checkpoint in fp8 is the published one, which may be scaled in blocks or leave attention wide, unless the row says
    more: ``fp8`` of its products repeats the precision.
    """
    precision = row.get("precision")
    if not isinstance(precision, str) or precision not in (*SCHEMES, "fp32"):
        raise UnsupportedError(f"serving in the precision {shown(precision)} is not modelled")
    stated = Section({"quantization": asked.values.get("quantization") or {}}, "quantization")
    weight = stated.text("weight", precision)
    mlp, experts = stated.text("gemm", weight), stated.text("moe", stated.text("gemm", weight))
    for name in (mlp, experts):
        if name not in SCHEMES:
            raise UnsupportedError(f"weights in {shown(name)} are not modelled")
    filled = () if stated.states("kv_cache") else ("kv_cache",)
    is_quantized = SCHEMES[experts].activation_bytes < BYTES_16_BIT
    kv_cache = stated.text("kv_cache", recipe.quantized_kv_cache if is_quantized else "bf16")
    if kv_cache not in KV_CACHE_BYTES:
        raise UnsupportedError(f"a KV cache in {shown(kv_cache)} is not modelled")
    if "gpt-oss" in shape.slug:  # "nvfp4" of such rows is the published MXFP4
        return checkpoint_formats(shape, "mxfp4", kv_cache), filled
    if shape.latent is not None:
        return checkpoint_formats(shape, "fp8_block" if mlp == "fp8" else mlp, kv_cache), filled
    if experts == "fp8_block" and mlp == "fp8":  # no checkpoint has both
        mlp = experts
    if weight == mlp == experts == "fp8":
        published = named(str(Section(row, "model").values.get("name", ""))) or published_formats(shape)
        if published is not None and published.mlp in FP8:
            return published.with_cache(kv_cache), filled
    return Quantization(attention=mlp, mlp=mlp, experts=experts, kv_cache=kv_cache), filled


def observed_pools(server: Server, degrees: Section, *, disaggregated: bool) -> tuple[Pool, ...]:
    """The pools of a row.

    Args:
        server: what they share.
        degrees: the row's ``parallelism``.
        disaggregated: prefill and decode have pools of their own.

    Raises:
        UnsupportedError: the degrees do not fit the model or the devices.
    """
    if disaggregated:
        parts = [(Role.PREFILL, Section(degrees.values, "prefill")), (Role.DECODE, Section(degrees.values, "decode"))]
    else:
        parts = [(Role.MIXED, degrees)]
    pools = tuple(_pool(server, role, section) for role, section in parts)
    total = sum(pool.num_devices for pool in pools)
    if total > server.machine.num_devices:
        raise UnsupportedError(f"its degrees need {total} devices, it names {server.machine.num_devices}")
    return pools


def _pool(server: Server, role: Role, section: Section) -> Pool:
    base, workload = server.recipe, server.workload
    started = benchmark_run(server.benchmark, section, role)
    recipe = started_as(base, started)
    if server.memory_share is not None:
        recipe = replace(recipe, memory_fraction=server.memory_share, memory_fraction_of="total")
    layout = _layout(
        section, server.shape, spread=spreads_attention(base, started), experts=expert_parallel(base, started)
    )
    workers = section.whole("data_parallel" if role is Role.MIXED else "num_workers", 1)
    in_flight = workload.concurrency or recipe.max_num_seqs
    seqs = _max_running(section, base, started) * layout.attention_data_parallel
    seqs = seqs or max(recipe.max_num_seqs, in_flight)
    if workload.arrival is not Arrival.ALL_AT_ONCE:
        seqs = min(seqs, max(in_flight - num_waiting(base, started), 1))
    seqs = server.stated.get("max_num_seqs", seqs)
    budget = recipe.token_budget(workload.input_length, min(seqs, in_flight))
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_batched_tokens=server.stated.get("max_num_batched_tokens", budget),
        chunked_prefill=not recipe.exclusive_prefill,
        cuda_graphs=recipe.cuda_graphs,
        stream_interval=recipe.stream_interval,
        prefix_caching=workload.trace is not None and workload.trace.cached_tokens is not None,
    )
    return Pool(
        role=role,
        layout=layout,
        num_workers=workers,
        limits=_within_memory(limits, replace(server, recipe=recipe), role, layout),
        quantization=server.quantization,
        node_type=server.machine.device.slug,
    )


def _within_memory(limits: EngineLimits, server: Server, role: Role, layout: Layout) -> EngineLimits:
    """The limits with the engine's memory fraction and, where it reserves whole answers, the requests that fit."""
    recipe, workload = server.recipe, server.workload
    held = workload.input_length + (1.0 if role is Role.PREFILL else workload.output_length)

    def memory_under(limits: EngineLimits) -> WorkerMemory:
        device = server.machine.device
        return worker_memory(
            server.shape,
            device,
            layout,
            limits,
            server.quantization,
            context=held,
            padding=expert_padding(recipe.engine, server.quantization, device),
        )

    memory = memory_under(replace(limits, memory_fraction=1.0))
    share = share_of_device(memory, recipe.memory_fraction, recipe.memory_fraction_of)
    limits = replace(limits, memory_fraction=share)
    if not recipe.reserves_output:
        return limits
    ranks = layout.attention_data_parallel
    fitting = max(int(memory_under(limits).kv_capacity_tokens / ranks / max(held, 1.0)), 1) * ranks
    return replace(limits, max_num_seqs=max(min(limits.max_num_seqs, fitting), 1))


def _max_running(section: Section, base: EngineRecipe, started: BenchmarkRun) -> int:
    """Running requests of one rank of a worker with a role of its own: as its scripts say, else those of a decode
    worker as the row does; 0 where neither does.

    The row's figure is the concurrency over all ranks, rounded up: it does not show the requests that wait because the
    limit in the scripts is lower, nor that none waits where it is higher.
    """
    if started.role == Role.MIXED.value:
        return 0
    stated = settings_of(base, started).get("max_num_seqs")
    if stated is not None:
        return int(stated)
    return section.whole("max_batch_size", 0, least=0) if started.role == Role.DECODE.value else 0


def benchmark_run(run: BenchmarkRun, section: Section, role: Role) -> BenchmarkRun:
    """The run with the role and the degrees of one pool."""
    return replace(
        run,
        tensor_parallel=section.whole("tensor_parallel"),
        attention_data_parallel=section.whole("attention_data_parallel", 1),
        role=role.value,
    )


def _layout(section: Section, shape: ModelShape, *, spread: bool = False, experts: int | None = None) -> Layout:
    """Degrees of one worker.

    Args:
        section: the pool's part of ``parallelism``.
        shape: the model.
        spread: the attention is data-parallel over all ranks that the row calls tensor-parallel.
        experts: expert-parallel degree in place of the row's.
    """
    tensor, ranks = section.whole("tensor_parallel"), section.whole("attention_data_parallel", 1)
    if spread:
        tensor, ranks = 1, tensor * ranks
    if shape.num_attention_heads % tensor:
        raise UnsupportedError(f"tensor_parallel {tensor} does not divide {shape.num_attention_heads} heads")
    stage = tensor * ranks
    expert = (experts or section.whole("expert_parallel", 1)) if shape.moe is not None else 1
    if stage % expert:
        raise UnsupportedError(f"expert_parallel {expert} does not divide the {stage} devices of a stage")
    return Layout(
        tensor_parallel=tensor,
        pipeline_parallel=section.whole("pipeline_parallel", 1),
        attention_data_parallel=ranks,
        expert_parallel=expert,
        expert_tensor_parallel=stage // expert if shape.moe is not None else 1,
        context_parallel=section.whole("context_parallel", 1),
    )
