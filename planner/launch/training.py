"""A stored training plan as a request to the emitters: the device's name and memory from the catalog; and what can be
said of its files before it is searched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import EmitError, UnknownEntryError
from meshplan.planner.cluster.lookup import usable_part
from meshplan.planner.core.plan import shape_from_document
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.emit.training import flagscale, own_script, torchtune
from meshplan.planner.emit.training.adapters import TRAINERS_OF_EVERY_WEIGHT, no_adapters
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.launch import far_apart, mixed, replica_groups, torchtitan_sites
from meshplan.planner.launch.registry import emit, is_orchestrator
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.spec import TrainingSpec, read_training_spec, target_of

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.hardware import Device
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.emit.artifact import Artifact, EmittedPlan
    from meshplan.planner.emit.hosts import HostPool


def target(plan: Plan) -> str | None:
    """The framework that the plan was made for; torchrun with a script of the user's where it was made for any."""
    return _launched(target_of(plan.spec))


def _launched(framework: str) -> str:
    return own_script.TARGET if framework == ANY_FRAMEWORK.name else framework


# Degrees that the user's own script may have and train.py of meshplan has not, by target.
_SCRIPTS_DEGREES = {"deepspeed": ("tensor_parallel",), "accelerate": ("tensor_parallel", "context_parallel")}


def check(document: Mapping[str, Any], catalog: Catalog, options: EmitOptions) -> None:
    """Stop before a search of minutes where its plan would not become files.

    Args:
        document: the spec.
        catalog: how many devices a node has.
        options: what the user adds to the files.

    Raises:
        SpecError: the spec is malformed.
        EmitError: a script is missing that the plan may need.
        CannotExpressError: the target does not train what the workload asks for.
    """
    spec = read_training_spec(document)
    name, phase = _launched(spec.constraints.target), spec.workload.phase
    if phase.has_adapters and name in TRAINERS_OF_EVERY_WEIGHT:
        raise no_adapters(name, phase)
    if name == torchtune.TARGET and phase is Phase.PRETRAINING:
        raise torchtune.no_pretraining()
    if options.script:
        return
    if name == own_script.TARGET:
        raise own_script.no_script()
    open_degrees = [degree for degree in _SCRIPTS_DEGREES.get(name, ()) if getattr(spec.fixed, degree) != 1]
    if open_degrees and not _is_one_device(spec, catalog) and not _has_encoder(spec, catalog):
        pins = " ".join(f"--set fixed.{degree}=1" for degree in open_degrees)
        raise EmitError(
            f"target {name}: the plan may have {' and '.join(open_degrees)}, and {own_script.TRAIN_FILE} of meshplan "
            f"expresses data parallelism only: name a training script of yours (--script FILE), or keep to data "
            f"parallelism ({pins})"
        )


def _has_encoder(spec: TrainingSpec, catalog: Catalog) -> bool:
    """Whether the model is an encoder–decoder of the catalog: these targets' rules leave it data parallelism alone."""
    name = catalog.model_name(spec.model)
    return name is not None and catalog.model_shape(name.slug).encoder is not None


def _is_one_device(spec: TrainingSpec, catalog: Catalog) -> bool:
    """Whether no degree can be above 1."""
    cluster = spec.cluster
    if spec.constraints.max_devices == 1:
        return True
    if cluster.devices is not None:
        return cluster.devices.nodes * cluster.devices.per_node == 1
    try:
        nodes = cluster.nodes or ()
        return sum(one.count * (one.devices or catalog.node_type(one.type).num_devices) for one in nodes) == 1
    except UnknownEntryError:
        return True  # planning says which name is unknown


def files(plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions) -> EmittedPlan:
    """Launcher files of a training plan, in memory; see :func:`meshplan.planner.service.emit_plan`."""
    if target_name == flagscale.TARGET:
        return mixed.flagscale_files(plan, catalog)
    framework = options.framework
    if framework is None and is_orchestrator(target_name):
        framework = target(plan)
    if "model" not in plan.provenance:
        raise EmitError(f"plan {plan.plan_id} of the kind {plan.kind!r} has no configuration to launch")
    device, devices_per_host = _hardware(plan.spec, catalog)
    pools: tuple[HostPool, ...] = ()
    if mixed.has_stages(plan):
        pools = mixed.host_pools(plan, catalog)
        plan, device, devices_per_host = mixed.as_launched(plan, framework or target_name), None, 0
    request = replace(_request(plan, device, devices_per_host, options), host_pools=pools)
    if torchtitan_sites.is_over_sites(plan):
        return far_apart.files(request, target_name)
    return emit(target_name, request, framework=framework)


def beside_agents(
    plan: Plan, target_name: str, catalog: Catalog, options: EmitOptions
) -> tuple[tuple[Artifact, ...], str]:
    """What a target has of its own for nodes that come and go: files, and words for the operator's page.

    Args:
        plan: the one on most hosts.
        target_name: emit target.
        catalog: as in :func:`files`.
        options: as in :func:`files`.
    """
    if target_name != replica_groups.TARGET:
        return (), ""
    return replica_groups.beside_agents(_request(plan, *_hardware(plan.spec, catalog), options))


def _request(plan: Plan, device: Device | None, devices_per_host: int, options: EmitOptions) -> TrainingRequest:
    """A plan of one node type as the emitters take it."""
    return TrainingRequest(
        plan=plan,
        shape=shape_from_document(plan.provenance["model"]),
        device=device,
        devices_per_host=devices_per_host,
        hosts=tuple((plan.mapping or {}).get("hosts", ())),
        script=options.script,
        framework_version=options.framework_version,
        image=options.image,
        pod_resources=options.pod_resources,
    )


def _hardware(spec: Mapping[str, Any], catalog: Catalog) -> tuple[Device | None, int]:
    """The accelerator of a training spec and how many a host has; None and 0 where the catalog does not say."""
    cluster = spec["cluster"]
    try:
        if cluster.get("nodes"):
            name = cluster["nodes"][0]["type"]
            node = usable_part(cluster, catalog.node_type(name))
            return node.device, node.devices_per_host
        return catalog.device(cluster["devices"]["type"]), 0
    except UnknownEntryError:
        return None, 0
