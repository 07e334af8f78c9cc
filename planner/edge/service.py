"""Answers to questions about machines at home: spec → catalog → problem → every option → plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.planner.core.budget import spent
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan, plan_identity
from meshplan.planner.core.solution import Status
from meshplan.planner.edge.infeasible import explain_infeasible
from meshplan.planner.edge.options import every_option
from meshplan.planner.edge.plan import content, make_plan, provenance, rejected_rows
from meshplan.planner.edge.problem import EdgeProblem
from meshplan.planner.edge.resolve import resolve
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
    options = every_option(problem)
    identity = plan_identity(question.document, content(problem))
    best = options.priced[0].time.total_s if options.priced else None
    kept = best is not None and (problem.most_token_s is None or best <= problem.most_token_s)
    # All ways are priced: the least is its own bound.
    proved = {"objective": best, "bound": best, "gap": 0.0} if kept else dict.fromkeys(("objective", "bound", "gap"))
    after = spent()
    report: dict[str, Any] = {
        "status": (Status.OPTIMAL if kept else Status.INFEASIBLE).value,
        **proved,
        "solver": SOLVER,
        "seed": question.seed,
        "num_candidates": len(options.priced),
        "wall_s": after.wall_s - before.wall_s,
        "cpu_s": after.cpu_s - before.cpu_s,
    }
    if kept:
        return make_plan(problem, options, solution=report, identity=identity)
    return Plan(
        config={},
        predicted={},
        solution={**report, **explain_infeasible(problem, options)},
        provenance=provenance(problem, None),
        rejected=tuple(rejected_rows(options)),
        **identity,
    )


def written_out(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with its defaults."""
    return read_edge_spec(spec).model_dump(mode="json", exclude_none=True)


def _resolved(document: Mapping[str, Any], catalog: Catalog, base: Path) -> EdgeProblem:
    return resolve(read_edge_spec(document), catalog, base)
