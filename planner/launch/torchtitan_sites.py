"""A plan over sites far apart as TorchTitan with torchft: each site runs the same job and is one replica group.

TorchTitan's ``experiments/torchft`` averages outer gradients of replica groups (DiLoCo, and Streaming DiLoCo by
fragments) and finds them through torchft's lighthouse. It registers a debug model only, so a configuration module with
the plan's model is written. The global batch is that of all groups, which share it evenly.

Source of names and rules: torchtitan 0.3.0, experiments/torchft (config/job_config.py, manager.py, trainer.py,
llama3/config_registry.py); torchft-nightly 2026.10.26, local_sgd.py (H is a multiple of the fragments, τ < H/F, the
kept copy lies on the host, the momentum on the device) and collectives.py (quantised exchanges need NCCL).
Read, not run: its parser is not among the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import Artifact, commented, stamp
from meshplan.planner.emit.training import torchtitan
from meshplan.planner.emit.training.job import Job, Setting
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN_CONFIGS

TARGET = torchtitan.TARGET
MODULE_FILE = PurePosixPath("meshplan_sites.py")
LIGHTHOUSE_FILE = PurePosixPath("lighthouse.sh")
# Whole fp32 parameters, or torchft's quantised ones: fp8 with fp32 scales (quantization.py).
_QUANTISED = {32: False, 8: True}
_WAYS = ("diloco", "streaming-diloco")
# An exchange that takes longer than this times its prediction is given up, and at least torchft's own 10 s.
_PATIENCE, _LEAST_TIMEOUT_MS = 4.0, 10_000
_FAULT_TOLERANCE = "--fault-tolerance."

_MODULE = '''"""TorchTitan's {config} with torchft, for one job on each site."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.experiments.torchft.llama3 import model_registry
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import {config}


def sites() -> FaultTolerantTrainer.Config:
    plain, model = {config}(), model_registry("{flavor}")
    return FaultTolerantTrainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model)),
        hf_assets_path=plain.hf_assets_path,
        model_spec=model,
        optimizer=TorchFTOptimizersContainer.Config(param_groups=plain.optimizer.param_groups),
        lr_scheduler=plain.lr_scheduler,
        training=plain.training,
        dataloader=plain.dataloader,
        checkpoint=TorchFTCheckpointManager.Config(interval=plain.checkpoint.interval),
        activation_checkpoint=plain.activation_checkpoint,
        fault_tolerance=FaultTolerance(enable=True, semi_sync_method="diloco"),
    )
'''

_LIGHTHOUSE = r"""set -euo pipefail
# One for all sites, where every host reaches it. The jobs find it by TORCHFT_LIGHTHOUSE=http://THIS_HOST:29510.
exec torchft_lighthouse --min_replicas {count} --quorum_tick_ms 100 --join_timeout_ms 60000 "$@"
"""

_PROGRAM = r"""
# --- the site ------------------------------------------------------------------------------------------------------
: "${{TORCHFT_LIGHTHOUSE:?set TORCHFT_LIGHTHOUSE to http://HOST:29510 of {lighthouse}}}"
[[ ${{SITE:-}} =~ ^[0-9]+$ && $SITE -lt {count} ]] || fail "set SITE to the number of this site, 0 to {last}"
export TORCHFT_LIGHTHOUSE PYTHONPATH="$here${{PYTHONPATH:+:$PYTHONPATH}}"
set -- {replica} "$SITE" "$@"
"""


def job(request: TrainingRequest) -> Job:
    """The job of every site; ``SITE`` tells them apart.

    Raises:
        CannotExpressError: another way, model, precision or share than torchft's DiLoCo has.
    """
    section = request.plan.far_apart or {}
    row = next(one for one in section["ways"] if one["name"] == section["chosen"])
    _refuse(request, section, row)
    plain, count = torchtitan.job(request), len(section["sites"])
    _, config = TORCHTITAN_CONFIGS[request.shape.slug]
    arguments = Artifact(path=torchtitan.ARGUMENTS_FILE, content=_arguments(request, section, row))
    head = "#!/usr/bin/env bash\n" + commented(stamp(request.plan, None))
    module = _MODULE.format(config=config, flavor=config.removeprefix("llama3_").upper())
    files = (
        arguments,
        Artifact(path=MODULE_FILE, content=commented(stamp(request.plan, None)) + module),
        Artifact(path=LIGHTHOUSE_FILE, content=head + _LIGHTHOUSE.format(count=count), executable=True),
    )
    start = _PROGRAM.format(
        lighthouse=LIGHTHOUSE_FILE, count=count, last=count - 1, replica=f"{_FAULT_TOLERANCE}replica-id"
    )
    return replace(
        plain,
        verified=None,
        program=start + plain.program,
        files=files,
        settings=(
            Setting(name="SITE", default="", meaning=f"number of this site, 0 to {count - 1}", required=True),
            Setting(name="TORCHFT_LIGHTHOUSE", default="", meaning=f"where {LIGHTHOUSE_FILE} runs", required=True),
            *plain.settings,
        ),
        notes=(
            f"Start {LIGHTHOUSE_FILE} once, then this job on each of {count} sites with its SITE; MASTER_ADDR is a "
            "site's own first host.",
            "TorchTitan's torchft is experimental and needs torchft-nightly; its arguments were read, not run.",
            "The outer optimizer is TorchTitan's: SGD, learning rate 0.7, Nesterov momentum 0.9.",
            *plain.notes,
        ),
    )


def _arguments(request: TrainingRequest, section: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """TorchTitan's flags, one a line, with the batch of all sites and torchft's flags before the sub-command."""
    batch = sum(site["sequences"] for site in section["sites"])
    fragments, ring = row["fragments"], section["ring"]
    exchange_s = 2.0 * row["payload_bytes"] / ring["bytes_per_s"] + 2.0 * ring["num_sites"] * ring["latency_s"]
    timeout = max(_LEAST_TIMEOUT_MS, math.ceil(_PATIENCE * exchange_s * 1e3))
    own = {
        f"{_FAULT_TOLERANCE}enable": "",
        f"{_FAULT_TOLERANCE}semi-sync-method": "diloco",
        f"{_FAULT_TOLERANCE}group-size": str(len(section["sites"])),
        f"{_FAULT_TOLERANCE}min-replica-size": str(len(section["sites"])),
        f"{_FAULT_TOLERANCE}sync-steps": str(row["sync_steps"]),
        f"{_FAULT_TOLERANCE}num-fragments": str(fragments),
        f"{_FAULT_TOLERANCE}fragment-sync-delay": str(row["overlap_steps"]),
        f"{_FAULT_TOLERANCE}process-group-timeout-ms": str(timeout),
    }
    if _QUANTISED[row["bits"]]:
        own |= {f"{_FAULT_TOLERANCE}should-quantize": "", f"{_FAULT_TOLERANCE}process-group": "nccl"}
    changed = {"--module": MODULE_FILE.stem, "--config": "sites", "--training.global-batch-size": str(batch)}
    flags = [(flag[0], changed[flag[0]]) if flag[0] in changed else flag for flag in torchtitan.arguments(request)]
    said = [*flags[:-1], *((flag, value) if value else (flag,) for flag, value in own.items()), flags[-1]]
    head = commented((*stamp(request.plan, None), "One flag per line, the sub-command last; read by launch.sh."))
    return head + "".join(" ".join(flag) + "\n" for flag in said)


def _refuse(request: TrainingRequest, section: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Stop at what torchft's DiLoCo has not."""
    sites, config = section["sites"], request.config
    module, _ = TORCHTITAN_CONFIGS.get(request.shape.slug, ("", ""))
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
        f"{request.shape.slug} over sites": (module != "llama3", "a Llama 3: experiments/torchft has no other model"),
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
