"""What an emitter returns: text files in memory. Nothing in here touches a disk (:mod:`.writer` does)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.untrusted.quoting import comment_lines
from meshplan.planner.core.plan import PLAN_ID_LENGTH, Plan


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
    """Which parser checked the files of a target, and how far it went.

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
class EmitOptions:
    """What a user adds to a plan when its files are written.

    Args:
        framework: what an orchestrator launches (the framework that the plan was made for where None); a target that
            is itself a framework takes none.
        framework_version: release of the framework or engine that runs the files; empty for the one that was checked.
        script: training script, for frameworks that bring none of their own.
        image: container image, for launchers that start containers.
        model_path: checkpoint to serve; empty for where the model is published.
        pod_resources: what pods ask for besides devices, by Kubernetes' name: RDMA devices.
    """

    framework: str | None = None
    framework_version: str = ""
    script: str = ""
    image: str = ""
    model_path: str = ""
    pod_resources: Mapping[str, int] = field(default_factory=dict)


def plan_artifact(plan: Plan) -> Artifact:
    """The plan itself as a file: what ``explain``, ``compare`` and ``emit`` take instead of a stored plan's id."""
    text = json.dumps(plan.to_document(clocks=False), indent=2, ensure_ascii=False, allow_nan=False)
    return Artifact(path=PurePosixPath("plan.json"), content=f"{text}\n")


def stamp(plan: Plan, verified: ParserVerified | None) -> tuple[str, ...]:
    """The lines that begin every emitted file, without a comment sign."""
    digest = plan.digest  # covers every rank's (host, device): computed once
    lines = (f"meshplan plan {digest[:PLAN_ID_LENGTH]}", f"plan digest: {digest}")
    return lines if verified is None else (*lines, f"parser: {verified}")


def commented(lines: Sequence[str], sign: str = "#") -> str:
    """``lines`` as comments."""
    return comment_lines(lines, sign)


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
