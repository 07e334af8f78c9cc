"""The straight line for allocations: spec → catalog → capacities → fleet → replay → plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, UnknownEntryError
from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, own_version, plain, plan_identity, shape_document
from meshplan.planner.core.reading.instance_reader import ARRAY, TEXT, WHOLE, instance_schema
from meshplan.planner.core.reading.spec_reader import read_with_names
from meshplan.planner.core.solution import solution_document
from meshplan.planner.core.stand_alone import answer_plan
from meshplan.planner.gpu_allocation.answer import answer_document, config_document
from meshplan.planner.gpu_allocation.infeasible import explain_allocation
from meshplan.planner.gpu_allocation.nodes.certify import certify_allocation
from meshplan.planner.gpu_allocation.question import AllocationQuestion
from meshplan.planner.gpu_allocation.replicas.problem import KIND, GpuAllocationProblem
from meshplan.planner.gpu_allocation.replicas.solve import answer, solve
from meshplan.planner.gpu_allocation.resolve import resolve_allocation
from meshplan.planner.gpu_allocation.search import Searched, compile_question, search_allocation
from meshplan.planner.gpu_allocation.spec import AllocationSpec, is_market_question, read_allocation_spec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


SPEC = AllocationSpec
_NAMED = {"type": "object", "required": ["name", "usd_per_hour"]}
_RANGES = {"type": "object", "required": ["input_tokens", "output_tokens"]}
SCHEMA = instance_schema(
    KIND,
    {
        "name": (TEXT, "of the instance"),
        "gpu_types": ({"type": "array", "minItems": 1, "items": _NAMED}, "what can be rented, a replica each"),
        "buckets": ({"type": "array", "minItems": 1, "items": _RANGES}, "[least, most] tokens of requests of one size"),
        "request_rate_per_s": (ARRAY, "[buckets] requests/s that arrive"),
        "max_request_rate_per_s": (
            {"type": "object", "additionalProperties": ARRAY},
            "type → [buckets] requests/s that a replica serves of one bucket alone",
        ),
        "max_utilization": (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "share of its capacity to which a replica may be filled; default 1",
        ),
        "min_spare_replicas": (WHOLE, "replicas of each type in use that carry no load; default 0"),
    },
    required=("gpu_types", "buckets", "request_rate_per_s", "max_request_rate_per_s"),
)


def plan(question: Question) -> Plan:
    """The cheapest fleet; see :func:`meshplan.planner.service.make_plan`.

    With a ``market`` in the spec capacities are estimated and the fleet is replayed; without one they are given.
    """
    if is_market_question(question.document):
        return _plan_market(question)
    problem = GpuAllocationProblem.from_document(question.document, question.base)
    return answer_plan(question, problem, solve, answer)


def is_instance(document: Mapping[str, Any]) -> bool:
    """Whether capacities are given, and not asked from models and workloads."""
    return not is_market_question(document)


def check(document: Mapping[str, Any]) -> None:
    """Read an instance; its array files lie in the working directory.

    Raises:
        SpecError: every problem of it.
    """
    GpuAllocationProblem.from_document(document, Path())


def certify(question: Question, made: Plan) -> Certificate:
    """A second opinion on an allocation; see :func:`meshplan.planner.service.make_plan`."""
    if is_market_question(question.document):
        covers = "fleets rented by the node, whose capacities are estimated, have no second way"
        return Certificate(method="none", covers=covers, checks=())
    return certify_allocation(GpuAllocationProblem.from_document(question.document, question.base), made)


def _plan_market(question: Question) -> Plan:
    asked = _resolved(question.document, question.catalog, question.base)
    compiled = compile_question(asked)
    searched = search_allocation(compiled, seed=question.seed, budget=question.budget, on_progress=question.on_progress)
    report = solution_document(searched.solution, question.seed)
    rejected = tuple(
        {"reason": reason, "count": count, "example": None} for reason, count in compiled.rejected.most_common()
    )
    identity, provenance = _identity(question.document, asked), _provenance(asked)
    if searched.solution.assignment is None:
        report |= explain_allocation(searched.compiled)
        return Plan(config={}, predicted={}, solution=report, rejected=rejected, provenance=provenance, **identity)
    judged = searched.replays and not searched.solution.stopped  # a replay that was cut short judges nothing
    report["kept"] = all(one.is_kept for one in searched.replays) if judged else None
    return Plan(
        config=config_document(searched),
        predicted=_predicted(searched),
        solution=report,
        answer=answer_document(searched, seed=question.seed),
        rejected=rejected,
        provenance=provenance,
        **identity,
    )


def _resolved(document: Mapping[str, Any], catalog: Catalog, base: Path) -> AllocationQuestion:
    spec = read_with_names(read_allocation_spec, document, lambda: _unknown_names(document, catalog))
    return resolve_allocation(spec, catalog, base)


def _unknown_names(document: Mapping[str, Any], catalog: Catalog) -> list[Problem]:
    """Node types that the catalog does not have, in a document that is malformed elsewhere."""
    market = document.get("market")
    offers = market.get("offers") if isinstance(market, Mapping) else None
    found = []
    for index, offer in enumerate(offers if isinstance(offers, list) else []):
        name = offer.get("type") if isinstance(offer, Mapping) else None
        if isinstance(name, str) and name:
            try:
                catalog.node_type(name)
            except UnknownEntryError as error:
                found.append(Problem(path=f"market.offers[{index}].type", message=str(error)))
    return found


def _predicted(searched: Searched) -> dict[str, Interval]:
    """What a plan is compared by."""
    assignment, problem = searched.solution.assignment, searched.compiled.problem
    if assignment is None:
        return {}
    usd = sum(count * offer.usd_per_hour for count, offer in zip(assignment.units[0], problem.offers, strict=True))
    return {"usd_per_hour": Interval(value=usd, low=usd, high=usd)}


def _calibrations(question: AllocationQuestion) -> dict[str, dict[str, Any]]:
    """The constants of each service on each node type."""
    return {
        f"{service.name} on {name}": calibration.to_document()
        for service in question.services
        for name, calibration in service.problem.calibrations.items()
    }


def _identity(document: Mapping[str, Any], question: AllocationQuestion) -> PlanIdentity:
    content = {
        "machines": [plain(service.problem.machines) for service in question.services],
        "models": [shape_document(service.problem.shape) for service in question.services],
        "prices": plain(dict(question.prices)),
        "calibrations": _calibrations(question),
    }
    return plan_identity(document, content)


def _provenance(question: AllocationQuestion) -> dict[str, Any]:
    """What the numbers rest on."""
    return {
        "meshplan": own_version(),
        "sources": dict(question.sources),
        "calibration": {
            name: {"num_runs": item["num_runs"], "error_p90": item["error_p90"]}
            for name, item in _calibrations(question).items()
        },
        "models": {service.name: shape_document(service.problem.shape) for service in question.services},
    }
