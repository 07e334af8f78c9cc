"""Rank mappings: instance → search with a bound → answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.planner.core.certificate import Certificate
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.reading.instance_reader import AMOUNT, ARRAY, COUNT, TEXT, instance_schema
from meshplan.planner.core.stand_alone import answer_plan
from meshplan.planner.rank_mapping.certify import certify_mapping
from meshplan.planner.rank_mapping.pictures import MappingView
from meshplan.planner.rank_mapping.problem import KIND, REQUIRED_AMOUNTS, REQUIRED_COUNTS, RankMappingProblem
from meshplan.planner.rank_mapping.solve import answer, solve
from meshplan.planner.rank_mapping.view import stand_alone_view

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


SCHEMA = instance_schema(
    KIND,
    {
        "name": (TEXT, "of the instance"),
        "num_nodes": (COUNT, "nodes n, numbered from 0; pipeline_parallel × data_parallel_nodes"),
        "pipeline_parallel": (COUNT, "stages of each pipeline"),
        "data_parallel_nodes": (COUNT, "pipelines: nodes in each stage's data-parallel ring"),
        "devices_per_node": (COUNT, "devices that share a node's cell; reported, not used"),
        "pipeline_message_bytes": (AMOUNT, "activations of one micro-batch between two stages"),
        "data_parallel_message_bytes": (AMOUNT, "gradients that one node reduces in one step"),
        "num_microbatches_exposed": (AMOUNT, "how often the critical path crosses each stage boundary"),
        "bandwidth_bytes_per_s": (ARRAY, "[n, n], row = sender, directed; the diagonal means nothing"),
        "latency_s": (ARRAY, "[n, n], row = sender; without it 0"),
    },
    required=(*REQUIRED_COUNTS, *REQUIRED_AMOUNTS, "bandwidth_bytes_per_s"),
)


def plan(question: Question) -> Plan:
    """Map ranks to nodes; see :func:`meshplan.planner.service.make_plan`."""
    problem = RankMappingProblem.from_document(question.document, question.base)
    return answer_plan(question, problem, solve, answer)


def check(document: Mapping[str, Any]) -> None:
    """Read an instance; its array files lie in the working directory.

    Raises:
        SpecError: every problem of it.
    """
    RankMappingProblem.from_document(document, Path())


def certify(question: Question, made: Plan) -> Certificate:
    """A second opinion on a mapping; see :func:`meshplan.planner.service.make_plan`."""
    return certify_mapping(RankMappingProblem.from_document(question.document, question.base), made)


def mapping_view(made: Plan, _catalog: Catalog, base: Path) -> MappingView:
    """The mapping to draw; ``base`` is the folder of the instance's array files."""
    return stand_alone_view(made, RankMappingProblem.from_document(made.spec, base))
