"""A plan over sites far apart as TorchTitan with torchft: each site runs the same job and is one replica group.

Outer gradients of the groups are averaged every H steps (DiLoCo, and Streaming DiLoCo by fragments); what all such jobs
have is in :mod:`.torchft`.

Source of rules: torchft-nightly 2026.10.26, local_sgd.py (H is a multiple of the fragments, τ < H/F, the kept copy lies
on the host, the momentum on the device) and collectives.py (quantised exchanges need NCCL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.training import torchtitan
from meshplan.planner.emit.training.job import Job
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch import torchft

TARGET = torchtitan.TARGET
# Whole fp32 parameters, or torchft's quantised ones: fp8 with fp32 scales (quantization.py).
_QUANTISED = {32: False, 8: True}
_WAYS = ("diloco", "streaming-diloco")
_SITE = {"group": "site", "variable": "SITE"}


def job(request: TrainingRequest) -> Job:
    """The job of every site; ``SITE`` tells them apart.

    Raises:
        CannotExpressError: another way, model, precision or share than torchft's DiLoCo has.
    """
    section = request.plan.far_apart or {}
    row = next(one for one in section["ways"] if one["name"] == section["chosen"])
    _refuse(request, section, row)
    plain, count = torchtitan.job(request), len(section["sites"])
    return replace(
        plain,
        verified=torchft.VERIFIED,
        program=torchft.program(**_SITE, count=count) + plain.program,
        files=(
            _arguments(request, section, row),
            torchft.module(request),
            torchft.lighthouse(request, groups="sites", least=count),
        ),
        settings=(*torchft.settings(**_SITE, count=count), *plain.settings),
        notes=(
            f"Start {torchft.LIGHTHOUSE_FILE} once, then this job on each of {count} sites with its SITE; "
            "MASTER_ADDR is a site's own first host.",
            torchft.NOTE,
            "The outer optimizer is TorchTitan's: SGD, learning rate 0.7, Nesterov momentum 0.9.",
            *plain.notes,
        ),
    )


def _arguments(request: TrainingRequest, section: Mapping[str, Any], row: Mapping[str, Any]) -> Artifact:
    """The batch of all sites and what DiLoCo is told."""
    ring = section["ring"]
    exchange_s = 2.0 * row["payload_bytes"] / ring["bytes_per_s"] + 2.0 * ring["num_sites"] * ring["latency_s"]
    timeout = max(torchft.LEAST_TIMEOUT_MS, math.ceil(torchft.PATIENCE * exchange_s * 1e3))
    own = {
        "semi-sync-method": "diloco",
        "group-size": str(len(section["sites"])),
        "min-replica-size": str(len(section["sites"])),
        "sync-steps": str(row["sync_steps"]),
        "num-fragments": str(row["fragments"]),
        "fragment-sync-delay": str(row["overlap_steps"]),
        "process-group-timeout-ms": str(timeout),
    }
    if _QUANTISED[row["bits"]]:
        own |= {"should-quantize": "", "process-group": "nccl"}
    return torchft.arguments(request, own, global_batch_size=sum(site["sequences"] for site in section["sites"]))


def _refuse(request: TrainingRequest, section: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Stop at what torchft's DiLoCo has not."""
    sites, config = section["sites"], request.config
    refusals = {
        f"the way {row['way']} over sites": (row["way"] not in _WAYS, "far_apart.way: diloco or streaming-diloco"),
        f"outer gradients of {row.get('bits')} bits": (
            row.get("bits") not in _QUANTISED,
            "far_apart.outer_gradient_bits: [32] or [8]",
        ),
        "sites that take different shares or plans": (
            any((one["sequences"], one["config"]) != (sites[0]["sequences"], sites[0]["config"]) for one in sites),
            "sites of equal size: TorchTitan divides the batch evenly",
        ),
        f"{request.shape.slug} over sites": (
            not torchft.has_model(request.shape.slug),
            "a Llama 3: experiments/torchft has no other model",
        ),
        f"pipeline_parallel {config.pipeline_parallel} over sites": (
            config.pipeline_parallel > 1,
            "fixed.pipeline_parallel: 1, because torchft wraps the first model part only",
        ),
        f"data_parallel_shard {config.data_parallel_shard} of {config.data_parallel} over sites": (
            config.data_parallel_shard != config.data_parallel or config.zero_stage == 0,
            f"fixed.zero_stage: 3 and fixed.data_parallel_shard: {config.data_parallel}: the replicas are the sites",
        ),
        f"{row['sync_steps']} steps for {row['fragments']} fragments": (
            row["sync_steps"] % (row["fragments"] or 1) != 0,
            "far_apart.sync_steps a multiple of the fragments",
        ),
    }
    for what, (is_so, instead) in refusals.items():
        if is_so:
            raise CannotExpressError(TARGET, what, instead)


def is_over_sites(plan: Plan) -> bool:
    """Whether a plan is one of a way over sites, not the synchronous plan."""
    section = plan.far_apart
    return section is not None and section["chosen"] != section["ways"][0]["name"]
