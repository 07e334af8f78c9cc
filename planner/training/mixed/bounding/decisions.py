"""Decisions of one cell by themselves: the least over decisions of their largest bound, not the largest of the least.

A form of :mod:`.bounds` is least for a decision of its own, and no decision need be bad for every form.
Of a narrow cell few decisions are left below the best plan's step: they are listed pool by pool, as
long as each form with the least of the pools to come is below a ceiling, and each has the largest of its own forms.

    bound of a cell ≥ min over decisions of max over forms of (what the decision adds to the form + its constant)

A decision is an option and a number of layers for each pool in use, one of them with the LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.training.mixed.bounding.bounds import Choice, Field, least_convolved
from meshplan.planner.training.mixed.bounding.fills import Cells, Fill, PoolRows

# A, which alone leaves few options; then C, and B at thresholds from τ down in hundredths: B loses nothing where its
# threshold is the time of a stage, and what is a step too low loses a hundredth of τ for each micro-batch.
FIRST_FORM = (1.0, 0.0, 0.0, 1.0)
FORMS = (FIRST_FORM, (0.0, 0.0, 1.0, 1.0), *((0.0, 1.0, 0.0, 1.0 - step / 100.0) for step in range(31)))
# Where more decisions than this are left after a pool, a cell keeps the bound that it has.
MOST_DECISIONS = 5000


@dataclass(slots=True, kw_only=True)
class _Some:
    """Decisions of the first pools. Arrays over decisions.

    Args:
        left: layers that are not on a pool yet.
        needs_head: whether no pool has the LM head yet, 0 or 1.
        added_s: to each form, [decisions, forms].
        choices: of each decision.
    """

    left: IntArray
    needs_head: IntArray
    added_s: FloatArray
    choices: list[tuple[Choice, ...]]


def least_of_decisions(field: Field, cell: Cells, ceiling_s: float) -> tuple[float, tuple[Choice, ...]] | None:
    """Bound of one cell by its decisions, at most a ceiling, and the decision with the least; None where they are many.

    Args:
        field: of the cell.
        cell: one cell.
        ceiling_s: decisions with a bound of this or more are of no interest.
    """
    always_s = float(cell.least_waiting_s[0]) + field.always_s
    constants = np.array([field.constant_s(*shares, cell)[0] for shares in FORMS]) + always_s
    owns = _useful(field, cell, ceiling_s - float(constants[0]))
    added = [_added(field, own, cell, FORMS) for own in owns]
    to_come = _least_to_come(added)
    some = _Some(left=np.array([field.num_layers]), needs_head=np.array([1]), added_s=constants[None, :], choices=[()])
    for (pool, _), own, here, later in zip(field.pools, owns, added, to_come[1:], strict=True):
        longer = _with_pool(some, pool, own.rows, here, later, ceiling_s)
        if longer is None:
            return None
        some = longer
    if not len(some.left):
        return ceiling_s, ()
    bounds = some.added_s.max(axis=1)
    least = int(bounds.argmin())
    return float(bounds[least]), some.choices[least]


def _added(field: Field, own: PoolRows, cell: Cells, forms: Sequence[tuple[float, float, float, float]]) -> FloatArray:
    """What a pool adds to forms, without and with the LM head, [forms, 2, rows, L + 1]."""
    fill = Fill.of(own, cell, field.num_layers, field.num_microbatches)
    return np.stack([fill.added(field.form(*shares))[:, :, 0, :] for shares in forms])


def _useful(field: Field, cell: Cells, ceiling_s: float) -> list[PoolRows]:
    """Options of each pool with which A may stay below a ceiling, whatever the other pools do."""
    added = [_added(field, own, cell, [FIRST_FORM]) for _, own in field.pools]
    later, before, found = _least_to_come(added), _least_to_come(added[::-1])[::-1], []
    for index, ((_, own), here) in enumerate(zip(field.pools, added, strict=True)):
        others = _together(before[index], later[index + 1])[0]  # [2, L + 1]
        left = others[:, ::-1][:, None, :]  # by the layers of this pool
        least = np.minimum(here[0][0] + left[1], here[0][1] + left[0])
        found.append(own.taking((least < ceiling_s).any(axis=1)))
    return found


def _together(first: FloatArray, second: FloatArray) -> FloatArray:
    """The least of two sets of pools together, without and with the LM head, [forms, 2, L + 1]."""
    without = least_convolved(first[:, 0], second[:, 0])
    with_head = np.minimum(least_convolved(first[:, 1], second[:, 0]), least_convolved(first[:, 0], second[:, 1]))
    return np.stack([without, with_head], axis=1)


def _with_pool(
    some: _Some, pool: int, rows: IntArray, added: FloatArray, later: FloatArray, ceiling_s: float
) -> _Some | None:
    """The decisions with one pool more, those that stay below the ceiling in every form.

    Args:
        some: decisions so far.
        pool: the next one.
        rows: its options.
        added: by it, [forms, 2, rows, L + 1].
        later: least that the pools after it add, [forms, 2, L + 1].
        ceiling_s: see above.
    """
    head, row, layers = np.nonzero(np.isfinite(added[0]) & (np.arange(added.shape[-1]) > 0))
    own = np.vstack([np.zeros((1, len(added))), added[:, head, row, layers].T])
    # The first choice leaves the pool out.
    head, row, layers = (np.concatenate([[zero], of]) for zero, of in ((0, head), (-1, row), (0, layers)))
    before, taken = [], []
    for index, (left, needs) in enumerate(zip(some.left.tolist(), some.needs_head.tolist(), strict=True)):
        legal = np.flatnonzero((layers <= left) & (head <= needs))
        least = some.added_s[index] + own[legal] + later[:, needs - head[legal], left - layers[legal]].T
        legal = legal[(least < ceiling_s).all(axis=1)]
        before += [index] * len(legal)
        taken += legal.tolist()
        if len(taken) > MOST_DECISIONS:
            return None
    at, of = np.array(before, dtype=np.int64), np.array(taken, dtype=np.int64)
    return _Some(
        left=some.left[at] - layers[of],
        needs_head=some.needs_head[at] - head[of],
        added_s=some.added_s[at] + own[of],
        choices=[
            some.choices[index] + _choice(pool, rows, int(row[one]), int(layers[one]))
            for index, one in zip(before, taken, strict=True)
        ],
    )


def _choice(pool: int, rows: IntArray, row: int, layers: int) -> tuple[Choice, ...]:
    return (Choice(pool=pool, row=int(rows[row]), layers=layers),) if layers else ()


def _least_to_come(added: Sequence[FloatArray]) -> list[FloatArray]:
    """What the pools from each one on add at least, without and with the LM head, [forms, 2, L + 1] each."""
    nothing = np.full((len(added[0]), 2, added[0].shape[-1]), np.inf)
    nothing[:, 0, 0] = 0.0
    found = [nothing]
    for here in reversed(added):
        least = here.min(axis=2, initial=np.inf)
        least[:, 0, 0] = 0.0
        found.insert(0, _together(found[0], least))
    return found
