"""Files of a way over sites far apart: TorchTitan with torchft, and a refusal in words for every other target."""

from __future__ import annotations

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.emit.training import readme, torchrun
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch import torchtitan_sites


def files(request: TrainingRequest, target: str) -> EmittedPlan:
    """Files that every site runs.

    Raises:
        CannotExpressError: another target, or a plan that torchft cannot express.
    """
    if target != torchtitan_sites.TARGET:
        chosen = (request.plan.far_apart or {})["chosen"]
        raise CannotExpressError(
            target,
            f"{chosen} over sites",
            "target torchtitan (constraints.target: torchtitan), which has DiLoCo by torchft (far_apart.way: diloco); "
            "or drop far_apart for the synchronous plan",
        )
    job = torchtitan_sites.job(request)
    launch = torchrun.launch_of(job)
    artifacts = (readme.overview(launch), *job.files, *torchrun.scripts(launch))
    return EmittedPlan(target=target, artifacts=artifacts, parser_verified=job.verified, notes=job.notes)
