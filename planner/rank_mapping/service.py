"""Rank mappings: instance → search with a bound → answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.stand_alone import answer_plan
from meshplan.planner.rank_mapping.certify import certify_mapping
from meshplan.planner.rank_mapping.pictures import MappingView
from meshplan.planner.rank_mapping.problem import RankMappingProblem
from meshplan.planner.rank_mapping.solve import answer, solve
from meshplan.planner.rank_mapping.view import stand_alone_view

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


def plan(question: Question) -> Plan:
    """Map ranks to nodes; see :func:`meshplan.planner.service.make_plan`."""
    problem = RankMappingProblem.from_document(question.document, question.base)
    return answer_plan(question, problem, solve, answer)


def certify(question: Question, made: Plan) -> Certificate:
    """A second opinion on a mapping; see :func:`meshplan.planner.service.make_plan`."""
    return certify_mapping(RankMappingProblem.from_document(question.document, question.base), made)


def mapping_view(made: Plan, _catalog: Catalog, base: Path) -> MappingView:
    """The mapping to draw; ``base`` is the folder of the instance's array files."""
    return stand_alone_view(made, RankMappingProblem.from_document(made.spec, base))
