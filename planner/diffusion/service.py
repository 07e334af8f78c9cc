"""Answers to diffusion questions: spec → catalog → problem → search → plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.lookup import unknown_names
from meshplan.planner.core.budget import spent
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Interval, Plan, plan_identity
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.core.solution import Status, relative_gap
from meshplan.planner.diffusion.infeasible import broken_text, explain_infeasible
from meshplan.planner.diffusion.measured.validate import row_validator
from meshplan.planner.diffusion.plan import content, intervals, make_plan, objective_value, provenance, rejected_rows
from meshplan.planner.diffusion.problem.legality import DEGREES
from meshplan.planner.diffusion.problem.spec import DiffusionObjective, DiffusionSpec, read_diffusion_spec
from meshplan.planner.diffusion.resolve import Resolved, resolve
from meshplan.planner.diffusion.search.search import Searched, search

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

__all__ = ["SPEC", "estimate", "instead", "plan", "predict", "row_validator", "written_out"]

SPEC = DiffusionSpec
SOLVER = "all legal degrees"


def plan(question: Question) -> Plan:
    """The best deployment; see :func:`meshplan.planner.service.make_plan`."""
    before = spent()
    resolved = _resolved(question.document, question.catalog)
    problem = resolved.problem
    searched = search(problem)
    identity = plan_identity(question.document, content(resolved))
    count = 0 if searched.found is None else len(searched.found.configs)
    report: dict[str, Any] = {"solver": SOLVER, "num_candidates": count, "seed": question.seed}
    report |= {"tie": problem.calibration.tie, "is_complete": True}
    if searched.best is None:
        none = {"status": Status.INFEASIBLE.value, "objective": None, "bound": None, "gap": None}
        return Plan(
            config={},
            predicted={},
            solution={**none, **report, **_clocks(before), **explain_infeasible(problem, searched)},
            provenance=provenance(resolved, None),
            rejected=tuple(rejected_rows(problem, searched)),
            **identity,
        )
    objective = objective_value(problem, float(searched.cost[searched.best]))
    bound = objective_value(problem, searched.least_cost)
    proved = {"status": Status.OPTIMAL.value, "objective": objective, "bound": bound}
    proved |= {"gap": relative_gap(objective, bound)}
    return make_plan(
        resolved,
        searched,
        searched.best,
        solution={**proved, **report, **_clocks(before)},
        identity=identity,
        top=question.top,
    )


def estimate(question: Question) -> Plan:
    """Price one pinned configuration, whether or not it keeps the limits; other degrees are 1.

    Raises:
        SpecError: malformed, or the pinned choices do not fit together.
    """
    pinned, workload = (question.document.get(section) or {} for section in ("fixed", "workload"))
    if not (isinstance(pinned, Mapping) and isinstance(workload, Mapping)):
        _resolved(question.document, question.catalog)  # tells what is malformed
    fixed = {**dict.fromkeys(DEGREES, 1), "replicas": 1, **pinned}
    fixed.setdefault("batch_size", workload.get("batch_size") or 1)
    document = {**question.document, "fixed": fixed}
    resolved = _resolved(document, question.catalog)
    searched = search(resolved.problem)
    if searched.found is None:
        reason = next(iter(searched.illegal), "more devices than the cluster has")
        raise SpecError.at("fixed", reason)
    broken = [name for name, mask in searched.broken.items() if mask[0]]
    report: dict[str, Any] = {"status": Status.FEASIBLE.value, "solver": "none: one configuration"}
    report |= {"kept": not broken, "broken": broken}
    if broken:
        report["binding_constraint"] = broken_text(resolved.problem, searched, broken, 0)
    identity = plan_identity(question.document, content(resolved))
    chosen = Searched(
        found=searched.found,
        cost=searched.cost,
        broken=searched.broken,
        best=0,
        least_cost=float(searched.cost[0]),
        illegal=searched.illegal,
    )
    return make_plan(resolved, chosen, 0, solution=report, identity=identity, top=1)


def instead(made: Plan, choices: Mapping[str, int | str | bool], catalog: Catalog) -> tuple[Plan | None, str]:
    """The best plan with other choices pinned, and one sentence on the difference."""
    spec = {**made.spec, "fixed": {**made.spec.get("fixed", {}), **choices}}
    if choices.get("pipefusion", 1) != 1:
        spec["constraints"] = {**made.spec.get("constraints", {}), "stale_activations": True}
    other = plan(Question(document=spec, catalog=catalog, top=1))
    if not other.config:
        return None, f"none keeps every limit: {other.solution['binding_constraint']}"
    mine, theirs = made.solution.get("objective"), other.solution["objective"]
    if mine is None:
        return other, "the plan was not searched for, so there is no objective to compare"
    change, objective = theirs / mine - 1.0, read_diffusion_spec(made.spec).objective
    if math.isclose(change, 0.0, abs_tol=1e-12):
        return other, f"{objective.value} is the same"
    better = "better" if (change > 0) == (objective is DiffusionObjective.THROUGHPUT_PER_DEVICE) else "worse"
    return other, f"{objective.value} is {abs(change):.1%} {better}"


def predict(made: Plan, workload: Mapping[str, float], catalog: Catalog) -> Mapping[str, Interval]:
    """The plan's own configuration under another workload.

    Args:
        made: the plan.
        workload: keys of the spec's workload that change.
        catalog: where names are looked up.
    """
    spec = {**made.spec, "workload": {**made.spec.get("workload", {}), **workload}, "fixed": dict(made.config)}
    resolved = _resolved(spec, catalog)
    found = search(resolved.problem).found
    if found is None:
        raise SpecError.at("workload", "the plan's degrees are not legal with this workload")
    return intervals(resolved.problem, found, 0)


def written_out(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with its defaults."""
    return read_diffusion_spec(spec).model_dump(mode="json", exclude_none=True)


def _resolved(document: Mapping[str, Any], catalog: Catalog) -> Resolved:
    hardware = {key: value for key, value in document.items() if key != "model"}
    spec = read_with_names(read_diffusion_spec, document, lambda: unknown_names(hardware, catalog))
    return resolve(spec, catalog)


def _clocks(before: Any) -> dict[str, float]:
    after = spent()
    return {"wall_s": after.wall_s - before.wall_s, "cpu_s": after.cpu_s - before.cpu_s}
