"""Plans for a cluster that has lost nodes: one for each number, and what it takes to get there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.units import SECONDS_PER_DAY
from meshplan.planner.core.plan import Plan
from meshplan.planner.goodput.published import REPAIR_S, RESTART_S, STORE_BYTES_PER_S
from meshplan.planner.training.estimator.states import optimizer_bytes
from meshplan.planner.training.plan import config_from_document
from meshplan.planner.training.problem.spec import question_of_plan
from meshplan.planner.training.replanning.by_nodes import steady, usable_nodes
from meshplan.planner.training.replanning.decision import Decision, decide, join_from_s
from meshplan.planner.training.replanning.moves import Layout, Moves, moves
from meshplan.planner.training.resolve import Resolved

# Times beyond are never reached.
FOREVER_S = 1e4 * SECONDS_PER_DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The plan on what is left.

    Args:
        lost: numbers of the nodes that are gone.
        gained: nodes that have come.
        plan: the best plan on what there is; None where there is none.
        why_not: why there is none.
        speed: its training over that of the old plan.
        moves: bytes to get there; None without a plan.
        move_s: seconds for them: over the network where the live states survive, else from the store.
        load_s: seconds to load all of them from the store, which processes that start anew must.
        decision: wait or go on.
        join_s: nodes that have come must stay so long for joining them to pay.
        uses_spares: spare nodes of the old plan take over, so that nothing else changes.
        is_idle: no rank of the old plan sat on the nodes that are gone, so that it runs on.
    """

    lost: tuple[int, ...]
    gained: int = 0
    plan: Plan | None
    why_not: str
    speed: float
    moves: Moves | None
    move_s: float
    load_s: float
    decision: Decision
    join_s: float = 0.0
    uses_spares: bool
    is_idle: bool = False


def without_nodes(spec: Mapping[str, Any], lost: Sequence[int]) -> dict[str, Any]:
    """The question with nodes excluded; spare nodes take their places first.

    Raises:
        SpecError: a node is excluded already.
    """
    cluster = dict(spec["cluster"])
    exclude = dict(cluster.get("exclude") or {})
    known = list(exclude.get("nodes") or [])
    twice = sorted(set(known) & set(lost))
    if twice:
        raise SpecError.at("--without", f"node {twice[0]} is not used by this plan already")
    cluster["exclude"] = {**exclude, "nodes": sorted([*known, *lost])}
    cluster["spare_nodes"] = max(0, int(cluster.get("spare_nodes") or 0) - len(lost))
    return {**steady(spec), "cluster": cluster}


def with_nodes(spec: Mapping[str, Any], gained: int) -> dict[str, Any]:
    """The question with more nodes like its own, behind them, so that these keep their numbers.

    Raises:
        SpecError: the cluster has nodes of several types.
    """
    cluster = dict(spec["cluster"])
    described = cluster.get("devices")
    if described:
        return {
            **steady(spec),
            "cluster": {**cluster, "devices": {**described, "nodes": int(described["nodes"]) + gained}},
        }
    groups = [dict(group) for group in cluster["nodes"]]
    types = sorted({str(group["type"]) for group in groups})
    if len(types) != 1:
        message = f"says for how many more nodes of one type to plan: this plan's cluster has {', '.join(types)}"
        raise SpecError.at("--more", message)
    groups[-1]["count"] = int(groups[-1]["count"]) + gained
    return {**steady(spec), "cluster": {**cluster, "nodes": groups}}


def replanned(
    made: Plan,
    old: Resolved,
    lost: Sequence[int],
    answer: Callable[[Mapping[str, Any]], Plan],
    *,
    gained: int = 0,
) -> Replanned:
    """The plan without some nodes or with more, and what it takes to get there.

    Args:
        made: the plan that runs.
        old: its question.
        lost: numbers of the nodes that are gone.
        answer: searches a plan for a question.
        gained: nodes that have come.
    """
    asked = question_of_plan(made.spec)
    spec = with_nodes(asked, gained) if gained else without_nodes(asked, lost)
    setting = None if old.problem.run is None else old.problem.run.setting
    repair_s = REPAIR_S if setting is None else setting.repair_s
    restart_s = RESTART_S if setting is None else setting.restart_s
    is_idle = bool(lost) and not set(lost) & set(used_nodes(made, old))
    try:
        found = answer(spec)
    except SpecError as error:
        reasons = "; ".join(problem.message for problem in error.problems)
        return _without_a_plan(reasons, lost, gained, repair_s, is_idle=is_idle)
    if not found.config:
        reason = str(found.solution.get("binding_constraint", "no plan"))
        return _without_a_plan(reason, lost, gained, repair_s, is_idle=is_idle)
    problem = old.problem
    per_host, per_node = problem.machine.devices_per_host, problem.machine.domain_size
    gone = [divmod(node * per_node + device, per_host) for node in lost for device in range(per_node)]
    recipe = problem.calibration.recipe
    recipe = replace(recipe, optimizer_bytes=optimizer_bytes(recipe, problem.workload))
    taken = moves(problem.shape, recipe, _layout(made), _layout(found), gone)
    speed = made.predicted["iteration_s"].value / found.predicted["iteration_s"].value
    load_s = taken.needed / (STORE_BYTES_PER_S if setting is None else setting.store_bytes_per_s)
    move_s = load_s if taken.lost else taken.most_in / problem.machine.scale_out_bytes_per_s
    return Replanned(
        lost=tuple(lost),
        gained=gained,
        plan=found,
        why_not="",
        speed=speed,
        moves=taken,
        move_s=move_s,
        load_s=load_s,
        decision=_unmoved(repair_s) if is_idle else decide(speed=speed, change_s=restart_s + move_s, repair_s=repair_s),
        join_s=join_from_s(speed=speed, change_s=restart_s + move_s) if gained else 0.0,
        uses_spares=bool(lost) and not is_idle and found.config == made.config,
        is_idle=is_idle,
    )


def _unmoved(repair_s: float) -> Decision:
    """The old plan runs on, since none of its ranks is missing."""
    return Decision(going_on_s=0.0, waiting_s=repair_s, from_s=0.0)


def _without_a_plan(why_not: str, lost: Sequence[int], gained: int, repair_s: float, *, is_idle: bool) -> Replanned:
    """Nothing to change to: it waits for what is gone, unless it did not use it."""
    return Replanned(
        lost=tuple(lost),
        gained=gained,
        plan=None,
        why_not=why_not,
        speed=0.0,
        moves=None,
        move_s=0.0,
        load_s=0.0,
        decision=_unmoved(repair_s) if is_idle else decide(speed=0.0, change_s=0.0, repair_s=repair_s),
        uses_spares=False,
        is_idle=is_idle,
    )


def _layout(plan: Plan) -> Layout:
    return Layout(config=config_from_document(plan.config), places=plan.rank_table or ())


def elastic_plans(made: Plan, rows: Sequence[Replanned]) -> list[Plan]:
    """Plans for neighbouring numbers of hosts around that of a plan, each on all devices of its hosts, ascending.

    Args:
        made: the plan that runs.
        rows: plans for fewer or more nodes.
    """
    devices, hosts = _devices_and_hosts(made)
    found = {hosts: made}
    for row in rows:
        if row.plan is not None:
            own_devices, own_hosts = _devices_and_hosts(row.plan)
            if own_devices * hosts == devices * own_hosts:
                found.setdefault(own_hosts, row.plan)
    least = most = hosts
    while least - 1 in found:
        least -= 1
    while most + 1 in found:
        most += 1
    return [found[count] for count in range(least, most + 1)]


def _devices_and_hosts(plan: Plan) -> tuple[int, int]:
    table = plan.rank_table or ()
    return len(table), len({host for host, _ in table})


def used_nodes(made: Plan, old: Resolved) -> list[int]:
    """Numbers of the nodes that hold ranks of a plan, ascending."""
    machine = old.problem.machine
    return sorted({host * machine.devices_per_host // machine.domain_size for host, _ in made.rank_table or ()})


def losses(made: Plan, old: Resolved, without: Sequence[int], fewer: int) -> list[list[int]]:
    """Which nodes each answer is without: those named, else one, two, … of those that hold the last ranks.

    Empty where no node can go without ending the job: it runs on all there are, and has one.

    Raises:
        SpecError: the plan's cluster has no such node.
    """
    if without:
        cluster = made.spec["cluster"]
        described = cluster.get("devices")
        count = int(described["nodes"]) if described else sum(int(node["count"]) for node in cluster["nodes"])
        beyond = sorted({node for node in without if not 0 <= node < count})
        if beyond:
            said = f"there is no node {', '.join(map(str, beyond))}: the cluster has {count}, from 0"
            raise SpecError.at("without", said, of="the question")
        return [sorted(set(without))]
    used = used_nodes(made, old)
    most = min(fewer, len(used), len(usable_nodes(old)) - 1)
    return [used[-count:] for count in range(1, most + 1)]


def replan_document(made: Plan, rows: Sequence[Replanned]) -> dict[str, Any]:
    """Plans without nodes as plain JSON."""
    return {
        "plan_id": made.plan_id,
        "iteration_s": made.predicted["iteration_s"].value,
        "rows": [_row(one) for one in rows],
    }


def _row(one: Replanned) -> dict[str, Any]:
    taken, decision = one.moves, one.decision
    return {
        "lost_nodes": list(one.lost),
        "gained_nodes": one.gained,
        "plan_id": None if one.plan is None else one.plan.plan_id,
        "config": None if one.plan is None else dict(one.plan.config),
        "why_not": one.why_not,
        "iteration_s": None if one.plan is None else one.plan.predicted["iteration_s"].value,
        "speed": one.speed,
        "uses_spares": one.uses_spares,
        "is_idle": one.is_idle,
        "bytes": None
        if taken is None
        else {
            "needed": taken.needed,
            "kept": taken.kept,
            "moved": taken.moved,
            "most_in_one_device": taken.most_in,
            "lost": taken.lost,
        },
        "from_checkpoint": bool(taken and taken.lost),
        "move_s": one.move_s,
        "load_s": one.load_s,
        "decision": "join" if one.gained else "go on" if decision.goes_on else "wait",
        "join_if_they_stay_s": one.join_s if one.gained and one.join_s < FOREVER_S else None,
        "go_on_from_repair_s": decision.from_s if decision.from_s < FOREVER_S else None,
    }
