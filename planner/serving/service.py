"""The straight line for serving: spec → catalog → problem → search → plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.core.plan import Plan, plan_identity
from meshplan.planner.core.solution import OnProgress, solution_document
from meshplan.planner.serving.infeasible import explain_infeasible
from meshplan.planner.serving.plan import catalog_content, make_serving_plan, provenance, rejected_rows
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import ResolvedServing, resolve_serving
from meshplan.planner.serving.search.search import estimate_pinned, search_serving
from meshplan.planner.training.resolve import unknown_names

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.models.shapes import ModelShape


def plan_serving(
    document: Mapping[str, Any],
    catalog: Catalog,
    base: Path,
    *,
    seed: int = 0,
    top: int,
    time_limit_s: float | None = None,
    on_progress: OnProgress | None = None,
    shape: ModelShape | None = None,
) -> Plan:
    """Answer a serving question; see :func:`meshplan.planner.service.make_plan`."""
    resolved = _resolved(document, catalog, base, shape)
    solution, report = search_serving(resolved.problem, seed=seed, time_limit_s=time_limit_s, on_progress=on_progress)
    told = {**solution_document(solution, seed), "num_candidates": report.num_candidates}
    told["num_simulated"] = len(report.simulated)
    identity = plan_identity(document, catalog_content(resolved))
    if solution.assignment is None:
        return Plan(
            config={},
            predicted={},
            solution={**told, **explain_infeasible(resolved.problem, report, seed=seed)},
            provenance=provenance(resolved),
            rejected=tuple(rejected_rows(report)),
            **identity,
        )
    return make_serving_plan(resolved, solution.assignment, report, solution=told, identity=identity, top=top)


def estimate_serving(document: Mapping[str, Any], catalog: Catalog, base: Path, *, seed: int = 0) -> Plan:
    """Simulate one pinned configuration, whatever its promises; what ``fixed`` leaves out takes its plain default.

    Raises:
        SpecError: malformed, or the pinned choices do not fit together or the device.
    """
    resolved = _resolved(document, catalog, base)
    try:
        simulated, report = estimate_pinned(resolved.problem, seed=seed)
    except ValueError as error:
        raise SpecError([Problem(path="fixed", message=str(error))]) from error
    told = {"status": "feasible", "solver": "none: one configuration", "kept": not simulated.judged.broken}
    return make_serving_plan(
        resolved, simulated, report, solution=told, identity=plan_identity(document, catalog_content(resolved)), top=1
    )


def instead_serving(
    plan: Plan, choices: Mapping[str, int | str | bool], catalog: Catalog, shape: ModelShape
) -> tuple[Plan | None, str]:
    """The best plan of the same mode with other choices pinned, and one sentence on the difference."""
    mode = "aggregated" if len(plan.config["pools"]) == 1 else "disaggregated"
    spec = {**plan.spec, "fixed": {"mode": mode, **plan.spec.get("fixed", {}), **choices}}
    other = plan_serving(spec, catalog, Path(), top=1, shape=shape)
    pinned = ", ".join(f"{name}={value}" for name, value in choices.items())
    if not other.config:
        return None, f"with {pinned} no plan keeps every promise: {other.solution['binding_constraint']}"
    mine, theirs = plan.solution.get("objective"), other.solution["objective"]
    if mine is None:
        return other, f"with {pinned}"
    change = theirs / mine - 1.0
    better = "worse" if change > 0 else "better"
    same = f"with {pinned} the objective is the same"
    return other, same if change == 0 else f"with {pinned} the objective is {abs(change):.1%} {better}"


def _resolved(
    document: Mapping[str, Any], catalog: Catalog, base: Path, shape: ModelShape | None = None
) -> ResolvedServing:
    try:
        spec = read_serving_spec(document)
    except SpecError as error:  # one run is enough to mend them all: the names are looked up even so
        raise SpecError([*error.problems, *unknown_names(document, catalog)]) from None
    return resolve_serving(spec, catalog, base, shape=shape)
