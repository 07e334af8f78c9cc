"""Stages as numbers of layers of each kind, without saying which layers: what the estimator is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshplan.planner.training.estimator.candidates import StageClass


def stage_of(counts: Sequence[int], *, first: bool = False, head: bool = False, index: int = 0) -> StageClass:
    """A stage whose layers are counted by kind.

    Args:
        counts: layers of each kind.
        first: it has the embedding.
        head: it has the LM head.
        index: its place in the pipeline, which decides the micro-batches in flight.
    """
    one = tuple(int(count > 0) for count in counts)
    return StageClass(
        layers=tuple(counts),
        has_embedding=first,
        has_head=head,
        first_index=index,
        count=1,
        first_layers=(tuple(0 for _ in counts), one),
    )


def stages_of(
    counts: Sequence[Sequence[int]], *, first: bool = False, head: bool = False, index: int = 0
) -> StageClass:
    """Several stages as one: the estimator's figures are [stages, n] then.

    Each count of layers may be a column of counts, because the estimator is made of sums over layers.

    Args:
        counts: layers of each kind on each of the stages.
        first: they have the embedding.
        head: they have the LM head.
        index: their place in the pipeline.
    """
    columns: Any = tuple(np.array(kind, dtype=np.int64)[:, None] for kind in zip(*counts, strict=True))
    return replace(stage_of([1] * len(columns), first=first, head=head, index=index), layers=columns)


def unit(kind: int, kinds: int, count: int = 1) -> tuple[int, ...]:
    """``count`` layers of one of ``kinds`` kinds, and none of the others."""
    return tuple(count if index == kind else 0 for index in range(kinds))
