"""Wait for a node, or go on with fewer?

Notation     T₀, T₁  wall time of one second of the old plan's training, before and on what is left (T₁ ≥ T₀)
             C       seconds to change over: restart, and moving or loading the states; it is paid there and back
             M       mean repair time

Waiting costs M seconds of a run that stands still. Going on costs 2 C seconds, and M (1 − T₀/T₁) of lost progress
meanwhile. Going on is better from the repair time on where both are equal:

    M* = 2 C / (T₀/T₁)

Assumption   the repaired node comes back into the job, and nothing else breaks meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What an operator does when nodes are lost.

    Args:
        going_on_s: seconds of progress lost by going on with fewer, over a repair of the mean length.
        waiting_s: seconds lost by waiting for it.
        from_s: repair time from which on going on is better; infinite where nothing runs on what is left.
    """

    going_on_s: float
    waiting_s: float
    from_s: float

    @property
    def goes_on(self) -> bool:
        """Whether to go on with fewer nodes at the mean repair time."""
        return self.going_on_s < self.waiting_s


def decide(*, speed: float, change_s: float, repair_s: float) -> Decision:
    """Wait for a repair, or go on.

    Args:
        speed: T₀/T₁, of the plan on what is left over the old one; 0 where there is none.
        change_s: C.
        repair_s: M.
    """
    return Decision(
        going_on_s=2.0 * change_s + repair_s * (1.0 - speed),
        waiting_s=repair_s,
        from_s=2.0 * change_s / speed if speed > 0.0 else math.inf,
    )


def join_from_s(*, speed: float, change_s: float) -> float:
    """How long further nodes must stay for joining them to pay; infinite where they do not speed the job up.

    M seconds as before train M seconds; with the nodes (M − C) · speed. Both are equal at C · speed/(speed − 1).

    Args:
        speed: of the plan with the nodes over the old one.
        change_s: C.
    """
    return change_s * speed / (speed - 1.0) if speed > 1.0 else math.inf
