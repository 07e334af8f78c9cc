"""Mappings of training plans and stand-alone answers, as :mod:`~meshplan.planner.rank_mapping.pictures` draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.units import format_duration
from meshplan.planner.core.plan import Plan
from meshplan.planner.rank_mapping.pictures import Link, MappingView

if TYPE_CHECKING:
    from meshplan.planner.cluster.network.network import Network
    from meshplan.planner.rank_mapping.problem import RankMappingProblem


def training_view(plan: Plan, network: Network | None) -> MappingView:
    """The mapping of a training plan on its network.

    Raises:
        SpecError: the plan has no mapping, because its network is uniform.
    """
    mapping = plan.mapping
    if mapping is None or network is None:
        message = f"plan {plan.plan_id} has no mapping to draw: all links of its cluster are alike"
        raise SpecError.at("", message, of="the question")
    nodes, stages = np.array(mapping["nodes"], dtype=np.int64), int(plan.config["pipeline_parallel"])
    world = int(plan.config["world_size"])
    per_node, per_stage = -(-world // len(nodes)), world // stages
    columns = np.arange(max(1, per_stage // per_node)) * per_node
    grid = nodes[(np.arange(stages)[:, None] * per_stage + columns) // per_node]
    rows = mapping["critical"]
    critical: list[tuple[Link, str]] = [((row["nodes"][0], row["nodes"][1]), row["what"]) for row in rows]
    path: list[int] = next((row["path"] for row in rows if "path" in row), [])
    notes = [
        f"{mapping['method']}: {format_duration(mapping['objective_s'])} a step, rank order "
        f"{format_duration(mapping['identity_s'])}, random mappings {format_duration(mapping['random_mean_s'])} on "
        f"average; no mapping of these degrees is below {format_duration(mapping['bound_s'])}",
        f"{mapping['source']}; a link's figure is one device's share",
    ]
    for what in ("spare", "excluded"):
        if mapping[f"{what}_nodes"]:
            notes.append(f"{what}: {', '.join(network.names[node] for node in mapping[f'{what}_nodes'])}")
    return MappingView(
        title=f"Plan {plan.plan_id}: {len(nodes)} nodes, {stages} stages",
        names=network.names,
        bytes_per_s=network.bytes_per_s,
        grid=grid,
        critical=[(link, what) for link, what in critical if link[0] != link[1]],
        path=path,
        notes=notes,
    )


def stand_alone_view(plan: Plan, problem: RankMappingProblem) -> MappingView:
    """The answer of a ``kind: rank-mapping`` problem, to draw."""
    answer = plan.answer or {}
    found = answer["critical_path"]
    critical: list[tuple[Link, str]] = []
    if "slowest_ring_link" in found:
        link = found["slowest_ring_link"]
        critical.append(((link["sender"], link["receiver"]), f"ring of stage {found['stage']}"))
    if "slowest_hop" in found:
        first, second = found["slowest_hop"]["nodes"]
        critical.append(((first, second), f"pipeline {found['pipeline']}"))
    return MappingView(
        title=problem.name or f"Plan {plan.plan_id}",
        names=tuple(f"node {number}" for number in range(problem.num_nodes)),
        bytes_per_s=problem.bandwidth_bytes_per_s,
        grid=np.array(answer["assignment"], dtype=np.int64).T,
        critical=critical,
        path=found["pipeline_nodes"],
        notes=[
            f"{answer['method']}: {format_duration(answer['objective_s'])}, default layout "
            f"{format_duration(answer['identity_s'])}, bound {format_duration(answer['bound_s'])}"
        ],
    )
