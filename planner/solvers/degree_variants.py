"""What choices beyond the templates make of a batch of candidates: ways to split sequences.

Such a choice stays at its default unless it is pinned or the question asks for it (``search_over``); then every
candidate to which it can apply stands there once with each value. A pin on how sequences are split counts where they
are: candidates without context parallelism stay as they are.

All-to-alls inside a ring take neighbours that share a scale-up domain, unless their number is pinned: across the
network the ring hides its exchange and the all-to-all does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshplan.planner.estimators.candidates import Candidates, ContextStyle
from meshplan.planner.problems.training import CONTEXT_PARALLEL_STYLES, TrainingProblem
from meshplan.planner.solvers.degree_templates import divisors

_RING = CONTEXT_PARALLEL_STYLES[ContextStyle.RING]
# A plain ring takes no less time than a balanced one, so that it is never searched for.
_SEARCHED_STYLES = (
    _RING,
    CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_GATHER],
    CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_TO_ALL],
    CONTEXT_PARALLEL_STYLES[ContextStyle.ALL_TO_ALL_AND_RING],
)


def variants(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch as it is, then with every other value of the choices that are asked for; rules are not asked yet."""
    styles = _styles(problem)
    if styles == (_RING,):
        yield batch
        return
    split = batch.context_parallel > 1
    yield batch if _RING in styles else batch.take(~split)
    parted = batch.take(split)
    for style in styles:
        if style == _RING or not len(parted):
            continue
        code = CONTEXT_PARALLEL_STYLES.index(style)
        named = replace(parted, context_parallel_style=np.full(len(parted), code))
        if code == ContextStyle.ALL_TO_ALL_AND_RING:
            yield from _two_dimensional(problem, named)
        else:
            yield named


def _styles(problem: TrainingProblem) -> tuple[str, ...]:
    if "context_parallel_style" in problem.fixed:
        return (str(problem.fixed["context_parallel_style"]),)
    return _SEARCHED_STYLES if "context_parallel_style" in problem.search_over else (_RING,)


def _two_dimensional(problem: TrainingProblem, batch: Candidates) -> Iterator[Candidates]:
    """The batch with every number of ranks that exchange heads inside the ring."""
    c, t = batch.context_parallel, batch.tensor_parallel
    pinned = problem.fixed.get("context_parallel_heads")
    possible = sorted({u for group in np.unique(c) for u in divisors(int(group)) if 1 < u < group})
    for heads in possible if pinned is None else [int(pinned)]:
        rows = (c % heads == 0) & (heads < c)
        if pinned is None:
            rows &= heads * t <= problem.machine.domain_size
        if rows.any():
            inside = batch.take(rows)
            yield replace(inside, context_parallel_heads=np.full(len(inside), heads))
