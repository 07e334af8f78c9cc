"""A run event by event, with nothing of the planner's formulas: the judge of meshplan.planner.goodput.

The clock goes from event to event: the next interruption, the end of a restart, a checkpoint, the end of its upload, a
repaired node. Interruptions are Poisson while the job trains or starts; repair times may have any distribution.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Simulated:
    """One run.

    Args:
        per_s: interruptions per second.
        restart_s: from an interruption (or the return of a node) to training.
        block_s: training stands still for a checkpoint.
        durable_s: after it, until it can be restored from.
        interval_s: training between checkpoints.
        broken_share: of interruptions that break a node.
        repair: draws a repair time.
        spares: nodes that stand by.
        late_share: of interruptions with older damage.
        late_s: its age in training time.
        seed: of everything random.
    """

    per_s: float
    restart_s: float
    block_s: float
    durable_s: float
    interval_s: float
    broken_share: float = 0.0
    repair: Callable[[random.Random], float] = lambda _: 0.0
    spares: int = 0
    late_share: float = 0.0
    late_s: float = 0.0
    seed: int = 0
    _back: list[float] = field(default_factory=list)

    def wall_time(self, training_s: float) -> float:
        """Seconds until ``training_s`` of training are secured."""
        draw = random.Random(self.seed)
        clock, secured = 0.0, 0
        least = -(-training_s // self.interval_s)
        period = self.interval_s + self.block_s
        while secured < least:
            stretch = draw.expovariate(self.per_s) if self.per_s else float("inf")
            # The last secured checkpoint counts from when it lies in the store.
            wanted = (least - secured) * period + self.durable_s
            if stretch >= wanted:
                return clock + wanted
            done = 0
            while (done + 1) * period + self.durable_s <= stretch:
                done += 1
            if draw.random() < self.late_share:
                clean = (stretch - self.late_s) // period
                done = int(min(done, clean))
            secured = max(0, secured + done)
            clock = self._restart(draw, clock + stretch)
        return clock

    def _restart(self, draw: random.Random, clock: float) -> float:
        """From an interruption to training again: nodes are waited for, and what fails meanwhile starts over."""
        while True:
            if draw.random() < self.broken_share:
                while self._back and self._back[0] <= clock:
                    heapq.heappop(self._back)
                heapq.heappush(self._back, clock + self.repair(draw))
                if len(self._back) > self.spares:
                    clock = heapq.heappop(self._back)
            gap = draw.expovariate(self.per_s)
            if gap >= self.restart_s:
                return clock + self.restart_s
            clock += gap
