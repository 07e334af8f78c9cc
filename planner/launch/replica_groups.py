"""A TorchTitan plan with whole copies of the states as torchft's replica groups: one dies, the others go on.

Hybrid sharding keeps R copies of all states, each on hosts of its own. As one job for each copy, torchft averages
gradients over the groups that are there: where a host dies, its group leaves within a step, nobody loads a checkpoint,
and the batch is smaller by its share until the group is back, which then copies the states from a group that has them.

Step time        that of the whole plan: what a group computes and reduces does not change with the number of groups
                 beyond the ring's (R − 1)/R.
Sequences a step B · r / R with r of R groups; torchft divides the sum by r, so that learning rates see a smaller batch.
Source           torchtitan 0.3.0, experiments/torchft/manager.py (the all-reduce of FSDP's hook is torchft's) and
                 trainer.py (batch over group_size · replicas); :mod:`.torchft` for the rest.
Assumptions      hosts are alike: a rank mapping is lost, as with elastic agents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.training import readme, torchrun, torchtitan
from meshplan.planner.emit.training.job import Job
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.goodput.copies import least_copies
from meshplan.planner.launch import torchft

TARGET = torchtitan.TARGET
FOLDER = PurePosixPath("replica-groups")
_PAGE = """
# Without a restart: replica groups of torchft

The plan keeps {groups} copies of all states, each on hosts of its own. Started from `{folder}/`, not by agents, each
copy is a job for itself (see its README):

- The groups go on while {least} of them are there.
- A host dies: its group ends, the others go on within a step, with {lost} of {batch} sequences a step fewer. Nothing is
  loaded. Start the group again when the host, or another in its place, is there: it copies the states from a group that
  has them.
- The batch changes with the number of groups, and the learning rate does not; under elastic agents the batch stays.
{forecast}"""
_GROUP = {"group": "replica group", "variable": "REPLICA_GROUP"}


def beside_agents(request: TrainingRequest) -> tuple[tuple[Artifact, ...], str]:
    """Files of the groups beside those of elastic agents, and what the operator's page says of them.

    Args:
        request: the plan on all hosts.

    Returns:
        Files in a folder of their own, and a paragraph; no files and the reason where torchft cannot run the plan.
    """
    try:
        made = files(request)
    except CannotExpressError as refusal:
        return (), f"\nNo replica groups of torchft: {refusal}\n"
    groups = request.config.num_copies
    return made, _PAGE.format(
        least=least_copies(groups),
        folder=FOLDER,
        groups=groups,
        batch=request.config.global_batch_size,
        lost=request.config.global_batch_size // groups,
        forecast=_forecast(request.plan.run),
    )


def _forecast(run: Mapping[str, Any] | None) -> str:
    """What the plan's forecast says of groups; empty where no run was asked about."""
    if run is None or not run.get("copies"):
        return ""
    return (
        f"- Forecast: {run['copies']['batch_share']:.1%} of the run's batches train, beside "
        f"{run['effective_training_time_ratio']:.1%} where all restart together.\n"
    )


def files(request: TrainingRequest) -> tuple[Artifact, ...]:
    """Files that every group runs, in a folder of their own; arguments as :func:`beside_agents`.

    Raises:
        CannotExpressError: the plan keeps one copy, copies share hosts, or torchft has not what it asks for.
    """
    _refuse(request)
    launch = torchrun.launch_of(_job(request))
    start = (
        f"Start `{torchft.LIGHTHOUSE_FILE}` once. Then, on every host of a group, `REPLICA_GROUP=N "
        f"TORCHFT_LIGHTHOUSE=http://HOST:29510 ./{torchrun.LAUNCH_SCRIPT} NODE_RANK`, where NODE_RANK counts the hosts "
        "of the group and MASTER_ADDR is its first."
    )
    made = (readme.overview(launch, start=start), *launch.job.files, *torchrun.scripts(launch))
    return tuple(replace(one, path=FOLDER / one.path) for one in made if not torchrun.is_host_script(one))


def _job(request: TrainingRequest) -> Job:
    """The job of every group."""
    groups = request.config.num_copies
    one = replace(request, plan=_of_one_group(request.plan, groups), hosts=())
    hosts = len({host for host, _ in one.plan.rank_table or ()})
    least = least_copies(groups)
    step_s = request.plan.predicted["iteration_s"].high
    own = {
        "group-size": str(groups),
        "min-replica-size": str(least),
        # Gloo would carry every step's gradients through the hosts.
        "process-group": "nccl",
        "process-group-timeout-ms": str(max(torchft.LEAST_TIMEOUT_MS, math.ceil(torchft.PATIENCE * step_s * 1e3))),
    }
    plain = torchtitan.job(one)
    return replace(
        plain,
        verified=torchft.VERIFIED,
        program=torchft.program(**_GROUP, count=groups) + plain.program,
        files=(
            torchft.arguments(one, own, global_batch_size=request.config.global_batch_size),
            torchft.module(one),
            torchft.lighthouse(one, groups="replica groups", least=least),
        ),
        settings=(*torchft.settings(**_GROUP, count=groups), *plain.settings),
        notes=(
            f"{groups} groups of {counted(hosts, 'host')} share {request.config.global_batch_size} sequences a step; "
            f"without a group a step has {request.config.global_batch_size // groups} fewer.",
            torchft.NOTE,
            *plain.notes,
        ),
    )


def _of_one_group(plan: Plan, groups: int) -> Plan:
    """The plan as one group sees it: a copy of the states, its share of the batch, the first hosts in order."""
    ranks = int(plan.config["world_size"]) // groups
    changes = {
        "data_parallel": plan.config["data_parallel"] // groups,
        "global_batch_size": plan.config["global_batch_size"] // groups,
        "world_size": ranks,
    }
    places = tuple(sorted(plan.rank_table or ())[:ranks])
    return replace(plan, config={**plan.config, **changes}, rank_table=places, launched_from=plan.digest)


def _refuse(request: TrainingRequest) -> None:
    """Stop at what torchft's replica groups have not."""
    config, groups = request.config, request.config.num_copies
    hosts = len({host for host, _ in request.plan.rank_table or ()})
    refusals = {
        "one copy of the states": (
            groups == 1,
            "fixed.data_parallel_shard below the data-parallel degree: each copy is a replica group",
        ),
        "states that are not sharded": (
            config.zero_stage == 0,
            "fixed.zero_stage: 3, because torchft reduces gradients in the hook of FSDP",
        ),
        f"{groups} copies on {hosts} hosts": (hosts % groups != 0, "copies on whole hosts of their own"),
        f"{request.shape.slug} with torchft": (
            not torchft.has_model(request.shape.slug),
            "a Llama 3: experiments/torchft has no other model",
        ),
    }
    for what, (is_so, instead) in refusals.items():
        if is_so:
            raise CannotExpressError(TARGET, what, instead)
