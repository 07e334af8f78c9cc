"""Reading rows of measured serving runs: model, machine, configuration and requests, ready to be simulated.

The format is documented in ``planner/validation/README.md``. What a row leaves unstated (batch limits, token budget,
memory fraction) is the documented default of the engine's release (``catalogs/seed/engines.yaml``) and is listed in
:attr:`ServedRun.filled`. What the estimator cannot express is refused with a reason, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.engine_recipes import EngineRecipe, engine_observed_as, is_exactly_known
from meshplan.catalogs.constants.serving_benchmarks import (
    BenchmarkRun,
    measures_decodes_alone,
    router_in,
    started_as,
    warms_up,
)
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.measured.drawn import LENGTH_FORMS, num_before
from meshplan.planner.serving.measured.exclusions import measured_on
from meshplan.planner.serving.measured.layouts import (
    STATED_LIMITS,
    Server,
    benchmark_run,
    observed_formats,
    observed_pools,
    refuse_misnamed_degrees,
    stated_limits,
    stated_memory_share,
)
from meshplan.planner.serving.measured.workloads import observed_workload
from meshplan.planner.serving.problem.config import KvConnector, Role, Router, ServingConfig
from meshplan.planner.serving.problem.requests import Requests, ServingWorkload
from meshplan.planner.validation.fields import Section, UnsupportedError, has_caveat, row_id, shown

if TYPE_CHECKING:
    from meshplan.planner.validation.machines import MachineReader

NCCL_MARK = "custom all-reduce disabled"
VENDOR_MARK = "vendor internal"


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
        steady_window: rates are those of the time in which so many requests run; None: of the whole run.
        num_before: requests at the start that the row does not measure: an earlier stage of the same run.
        power_of_decodes: its power is that of the iterations without prompts alone.
        warms_up: the server had answered requests before, so that its kernels were compiled.
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
    steady_window: int | None = None
    num_before: int = 0
    power_of_decodes: bool = False
    warms_up: bool = True

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
    refuse_misnamed_degrees(degrees, asked, hardware, framework)
    disaggregated = asked.flag("disaggregated", default=False)
    title = str(Section(row, "source", required=False).values.get("title", ""))
    # Disaggregated rows print the release of the orchestrator, not of the engine.
    release = None if disaggregated else str(framework.values.get("version") or "") or None
    recipe = engine_observed_as(framework.text("name"), release, title)
    if recipe is None:
        raise UnsupportedError(f"no scheduling rules are known for the engine {shown(framework.text('name'))}")
    shape = reader.shape(model)
    machine = reader.machine(hardware)
    recipe = recipe.on_board(machine.device.slug, machine.device.memory_bytes)
    # vLLM keeps no prefixes of models with recurrent layers unless told to (vllm-project/vllm, pull request 23716).
    workload = observed_workload(row, asked, traces, caches_prefixes=not shape.num_recurrent_layers)
    run = _benchmark(row, title, machine, workload)
    if disaggregated:
        first = started_as(recipe, benchmark_run(run, Section(degrees.values, "prefill"), Role.PREFILL))
        recipe = replace(recipe, gathers_tokens=first.gathers_tokens, parses_requests=first.parses_requests)
    else:
        first = recipe = started_as(recipe, benchmark_run(run, degrees, Role.MIXED))
    # A measured server captured what its engine captures by itself, unless its benchmark's scripts say more.
    cuda_graphs = asked.flag("cuda_graphs", default=recipe.cuda_graphs)
    recipe = replace(recipe, cuda_graphs=cuda_graphs, raises_graphs_to=0)
    quantization, filled = observed_formats(row, asked, shape, first)
    stated = stated_limits(asked)
    server = Server(
        shape=shape,
        machine=machine,
        workload=workload,
        recipe=recipe,
        quantization=quantization,
        benchmark=run,
        stated=stated,
        memory_share=stated_memory_share(asked),
    )
    pools = observed_pools(server, degrees, disaggregated=disaggregated)
    if has_caveat(row, NCCL_MARK):
        pools = tuple(replace(pool, limits=replace(pool.limits, custom_all_reduce=False)) for pool in pools)
    return ServedRun(
        id=row_id(row),
        group=str(row.get("group") or row_id(row)),
        shape=shape,
        machine=machine,
        config=ServingConfig(
            engine=recipe.engine,
            pools=pools,
            router=_router(title, disaggregated=disaggregated),
            kv_connector=_connector(framework.text("name")),
        ),
        workload=workload,
        recipe=recipe,
        measured=_measured(row, asked),
        derived={**Section(row, "derived", required=False).measurements(), **_cache_blocks(asked)},
        filled=(*filled, *_unstated(framework.text("name"), asked, stated)),
        steady_window=asked.whole("max_num_seqs") if asked.flag("steady_state", default=False) else None,
        num_before=num_before(asked),
        power_of_decodes=measures_decodes_alone(title),
        warms_up=warms_up(title, measured_on(row)),
    )


def _benchmark(row: Mapping[str, Any], title: str, machine: Machine, workload: ServingWorkload) -> BenchmarkRun:
    """A row as its benchmark ran it, on one device until its degrees are read."""
    return BenchmarkRun(
        title=title,
        device=machine.device.slug,
        model=str(Section(row, "model").values.get("name", "")),
        precision=str(row.get("precision")),
        input_length=workload.input_length,
        output_length=workload.output_length,
        concurrency=workload.concurrency or 0,
        tensor_parallel=1,
        attention_data_parallel=1,
        is_vendors=has_caveat(row, VENDOR_MARK),
        measured_on=measured_on(row),
    )


def _connector(framework: str) -> KvConnector:
    """What moves caches, as the engine's name says (``vLLM with the Mooncake connector``); NIXL where it is silent."""
    return KvConnector.MOONCAKE if KvConnector.MOONCAKE.value in framework.lower() else KvConnector.NIXL


def _router(title: str, *, disaggregated: bool) -> Router:
    """How requests reached the workers: as the benchmark's scripts say, else to the least loaded."""
    named = router_in(title) if disaggregated else None
    return Router.LEAST_LOADED if named is None else Router(named)


def _unstated(engine: str, asked: Section, stated: Mapping[str, int]) -> tuple[str, ...]:
    """What the row leaves to defaults: limits of the scheduler, the prompts' length, the engine's own rules."""
    names = [field for name, field in STATED_LIMITS.items() if name not in stated]
    if not any(asked.states(f"input_length{form}") for form in LENGTH_FORMS) and asked.states("prompt_set"):
        names.append("input_length")
    return (*names, *(() if is_exactly_known(engine) else ("engine",)))


def _measured(row: Mapping[str, Any], asked: Section) -> Mapping[str, Any]:
    """What was measured; the time per token over the tokens that were asked for, where the client counted others.

    A client that splits the text again finds fewer tokens than the engine made, and so a longer time for each.
    """
    measured, derived = (Section(row, name, required=False).measurements() for name in ("measured", "derived"))
    is_recounted = asked.states("output_length_counted_mean") and "tpot_s" in measured
    return {**measured, "tpot_s": derived["tpot_s"]} if is_recounted and "tpot_s" in derived else measured


def _cache_blocks(asked: Section) -> dict[str, float]:
    """The blocks of KV cache that an engine has printed."""
    return {"kv_blocks": asked.number("kv_blocks")} if asked.states("kv_blocks") else {}
