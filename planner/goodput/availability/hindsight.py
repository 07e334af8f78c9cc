"""The most that any policy could have made of a trace that it knew in advance.

Backward dynamic programming over the spells. A state is the number of nodes used and the time from which they run; a
change is worth making only when a spell begins, since earlier is better for more nodes, or at the very end of a spell,
before nodes go: a job that then uses fewer is hit less often. Earlier within the spell costs f per second and gains at
most the smaller f of the fewer nodes. Which nodes go is not known in advance even here, only how many and when: the
value of a spell is the expectation over being hit or not.
"""

from __future__ import annotations

from meshplan.planner.goodput.availability.capacity import Capacity, hit_probability
from meshplan.planner.goodput.availability.trace import AvailabilityTrace


def best_in_hindsight(trace: AvailabilityTrace, capacity: Capacity) -> float:
    """Tokens of the best policy that knows when how many nodes come and go."""
    return _Hindsight(trace, capacity).start()


class _Hindsight:
    """Values of the spells from the last to the first.

    ``value[m]`` lists (running from, value) for jobs of m nodes as a spell begins; "running from" is 0 where the job
    runs already, else the times that changes of earlier spells can have led to.
    """

    def __init__(self, trace: AvailabilityTrace, capacity: Capacity) -> None:
        changes = trace.changes()
        self.times = [float(time) for time in changes.times_s]
        self.nodes = [int(nodes) for nodes in changes.nodes]
        self.capacity = capacity
        self.choices = capacity.useful

    def start(self) -> float:
        """Value before the first spell, when no node is used."""
        later: dict[tuple[int, float], float] = {}
        hit_later = 0.0
        for spell in range(len(self.nodes) - 1, -1, -1):
            later, hit_later = self._spell(spell, later, hit_later)
        return later[0, self.times[0]]

    def _ready_times(self, spell: int) -> list[float]:
        """When a job may run from, seen as a spell begins: now, or when a change is done, of just before or earlier."""
        now = self.times[spell]
        ready = {now, now + self.capacity.change_s}
        for before in range(spell - 1, -1, -1):
            if self.times[before] + self.capacity.forced_s <= now:
                break
            ready |= {self.times[before] + self.capacity.change_s, self.times[before] + self.capacity.forced_s}
        return sorted(time for time in ready if time >= now)

    def _spell(
        self, spell: int, later: dict[tuple[int, float], float], hit_later: float
    ) -> tuple[dict[tuple[int, float], float], float]:
        """Values as the spell begins: by (nodes used, running from), and of a job that was hit."""
        now, limit = self.times[spell], self.nodes[spell]
        change_s, forced_s = self.capacity.change_s, self.capacity.forced_s
        choices = [m for m in self.choices if m <= limit]
        memo: dict[tuple[int, float], float] = {}

        def stay(used: int, ready: float) -> float:
            """Value of using this many nodes in this spell."""
            if (used, ready) not in memo:
                memo[used, ready] = self._through(spell, used, ready, later, hit_later)
            return memo[used, ready]

        def begin(ready_after_change: float) -> float:
            return max(stay(m, now if m == 0 else ready_after_change) for m in choices)

        found: dict[tuple[int, float], float] = {}
        for ready in self._ready_times(spell):
            other = begin(max(ready, now + change_s))
            for used in choices:
                if used or ready == now:
                    found[used, ready] = max(stay(used, ready), other)
        return found, begin(now + forced_s)

    def _through(
        self, spell: int, used: int, ready: float, later: dict[tuple[int, float], float], hit_later: float
    ) -> float:
        """Tokens of this spell and all later ones with ``used`` nodes until its end, or until just before."""
        now, end = self.times[spell], self.times[spell + 1]
        gained = self.capacity.rates[used] * max(0.0, end - max(now, ready)) if used else 0.0
        if spell + 1 == len(self.nodes):
            return gained
        changed = max(ready, end + self.capacity.change_s)
        nexts = [(used, max(ready, end) if used else end)]
        nexts += [(m, changed if m else end) for m in self.choices if m < used]
        return gained + max(self._after(spell, m, at, later, hit_later) for m, at in nexts)

    def _after(
        self, spell: int, used: int, ready: float, later: dict[tuple[int, float], float], hit_later: float
    ) -> float:
        """Value of the next spell for a job that reaches its beginning with so many nodes."""
        gone = max(0, self.nodes[spell] - self.nodes[spell + 1])
        hit = hit_probability(self.nodes[spell], used, gone)
        safe = 0.0 if hit >= 1.0 else later[used, ready]
        return hit * hit_later + (1.0 - hit) * safe
