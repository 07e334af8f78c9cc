"""Throughputs by number of nodes, and the two ways of Parcae to use nodes that come and go."""

from __future__ import annotations

import numpy as np

from meshplan.planner.goodput.availability.capacity import Capacity, hit_probability
from meshplan.planner.goodput.availability.outcome import Seen

# Samples per second of a GPT of 1.5 B parameters by V100 nodes, the best division for each number: JF-D/Parcae (MIT),
# liveput/cost.py, as profiled; fewer than six nodes do not hold it.
PARCAE_RATES = {
    6: 14.485, 7: 17.225, 8: 17.307, 9: 19.327, 10: 21.605, 11: 21.83, 12: 24.236, 14: 28.316, 16: 29.484, 18: 32.053,
    20: 35.133, 21: 35.698, 22: 35.98, 24: 36.827, 26: 40.732, 27: 40.732, 28: 40.275, 30: 41.499, 32: 43.468,
}  # fmt: skip
# Seconds to restart on 8 to 32 nodes, profiled there (37 to 43 s).
PARCAE_RESTART_S = 40.0
MINUTE = 60.0
HISTORY, AHEAD, MOST_STEP = 12, 10, 3


def stretched(known: dict[int, float], most: int) -> tuple[float, ...]:
    """The rates of 32 nodes at as many as there are: n nodes are n · 32/most of them; one node runs where most is 1."""
    best = np.maximum.accumulate([known.get(n, 0.0) for n in range(33)])
    return tuple(float(np.interp(n * 32 / most, np.arange(33), best)) for n in range(most + 1))


class Reactive:
    """Every node as soon as it is there."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity, self.wait_s = capacity, 1e12

    def saw(self, time_s: float, nodes: int) -> None:
        pass

    def choose(self, seen: Seen) -> int:
        best = max(range(seen.nodes + 1), key=lambda m: (self.capacity.rates[m], -m))
        if not seen.was_hit and seen.used and self.capacity.rates[best] == self.capacity.rates[seen.used]:
            return seen.used
        return best


class Liveput:
    """ARIMA(1, 1, 0) of the last minutes, then the best numbers of nodes for the next ones.

    Parcae decides each minute; here it decides at each change and a minute after it, which is when its forecast or
    its plan changes.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity, self.wait_s = capacity, MINUTE
        self.history: list[tuple[float, int]] = []

    def saw(self, time_s: float, nodes: int) -> None:
        self.history.append((time_s, nodes))

    def choose(self, seen: Seen) -> int:
        return self._plan(seen, self._forecast(seen.time_s))

    def _forecast(self, now: float) -> list[int]:
        """Nodes in each of the next minutes."""
        past = [self._at(now - MINUTE * back) for back in range(HISTORY - 1, -1, -1)]
        steps = np.diff(past).astype(float)
        level = float(past[-1])
        if not steps.any():
            return [int(level)] * AHEAD
        weight = float(steps[1:] @ steps[:-1]) / max(float(steps[:-1] @ steps[:-1]), 1e-9)
        weight, step, found = max(-0.99, min(0.99, weight)), float(steps[-1]), []
        for _ in range(AHEAD):
            step *= weight
            level += step
            capped = min(max(level, past[-1] - MOST_STEP), past[-1] + MOST_STEP, self.capacity.most)
            found.append(round(max(0.0, capped)))
        return found

    def _at(self, time_s: float) -> int:
        found = self.history[0][1]
        for when, nodes in self.history:
            if when > time_s + 1e-6:
                break
            found = nodes
        return found

    def _plan(self, seen: Seen, ahead: list[int]) -> int:
        """The first of the best numbers of nodes over the minutes ahead, by backward induction."""
        rates, most = np.asarray(self.capacity.rates), self.capacity.most
        change = min(self.capacity.change_s, MINUTE * AHEAD)
        value = np.zeros(most + 1)
        levels = [seen.nodes, *ahead]
        for minute in range(AHEAD - 1, -1, -1):
            now, then = levels[minute], levels[minute + 1]
            gone = max(0, now - then)
            allowed = np.arange(most + 1) <= now
            fresh = np.where(np.arange(most + 1) <= then, value - change * rates, -np.inf).max()
            hits = np.array([hit_probability(now, m, gone) if m <= now else 1.0 for m in range(most + 1)])
            stays = np.maximum(np.where(np.arange(most + 1) <= then, value, -np.inf), fresh)
            later = hits * fresh + (1.0 - hits) * np.where(hits < 1.0, stays, 0.0)
            value = np.where(allowed, rates * MINUTE + later, -np.inf)
        worth = value - change * rates
        if not seen.was_hit and seen.used <= seen.nodes:
            worth[seen.used] = value[seen.used]
        return int(np.argmax(worth[: seen.nodes + 1]))
