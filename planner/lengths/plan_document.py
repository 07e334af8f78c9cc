"""Documents of different lengths in a plan's JSON; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshplan.planner.core.plan_document import Closed, Count, Positive, Share, Text
from meshplan.planner.lengths.packing import LONGER, PACKINGS


class _Documents(Closed):
    """How long documents are, and how they lie in sequences."""

    mean: Positive
    median: Count
    p99: Count
    longest: Count
    longer_token_share: Share
    packing: Literal[PACKINGS]  # type: ignore[valid-type]  # names from the table
    longer: Literal[LONGER]  # type: ignore[valid-type]  # names from the table
    filled: Positive
    mean_context: Share


class _Way(Closed):
    """One way to deal documents out."""

    name: Text
    step_s: Positive
    low_s: Positive
    high_s: Positive
    imbalance: Positive
    gap: Share | None


class _GroupSize(Closed):
    size: Annotated[int, Field(ge=1)]
    count: Count


class _Pair(Closed):
    window: Annotated[int, Field(ge=1)] | None
    seconds: Share


class _Work(Closed):
    fixed_s: Share
    per_token_s: Share
    per_pair_s: list[_Pair]


class _WorkOfSize(Closed):
    size: Annotated[int, Field(ge=1)]
    work: _Work


class _Groups(Closed):
    """What a data loader needs to choose context-parallel groups."""

    works: Annotated[list[_WorkOfSize], Field(min_length=1)]
    heads: Positive
    head_dim: Annotated[int, Field(ge=1)]
    ranks: Annotated[int, Field(ge=1)]
    static_size: Annotated[int, Field(ge=1)]
    most_tokens: Annotated[int, Field(ge=1)]


class _Assignment(Closed):
    """What a data loader needs to deal documents out."""

    data_parallel: Annotated[int, Field(ge=1)]
    num_microbatches: Annotated[int, Field(ge=1)]
    pipeline_parallel: Annotated[int, Field(ge=1)]
    micro_batch_tokens: Annotated[int, Field(ge=1)]
    most_tokens: Annotated[int, Field(ge=1)]
    work: _Work


class LengthsDocument(Closed):
    """What :func:`meshplan.planner.training.lengths.study.lengths_document` wrote."""

    documents: _Documents
    attention_share: Share
    waiting_s: Share
    ways: list[_Way]
    groups: _Groups | None
    group_sizes: list[_GroupSize]
    assignment: _Assignment
