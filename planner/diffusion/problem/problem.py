"""A diffusion question with every name looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.constants.diffusion import DiffusionCalibration
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.diffusion.problem.job import Job
from meshplan.planner.diffusion.problem.spec import DiffusionObjective

# A replica is not asked to be busy all the time: random arrivals would queue without end (M/D/1 at 0.9: 4.5 batches).
MAX_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionProblem:
    """What the search solves.

    Args:
        job: one item.
        machine: the cluster, one type of node.
        node_type: its name in the catalog.
        calibration: constants of the device's generation.
        objective: what is best.
        request_rate_per_s: items a second that must be carried; None where nobody asked.
        max_latency_s: SLO; None for none.
        max_usd_per_item: SLO; None for none.
        max_usd_per_hour: limit; None for none.
        max_power_w: limit; None for none.
        max_devices: devices that may be used.
        stale_activations: PipeFusion may be chosen.
        pinned: choice → value.
        is_batch_asked: the batch is pinned by the workload, not by a choice.
    """

    job: Job
    machine: Machine
    node_type: str
    calibration: DiffusionCalibration
    objective: DiffusionObjective
    request_rate_per_s: float | None
    max_latency_s: float | None
    max_usd_per_item: float | None
    max_usd_per_hour: float | None
    max_power_w: float | None
    max_devices: int
    stale_activations: bool
    pinned: Mapping[str, int]
    is_batch_asked: bool = False

    @property
    def item(self) -> str:
        """``image`` or ``video``."""
        return "video" if self.job.model.is_video else "image"
