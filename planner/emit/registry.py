"""The emit targets: one line each. A module is imported when its target is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from meshplan.catalogs.errors import EmitError, closest_names, did_you_mean
from meshplan.planner.emit.artifact import EmittedPlan, TrainingRequest

Emitter = Callable[[TrainingRequest], EmittedPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One row of the support matrix.

    Args:
        name: a term of the plan, such as ``tensor_parallel``.
        expressed_by: flags or files that say it; empty where the target cannot.
        verified_by: how it is known that the target understands it.
    """

    name: str
    expressed_by: str
    verified_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One emit target; its module has ``emit(request) -> EmittedPlan`` and ``features() -> tuple[Feature, ...]``."""

    name: str
    module: str
    summary: str


TARGETS = (
    Target(
        name="megatron", module="meshplan.planner.emit.megatron", summary="Megatron-LM arguments and torchrun scripts"
    ),
)


def target_names() -> tuple[str, ...]:
    """Names that ``emit --target`` accepts."""
    return tuple(target.name for target in TARGETS)


def emit(target: str, request: TrainingRequest) -> EmittedPlan:
    """Launcher files of ``target`` for one plan.

    Raises:
        EmitError: unknown target, or the plan has nothing to launch.
        CannotExpressError: the target has no words for a choice of the plan.
    """
    emitter = cast(Emitter, _module(target).emit)
    return emitter(request)


def support_matrix() -> tuple[Mapping[str, str], ...]:
    """Rows of target, feature, expressed_by and verified_by, read from the emitters themselves."""
    return tuple(
        {
            "target": target.name,
            "feature": feature.name,
            "expressed_by": feature.expressed_by,
            "verified_by": feature.verified_by,
        }
        for target in TARGETS
        for feature in cast("tuple[Feature, ...]", _module(target.name).features())
    )


def _module(name: str) -> Any:
    for target in TARGETS:
        if target.name == name:
            return importlib.import_module(target.module)
    known = ", ".join(target_names())
    raise EmitError(
        f"unknown emit target {name!r}{did_you_mean(closest_names(name, target_names()))}; known targets: {known}"
    )
