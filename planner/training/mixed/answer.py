"""The straight line for a training job on several node types: spec → pools → search → plan.

The best plan of each pool by itself is always shown, and the answer is never worse than one: where a bound does not
rule a pool out, it is planned with everything that one node type may have (interleaving, context parallelism, ZeRO-3),
and taken if it is better. With a profile, which is of all pools together, that bound stands as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.units import format_bytes
from meshplan.planner.cluster.lookup import unknown_names
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan, PlanIdentity, plan_identity
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.core.solution import relative_gap
from meshplan.planner.training.admission import pinned_report
from meshplan.planner.training.mixed.estimator import MixedPriced, price_mixed
from meshplan.planner.training.mixed.pinned import pinned_stages
from meshplan.planner.training.mixed.plan import config_document, make_mixed_plan, mixed_content
from meshplan.planner.training.mixed.resolve import MixedResolved, alone, resolve_mixed
from meshplan.planner.training.mixed.search import Found, MixedSearch
from meshplan.planner.training.problem.spec import read_training_spec
from meshplan.planner.training.search.report import TIE_WIDTH

SOLVER = "branch and bound over pools, bounds by dynamic programming"


def answer(question: Question, plan_alone: Callable[[Question], Plan]) -> Plan:
    """Search stages over pools.

    Args:
        question: a spec with several node types.
        plan_alone: answers a question on one node type.

    Raises:
        SpecError: malformed, or what is not planned on several node types.
    """
    started = time.perf_counter(), time.process_time()
    resolved = resolved_question(question)
    if _pinned(question.document):
        return estimate(question)
    problem = resolved.problem
    search = MixedSearch(problem, question.budget)
    singles = {name: search.alone(pool) for pool, name in enumerate(problem.names)}
    together = search.best(range(len(problem.names)))
    found = min([together, *singles.values()], key=lambda one: one.step_s)
    better, bounds = _better_alone(question, resolved, search, found, plan_alone)
    bound = min([together.bound_s, *bounds.values()])
    report = {
        "solver": SOLVER,
        "seed": question.seed,
        "num_candidates": search.considered,
        "tie_width": TIE_WIDTH,
        "wall_s": time.perf_counter() - started[0],
        "cpu_s": time.process_time() - started[1],
    }
    if question.budget.stopped:
        report["stopped"] = question.budget.stopped
    if better is not None:
        step = better.predicted["iteration_s"].value
        proof = {"objective": step, "bound": min(bound, step), "gap": relative_gap(step, min(bound, step))}
        status = "optimal" if proof["gap"] <= TIE_WIDTH else "feasible"
        left = [name for name in problem.names if name != better.spec["cluster"]["nodes"][0]["type"]]
        return replace(better, solution={**better.solution, **report, **proof, "status": status, "left_idle": left})
    if found.config is None:
        miss = _infeasible(resolved, search)
        return Plan(
            config={},
            predicted={},
            solution={"status": "infeasible", **report, **miss},
            **_identity(question, resolved),
        )
    priced = price_mixed(problem, found.config)
    gap = relative_gap(found.step_s, bound)
    proof = {"objective": found.step_s, "bound": bound, "gap": gap}
    status = "optimal" if gap <= TIE_WIDTH else "feasible"
    rows = (_chosen_row(resolved, priced), *(_alone_row(resolved, found, name, one) for name, one in singles.items()))
    return make_mixed_plan(
        resolved,
        priced,
        solution={"status": status, **proof, **report},
        identity=_identity(question, resolved),
        alternatives=rows,
    )


def estimate(question: Question, *, shape: ModelShape | None = None) -> Plan:
    """Price the stages that ``fixed.stages`` pins.

    Raises:
        SpecError: malformed, no stages are pinned, or they are not legal together.
    """
    resolved = resolved_question(question, shape=shape)
    spec = read_training_spec(question.document)
    priced = price_mixed(resolved.problem, pinned_stages(resolved.problem, spec.fixed.stages or ()))
    worst = priced.worst
    report = pinned_report(priced.admission, safe_bytes=worst.safe_bytes, limit_bytes=worst.limit_bytes)
    return make_mixed_plan(resolved, priced, solution=report, identity=_identity(question, resolved))


def instead(made: Plan, other: Plan) -> tuple[Plan | None, str]:
    """The best plan with other choices pinned, and how much longer its step is."""
    if not other.config:
        return None, str(other.solution.get("binding_constraint", "nothing fits"))
    change = other.predicted["iteration_s"].value / made.predicted["iteration_s"].value - 1.0
    return other, f"its step takes {abs(change):.1%} {'longer' if change >= 0 else 'less'}"


def resolved_question(question: Question, *, shape: ModelShape | None = None) -> MixedResolved:
    """Read and look up a spec with several node types.

    Raises:
        SpecError: malformed, or with unknown names.
    """
    document, catalog = question.document, question.catalog
    spec = read_with_names(read_training_spec, document, lambda: unknown_names(document, catalog))
    return resolve_mixed(spec, catalog, question.base, shape=shape)


def _pinned(document: Mapping[str, Any]) -> bool:
    fixed = document.get("fixed")
    return bool(isinstance(fixed, Mapping) and fixed.get("stages"))


def _identity(question: Question, resolved: MixedResolved) -> PlanIdentity:
    return plan_identity(question.document, mixed_content(resolved))


def _better_alone(
    question: Question,
    resolved: MixedResolved,
    search: MixedSearch,
    found: Found,
    plan_alone: Callable[[Question], Plan],
) -> tuple[Plan | None, dict[str, float]]:
    """The best plan of one pool if it beats what was found, and the bound of every pool by itself."""
    better, bounds = None, {}
    least = found.step_s
    for pool, name in enumerate(resolved.problem.names):
        bounds[name] = search.least_alone_s(pool)
        if bounds[name] >= least or question.document["cluster"].get("profile"):
            continue
        own = plan_alone(replace(question, document=alone(question.document, name)))
        bounds[name] = own.solution.get("bound") or float("inf")
        step = own.predicted.get("iteration_s")
        if step is not None and step.value < least:
            better, least = own, step.value
    return better, bounds


def _chosen_row(resolved: MixedResolved, priced: MixedPriced) -> dict[str, Any]:
    return {
        "name": "chosen",
        "config": config_document(resolved.problem, priced.config),
        "iteration_s": priced.step_s,
        "safe_bytes": priced.worst.safe_bytes,
        "chosen": True,
    }


def _alone_row(resolved: MixedResolved, found: Found, name: str, one: Found) -> dict[str, Any]:
    """What the best plan on one pool alone would take."""
    problem = resolved.problem
    priced = None if one.config is None else price_mixed(problem, one.config)
    if priced is None:
        pool = problem.pools[problem.names.index(name)]
        memory = format_bytes(pool.limits.memory_bytes)
        reason = f"no plan on {pool.machine.num_devices} devices stays within {memory}"
    else:
        slower = priced.step_s / found.step_s - 1.0
        reason = f"{slower:.1%} longer on {priced.config.world_size} devices" if slower > 0 else "this is the plan"
    return {
        "name": f"{name} alone",
        "choices": {"cluster": name},
        "config": None if priced is None else config_document(problem, priced.config),
        "iteration_s": None if priced is None else priced.step_s,
        "safe_bytes": None if priced is None else priced.worst.safe_bytes,
        "slower_by": None if priced is None else priced.step_s / found.step_s - 1.0,
        "reason": reason,
    }


def _infeasible(resolved: MixedResolved, search: MixedSearch) -> dict[str, Any]:
    """Which types cannot hold one layer, and that is why nothing fits."""
    small = []
    for pool, name in enumerate(resolved.problem.names):
        need = search.least_layer_bytes(pool)
        limit = resolved.problem.pools[pool].limits.memory_bytes
        if need is None:
            small.append(f"{name} has no legal degrees")
        elif need > limit:
            small.append(f"{name} cannot hold one layer: {format_bytes(need)} of {format_bytes(limit)}")
    what = "; ".join(small) or "all pools together cannot hold the model's layers"
    return {"binding_constraint": f"device memory: {what}"}
