"""What every TorchTitan job with torchft has: a configuration module, a lighthouse, and flags of its own.

torchft joins jobs that know nothing of each other, its replica groups: a lighthouse tells each who is there. The
``experiments/torchft`` of TorchTitan registers a debug model only, so a module with the plan's model is written. The
global batch is that of all groups, which share it evenly.

Source of names and rules: torchtitan 0.3.0, experiments/torchft (config/job_config.py, manager.py, trainer.py,
llama3/config_registry.py); torchft-nightly 2026.10.26 (local_sgd.py, collectives.py, its lighthouse's options).
TorchTitan's parser reads the emitted arguments with the emitted module (tests/conformance/torchtitan); torchft itself
is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from meshplan.planner.emit.artifact import Artifact, ParserVerified, commented, stamp
from meshplan.planner.emit.training import torchtitan
from meshplan.planner.emit.training.job import Setting
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN, TORCHTITAN_CONFIGS

MODULE_FILE = PurePosixPath("meshplan_torchft.py")
LIGHTHOUSE_FILE = PurePosixPath("lighthouse.sh")
FLAG = "--fault-tolerance."
# An exchange that takes longer than this times its prediction is given up, and at least torchft's own 10 s.
PATIENCE, LEAST_TIMEOUT_MS = 4.0, 10_000
VERIFIED = ParserVerified(
    framework="torchtitan",
    version=TORCHTITAN.version,
    mode="ConfigManager.parse_args with the emitted module, ParallelDims; torchft is not run",
)
NOTE = "TorchTitan's torchft is experimental and needs torchft-nightly; its arguments were parsed, not run."
_FUNCTION = "job"

_MODULE = '''"""TorchTitan's {config} with torchft."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.experiments.torchft.llama3 import model_registry
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import {config}


def {function}() -> FaultTolerantTrainer.Config:
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
        fault_tolerance=FaultTolerance(enable=True),
    )
'''

_LIGHTHOUSE = r"""set -euo pipefail
# One for all {groups}, where every host reaches it. They find it by TORCHFT_LIGHTHOUSE=http://THIS_HOST:29510.
exec torchft_lighthouse --min_replicas {least} --quorum_tick_ms 100 --join_timeout_ms 60000 "$@"
"""

_PROGRAM = r"""
# --- the {group}
: "${{TORCHFT_LIGHTHOUSE:?set TORCHFT_LIGHTHOUSE to http://HOST:29510 of {lighthouse}}}"
[[ ${{{variable}:-}} =~ ^[0-9]+$ && ${variable} -lt {count} ]] || \
  fail "set {variable} to the number of this {group}, 0 to {last}"
export TORCHFT_LIGHTHOUSE PYTHONPATH="$here${{PYTHONPATH:+:$PYTHONPATH}}"
set -- {flag}replica-id "${variable}" "$@"
"""


def has_model(slug: str) -> bool:
    """Whether TorchTitan's torchft has the model: its registry holds Llama 3 alone."""
    return TORCHTITAN_CONFIGS.get(slug, ("", ""))[0] == "llama3"


def arguments(request: TrainingRequest, own: Mapping[str, str], *, global_batch_size: int) -> Artifact:
    """TorchTitan's flags, one a line, torchft's before the sub-command.

    Args:
        request: the plan of one group.
        own: flags of torchft without their prefix; an empty value is a switch.
        global_batch_size: sequences a step of all groups together.
    """
    changed = {
        "--module": MODULE_FILE.stem,
        "--config": _FUNCTION,
        "--training.global-batch-size": str(global_batch_size),
    }
    flags = [(flag[0], changed[flag[0]]) if flag[0] in changed else flag for flag in torchtitan.arguments(request)]
    ours = (tuple(filter(None, (f"{FLAG}{name}", value))) for name, value in {"enable": "", **own}.items())
    said = [*flags[:-1], *ours, flags[-1]]
    head = commented((*stamp(request.plan, VERIFIED), "One flag per line, the sub-command last; read by launch.sh."))
    return Artifact(path=torchtitan.ARGUMENTS_FILE, content=head + "".join(" ".join(flag) + "\n" for flag in said))


def module(request: TrainingRequest) -> Artifact:
    """The configuration that the arguments name."""
    _, config = TORCHTITAN_CONFIGS[request.shape.slug]
    text = _MODULE.format(config=config, flavor=config.removeprefix("llama3_").upper(), function=_FUNCTION)
    return Artifact(path=MODULE_FILE, content=commented(stamp(request.plan, VERIFIED)) + text)


def lighthouse(request: TrainingRequest, *, groups: str, least: int) -> Artifact:
    """The script of the one process that knows who is there; without ``least`` groups nobody goes on."""
    head = "#!/usr/bin/env bash\n" + commented(stamp(request.plan, None))
    return Artifact(
        path=LIGHTHOUSE_FILE, content=head + _LIGHTHOUSE.format(groups=groups, least=least), executable=True
    )


def program(*, group: str, variable: str, count: int) -> str:
    """Bash before TorchTitan's own: which group this is, and where the lighthouse is."""
    return _PROGRAM.format(
        group=group, variable=variable, count=count, last=count - 1, lighthouse=LIGHTHOUSE_FILE, flag=FLAG
    )


def settings(*, group: str, variable: str, count: int) -> tuple[Setting, ...]:
    """Variables of :func:`program`."""
    return (
        Setting(name=variable, default="", meaning=f"number of this {group}, 0 to {count - 1}", required=True),
        Setting(name="TORCHFT_LIGHTHOUSE", default="", meaning=f"where {LIGHTHOUSE_FILE} runs", required=True),
    )
