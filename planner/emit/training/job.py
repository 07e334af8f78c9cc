"""What a training framework hands to a launcher: the program, its files, its variables. No host and no process yet.

A framework makes a :class:`Job`; :mod:`.torchrun` starts it from scripts, and the orchestrators (:mod:`.slurm`,
:mod:`.kubernetes`, :mod:`.skypilot`) wrap those scripts. So each of them is written once, for every framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.errors import EmitError
from meshplan.planner.emit.artifact import Artifact, ParserVerified
from meshplan.planner.emit.training.request import TrainingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable of the launch script.

    Args:
        name: of the variable.
        default: what holds when it is unset; empty when there is none.
        meaning: for the README.
        flag: flag of the program that takes the value as it is; empty where the script treats it specially.
        required: the script stops where it is unset.
    """

    name: str
    default: str
    meaning: str
    flag: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training program with everything that the plan decides about it.

    Args:
        target: the framework's name in the registry.
        request: plan, model, device and host names.
        verified: parser that checked the program's arguments; None where none has.
        rank_order: parallel dimensions as the program counts its ranks, the fastest-varying first.
        environment: variables of every rank; None unsets one.
        program: bash that fills the array ``program`` with what follows ``python`` or ``torchrun``; it may use
            ``$here`` and ``fail``.
        files: what the program reads, beside the scripts.
        settings: variables that the user may set.
        notes: what the user should know before launching.
        starter: bash that starts one agent per host in place of torchrun; empty for torchrun. It may use
            ``$node_rank``, ``$num_hosts``, ``$world_size``, ``${device_list[@]}`` and ``${program[@]}``.
        data: what the program trains on where the user names nothing.
    """

    target: str
    request: TrainingRequest
    verified: ParserVerified | None
    rank_order: tuple[str, ...]
    environment: Mapping[str, str | None]
    program: str
    files: tuple[Artifact, ...] = ()
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    starter: str = ""
    data: str = "synthetic data"

    @property
    def rank_table(self) -> tuple[tuple[int, int], ...]:
        """(host, device) of each rank.

        Raises:
            EmitError: the plan has none, or one of another size than its configuration.
        """
        plan = self.request.plan
        if plan.rank_table is None:
            raise EmitError(f"plan {plan.plan_id} has no rank table; plan again with this version of meshplan")
        if len(plan.rank_table) != self.request.world_size:
            raise EmitError(
                f"the rank table has {len(plan.rank_table)} ranks, the configuration {self.request.world_size}"
            )
        return plan.rank_table


def plan_fields(request: TrainingRequest) -> dict[str, Any]:
    """Every choice of the plan as plain JSON, for programs that read it themselves."""
    if request.has_unlike_stages:
        return dict(request.choices)
    fields = request.config.choices
    return {**fields, "layers_per_chunk": list(fields["layers_per_chunk"]), "world_size": request.config.world_size}
