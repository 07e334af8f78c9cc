"""How published benchmarks started their servers: what an observation leaves unsaid and the benchmark's scripts say.

They ship as ``seed/benchmark_recipes.yaml``. A user's plan never depends on them; they fill the choices of measured
runs, so that an engine's constants do not have to stand for its flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.constants.entries import read_entry, seed_content

BENCHMARK_FILE = "benchmark_recipes.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkServer:
    """The settings of one server of a benchmark, and which runs they hold for.

    Args:
        in_source: part of the title of the runs' source.
        devices: slugs.
        engine: name of the engine's entry; it holds for the entries that take the constants of that one, too.
        model: part of the model's name.
        when: further conditions, by name; see :data:`CONDITIONS`.
        settings: fields of :class:`EngineRecipe` → values.
        source: citation.
        role: what the workers do: ``mixed``, ``prefill`` or ``decode``.
        spreads_attention: every device of a worker is an attention-data-parallel rank, whatever the run's table prints.
        expert_parallel: degree that the scripts set, whatever the run's table prints; None: as it prints.
        num_waiting: requests of a closed loop for which the server never has a slot.
    """

    in_source: str
    devices: tuple[str, ...]
    engine: str
    model: str
    source: str
    when: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    role: str = "mixed"
    spreads_attention: bool = False
    expert_parallel: int | None = None
    num_waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRouter:
    """How the requests of a benchmark's disaggregated runs reached the workers of a pool.

    Args:
        in_source: part of the title of the runs' source.
        router: name of a rule of routing.
        source: citation.
    """

    in_source: str
    router: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPool:
    """The distinct prompts of a benchmark that draws them once and sends them in turn.

    Args:
        in_source: part of the title of the runs' source.
        groups: shared system prompts.
        prompts_per_group: prompts that begin with each.
        source: citation.
    """

    in_source: str
    groups: int
    prompts_per_group: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkClient:
    """How a benchmark's client has tokens drawn.

    Args:
        in_source: part of the title of the runs' source.
        top_p: probability that the candidates add up to.
        penalties: repetition, frequency or presence is penalised.
        source: citation.
    """

    in_source: str
    top_p: float
    penalties: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkWarmUp:
    """Since when a benchmark's client warms servers up before it measures.

    Args:
        in_source: part of the title of the runs' source.
        none_before: day before which it did not, ISO 8601.
        source: citation.
    """

    in_source: str
    none_before: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkMeter:
    """Of which part of a run a benchmark prints the average power.

    Args:
        in_source: part of the title of the runs' source.
        decodes_alone: of the iterations without prompts, not of the run.
        source: citation, or how it is known.
    """

    in_source: str
    decodes_alone: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRun:
    """The properties of a run that decide which settings it had.

    Args:
        title: its source's.
        device: slug.
        model: name.
        precision: as published.
        input_length: tokens of a prompt.
        output_length: tokens of an answer.
        concurrency: requests in flight; 0 where the load is open.
        tensor_parallel: degree of the attention.
        attention_data_parallel: ranks.
        role: what the workers do: ``mixed``, ``prefill`` or ``decode``.
        is_vendors: measured by the publisher of the table, not by the public benchmark whose rows it also holds.
        measured_on: day of the run as its source prints it, ISO 8601; empty where it does not.
    """

    title: str
    device: str
    model: str
    precision: str
    input_length: float
    output_length: float
    concurrency: int
    tensor_parallel: int
    attention_data_parallel: int
    role: str = "mixed"
    is_vendors: bool = False
    measured_on: str = ""


CONDITIONS: Mapping[str, Callable[[BenchmarkRun, Any], Any]] = {
    "precision": lambda run, value: run.precision == value,
    "input_length": lambda run, value: run.input_length == value,
    "output_length": lambda run, value: run.output_length == value,
    "most_tensor_parallel": lambda run, value: run.tensor_parallel <= value,
    "least_tensor_parallel": lambda run, value: run.tensor_parallel >= value,
    "least_concurrency": lambda run, value: run.concurrency >= value,
    "most_concurrency": lambda run, value: run.concurrency <= value,
    "attention_data_parallel": lambda run, value: (run.attention_data_parallel > 1) == value,
    "vendors": lambda run, value: run.is_vendors == value,
    # ISO dates are ordered as texts; a day that nobody prints fulfils neither.
    "measured_before": lambda run, value: bool(run.measured_on) and run.measured_on < value,
    "measured_since": lambda run, value: run.measured_on >= value,
}


@cache
def benchmark_servers() -> tuple[BenchmarkServer, ...]:
    """Every entry, in the order of the file."""
    return tuple(
        read_entry(
            BenchmarkServer,
            entry,
            in_source=benchmark["in_source"],
            devices=benchmark["devices"],
            source=f"{benchmark['source']}: {entry['source']}",
        )
        for benchmark in seed_content(BENCHMARK_FILE)["benchmarks"]
        for entry in benchmark["servers"]
    )


@cache
def _prompt_pools() -> tuple[PromptPool, ...]:
    return tuple(read_entry(PromptPool, entry) for entry in seed_content(BENCHMARK_FILE)["prompt_pools"])


@cache
def _clients() -> tuple[BenchmarkClient, ...]:
    return tuple(read_entry(BenchmarkClient, entry) for entry in seed_content(BENCHMARK_FILE)["clients"])


def client_of(title: str) -> BenchmarkClient | None:
    """How a source's runs have tokens drawn; None where they take the likeliest ones, or nobody says."""
    return next((client for client in _clients() if client.in_source in title), None)


@cache
def _warm_ups() -> tuple[BenchmarkWarmUp, ...]:
    return tuple(read_entry(BenchmarkWarmUp, entry) for entry in seed_content(BENCHMARK_FILE)["warm_ups"])


def warms_up(title: str, measured_on: str) -> bool:
    """Whether a source's client had warmed the server up before it measured a run.

    Args:
        title: the source's.
        measured_on: day of the run, ISO 8601; empty where nobody prints it, as if it had.
    """
    of_source = [item for item in _warm_ups() if item.in_source in title]
    return not measured_on or all(measured_on >= item.none_before for item in of_source)


@cache
def _meters() -> tuple[BenchmarkMeter, ...]:
    return tuple(read_entry(BenchmarkMeter, entry) for entry in seed_content(BENCHMARK_FILE)["meters"])


def measures_decodes_alone(title: str) -> bool:
    """Whether the average power that a source prints is that of the iterations without prompts."""
    return any(meter.decodes_alone for meter in _meters() if meter.in_source in title)


def prompts_drawn_in(title: str) -> PromptPool | None:
    """The prompts of a source's runs, where they are not those that its workload files ask for."""
    return next((pool for pool in _prompt_pools() if pool.in_source in title), None)


@cache
def _routers() -> tuple[BenchmarkRouter, ...]:
    return tuple(read_entry(BenchmarkRouter, entry) for entry in seed_content(BENCHMARK_FILE)["routers"])


def router_in(title: str) -> str | None:
    """The rule by which a source's disaggregated runs were routed; None where nobody says."""
    return next((item.router for item in _routers() if item.in_source in title), None)


def started_as(recipe: EngineRecipe, run: BenchmarkRun) -> EngineRecipe:
    """The engine's defaults with what the run's benchmark is known to have set."""
    return replace(recipe, **settings_of(recipe, run))


def settings_of(recipe: EngineRecipe, run: BenchmarkRun) -> dict[str, Any]:
    """Field of the engine's entry → value that the run's benchmark is known to have set; later entries win."""
    return {name: value for server in _servers_of(recipe, run) for name, value in server.settings.items()}


def spreads_attention(recipe: EngineRecipe, run: BenchmarkRun) -> bool:
    """The benchmark's scripts make each device of a worker an attention-data-parallel rank."""
    return any(server.spreads_attention for server in _servers_of(recipe, run))


def expert_parallel(recipe: EngineRecipe, run: BenchmarkRun) -> int | None:
    """The expert-parallel degree that the benchmark's scripts set; None where they say nothing."""
    return next((server.expert_parallel for server in _servers_of(recipe, run) if server.expert_parallel), None)


def num_waiting(recipe: EngineRecipe, run: BenchmarkRun) -> int:
    """Requests of a closed loop for which the benchmark's servers never have a slot."""
    return max((server.num_waiting for server in _servers_of(recipe, run)), default=0)


def _servers_of(recipe: EngineRecipe, run: BenchmarkRun) -> list[BenchmarkServer]:
    return [
        server
        for server in benchmark_servers()
        if server.engine == recipe.constants_name
        and server.role == run.role
        and server.in_source in run.title
        and run.device in server.devices
        and server.model in run.model
        and all(CONDITIONS[name](run, value) for name, value in server.when.items())
    ]
