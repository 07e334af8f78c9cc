"""Published serving measurements as simulations: one JSON object a line, read into a configuration and its requests.

What a row leaves unstated – batch limits, token budget, memory fraction – is the engine release's documented default
(``catalogs/seed/engines.yaml``), and the row remembers what was filled. What the estimator cannot express is refused
with a reason, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.constants.engine_recipes import EngineRecipe, engine_observed_as
from meshplan.catalogs.constants.serving_benchmarks import BenchmarkRun, spreads_attention, started_as
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.models.observed import shape_from_observation
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.memory import worker_memory
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role, ServingConfig
from meshplan.planner.serving.problem.quantization import (
    KV_CACHE_BYTES,
    SCHEMES,
    Quantization,
    checkpoint_formats,
)
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.validation.fields import Section, UnsupportedError, shown

if TYPE_CHECKING:
    from meshplan.planner.validation.machines import MachineReader

# Requests of a closed-loop benchmark over those in flight, and its lengths: uniform from this share of nominal (the
# public harness behind the silicon rows: --random-range-ratio 0.8, --num-prompts 10 × concurrency).
PROMPTS_PER_CONCURRENCY = 10
LENGTH_RATIO = 0.8
_VARIED_MARK = "vary between 0.8 and 1.0"
_NCCL_MARK = "custom all-reduce disabled"
_VENDOR_MARK = "vendor internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """One measured serving run.

    Args:
        id: unique name.
        group: near-duplicates share it; cross-validation leaves out whole groups.
        shape: the model.
        machine: device and links.
        config: layout and limits that were run.
        workload: requests that were sent.
        recipe: the engine and release.
        measured: metric → value, SI units.
        derived: metric → value that rests on an assumption.
        filled: choices that the row left out.
    """

    id: str
    group: str
    shape: ModelShape
    machine: Machine
    config: ServingConfig
    workload: ServingWorkload
    recipe: EngineRecipe
    measured: Mapping[str, Any]
    derived: Mapping[str, Any]
    filled: tuple[str, ...]

    @property
    def architecture(self) -> str:
        """Hardware generation."""
        return self.machine.device.architecture


def served_run(
    row: Mapping[str, Any], reader: MachineReader, traces: Mapping[str, Requests] | None = None
) -> ServedRun:
    """Read a serving row.

    Args:
        row: the observation.
        reader: looks its machine up.
        traces: recorded requests by the ``trace_type`` of rows that replayed them.

    Raises:
        UnsupportedError: with the reason.
    """
    try:
        return _served_run(row, reader, traces or {})
    except CatalogError as error:
        raise UnsupportedError(str(error)) from error


def _served_run(row: Mapping[str, Any], reader: MachineReader, traces: Mapping[str, Requests]) -> ServedRun:
    sections = ("model", "hardware", "framework", "parallelism", "workload")
    model, hardware, framework, degrees, asked = (Section(row, name) for name in sections)
    disaggregated = asked.flag("disaggregated", default=False)
    title = str(Section(row, "source", required=False).values.get("title", ""))
    # Disaggregated rows print the release of the orchestrator, not of the engine.
    release = None if disaggregated else str(framework.values.get("version") or "") or None
    recipe = engine_observed_as(framework.text("name"), release, title)
    if recipe is None:
        raise UnsupportedError(f"no scheduling rules are known for the engine {shown(framework.text('name'))}")
    shape = shape_from_observation(model.values)
    machine = reader.machine(hardware)
    workload = _workload(row, asked, traces)
    run = BenchmarkRun(
        title=title,
        device=machine.device.slug,
        model=str(model.values.get("name", "")),
        precision=str(row.get("precision")),
        input_length=workload.input_length,
        output_length=workload.output_length,
        concurrency=workload.concurrency or 0,
        tensor_parallel=1,
        attention_data_parallel=1,
        is_vendors=_VENDOR_MARK in _caveats(row),
    )
    if disaggregated:
        first = started_as(recipe, _run_of(run, Section(degrees.values, "prefill"), Role.PREFILL))
    else:
        first = recipe = started_as(recipe, _run_of(run, degrees, Role.MIXED))
    quantization, filled = _quantization(row, asked, shape, first)
    pools = _pools(degrees, shape, workload, recipe, quantization, machine, run, disaggregated=disaggregated)
    if _NCCL_MARK in _caveats(row):
        pools = tuple(replace(pool, limits=replace(pool.limits, custom_all_reduce=False)) for pool in pools)
    name = row.get("id")
    if not isinstance(name, str):
        raise UnsupportedError(f"id must be a text, is {shown(name)}")
    return ServedRun(
        id=name,
        group=str(row.get("group") or name),
        shape=shape,
        machine=machine,
        config=ServingConfig(engine=recipe.engine, pools=pools),
        workload=workload,
        recipe=recipe,
        measured=Section(row, "measured", required=False).measurements(),
        derived=Section(row, "derived", required=False).measurements(),
        filled=(*filled, "max_num_seqs", "max_batched_tokens"),
    )


def _caveats(row: Mapping[str, Any]) -> str:
    return " ".join(str(item) for item in row.get("caveats", ()))


# --- requests -----------------------------------------------------------------------------------------------------


def _workload(row: Mapping[str, Any], asked: Section, traces: Mapping[str, Requests]) -> ServingWorkload:
    try:
        arrival = Arrival(asked.text("arrival"))
    except ValueError:
        raise asked.wrong("arrival", f"one of {', '.join(item.value for item in Arrival)}") from None
    trace_name = asked.values.get("trace_type")
    if trace_name is not None:
        return _replayed(asked, arrival, traces.get(str(trace_name)))
    lengths = (asked.whole("input_length"), asked.whole("output_length"))
    if arrival is Arrival.CLOSED_LOOP:
        concurrency = asked.whole("concurrency")
        return ServingWorkload(
            arrival=arrival,
            input_length=lengths[0],
            output_length=lengths[1],
            length_ratio=LENGTH_RATIO if _VARIED_MARK in _caveats(row) else 1.0,
            concurrency=concurrency,
            num_requests=PROMPTS_PER_CONCURRENCY * concurrency,
        )
    if arrival is Arrival.STATIC_BATCH:
        size = asked.whole("batch_size")
        return ServingWorkload(
            arrival=arrival,
            input_length=lengths[0],
            output_length=lengths[1],
            concurrency=size,
            num_requests=size,
        )
    if arrival is Arrival.ALL_AT_ONCE:
        return ServingWorkload(
            arrival=arrival,
            input_length=lengths[0],
            output_length=lengths[1],
            num_requests=asked.whole("num_requests"),
        )
    return ServingWorkload(
        arrival=arrival,
        input_length=lengths[0],
        output_length=lengths[1],
        request_rate_per_s=_rate(asked),
        num_requests=asked.whole("num_requests", 1000),
    )


def _replayed(asked: Section, arrival: Arrival, trace: Requests | None) -> ServingWorkload:
    """A row that replayed a recorded trace, its lengths stretched to the means that the row says were served."""
    rate = _rate(asked)
    if trace is None:
        raise UnsupportedError(f"the trace {shown(asked.text('trace_type'))} is not at hand (--traces DIR)")
    recorded = (len(trace) - 1) / float(trace.arrival_s[-1] - trace.arrival_s[0])
    served = replace(
        trace,
        arrival_s=(trace.arrival_s - trace.arrival_s[0]) * recorded / rate,
        input_length=_stretched(trace.input_length, asked.values.get("input_length_mean")),
        output_length=_stretched(trace.output_length, asked.values.get("output_length_mean")),
    )
    return ServingWorkload(
        arrival=Arrival.TRACE,
        input_length=float(served.input_length.mean()),
        output_length=float(served.output_length.mean()),
        request_rate_per_s=rate,
        num_requests=len(served),
        trace=served if arrival is not Arrival.TRACE else trace,
    )


def _stretched(lengths: NDArray[np.int64], mean: Any) -> NDArray[np.int64]:
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not mean > 0:
        return lengths
    return np.maximum(np.rint(lengths * (mean / lengths.mean())), 1).astype(np.int64)


def _rate(asked: Section) -> float:
    rate = asked.values.get("request_rate_per_s")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise asked.wrong("request_rate_per_s", "a number above 0")
    return float(rate)


# --- formats ------------------------------------------------------------------------------------------------------


def _quantization(
    row: Mapping[str, Any], asked: Section, shape: ModelShape, recipe: EngineRecipe
) -> tuple[Quantization, tuple[str, ...]]:
    """Formats of a row; DeepSeek's fp8 is the published one in blocks."""
    precision = row.get("precision")
    if precision not in SCHEMES and precision != "fp32":
        raise UnsupportedError(f"serving in the precision {shown(precision)} is not modelled")
    stated = Section({"quantization": asked.values.get("quantization") or {}}, "quantization")
    weight = stated.text("weight", str(precision))
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
    return Quantization(attention=mlp, mlp=mlp, experts=experts, kv_cache=kv_cache), filled


# --- layouts ------------------------------------------------------------------------------------------------------


def _pools(
    degrees: Section,
    shape: ModelShape,
    workload: ServingWorkload,
    recipe: EngineRecipe,
    quantization: Quantization,
    machine: Machine,
    run: BenchmarkRun,
    *,
    disaggregated: bool,
) -> tuple[Pool, ...]:
    if disaggregated:
        parts = [(Role.PREFILL, Section(degrees.values, "prefill")), (Role.DECODE, Section(degrees.values, "decode"))]
    else:
        parts = [(Role.MIXED, degrees)]
    pools = []
    base = recipe
    for role, section in parts:
        started = _run_of(run, section, role)
        recipe = started_as(base, started)
        layout = _layout(section, shape, spread=spreads_attention(base, started))
        workers = section.whole("num_workers", 1) if disaggregated else section.whole("data_parallel", 1)
        in_flight = workload.concurrency or recipe.max_num_seqs
        seqs = _most_decoding(section, base, recipe) * layout.attention_data_parallel
        seqs = seqs if seqs and role is Role.DECODE else max(recipe.max_num_seqs, in_flight)
        if workload.arrival is not Arrival.ALL_AT_ONCE:
            seqs = min(seqs, max(in_flight, 1))
        limits = EngineLimits(
            max_num_seqs=seqs,
            max_batched_tokens=recipe.token_budget(workload.input_length, min(seqs, in_flight)),
            chunked_prefill=not recipe.exclusive_prefill,
            cuda_graphs=recipe.cuda_graphs,
        )
        pools.append(
            Pool(
                role=role,
                layout=layout,
                num_workers=workers,
                limits=_in_memory(limits, role, layout, shape, workload, recipe, quantization, machine),
                quantization=quantization,
                node_type=machine.device.slug,
            )
        )
    total = sum(pool.num_devices for pool in pools)
    if total > machine.num_devices:
        raise UnsupportedError(f"its degrees need {total} devices, it names {machine.num_devices}")
    return tuple(pools)


def _in_memory(
    limits: EngineLimits,
    role: Role,
    layout: Layout,
    shape: ModelShape,
    workload: ServingWorkload,
    recipe: EngineRecipe,
    quantization: Quantization,
    machine: Machine,
) -> EngineLimits:
    """The limits with the engine's share of memory and, where it reserves whole answers, the requests that fit."""
    held = workload.input_length + (1.0 if role is Role.PREFILL else workload.output_length)
    whole = replace(limits, memory_fraction=1.0)
    memory = worker_memory(shape, machine.device, layout, whole, quantization, context=held)
    share, taken = recipe.memory_fraction, memory.weights_bytes + memory.workspace_bytes
    if recipe.memory_fraction_of == "free":
        share += (1.0 - share) * min(taken / memory.budget_bytes, 1.0)
    elif recipe.memory_fraction_of == "static":
        share += memory.workspace_bytes / memory.budget_bytes
    limits = replace(limits, memory_fraction=min(share, 1.0))
    if not recipe.reserves_output:
        return limits
    memory = worker_memory(shape, machine.device, layout, limits, quantization, context=held)
    lanes = layout.attention_data_parallel
    room = max(int(memory.kv_capacity_tokens / lanes / max(held, 1.0)), 1) * lanes
    return replace(limits, max_num_seqs=max(min(limits.max_num_seqs, room), 1))


def _most_decoding(section: Section, base: EngineRecipe, started: EngineRecipe) -> int:
    """Requests of one rank of a decode worker: as its scripts say, else as the table does; 0 where neither does.

    The table's figure is the concurrency over all ranks, rounded up: requests that the scripts' limit leaves waiting
    for a place in decode are not seen in it.
    """
    if started.max_num_seqs != base.max_num_seqs:
        return started.max_num_seqs
    return section.whole("max_batch_size", 0, least=0)


def _run_of(run: BenchmarkRun, section: Section, role: Role) -> BenchmarkRun:
    return replace(
        run,
        tensor_parallel=section.whole("tensor_parallel"),
        attention_data_parallel=section.whole("attention_data_parallel", 1),
        role=role.value,
    )


def _layout(section: Section, shape: ModelShape, *, spread: bool = False) -> Layout:
    """Degrees of one worker; experts that are not spread are split like the attention."""
    tensor, lanes = section.whole("tensor_parallel"), section.whole("attention_data_parallel", 1)
    if spread:
        tensor, lanes = 1, tensor * lanes
    if shape.num_attention_heads % tensor:
        raise UnsupportedError(f"tensor_parallel {tensor} does not divide {shape.num_attention_heads} heads")
    stage = tensor * lanes
    expert = section.whole("expert_parallel", 1) if shape.moe is not None else 1
    if stage % expert:
        raise UnsupportedError(f"expert_parallel {expert} does not divide the {stage} devices of a stage")
    return Layout(
        tensor_parallel=tensor,
        pipeline_parallel=section.whole("pipeline_parallel", 1),
        attention_data_parallel=lanes,
        expert_parallel=expert,
        expert_tensor_parallel=stage // expert if shape.moe is not None else 1,
        context_parallel=section.whole("context_parallel", 1),
    )
