"""Long documents wait until there are enough of a size for every micro-batch.

A document whose attention takes longer than a whole micro-batch of short ones makes the others wait, wherever it is.
Held until every micro-batch of a step can have one of like size, it makes none wait (the outlier delay of WLB-LLM,
arXiv:2503.17924, §4.2). A step is then either

- *long*: n documents of the queue, neighbours by length, the smallest so long that, filled up with short documents to
  ``most_tokens``, it takes as long as the longest; or
- *short*: documents as they came, about ``window_tokens`` in each micro-batch.

Short documents keep their order of arrival. What a step does not take waits for the next. The document that has waited
the longest is in the next step once that is as long as said: a long one with its neighbours, a short one in a short
step.

Assumes: the order of documents may change by some steps (WLB-LLM saw no other loss with 0.5 steps on average).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.lengths.balance import Assignment, balanced
from meshplan.planner.lengths.work import Work

# Steps after which a long document is trained whatever it does to the balance.
MOST_DELAY_STEPS = 64
# A document that takes more than this share of a micro-batch of short ones is long.
LONG_SHARE = 0.85
# Work that a short step leaves below full, so that whole documents fit.
SLACK = 0.98


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A document that waits: its number, tokens, work, and the step at which it came."""

    number: int
    tokens: int
    work: float
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step trains.

    Args:
        assignment: documents by their place in ``documents``.
        documents: numbers of the documents, in order of arrival since the queue began.
        tokens: of each.
        delays: steps that each has waited.
    """

    assignment: Assignment
    documents: tuple[int, ...]
    tokens: IntArray
    delays: IntArray


@dataclass(slots=True, kw_only=True)
class DocumentQueue:
    """Documents on their way from a loader into balanced steps.

    Args:
        work: seconds of a micro-batch from its documents.
        ranks: data-parallel ranks R.
        micro_batches: m of each rank.
        pipeline_parallel: stages p.
        window_tokens: tokens of a micro-batch on average.
        most_tokens: of one micro-batch at most: what the memory holds.
        most_delay_steps: after so many steps of waiting a document is in the next one, one for each step where several
            have waited as long.
    """

    work: Work
    ranks: int
    micro_batches: int
    window_tokens: int
    most_tokens: int
    pipeline_parallel: int = 1
    most_delay_steps: int = MOST_DELAY_STEPS
    _short: deque[_Waiting] = field(default_factory=deque)
    _long: list[_Waiting] = field(default_factory=list)
    _steps: int = 0
    _count: int = 0
    _rate: float = 0.0

    @property
    def _num_micro_batches(self) -> int:
        return self.ranks * self.micro_batches

    @property
    def waiting(self) -> int:
        """Documents that have come and are not trained yet."""
        return len(self._short) + len(self._long)

    def add(self, lengths: Sequence[int] | IntArray) -> None:
        """Documents as the loader gives them.

        Raises:
            ValueError: one is empty, or longer than a micro-batch may be.
        """
        tokens = np.asarray(lengths, dtype=np.int64)
        if tokens.size == 0:
            return
        if tokens.min() < 1 or tokens.max() > self.most_tokens:
            raise ValueError(
                f"documents of {tokens.min()} to {tokens.max()} tokens; a micro-batch holds 1 to {self.most_tokens}: "
                "split longer ones first"
            )
        work = self.work.of(tokens)
        if not self._rate:  # seconds of a token in short documents, from the first batch
            usual = tokens <= np.median(tokens)
            self._rate = float(work[usual].sum() / tokens[usual].sum())
        for length, seconds in zip(tokens.tolist(), work.tolist(), strict=True):
            one = _Waiting(self._count, length, seconds, self._steps)
            self._count += 1
            (self._long if self._is_long(one) else self._short).append(one)
        self._long.sort(key=lambda waiting: waiting.work)

    def next_step(self, *, last: bool = False) -> Step | None:
        """The next step; None where nothing waits.

        Args:
            last: no more documents come: what waits is trained, balanced or not.
        """
        oldest = self._overdue()
        if oldest is None:
            chosen = self._neighbours()
            if not chosen and last:
                chosen = self._long[-self._num_micro_batches :]
        else:
            chosen = self._with_neighbours(oldest) if self._is_long(oldest) else []
        for one in chosen:
            self._long.remove(one)
        target = max((one.work for one in chosen), default=0.0) * self._num_micro_batches
        chosen = [*chosen, *self._filling(chosen, target)]
        self._steps += 1
        while chosen:
            try:
                return self._step(chosen)
            except ValueError:  # longest first found no room for all of them
                self._put_back(chosen)
        return None

    def _put_back(self, chosen: list[_Waiting]) -> None:
        """The last of the chosen documents waits again, and with it a tenth of them."""
        for _ in range(max(len(chosen) // 10, 1)):
            one = chosen.pop()
            if self._is_long(one):
                self._long.append(one)
            else:
                self._short.appendleft(one)
        self._long.sort(key=lambda waiting: waiting.work)

    def _is_long(self, one: _Waiting) -> bool:
        return one.work > LONG_SHARE * self._rate * self.window_tokens

    def _overdue(self) -> _Waiting | None:
        """The document that has waited the longest, where that is as long as any may."""
        waiting = [*self._long, *([self._short[0]] if self._short else [])]
        oldest = min(waiting, key=lambda one: (one.since, one.number), default=None)
        return oldest if oldest is not None and self._steps - oldest.since >= self.most_delay_steps else None

    def _with_neighbours(self, one: _Waiting) -> list[_Waiting]:
        """A long document, and as many that are no longer as there are micro-batches beside its own; it comes first."""
        end = max(self._long.index(one) + 1, min(self._num_micro_batches, len(self._long)))
        near = self._long[max(0, end - self._num_micro_batches) : end]
        near.remove(one)
        return [one, *near]

    def _neighbours(self) -> list[_Waiting]:
        """N long documents of like size: the longest for which this works; empty where there are none."""
        n, long = self._num_micro_batches, self._long
        for end in range(len(long), n - 1, -1):
            smallest, longest = long[end - n], long[end - 1]
            if smallest.work + (self.most_tokens - smallest.tokens) * self._rate >= longest.work:
                return long[end - n : end]
        return []

    def _filling(self, chosen: Sequence[_Waiting], target: float) -> list[_Waiting]:
        """Short documents in order of arrival: up to the work of the longest, or a window for each micro-batch."""
        n = self._num_micro_batches
        work, tokens = sum(one.work for one in chosen), sum(one.tokens for one in chosen)
        room = SLACK * n * self.most_tokens if chosen else n * self.window_tokens
        taken = []
        while self._short:
            one = self._short[0]
            if tokens + one.tokens > room or (chosen and work + one.work > target):
                break
            taken.append(self._short.popleft())
            work, tokens = work + one.work, tokens + one.tokens
        return taken

    def _step(self, chosen: Sequence[_Waiting]) -> Step:
        work: FloatArray = np.array([one.work for one in chosen])
        tokens = np.array([one.tokens for one in chosen], dtype=np.int64)
        assignment = balanced(
            work,
            tokens,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            pipeline_parallel=self.pipeline_parallel,
            most_tokens=self.most_tokens,
            fixed_s=self.work.fixed_s,
        )
        return Step(
            assignment=assignment,
            documents=tuple(one.number for one in chosen),
            tokens=tokens,
            delays=np.array([self._steps - 1 - one.since for one in chosen], dtype=np.int64),
        )
