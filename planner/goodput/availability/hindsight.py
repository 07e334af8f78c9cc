"""The most that any policy could have made of a trace that it knew in advance.

Backward dynamic programming over the spells. A state is the number of nodes used, the time from which they run, and
whether lost work is still to be done again (:mod:`.outcome`). A change is worth making only when a spell begins, since
earlier is better for more nodes, or at the very end of a spell, before nodes go: a job that then uses fewer is hit less
often, and one that stops has lost nothing. Earlier within the spell costs f per second and gains at most the smaller f
of the fewer nodes. Which nodes go is not known in advance even here, only how many and when: the value of a spell is
the expectation over being hit or not.
"""

from __future__ import annotations

from meshplan.planner.goodput.availability.capacity import Capacity, hit_probability
from meshplan.planner.goodput.availability.trace import AvailabilityTrace


def best_in_hindsight(trace: AvailabilityTrace, capacity: Capacity) -> float:
    """Tokens of the best policy that knows when how many nodes come and go."""
    return _Hindsight(trace, capacity).start()


# A job as a spell begins: nodes used, running from (seconds), owes lost work.
_Job = tuple[int, float, bool]


class _Hindsight:
    """Values of the spells from the last to the first, by the job that reaches them.

    A job runs from now on, or from a time that changes of earlier spells have led to; it owes lost work only until
    then, unless it uses no node.
    """

    def __init__(self, trace: AvailabilityTrace, capacity: Capacity) -> None:
        changes = trace.changes()
        self.times = [float(time) for time in changes.times_s]
        self.nodes = [int(nodes) for nodes in changes.nodes]
        self.capacity = capacity
        self.choices = capacity.useful

    def start(self) -> float:
        """Value before the first spell, when no node is used."""
        later: dict[_Job, float] = {}
        hit_later = 0.0
        for spell in range(len(self.nodes) - 1, -1, -1):
            later, hit_later = self._spell(spell, later, hit_later)
        return later[0, self.times[0], False]

    def _ready_times(self, spell: int) -> list[float]:
        """When a job may run from, seen as a spell begins: now, or when a change is done, of just before or earlier."""
        now = self.times[spell]
        ready = {now, now + self.capacity.change_s}
        for before in range(spell - 1, -1, -1):
            if self.times[before] + self.capacity.forced_s <= now:
                break
            ready |= {self.times[before] + self.capacity.change_s, self.times[before] + self.capacity.forced_s}
        return sorted(time for time in ready if time >= now)

    def _spell(self, spell: int, later: dict[_Job, float], hit_later: float) -> tuple[dict[_Job, float], float]:
        """Values as the spell begins: by job, and of one that was hit."""
        now, limit = self.times[spell], self.nodes[spell]
        change_s, forced_s = self.capacity.change_s, self.capacity.forced_s
        choices = [m for m in self.choices if m <= limit]
        memo: dict[_Job, float] = {}

        def stay(job: _Job) -> float:
            """Value of using this many nodes in this spell."""
            if job not in memo:
                memo[job] = self._through(spell, job, later, hit_later)
            return memo[job]

        def begin(ready: float, owes: bool) -> float:
            """Value where each number of nodes can be had, running from ``ready``."""
            return max(stay((m, ready if m else now, owes)) for m in choices)

        idle_owing = begin(now + forced_s, True)
        found: dict[_Job, float] = {(0, now, False): begin(now + change_s, False), (0, now, True): idle_owing}
        for ready in self._ready_times(spell):
            for owes in (False, True) if ready > now else (False,):
                other = begin(max(ready, now + change_s), owes)
                for used in choices[1:]:
                    found[used, ready, owes] = max(stay((used, ready, owes)), other)
        return found, idle_owing

    def _through(self, spell: int, job: _Job, later: dict[_Job, float], hit_later: float) -> float:
        """Tokens of this spell and all later ones with the job's nodes until the spell's end, or until just before."""
        used, ready, owes = job
        now, end = self.times[spell], self.times[spell + 1]
        gained = self.capacity.rates[used] * max(0.0, end - max(now, ready)) if used else 0.0
        if spell + 1 == len(self.nodes):
            return gained
        still_owes = owes and (used == 0 or ready > end)
        changed = max(ready, end + self.capacity.change_s)
        nexts = [(used, max(ready, end) if used else end, still_owes)]
        nexts += [(m, changed if m else end, still_owes) for m in self.choices if m < used]
        return gained + max(self._after(spell, one, later, hit_later) for one in nexts)

    def _after(self, spell: int, job: _Job, later: dict[_Job, float], hit_later: float) -> float:
        """Value of the next spell for a job that reaches its beginning."""
        gone = max(0, self.nodes[spell] - self.nodes[spell + 1])
        hit = hit_probability(self.nodes[spell], job[0], gone)
        return hit * hit_later + (0.0 if hit >= 1.0 else (1.0 - hit) * later[job])
