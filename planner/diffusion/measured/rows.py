"""A measured run of a diffusion pipeline as a job, a machine and degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.models.diffusion import diffusion_model
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig
from meshplan.planner.diffusion.problem.job import Job
from meshplan.planner.validation.fields import Section, UnsupportedError, row_id
from meshplan.planner.validation.machines import MachineReader

METRICS = ("latency_s", "images_per_s", "videos_per_s", "power_w", "energy_per_item_j")
# Keys of a workload that are read, or that decide nothing here because the catalog's model says the same.
USED = frozenset(
    {"task", "height", "width", "num_frames", "steps", "batch_size", "torch_compile", "step_cache", "vae_decode"}
    | {"latent_tokens", "text_tokens"}
)
DEGREES = frozenset({"ulysses", "ring", "cfg", "pipefusion", "tensor_parallel"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run.

    Args:
        id: of the row.
        group: near-duplicates share it.
        job: what was made.
        machine: on what.
        config: with which degrees, one replica.
        measured: metric → value.
    """

    id: str
    group: str
    job: Job
    machine: Machine
    config: DiffusionConfig
    measured: Mapping[str, float]

    @property
    def cell(self) -> tuple[str, str, int, int]:
        """(model, device, batch, devices): runs of one cell differ in their degrees only."""
        config = self.config
        return self.job.model.slug, self.machine.device.slug, config.batch_size, config.replica_devices


def measured_run(row: Mapping[str, Any], reader: MachineReader) -> MeasuredRun:
    """Read a row.

    Raises:
        UnsupportedError: something in it is not estimated; the message says what.
    """
    workload, parallelism = Section(row, "workload"), Section(row, "parallelism")
    parallelism.refuse_misnamed(DEGREES)
    parallelism.refuse_misplaced(DEGREES, workload)
    try:
        model = diffusion_model(Section(row, "model").text("name"))
        machine = reader.machine(Section(row, "hardware"))
    except CatalogError as error:
        raise UnsupportedError(str(error)) from error
    for key in ("torch_compile", "step_cache"):
        if workload.values.get(key):
            raise UnsupportedError(f"workload.{key} is on: no constants were fitted to such runs")
    precision = row.get("precision", "bf16")
    if precision != "bf16":
        raise UnsupportedError(f"precision {precision}: only bf16 pipelines are estimated")
    config = DiffusionConfig(
        ulysses=parallelism.whole("ulysses", 1),
        ring=parallelism.whole("ring", 1),
        cfg_parallel=parallelism.whole("cfg", 1),
        pipefusion=parallelism.whole("pipefusion", 1),
        tensor_parallel=parallelism.whole("tensor_parallel", 1),
        batch_size=workload.whole("batch_size", 1),
    )
    if config.replica_devices != machine.num_devices:
        raise UnsupportedError(f"the degrees multiply to {config.replica_devices}, not {machine.num_devices} devices")
    decode = str(workload.values.get("vae_decode") or "")
    if decode:
        model = replace(model, vae=replace(model.vae, tiled="tiled" in decode))
    job = Job(
        model=model,
        height=workload.whole("height"),
        width=workload.whole("width"),
        frames=workload.whole("num_frames", 1),
        steps=workload.whole("steps"),
    )
    found = {**Section(row, "derived", required=False).measurements(), **Section(row, "measured").measurements()}
    return MeasuredRun(
        id=row_id(row),
        group=str(row.get("group", "")),
        job=job,
        machine=machine,
        config=config,
        measured={name: float(found[name]) for name in METRICS if name in found},
    )
