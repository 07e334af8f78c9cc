"""Measured runs on several types of devices: ``hardware.pools`` and ``parallelism.stages`` of a row, priced.

Each pool is read as the run that it would be by itself, so that workload, framework and recipe mean what they mean
there; links are the row's where it states them. A stated network is a node's, shared by its devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.pools import PoolLinks
from meshplan.planner.core.plan import Interval
from meshplan.planner.training.admission import peak_interval
from meshplan.planner.training.estimator.flops import model_flops_per_step
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.measured.observations import ObservationReader, ObservedRun
from meshplan.planner.training.mixed.estimator import MixedPriced, price_mixed
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage
from meshplan.planner.training.resolve import calibration_for
from meshplan.planner.validation.fields import Section, UnsupportedError
from meshplan.planner.validation.summary import ValidatedRow

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

# Choices of a row that its stages say instead.
_RANKS = ("tensor_parallel", "pipeline_parallel", "data_parallel", "num_microbatches", "layers_per_stage", "stages")


def is_pooled(row: Mapping[str, Any]) -> bool:
    """Whether a row ran on several types of devices."""
    hardware = row.get("hardware")
    return isinstance(hardware, Mapping) and hardware.get("device") == "mixed" and "pools" in hardware


def pooled_run(
    reader: ObservationReader, row: Mapping[str, Any], catalog: Catalog
) -> tuple[MixedProblem, MixedConfig, ObservedRun]:
    """The question, the plan and the measurement of a row.

    Raises:
        UnsupportedError: with the reason.
    """
    hardware = Section(row, "hardware")
    pools = [one for one in hardware.values.get("pools") or () if isinstance(one, Mapping)]
    stages = [one for one in row["parallelism"].get("stages") or () if isinstance(one, Mapping)]
    if not pools or not stages:
        raise UnsupportedError("a run on several types of devices needs hardware.pools and parallelism.stages")
    runs = [_alone(reader, row, pool) for pool in pools]
    problems = []
    for run, pool in zip(runs, pools, strict=True):
        calibration = calibration_for(catalog, run.framework, run.architecture)
        machine = _with_links(run.problem.machine, pool)
        problems.append(replace(run.problem, machine=machine).with_calibration(calibration))
    names = tuple(str(pool["device"]) for pool in pools)
    problem = MixedProblem(pools=tuple(problems), links=_links(names, problems, row), pins={})
    return problem, _config(row, names, stages, runs[0]), runs[0]


def _alone(reader: ObservationReader, row: Mapping[str, Any], pool: Mapping[str, Any]) -> ObservedRun:
    """The row as a data-parallel run on one pool."""
    count = int(pool["num_nodes"]) * int(pool["devices_per_node"])
    own = {"device": pool["device"], "num_devices": count, "devices_per_node": pool["devices_per_node"]}
    choices = {name: value for name, value in row["parallelism"].items() if name not in _RANKS}
    measured = {name: value for name, value in row.get("measured", {}).items() if name != "failed"}
    return reader.training_run({**row, "hardware": own, "parallelism": choices, "measured": measured})


def _with_links(machine: Machine, pool: Mapping[str, Any]) -> Machine:
    inside, outside = pool.get("intra_node_bandwidth_bytes_per_s"), pool.get("inter_node_bandwidth_bytes_per_s")
    if inside:  # stated for each device, whatever its peer, as in a spec
        machine = replace(machine, scale_up_bytes_per_s=float(inside), mesh=None)
    if outside:
        machine = replace(machine, scale_out_bytes_per_s=float(outside) / int(pool["devices_per_node"]))
    return machine


def _links(names: tuple[str, ...], problems: Sequence[Any], row: Mapping[str, Any]) -> PoolLinks:
    rates = np.full((len(names), len(names)), np.inf)
    latencies = np.zeros_like(rates)
    stated = row["hardware"].get("cross_pool_bandwidth_bytes_per_s")
    for one, first in enumerate(problems):
        for other, second in enumerate(problems):
            if one != other:
                slower = min(first.machine.scale_out_bytes_per_s, second.machine.scale_out_bytes_per_s)
                most = max(first.machine.devices_per_host, second.machine.devices_per_host)
                rates[one, other] = float(stated) / most if stated else slower
                latencies[one, other] = max(first.machine.scale_out_latency_s, second.machine.scale_out_latency_s)
    return PoolLinks(names=names, bytes_per_s=rates, latency_s=latencies, sources={})


def _config(
    row: Mapping[str, Any], names: tuple[str, ...], stages: Sequence[Mapping[str, Any]], run: ObservedRun
) -> MixedConfig:
    made = []
    for stage in stages:
        tensor = int(stage["tensor_parallel"])
        shares = tuple(
            Share(
                pool=names.index(str(device)),
                data_parallel=int(count) // tensor,
                micro_batch_size=int(stage["micro_batch_size"]),
            )
            for device, count in stage["devices"]
        )
        if any(int(count) % tensor for _, count in stage["devices"]):
            raise UnsupportedError("a tensor-parallel group over two types of devices is not modelled")
        made.append(
            Stage(
                num_layers=float(stage["num_layers"]),
                tensor_parallel=tensor,
                shares=shares,
                activation_recompute=run.config.activation_recompute,
                in_flight=int(stage.get("warmup_micro_batches") or 0),
            )
        )
    batch = run.problem.workload.global_batch_size
    rounds = row["parallelism"].get("num_microbatches") or batch // made[0].sequences
    zero = min(run.config.zero_stage, 2)
    return MixedConfig(
        stages=tuple(made),
        num_microbatches=int(rounds),
        zero_stage=zero,
        sequence_parallel=run.config.sequence_parallel,
    )


def validate_pooled(reader: ObservationReader, row: Mapping[str, Any], catalog: Catalog) -> ValidatedRow:
    """Price one run on several types of devices and hold it against its measurement."""
    problem, config, run = pooled_run(reader, row, catalog)
    priced = price_mixed(problem, config)
    failed = bool(row.get("measured", {}).get("failed"))
    measured = {
        name: float(value)
        for name, value in {**run.derived, **run.measured}.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    predicted = _predicted(problem, priced)
    counts = " + ".join(f"{own.machine.num_devices} × {own.machine.device.slug}" for own in problem.pools)
    likely = str((row.get("failure") or {}).get("likely") or "unknown")
    return ValidatedRow(
        id=run.id,
        group=run.group,
        question=f"{run.framework}: {problem.any.shape.name} on {counts}",
        labels={"framework": run.framework, "device": "mixed", "model": problem.any.shape.name, "strategy": "mixed"},
        status="ok",
        reason=f"the run failed, likely {likely.replace('_', ' ')}" if failed else "",
        predicted=predicted,
        measured=measured,
        error={name: predicted[name].value / measured[name] - 1.0 for name in predicted if measured.get(name)},
        filled=run.filled,
        oom=not priced.fits,
        admitted=priced.admission.value if measured and not failed else "",
        breakdown_s={name: float(seconds[0]) for name, seconds in priced.estimate.breakdown_s.items()},
    )


def _predicted(problem: MixedProblem, priced: MixedPriced) -> dict[str, Interval]:
    """Every metric that rows of mixed runs have."""
    workload, devices = problem.any.workload, sum(own.machine.num_devices for own in problem.pools)
    spread = 1.0 + max(own.calibration.error_p90[own.kind_of_work] for own in problem.pools)
    flops = model_flops_per_step(problem.any.shape, workload.sequence_length, workload.global_batch_size)
    peak = sum(
        own.machine.num_devices * peak_flops_per_s(own.machine.device, workload.precision) for own in problem.pools
    )
    rates = {
        "iteration_s": priced.step_s,
        "tokens_per_s_per_device": workload.tokens_per_step / priced.step_s / devices,
        "samples_per_s": workload.global_batch_size / priced.step_s,
        "model_flops_per_s_per_device": flops / priced.step_s / devices,
        "mfu": flops / priced.step_s / peak,
    }
    found = {name: Interval(value=value, low=value / spread, high=value * spread) for name, value in rates.items()}
    typical = max(one.typical_bytes for one in priced.shares)
    safe = max(one.safe_bytes for one in priced.shares)
    return {**found, "peak_memory_bytes": peak_interval(typical, safe)}
