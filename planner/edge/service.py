"""Answers to questions about machines at home: spec → catalog → problem → every option → plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.planner.core.budget import spent
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan, plan_identity
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.core.solution import Status, relative_gap, status_of
from meshplan.planner.edge.infeasible import explain_infeasible
from meshplan.planner.edge.options import Options, every_option, least_token_s
from meshplan.planner.edge.plan import content, make_plan, provenance, rejected_rows
from meshplan.planner.edge.problem import EdgeProblem
from meshplan.planner.edge.resolve import resolve, unknown_machines
from meshplan.planner.edge.spec import EdgeSpec, read_edge_spec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

__all__ = ["SPEC", "plan", "written_out"]

SPEC = EdgeSpec
SOLVER = "every group of machines, engine and format"


def plan(question: Question) -> Plan:
    """The fastest way to generate; see :func:`meshplan.planner.service.make_plan`."""
    before = spent()
    problem = _resolved(question.document, question.catalog, question.base)
    options = every_option(problem, question.budget)
    identity = plan_identity(question.document, content(problem))
    best = options.priced[0].time.total_s if options.priced else None
    kept = best is not None and (problem.most_token_s is None or best <= problem.most_token_s)
    if not kept and not options.is_whole:
        question.budget.nothing_found("plan")
    report = _proof(problem, options, best if kept else None)
    after = spent()
    report |= {
        "solver": SOLVER,
        "seed": question.seed,
        "num_candidates": len(options.priced),
        "wall_s": after.wall_s - before.wall_s,
        "cpu_s": after.cpu_s - before.cpu_s,
    }
    if not options.is_whole:
        report["stopped"] = question.budget.stopped
    if kept:
        return make_plan(problem, options, solution=report, identity=identity)
    return Plan(
        config={},
        predicted={},
        solution={**report, **explain_infeasible(problem, options, question.budget)},
        provenance=provenance(problem, None),
        rejected=tuple(rejected_rows(options)),
        **identity,
    )


def _proof(problem: EdgeProblem, options: Options, best: float | None) -> dict[str, Any]:
    """Status, objective, bound and gap: where all ways are priced the least is its own bound."""
    if best is None:
        return {"status": Status.INFEASIBLE.value, "objective": None, "bound": None, "gap": None}
    bound = best if options.is_whole else min(best, least_token_s(problem))
    gap = relative_gap(best, bound)
    return {"status": status_of(best, bound).value, "objective": best, "bound": bound, "gap": gap}


def written_out(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with its defaults."""
    return read_edge_spec(spec).model_dump(mode="json", exclude_none=True)


def _resolved(document: Mapping[str, Any], catalog: Catalog, base: Path) -> EdgeProblem:
    spec = read_with_names(read_edge_spec, document, lambda: unknown_machines(document, catalog))
    return resolve(spec, catalog, base)
