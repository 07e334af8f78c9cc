"""What an emitter returns: text files in memory. Nothing in here touches a disk (:mod:`.writer` does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.errors import EmitError
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import PLAN_ID_LENGTH, Plan
from meshplan.planner.training.problem.problem import TrainingConfig

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file to be written.

    Args:
        path: below the output folder.
        content: the whole text, newline at the end.
        executable: whether the file is a script.
    """

    path: PurePosixPath
    content: str
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserVerified:
    """Which parser judged the files of a target, and how far it went.

    Args:
        framework: distribution whose parser it is.
        version: release.
        mode: what ran, and where (never at emit time: the tests do it).
    """

    framework: str
    version: str
    mode: str

    def __str__(self) -> str:
        return f"{self.framework} {self.version} ({self.mode})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedPlan:
    """All files of one target for one plan.

    Args:
        target: name in the registry.
        artifacts: the files, in the order in which a person would read them.
        parser_verified: see :class:`ParserVerified`; None where no parser exists that runs without the hardware.
        notes: what the user should know before launching.
    """

    target: str
    artifacts: tuple[Artifact, ...]
    parser_verified: ParserVerified | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """Everything that an emitter of training launchers needs.

    Args:
        plan: a plan of the kind ``training`` that found a configuration.
        shape: the model, as the planner saw it.
        device: the accelerator of every host; None leaves out what depends on it (checks of name and memory).
        hosts: names of the hosts, by the host number of the rank table; empty: each launch reads MASTER_ADDR.
        master_port: TCP port of the rendezvous on the first host.
        devices_per_host: devices of every host, used or not; 0 where that is not known.
        image: container image, for launchers that start containers; empty for a name that the user has to replace.
        script: the user's training script, for frameworks that have none of their own; empty for none.
    """

    plan: Plan
    shape: ModelShape
    device: Device | None = None
    hosts: tuple[str, ...] = ()
    master_port: int = DEFAULT_MASTER_PORT
    devices_per_host: int = 0
    image: str = ""
    script: str = ""

    @property
    def config(self) -> TrainingConfig:
        """The choices of the plan.

        Raises:
            EmitError: the plan is of another kind, or it has no configuration.
        """
        return training_config(self.plan)


def training_config(plan: Plan) -> TrainingConfig:
    """Read the choices back from a (possibly stored) training plan."""
    if plan.kind != "training":
        raise EmitError(f"plan {plan.plan_id} is of the kind {plan.kind!r}; training launchers need kind 'training'")
    choices = fields(TrainingConfig)
    missing = sorted({item.name for item in choices if item.default is MISSING} - plan.config.keys())
    if missing:
        status = plan.solution.get("status", "unknown")
        raise EmitError(
            f"plan {plan.plan_id} has no complete configuration to launch (status {status}; "
            f"missing: {', '.join(missing)}); emit a plan whose status is optimal or feasible"
        )
    chosen: dict[str, Any] = {item.name: plan.config[item.name] for item in choices if item.name in plan.config}
    return TrainingConfig(**{**chosen, "layers_per_chunk": tuple(chosen["layers_per_chunk"])})


def stamp(plan: Plan, verified: ParserVerified | None) -> tuple[str, ...]:
    """The lines that begin every emitted file, without a comment sign."""
    digest = plan.digest  # of every rank's place: asked for once
    lines = (f"meshplan plan {digest[:PLAN_ID_LENGTH]}", f"plan digest: {digest}")
    return lines if verified is None else (*lines, f"parser: {verified}")


def commented(lines: Sequence[str], sign: str = "#") -> str:
    """``lines`` as comments."""
    return "".join(f"{sign} {line}\n" for line in lines)


def stamp_fields(plan: Plan, verified: ParserVerified | None) -> Mapping[str, Any]:
    """The stamp for JSON files, which have no comments."""
    digest = plan.digest
    fields: dict[str, Any] = {"plan_id": digest[:PLAN_ID_LENGTH], "plan_digest": digest}
    if verified is not None:
        fields["parser_verified"] = {
            "framework": verified.framework,
            "version": verified.version,
            "mode": verified.mode,
        }
    return fields
