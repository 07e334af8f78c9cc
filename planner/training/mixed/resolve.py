"""From a training spec with several node types to its pools: each is resolved as the question that it is by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.measured_pools import measured_pools, pools_profile_problems
from meshplan.planner.cluster.pools import PoolLinks, pool_links
from meshplan.planner.core.problems import Problems
from meshplan.planner.training.estimator.candidates import layer_kinds
from meshplan.planner.training.mixed.stages import MixedProblem
from meshplan.planner.training.problem.problem import TrainingObjective, TrainingProblem
from meshplan.planner.training.problem.spec import TrainingSpec
from meshplan.planner.training.resolve import Resolved, named_profile, resolve_training

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

# Choices that may be pinned beside whole stages.
PINNABLE = ("tensor_parallel", "micro_batch_size", "zero_stage", "activation_recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedResolved:
    """A question on several pools and what it was made of.

    Args:
        problem: for the search.
        pools: each by itself.
        counts: nodes of each.
    """

    problem: MixedProblem
    pools: tuple[Resolved, ...]
    counts: tuple[int, ...]


def alone(document: Mapping[str, Any], node_type: str) -> dict[str, Any]:
    """The same question on the nodes of one type, without what is said of several."""
    cluster = dict(document["cluster"])
    cluster["nodes"] = [node for node in cluster["nodes"] if node["type"] == node_type]
    links = {name: value for name, value in (cluster.pop("links", None) or {}).items() if name != "between_types"}
    if links:
        cluster["links"] = links
    return {**document, "cluster": cluster}


def resolve_mixed(
    spec: TrainingSpec, catalog: Catalog, base: Path = Path(), *, shape: ModelShape | None = None
) -> MixedResolved:
    """Look everything up.

    Raises:
        SpecError: unknown names, what several pools cannot have, and pools that nothing joins.
    """
    problems = Problems()
    _only_what_is_modelled(spec, problems)
    counts: dict[str, int] = {}
    for node in spec.cluster.nodes or ():
        counts[node.type] = counts.get(node.type, 0) + node.count
    pools = []
    for name, count in counts.items():
        try:
            pools.append(resolve_training(_pool_spec(spec, name, count), catalog, base, shape=shape))
        except SpecError as error:
            problems += [one for one in error.problems if one not in problems]
    problems.check()
    own, links = _linked(spec, pools, catalog, problems)
    problem = MixedProblem(
        pools=own,
        links=links,
        pins={name: value for name, value in spec.fixed.pinned().items() if name in PINNABLE},
    )
    if len(layer_kinds(problem.any.shape)[0]) > 1:
        problems.say(
            "model", f"{problem.any.shape.name} has layers of several kinds, which are planned on one node type"
        )
    problems.check()
    return MixedResolved(problem=problem, pools=tuple(pools), counts=tuple(counts.values()))


def _pool_spec(spec: TrainingSpec, node_type: str, count: int) -> TrainingSpec:
    """The part of a spec that is about one node type."""
    own = [node for node in spec.cluster.nodes or () if node.type == node_type]
    nodes = [own[0].model_copy(update={"count": count})]
    links = spec.cluster.links
    if links is not None:
        links = links.model_copy(update={"between_types": None})
    cluster = spec.cluster.model_copy(update={"nodes": nodes, "links": links, "profile": None})
    return spec.model_copy(update={"cluster": cluster, "fixed": spec.fixed.model_copy(update={"stages": None})})


def _linked(
    spec: TrainingSpec, pools: Sequence[Resolved], catalog: Catalog, problems: Problems
) -> tuple[tuple[TrainingProblem, ...], PoolLinks]:
    """The pools and what joins them: as a profile measured, else as the spec or the NICs say."""
    own, nodes = tuple(pool.problem for pool in pools), [pool.cluster.groups[0].node for pool in pools]
    profile = named_profile(spec.cluster, catalog, problems)
    if profile is None:
        return own, pool_links(nodes, spec.cluster.links, problems)
    machines = [problem.machine for problem in own]
    problems.extend(pools_profile_problems(machines, profile))
    problems.check()
    measured, links = measured_pools(machines, [node.slug for node in nodes], profile)
    return tuple(replace(problem, machine=machine) for problem, machine in zip(own, measured, strict=True)), links


def _only_what_is_modelled(spec: TrainingSpec, problems: Problems) -> None:
    """What a job on several node types cannot be asked yet, in words."""
    types = " and ".join(dict.fromkeys(node.type for node in spec.cluster.nodes or ()))
    here = f"on {types} in one job"
    if spec.workload.has_open_batch:
        mend = "state the batch, and meshplan batch compares others with it"
        problems.say("workload.global_batch_size", f"auto is not planned {here}: {mend}")
    if spec.objective is not TrainingObjective.THROUGHPUT:
        problems.say("objective", f"{spec.objective.value} is not planned {here}: throughput is")
    links = spec.cluster.links
    if links is not None and links.describes_unevenness:
        problems.say(
            "cluster.links", f"islands, degraded links and topologies are not planned {here}: between_types is"
        )
    if spec.cluster.exclude is not None:
        problems.say("cluster.exclude", f"is not planned {here}")
    if spec.cluster.profile is not None and links is not None and links.between_types is not None:
        problems.say("cluster.links.between_types", "the profile has these links: give one of both")
    if spec.cluster.spare_nodes or spec.run is not None:
        problems.say("run" if spec.run is not None else "cluster.spare_nodes", f"is not planned {here}")
    if spec.workload.phase.has_adapters:
        problems.say("workload.phase", f"{spec.workload.phase.value} is not planned {here}: every weight is trained")
    for name in spec.fixed.pinned():
        if name not in PINNABLE:
            problems.say(f"fixed.{name}", f"cannot be pinned {here}: {', '.join(PINNABLE)}, or all of fixed.stages")
    if spec.fixed.zero_stage not in (None, 0, 1):
        problems.say("fixed.zero_stage", f"{spec.fixed.zero_stage} is not planned {here}: 0 or 1")
    _same_limits(spec, here, problems)


def _same_limits(spec: TrainingSpec, here: str, problems: Problems) -> None:
    """Limits that count devices or money over all pools."""
    for name in ("max_devices", "min_devices", "max_usd_per_hour", "max_usd_per_run", "max_step_time", "max_run_time"):
        if getattr(spec.constraints, name) is not None:
            mend = "say cluster.nodes[].devices" if name == "max_devices" else "leave nodes out of cluster.nodes"
            problems.say(f"constraints.{name}", f"is not planned {here}: {mend}")
    if spec.constraints.offload:
        problems.say("constraints.offload", f"is not planned {here}")
    if spec.constraints.search_over:
        problems.say("constraints.search_over", f"is not searched {here}: leave it out")
    if spec.constraints.unvalidated_schedules:
        problems.say("constraints.unvalidated_schedules", f"every schedule is 1F1B {here}: leave it out")
