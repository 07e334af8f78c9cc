"""Documents of one step dealt out under a stored plan: what a data loader calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.lengths.balance import Assignment, balanced
from meshplan.planner.lengths.groups import MixedGroups
from meshplan.planner.lengths.queue import MOST_DELAY_STEPS, DocumentQueue
from meshplan.planner.lengths.work import Work
from meshplan.planner.training.lengths.group_costs import GroupCosts, grouped

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan


def assign_sequences(lengths: Sequence[int] | IntArray, plan: Plan, *, most_tokens: int | None = None) -> Assignment:
    """Deal the documents of one global batch out to data-parallel ranks and micro-batches.

    ``result.ranks[r][j]`` names the documents of micro-batch j of rank r by their index in ``lengths``; on a rank
    micro-batches run in this order. ``result.imbalance``, ``result.bound_s`` and ``result.gap`` say how even it is, and
    how much another assignment could gain. Needs NumPy and the plan alone: no catalog and no solver.

    Args:
        lengths: tokens of every document of the batch.
        plan: made from a spec with ``workload.sequence_lengths``, or read back by ``Plan.from_document``.
        most_tokens: of one micro-batch; None for what the plan's memory holds.

    Raises:
        SpecError: the plan says nothing of lengths, or the documents do not fit.
    """
    assignment = _assignment(plan)
    tokens = _tokens(lengths)
    work = Work.from_document(assignment["work"])
    try:
        return balanced(
            work.of(tokens),
            tokens,
            ranks=assignment["data_parallel"],
            micro_batches=assignment["num_microbatches"],
            pipeline_parallel=assignment["pipeline_parallel"],
            most_tokens=most_tokens or assignment["most_tokens"],
            fixed_s=work.fixed_s,
        )
    except ValueError as error:
        raise SpecError.at("lengths", str(error)) from error


def assign_groups(lengths: Sequence[int] | IntArray, plan: Plan) -> MixedGroups:
    """Context-parallel groups for the documents of one global batch, in place of the plan's equal ones.

    ``result.sizes[g]`` ranks of group g train ``result.documents[g]``, in as many micro-batches as they need.

    Args:
        lengths: tokens of every document of the batch.
        plan: made from a spec with ``workload.sequence_lengths``, without pipeline parallelism.

    Raises:
        SpecError: the plan says nothing of groups, or a document fits into none.
    """
    _assignment(plan)
    groups = None if plan.lengths is None else plan.lengths["groups"]
    if groups is None:
        message = "its ranks cannot be rearranged: it has a pipeline, one replica, or more than 64 ranks of both kinds"
        raise SpecError.at("plan", message)
    tokens = _tokens(lengths)
    costs = GroupCosts.from_document(groups)
    found = grouped(costs, tokens)
    if found is None:
        most = costs.ranks * costs.most_tokens
        message = f"a document of {tokens.max()} tokens fits into no group; all {costs.ranks} ranks hold {most}"
        raise SpecError.at("lengths", message)
    return found


def document_queue(plan: Plan, *, most_delay_steps: int = MOST_DELAY_STEPS) -> DocumentQueue:
    """A queue that holds long documents back until every micro-batch can have one, under a stored plan.

    Args:
        plan: as in :func:`assign_sequences`.
        most_delay_steps: a document waits no longer.

    Raises:
        SpecError: the plan says nothing of lengths.
    """
    assignment = _assignment(plan)
    return DocumentQueue(
        work=Work.from_document(assignment["work"]),
        ranks=assignment["data_parallel"],
        micro_batches=assignment["num_microbatches"],
        pipeline_parallel=assignment["pipeline_parallel"],
        window_tokens=assignment["micro_batch_tokens"],
        most_tokens=assignment["most_tokens"],
        most_delay_steps=most_delay_steps,
    )


def _assignment(plan: Plan) -> Mapping[str, Any]:
    if plan.lengths is None:
        message = "the plan was made without workload.sequence_lengths, which says what documents take; plan with it"
        raise SpecError.at("plan", message)
    found: Mapping[str, Any] = plan.lengths["assignment"]
    return found


def _tokens(lengths: Sequence[int] | IntArray) -> IntArray:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 1:
        raise SpecError.at("lengths", "must be whole numbers of tokens above 0, at least one")
    return tokens.astype(np.int64)
