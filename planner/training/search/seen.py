"""What a search has looked at, for searches of its space or a part of it: ties, and "why not" something else.

*Notation.* As in :mod:`.degrees`: f is minimised. A template under a split is *seen up to* L when each of its
candidates was priced, is beyond a limit, or has a bound of f above L. A search that wants no more than f ≤ L' then
knows the best of all that is seen up to L ≥ L', and leaves it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit
from meshplan.planner.training.problem.choices import COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedBatch:
    """Candidates within all limits.

    Args:
        candidates: the batch.
        objective: f, [n].
        step_s: seconds, [n].
        safe_bytes: memory of the worst rank, bytes, [n].
    """

    candidates: Candidates
    objective: FloatArray
    step_s: FloatArray
    safe_bytes: FloatArray

    def take(self, rows: BoolArray) -> PricedBatch:
        """The candidates at ``rows``."""
        if rows.all():
            return self
        return PricedBatch(
            candidates=self.candidates.take(rows),
            objective=self.objective[rows],
            step_s=self.step_s[rows],
            safe_bytes=self.safe_bytes[rows],
        )


class Seen:
    """The candidates that a search has priced, and up to which objective its templates are seen under each split.

    Attributes:
        batches: candidates within all limits, in the order in which they were priced.
    """

    def __init__(self) -> None:
        self.batches: list[PricedBatch] = []
        self._visits: dict[int, list[tuple[IntArray, float]]] = defaultdict(list)
        self._limits: dict[int, tuple[IntArray, FloatArray]] = {}

    def visited(self, split: PipelineSplit, rows: IntArray, limit: float) -> None:
        """Remember templates that are now seen up to ``limit``, each once."""
        self._visits[id(split)].append((rows, limit))
        self._limits.pop(id(split), None)

    def part(self, splits: Sequence[PipelineSplit], choices: Mapping[str, Any] | None = None) -> Seen:
        """What was seen under some splits, with some choices; what was priced otherwise is left out."""
        part, usual = Seen(), set(map(id, splits))
        part._visits, part._limits = self._visits, self._limits
        asked = [(one, one.encode(choices[one.name])) for one in COLUMNS if choices and one.name in choices]
        for batch in self.batches:
            if id(batch.candidates.split) in usual:
                has_them = np.ones(len(batch.objective), dtype=bool)
                for one, code in asked:
                    has_them &= batch.candidates.codes(one) == code
                if has_them.any():
                    part.batches.append(batch.take(has_them))
        return part

    def up_to(self, split: PipelineSplit, rows: IntArray, limit: float) -> BoolArray:
        """Which templates are seen up to ``limit`` under a split, [n]."""
        visited, limits = self._of(split)
        if not len(visited):
            return np.zeros(len(rows), dtype=bool)
        place = np.minimum(np.searchsorted(visited, rows), len(visited) - 1)
        return (visited[place] == rows) & (limits[place] >= limit)

    def _of(self, split: PipelineSplit) -> tuple[IntArray, FloatArray]:
        """Templates that were visited under a split, ascending, and up to where each is seen."""
        key = id(split)
        if key not in self._limits:
            visits = self._visits.get(key, [])
            rows = np.concatenate([np.zeros(0, dtype=np.int64), *(rows for rows, _ in visits)])
            limits = np.concatenate([np.zeros(0), *(np.full(len(rows), limit) for rows, limit in visits)])
            order = np.argsort(rows)
            self._limits[key] = rows[order], limits[order]
        return self._limits[key]
