"""What one exact enumeration reports."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.core.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The best mapping of a part of the space.

    Args:
        lines: [P, d] nodes by (stage, pipeline); None where no mapping is faster than the target.
        value_s: its time with the best rings, or the target.
        finished: whether the whole part was searched.
        work: pairs of partial mappings and extensions looked at.
    """

    lines: IntArray | None
    value_s: float
    finished: bool
    work: int
