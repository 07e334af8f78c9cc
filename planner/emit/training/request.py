"""A training plan as the emitters take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from meshplan.catalogs.errors import EmitError
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.hosts import HostPool
from meshplan.planner.emit.text import published_name
from meshplan.planner.lengths.packing import SPLIT
from meshplan.planner.training.problem.problem import TrainingConfig

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsAsked:
    """How the plan's documents lie in sequences.

    Args:
        packing: one of :data:`meshplan.planner.lengths.packing.PACKINGS`.
        is_masked: several share a sequence, and attention keeps to each.
        are_split: some are longer than a sequence, and go on in the next one.
    """

    packing: str
    is_masked: bool
    are_split: bool


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
        framework_version: release that runs the files (:mod:`..releases`); empty for the one that was checked.
        pod_resources: what pods ask for besides devices, by Kubernetes' name: RDMA devices.
        host_pools: hosts of each node type where the job has several, whose devices differ; empty for one type.
    """

    plan: Plan
    shape: ModelShape
    device: Device | None = None
    hosts: tuple[str, ...] = ()
    master_port: int = DEFAULT_MASTER_PORT
    devices_per_host: int = 0
    image: str = ""
    script: str = ""
    framework_version: str = ""
    pod_resources: Mapping[str, int] = field(default_factory=dict)
    host_pools: tuple[HostPool, ...] = ()

    @property
    def published_model(self) -> str:
        """Hugging Face name of the model; empty where the catalog knows none."""
        return published_name(self.shape.source)

    @property
    def documents(self) -> DocumentsAsked | None:
        """What the plan says of documents; None where all sequences are one document each."""
        if self.plan.lengths is None:
            return None
        asked, planned = self.plan.spec["workload"]["sequence_lengths"], self.plan.lengths["documents"]
        fill_sequences = planned["mean"] == planned["longest"] and planned["longest"] % self.config.sequence_length == 0
        return DocumentsAsked(
            packing=str(planned["packing"]),
            is_masked=not asked.get("cross_document_attention", False) and not fill_sequences,
            are_split=planned["longest"] > self.config.sequence_length and planned["longer"] == SPLIT,
        )

    @property
    def has_unlike_stages(self) -> bool:
        """Whether stages have degrees of their own, so that no one :attr:`config` tells them."""
        return "stages" in self.plan.config

    @property
    def choices(self) -> Mapping[str, Any]:
        """Every choice by its name, whatever the stages."""
        return self.plan.config if self.has_unlike_stages else self.config.choices

    @property
    def world_size(self) -> int:
        """Devices of the job."""
        return int(self.plan.config["world_size"]) if self.has_unlike_stages else self.config.world_size

    @property
    def config(self) -> TrainingConfig:
        """The choices of the plan, the same for all stages.

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
