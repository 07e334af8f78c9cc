"""One measured run of a diffusion pipeline against its prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.diffusion import diffusion_calibration
from meshplan.planner.core.plan import Interval
from meshplan.planner.diffusion.estimator.demand import demand
from meshplan.planner.diffusion.estimator.latency import latency
from meshplan.planner.diffusion.estimator.memory import memory
from meshplan.planner.diffusion.estimator.power import power_share
from meshplan.planner.diffusion.measured.rows import DEGREES, USED, MeasuredRun, measured_run
from meshplan.planner.diffusion.problem.degrees import degrees_of
from meshplan.planner.validation.machines import MachineReader
from meshplan.planner.validation.summary import ValidatedRow
from meshplan.planner.validation.unused import unused_keys

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


def row_validator(
    _rows: Iterable[Mapping[str, Any]], catalog: Catalog, _traces: Path | None
) -> Callable[[Mapping[str, Any]], ValidatedRow]:
    """Row → its validation with the shipped constants; see :mod:`meshplan.planner.core.kinds`."""
    reader = MachineReader(catalog)

    def validated_row(row: Mapping[str, Any]) -> ValidatedRow:
        found = validated(measured_run(row, reader))
        return replace(found, unused=unused_keys(row, workload=USED, parallelism=DEGREES, predicted=found.predicted))

    return validated_row


def validated(run: MeasuredRun) -> ValidatedRow:
    """A run predicted with the constants of its generation."""
    device = run.machine.device
    calibration = diffusion_calibration(device.architecture, device.slug)
    degrees = degrees_of([run.config])
    taken = latency(demand(run.job, run.machine, degrees), calibration.constants)
    seconds = float(taken.total_s[0])
    item = "video" if run.job.model.is_video else "image"
    values = {"latency_s": (seconds, "latency"), f"{item}s_per_s": (run.config.batch_size / seconds, "latency")}
    limit = run.machine.device.tdp_w
    if limit is not None:
        watts = limit * run.config.replica_devices * float(power_share(taken, calibration.constants)[0])
        values["power_w"] = (watts, "power")
        values["energy_per_item_j"] = (watts * seconds / run.config.batch_size, "energy")
    held = float(memory(run.job, degrees).bound_bytes[0])
    measured = {name: value for name, value in run.measured.items() if name in values}
    return ValidatedRow(
        id=run.id,
        group=run.group,
        question=f"{run.job.model.name} on {run.machine.device.slug}, batch {run.config.batch_size}",
        labels={
            "model": run.job.model.slug,
            "device": run.machine.device.slug,
            "devices": str(run.config.replica_devices),
        },
        status="ok",
        predicted={name: _interval(value, calibration.error_p90[metric]) for name, (value, metric) in values.items()},
        measured=measured,
        error={name: values[name][0] / value - 1.0 for name, value in measured.items()},
        oom=held > run.machine.device.usable_memory_bytes,
        breakdown_s={name: float(part[0]) for name, part in taken.parts().items()},
    )


def _interval(value: float, half_width: float) -> Interval:
    factor = math.exp(half_width)
    return Interval(value=value, low=value / factor, high=value * factor)
