"""Files of a training plan on several node types: FlagScale's, and those of a script of the user's, which gets every
stage; other targets' where stages have the same degrees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.cluster.lookup import usable_part
from meshplan.planner.core.plan import Plan, shape_from_document
from meshplan.planner.emit.hosts import HostPool
from meshplan.planner.emit.training import flagscale, own_script
from meshplan.planner.training.plan import config_document
from meshplan.planner.training.problem.problem import TrainingConfig

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.emit.artifact import EmittedPlan

# Degrees that a launcher with one set of them needs to be the same in all stages.
_ONE_SET = ("tensor_parallel", "data_parallel", "micro_batch_size", "activation_recompute")


def has_stages(plan: Plan) -> bool:
    """Whether a plan is one of stages on several node types."""
    return "stages" in plan.config


def flagscale_files(plan: Plan, catalog: Catalog) -> EmittedPlan:
    """FlagScale's files.

    Raises:
        EmitError: a plan on one node type.
        CannotExpressError: FlagScale has no arguments for the plan.
    """
    if not has_stages(plan):
        raise EmitError(f"target {flagscale.TARGET} writes plans on several node types; plan {plan.plan_id} is on one")
    shape = shape_from_document(plan.provenance["model"])
    used: dict[str, int] = {}
    for stage in plan.config["stages"]:
        used[stage["node_type"]] = used.get(stage["node_type"], 0) + stage["tensor_parallel"] * stage["data_parallel"]
    nodes = []
    for name, devices in used.items():
        per_host = usable_part(plan.spec["cluster"], catalog.node_type(name)).devices_per_host
        nodes.append(flagscale.NodeHosts(node_type=name, devices=devices, devices_per_host=per_host))
    return flagscale.files(plan, shape, _like_the_first(plan.config), nodes)


def host_pools(plan: Plan, catalog: Catalog) -> tuple[HostPool, ...]:
    """Hosts in use of each node type: the rank table counts hosts type by type, in the order of ``cluster.nodes``."""
    counts: dict[str, int] = {}
    for node in plan.spec["cluster"]["nodes"]:
        counts[node["type"]] = counts.get(node["type"], 0) + node.get("count", 1)
    used = {host for host, _ in plan.rank_table or ()}
    pools, first = [], 0
    for name, count in counts.items():
        node_type = usable_part(plan.spec["cluster"], catalog.node_type(name))
        numbers = range(first, first + count * node_type.num_hosts)
        first = numbers.stop
        if hosts := tuple(host for host in numbers if host in used):
            pools.append(
                HostPool(
                    node_type=name,
                    device=node_type.device,
                    devices_per_host=node_type.devices_per_host,
                    hosts=hosts,
                )
            )
    return tuple(pools)


def as_launched(plan: Plan, framework: str) -> Plan:
    """The plan as one of uniform degrees and uneven layers; as it is where degrees differ and the script takes stages.

    Raises:
        CannotExpressError: degrees differ between stages, and the framework has one set of them.
    """
    stages = plan.config["stages"]
    different = [name for name in _ONE_SET if len({stage[name] for stage in stages}) > 1]
    if different and framework == own_script.TARGET:
        return plan
    if different:
        values = "; ".join(f"{name} {', '.join(str(stage[name]) for stage in stages)}" for name in different)
        raise CannotExpressError(
            framework,
            f"stages that differ in {' and '.join(different)} ({values})",
            "target flagscale, which has degrees for each stage, or torchrun with a script of yours; or pin "
            "tensor_parallel and micro_batch_size",
        )
    return replace(plan, config=config_document(_like_the_first(plan.config)), launched_from=plan.digest)


def _like_the_first(config: Any) -> TrainingConfig:
    """The plan as if all stages had the degrees of the first."""
    first = config["stages"][0]
    data = first["data_parallel"]
    return TrainingConfig(
        tensor_parallel=first["tensor_parallel"],
        pipeline_parallel=len(config["stages"]),
        virtual_pipeline_stages=1,
        context_parallel=1,
        data_parallel=data,
        data_parallel_shard=data if config["zero_stage"] else 1,
        expert_parallel=1,
        expert_tensor_parallel=1,
        sequence_parallel=config["sequence_parallel"] and first["tensor_parallel"] > 1,
        zero_stage=config["zero_stage"],
        activation_recompute=first["activation_recompute"],
        pipeline_schedule=config["pipeline_schedule"],
        layers_per_chunk=tuple(stage["num_layers"] for stage in config["stages"]),
        micro_batch_size=first["micro_batch_size"],
        num_microbatches=config["num_microbatches"],
        global_batch_size=config["global_batch_size"],
        sequence_length=config["sequence_length"],
        precision=config["precision"],
    )
