"""A training plan for a script of the user's own: torchrun keeps the rank table, the choices are handed over.

torchrun knows processes and hosts, no degrees of parallelism. The choices of the plan go into ``training_config.json``
and its path into the environment of every rank; that the script obeys them is the script's own business, and the
support matrix states this. Where data parallelism is all that a plan needs, ``train.py`` of this package is such a
script, and comes with the files of DeepSpeed and Accelerate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from importlib import resources
from pathlib import PurePosixPath

from meshplan.catalogs.errors import EmitError
from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.emit.artifact import Artifact, ParserVerified, stamp_fields
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training.adapters import adapter_notes, adapters_of, phase_of
from meshplan.planner.emit.training.job import Job, Setting, plan_fields
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.training.torchrun import RANK_TABLE, RANK_TABLE_FILE
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, TrainingConfig

TARGET = "torchrun"
CONFIG_FILE = PurePosixPath("training_config.json")
TRAIN_FILE = PurePosixPath("train.py")
VERIFIED = ParserVerified(
    framework="torch",
    version="2.13.0",
    mode="torchrun's parser and real agents on CPU processes; what the script does with the choices is not checked",
)
_HANDED_OVER = "handed over only: nothing checks that the script obeys"

_PROGRAM = r"""
# --- your training script -----------------------------------------------------------------------------------------
export MESHPLAN_CONFIG=$here/{config_file} MESHPLAN_RANK_TABLE=$here/{rank_table_file}
{check}
program=("$script")
"""


def config_file(request: TrainingRequest, verified: ParserVerified) -> Artifact:
    """``training_config.json``: every choice of the plan, for scripts that read it themselves."""
    document = {
        **stamp_fields(request.plan, verified),
        "model": request.published_model,
        "num_parameters": request.shape.num_parameters,
        "phase": phase_of(request.plan).value,
        "config": plan_fields(request),
    }
    adapters = adapters_of(request.plan)
    if adapters:
        document["adapters"] = adapters
    return Artifact(path=CONFIG_FILE, content=json.dumps(document, indent=2) + "\n")


def program(request: TrainingRequest) -> str:
    """Bash that fills ``program`` with the script, and sets where it finds the choices."""
    check = script_check(request.script) if request.script else f"script=$here/{TRAIN_FILE}"
    return _PROGRAM.format(config_file=CONFIG_FILE, rank_table_file=RANK_TABLE_FILE, check=check)


def script_job(
    request: TrainingRequest,
    *,
    rules: FrameworkRules,
    target: str,
    verified: ParserVerified,
    notes: Sequence[str],
    files: tuple[Artifact, ...] = (),
    more_bash: str = "",
    starter: str = "",
) -> Job:
    """The user's script, or ours where none is named, with the choices of the plan in a file.

    Args:
        request: plan, model, device and host names.
        rules: the framework, for its order of ranks.
        target: name in the registry.
        verified: parser that checked the program's arguments.
        notes: what the user should know before launching.
        files: what the framework reads.
        more_bash: what else the script needs set.
        starter: bash that starts one agent per host in place of torchrun.

    Raises:
        EmitError: no script is named, and ours cannot express the plan.
    """
    ours = () if request.script else (train_file(request, target),)
    return Job(
        target=target,
        request=request,
        verified=verified,
        rank_order=rules.rank_orders[0],
        environment={},
        program=program(request) + more_bash,
        files=(*files, config_file(request, verified), *ours),
        settings=TRAIN_SETTINGS if ours else (script_setting(request.script),),
        notes=(*rules.kernel_notes, *notes),
        starter=starter,
    )


def train_file(request: TrainingRequest, target: str) -> Artifact:
    """``train.py``: a script of ours, for data parallelism.

    Raises:
        EmitError: the plan has other degrees.
    """
    config = request.config
    degrees = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    others = [f"{name} {getattr(config, name)}" for name in degrees if getattr(config, name) > 1]
    others += [name for name in ("activation_offload", OFFLOADED_LAYERS) if getattr(config, name)]
    if others:
        raise EmitError(
            f"{TRAIN_FILE} of meshplan expresses data parallelism only, this plan has {', '.join(others)}: name a "
            f"training script of yours, meshplan emit {request.plan.plan_id} --target {target} --out DIR --script "
            "train.py; or plan again with those degrees fixed to 1"
        )
    text = resources.files(__package__).joinpath(TRAIN_FILE.name).read_text(encoding="utf-8")
    return Artifact(path=TRAIN_FILE, content=text)


def no_script() -> EmitError:
    """The refusal where no script is named."""
    return EmitError("torchrun runs a training script of yours: name it with --script train.py")


def job(request: TrainingRequest) -> Job:
    """The user's script with the choices of the plan in a file.

    Raises:
        EmitError: no script is named.
    """
    if not request.script:
        raise no_script()
    return script_job(
        request,
        rules=ANY_FRAMEWORK,
        target=TARGET,
        verified=VERIFIED,
        notes=(
            *adapter_notes(request.plan, script=request.script),
            f"torchrun knows no degrees: the script must build its process groups from {CONFIG_FILE} (its path is in "
            "MESHPLAN_CONFIG), with the rank order of rank_table.json (MESHPLAN_RANK_TABLE).",
        ),
    )


# What train.py reads, as its docstring says.
TRAIN_SETTINGS = (
    Setting(name="MODEL", default="", meaning="folder or Hugging Face name; unset: where it is published"),
    Setting(name="DATA", default="", meaning="text, .jsonl, or a dataset's name; unset: synthetic tokens"),
    Setting(name="MAX_STEPS", default="100", meaning="optimizer steps"),
    Setting(name="LR", default="1e-4", meaning="learning rate"),
    Setting(name="WARMUP_STEPS", default="0", meaning="steps of warm-up"),
    Setting(name="WEIGHT_DECAY", default="0.1", meaning="weight decay"),
    Setting(name="LORA_ALPHA", default="", meaning="scale of adapters; unset: twice their rank"),
    Setting(name="OUTPUT", default="", meaning="where to save checkpoints; unset: nowhere"),
)


def script_setting(script: str) -> Setting:
    """The README's row for the script."""
    return Setting(name="SCRIPT", default=_one_line(script), meaning="training script, the same path on each host")


def script_check(script: str) -> str:
    """Bash that sets ``$script`` and stops where it is no file."""
    return (
        f"script={shell_word(_one_line(script))}\n"
        "script=${SCRIPT:-$script}\n"
        '[[ -f $script ]] || fail "no training script $script (in $PWD); set SCRIPT to its path"\n'
        "# A path that begins with a dash would be taken for a flag.\n"
        "[[ $script == /* ]] || script=$PWD/$script"
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix: every choice is handed over, the placement is honoured."""
    handed = (
        Feature(name=field.name, expressed_by=f"{CONFIG_FILE} (MESHPLAN_CONFIG)", verified_by=_HANDED_OVER)
        for field in fields(TrainingConfig)
    )
    return (*handed, RANK_TABLE)


def _one_line(script: str) -> str:
    if not script.isprintable() or set("`|") & set(script):
        raise EmitError(f"--script {script!r} has signs that no path needs; rename the script")
    return script
