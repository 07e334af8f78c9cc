"""Which number of nodes to use, from what the availability did until now.

Model. The nodes available jump by Δ, of either sign. Just after a jump the next one is likelier than later (nodes come
and go in groups), so the rate is λ₀ while it is *fresh* and λ₁ once it has *settled*, W seconds after the last jump.
Rates, sizes and directions are counted along the trace, directions by the number of nodes they started from, so that a
full cluster is expected to lose nodes and an empty one to gain some.

With these, using m of n nodes has a value v(n, m, z), the expected progress from now on, discounted per jump (z: fresh
or settled). Value iteration solves

    v(n, m, z) = [f(m) + [z fresh] d(n, m, settled)/W + λ_z Σ_Δ p(Δ | n) next(n + Δ)] / (λ_z + [z fresh]/W + λ_z δ)
    d(n, m, z) = max{v(n, m, z), max_a v(n, a, z) − C f(a)}
    next       = d, or after a hit max_a v(n + Δ, a, fresh) − L f(a)

The policy then compares v of all a ≤ n less what the change really costs now: a job that stands still already for an
earlier change loses only what its new start takes longer, and one that stood still since a hit pays L. In v a job
without nodes pays C: that it may owe lost work is left out there.

Source       Markov decision processes (Puterman 1994, ch. 11, semi-Markov); the expected effect of nodes that go while
             others stand by is the "liveput" of Parcae (Duan et al., NSDI 2024), which forecasts the number of nodes
             by ARIMA and plans some minutes ahead instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.goodput.availability.capacity import Capacity, hit_probability
from meshplan.planner.goodput.availability.outcome import Seen

FRESH, SETTLED = 0, 1
# Discount per jump: what is more than about twenty jumps away is not planned for. Jumps until v is known to 2 %, and
# where it is known for nearly the same counts already.
_DISCOUNT, _ROUNDS, _MORE_ROUNDS = 0.05, 80, 25
# Before anything was seen: as if two jumps had been, one node up and one down, an hour apart (assumed).
_ASSUMED_JUMPS, _ASSUMED_S = 2.0, 3600.0
# Directions are counted over neighbouring numbers of nodes, within this share of the cluster.
_NEIGHBOURS = 0.15
# Values are worked out again when the jumps seen have grown by this factor.
_AGAIN = 1.25
# The policy waits for so many times C before it calls the nodes settled.
_WAIT_IN_CHANGES = 1.0


@dataclass(slots=True)
class _Counted:
    """Jumps and the time that they were waited for, while fresh and while settled."""

    jumps: FloatArray = field(default_factory=lambda: np.full(2, 0.5 * _ASSUMED_JUMPS))
    seconds: FloatArray = field(default_factory=lambda: np.full(2, 0.5 * _ASSUMED_JUMPS * _ASSUMED_S))

    def waited(self, seconds: float, wait_s: float, *, jumped: bool) -> None:
        """A spell of so many seconds, and whether a jump ended it."""
        self.seconds += (min(seconds, wait_s), max(0.0, seconds - wait_s))
        self.jumps[SETTLED if seconds > wait_s else FRESH] += jumped


class LearnedPolicy:
    """The policy of this module's text; it learns from :meth:`saw`.

    Args:
        capacity: of the job.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.wait_s = max(1.0, _WAIT_IN_CHANGES * capacity.change_s)
        self._counted = _Counted()
        self._from: list[tuple[int, int]] = []
        self._sizes: dict[int, float] = {-1: 0.5 * _ASSUMED_JUMPS, 1: 0.5 * _ASSUMED_JUMPS}
        self._last: tuple[float, int] | None = None
        self._solved_at = 0.0
        self._value: FloatArray | None = None

    def saw(self, time_s: float, nodes: int) -> None:
        """The nodes available are these from now on."""
        nodes = min(nodes, self.capacity.most)
        if self._last is not None:
            since, before = self._last
            if nodes == before:
                return
            self._counted.waited(time_s - since, self.wait_s, jumped=True)
            self._from.append((before, nodes - before))
            self._sizes[nodes - before] = self._sizes.get(nodes - before, 0.0) + 1.0
        self._last = (time_s, nodes)

    def choose(self, seen: Seen) -> int:
        """Nodes to use."""
        nodes = min(seen.nodes, self.capacity.most)
        phase = SETTLED if seen.is_settled else FRESH
        values = self._values()[phase, nodes, : nodes + 1]
        rates = np.asarray(self.capacity.rates[: nodes + 1])
        if seen.was_hit or (seen.owes and not seen.used):
            cost_s = self.capacity.forced_s
        else:
            starts = max(seen.ready_s, seen.time_s + self.capacity.change_s)
            cost_s = starts - (max(seen.ready_s, seen.time_s) if seen.used else seen.time_s)
        worth = values - cost_s * rates
        if not seen.was_hit and seen.used <= nodes:
            worth[seen.used] = values[seen.used]
        if rates.any():
            # A start that is cut short makes nothing, and costs nothing that standing still would have made: v charges
            # C f for it even where the next jump is expected sooner than C.
            worth[rates <= 0.0] = -np.inf
        best = int(np.argmax(worth))
        keeps = not seen.was_hit and seen.used <= nodes and worth[seen.used] >= worth[best]
        return seen.used if keeps else best

    def _values(self) -> FloatArray:
        """Values v by phase, nodes available and nodes used; made anew when enough more was seen."""
        jumps = len(self._from) + _ASSUMED_JUMPS
        if self._value is None or jumps >= _AGAIN * self._solved_at:
            self._value = _solve(self.capacity, self.wait_s, self._rates(), *self._jumps(), start=self._value)
            self._solved_at = jumps
        return self._value

    def _rates(self) -> FloatArray:
        """λ₀, λ₁ per second."""
        return self._counted.jumps / self._counted.seconds

    def _jumps(self) -> tuple[IntArray, FloatArray]:
        """Sizes Δ, and p(Δ | n): [most + 1, sizes]."""
        most = self.capacity.most
        sizes = np.array(sorted(self._sizes))
        weights = np.array([self._sizes[size] for size in sizes])
        numbers = np.arange(most + 1)
        near = max(1.0, _NEIGHBOURS * most)
        ups = np.ones(most + 1)
        downs = np.ones(most + 1)
        for start, jump in self._from:
            kernel = np.maximum(0.0, 1.0 - np.abs(numbers - start) / near)
            if jump > 0:
                ups += kernel
            else:
                downs += kernel
        up = np.where(numbers == 0, 1.0, np.where(numbers == most, 0.0, ups / (ups + downs)))
        is_up = sizes > 0
        chances = np.where(
            is_up, up[:, None] * weights / weights[is_up].sum(), (1.0 - up[:, None]) * weights / weights[~is_up].sum()
        )
        return sizes, chances


def _solve(
    capacity: Capacity,
    wait_s: float,
    rates: FloatArray,
    sizes: IntArray,
    chances: FloatArray,
    *,
    start: FloatArray | None,
) -> FloatArray:
    """v, [2, most + 1, most + 1], by value iteration; −∞ where more nodes are used than available.

    Args:
        capacity: f, C, L.
        wait_s: W.
        rates: λ₀, λ₁.
        sizes: Δ.
        chances: p(Δ | n), [most + 1, sizes].
        start: v to begin with.
    """
    most = capacity.most
    progress = np.asarray(capacity.rates)
    numbers = np.arange(most + 1)
    allowed = numbers[None, :] <= numbers[:, None]
    value = np.zeros((2, most + 1, most + 1)) if start is None else start
    targets = np.clip(numbers[:, None] + sizes[None, :], 0, most)
    hits = _hits(most, targets)
    leave = np.array([rates[FRESH] * (1.0 + _DISCOUNT) + 1.0 / wait_s, rates[SETTLED] * (1.0 + _DISCOUNT)])
    for _ in range(_ROUNDS if start is None else _MORE_ROUNDS):
        value = np.where(allowed, value, -np.inf)
        changed = (value - capacity.change_s * progress).max(axis=2, keepdims=True)
        decided = np.where(allowed, np.maximum(value, changed), -np.inf)
        after_hit = (value[FRESH] - capacity.forced_s * progress).max(axis=1)
        safe = np.where(hits < 1.0, decided[FRESH][targets], 0.0)
        jump = ((1.0 - hits) * np.where(hits < 1.0, safe, 0.0) + hits * after_hit[targets][:, :, None]) * chances[
            :, :, None
        ]
        expected = np.where(allowed, jump.sum(axis=1), 0.0)
        settles = np.where(allowed, decided[SETTLED], 0.0) / wait_s
        fresh = (progress + settles + rates[FRESH] * expected) / leave[FRESH]
        settled = (progress + rates[SETTLED] * expected) / leave[SETTLED]
        value = np.stack([fresh, settled])
    return np.where(allowed, value, -np.inf)


def _hits(most: int, targets: IntArray) -> FloatArray:
    """P(hit) of a job of m nodes as n nodes become the target, [n, sizes, m]; 1 where m is above n."""
    hits = np.ones((*targets.shape, most + 1))
    for n in range(most + 1):
        for size, target in enumerate(targets[n]):
            for m in range(n + 1):
                hits[n, size, m] = hit_probability(n, m, n - int(target))
    return hits
