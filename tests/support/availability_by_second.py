"""The most that anybody can make of a trace, second by second: the judge of hindsight on traces of whole seconds.

A job decides again in each second, whatever the trace does, and knows the whole trace but not which nodes go. What it
stands still for is counted down in seconds; whether its lost work still has to be done again is part of its state.
Nothing is shared with the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb


def best_by_second(
    times_s: Sequence[int], nodes: Sequence[int], rates: Sequence[float], *, change_s: int, forced_s: int
) -> float:
    """Progress of the best decisions, in expectation over which nodes go.

    Args:
        times_s: [spells + 1], ascending.
        nodes: [spells].
        rates: by number of nodes.
        change_s: a chosen change, at least 1.
        forced_s: a start after a hit.
    """
    present = [count for count, start, end in zip(nodes, times_s, times_s[1:], strict=False) for _ in range(start, end)]

    @lru_cache(None)
    def value(second: int, used: int, still: int, owes: bool) -> float:
        if second == len(present):
            return 0.0
        found = []
        for chosen in range(present[second] + 1):
            if chosen == 0:
                waits = 0
            elif used == 0:
                waits = forced_s if owes else change_s
            else:
                waits = still if chosen == used else max(still, change_s)
            still_owes = owes and (chosen == 0 or waits > 0)
            found.append(gained(second, chosen, waits, still_owes))
        return max(found)

    def gained(second: int, used: int, still: int, owes: bool) -> float:
        """Of this second and all later ones, with so many nodes."""
        now = rates[used] if used and still == 0 else 0.0
        if second + 1 == len(present):
            return now
        before, after = present[second], present[second + 1]
        gone = max(0, before - after)
        hit = 1.0 - comb(before - used, gone) / comb(before, gone) if gone and used else 0.0
        left = max(0, still - 1)
        later = hit * value(second + 1, 0, 0, True) if hit > 0.0 else 0.0
        if hit < 1.0:
            later += (1.0 - hit) * value(second + 1, used, left, owes and (used == 0 or left > 0))
        return now + later

    return value(0, 0, 0, False)
