"""The straight line for expert placements: instance → search with a bound → answer.

Placements for the experts of a plan, by recorded routing, are in :mod:`meshplan.planner.expert_placement.placing`.
"""

from __future__ import annotations

from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.stand_alone import answer_plan
from meshplan.planner.expert_placement.certify import certify_placement
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.solve import answer, solve


def plan(question: Question) -> Plan:
    """Place experts on devices; see :func:`meshplan.planner.service.make_plan`."""
    problem = ExpertPlacementProblem.from_document(question.document, question.base)
    return answer_plan(question, problem, solve, answer)


def certify(question: Question, made: Plan) -> Certificate:
    """A second opinion on a placement; see :func:`meshplan.planner.service.make_plan`."""
    return certify_placement(ExpertPlacementProblem.from_document(question.document, question.base), made)
