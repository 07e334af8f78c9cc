"""State of the local search: K rank mappings, and the energies of whole neighbourhoods of them.

Each of the three kinds of move of :class:`MappingStates` is a pair of methods: one computes the energies of many
candidates for all mappings in one NumPy pass, the other applies one chosen candidate in some of the mappings.
Candidate energies are computed from differences; changed mappings are then summed afresh, so that rounding errors do
not accumulate.

The energy replaces both maxima of the objective by p-norms (:mod:`.annealing`): it also depends on the second-slowest
pipeline and on the number of slow ring links.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.annealing import TINY, raised, rooted
from meshplan.planner.rank_mapping.objective import LinkCosts

# Powers of link costs are kept below 10^250, so that the sum of all of them stays a finite double.
MAX_POWER_DECADES = 250.0


class MappingStates:
    """K mappings; cell q·d + r is stage q of pipeline r, ring cell q·d + i is position i in the ring of stage q.

    A dummy node n before the first and behind the last stage costs nothing to reach.

    Args:
        costs: link costs, seconds.
        lines: [K, P, d] node of each (stage, pipeline).
        rings: [K, P, d] nodes of each stage in ring order.
        ring_scale_s: a ring time near the best one; powers are taken of link cost / ring_scale_s.
    """

    def __init__(self, costs: LinkCosts, lines: IntArray, rings: IntArray, *, ring_scale_s: float) -> None:
        self.costs = costs
        num_chains, self.stages, self.pipelines = lines.shape
        self.num_nodes = costs.num_nodes
        self._allocate(lines.reshape(num_chains, -1).copy(), rings.reshape(num_chains, -1).copy())
        self._hop_s = np.pad(costs.hop_s, (0, 1))
        self._cells = np.arange(self.num_nodes)
        self._ring_scale_s = ring_scale_s if ring_scale_s > 0.0 else 1.0
        start, along = self._cells - self._cells % self.pipelines, self._cells % self.pipelines
        self._next_cell = start + (along + 1) % self.pipelines
        self._cell_before = start + (along - 1) % self.pipelines
        self.set_exponent(1)

    def set_exponent(self, doublings: int) -> None:
        """Use the norm with p = 2**doublings."""
        self._doublings = doublings
        self._max_ratio = 10.0 ** (MAX_POWER_DECADES / 2.0**doublings)
        self._power = self._raised(self.costs.ring_s / self._ring_scale_s)
        self._power_into = np.ascontiguousarray(self._power.T)
        self._refresh(np.arange(self.num_chains))

    def _allocate(self, lines: IntArray, rings: IntArray) -> None:
        """Allocate the mappings [K, n] and the arrays derived from them, which :meth:`_refresh` fills."""
        self.num_chains = len(lines)
        self.lines, self.rings = lines, rings
        self.line_cell, self.ring_cell = np.empty_like(lines), np.empty_like(rings)
        self.pipeline_s = np.empty((self.num_chains, self.pipelines))
        self.link_power = np.empty((self.num_chains, self.num_nodes))
        self.ring_power, self.pipeline_power, self.slowest_s, self.energy_s, self.objective_s = (
            np.empty(self.num_chains) for _ in range(5)
        )

    @property
    def solutions(self) -> tuple[IntArray, ...]:
        """Lines and rings, [K, n] each."""
        return self.lines, self.rings

    def keep_chains(self, kept: IntArray) -> None:
        """Keep only these chains."""
        self._allocate(self.lines[kept], self.rings[kept])
        self._refresh(np.arange(self.num_chains))

    def copy_chains(self, target: IntArray, source: IntArray) -> None:
        """Overwrite the chains ``target`` by the chains ``source``."""
        self.lines[target], self.rings[target] = self.lines[source], self.rings[source]
        self._refresh(target)

    # --- exchange of two nodes -------------------------------------------------------------------------------------

    def exchange_energies_s(self, first: IntArray, second: IntArray) -> FloatArray:
        """[K, m, c] energies if a node of ``first`` and one of ``second`` were exchanged; ∞ where they are the same.

        Each takes the other's pipeline cell. In different stages each also enters the other's ring where it adds the
        least power to the remaining nodes o₁ … o_{d−1}: power(oᵢ, new) + power(new, oᵢ₊₁) − power(oᵢ, oᵢ₊₁).

        Args:
            first: [K, m] nodes.
            second: [c] nodes, the same for all mappings.
        """
        chain = np.arange(self.num_chains)[:, None]
        cell, partner_cell = self.line_cell[chain, first], self.line_cell[chain, second]
        power = np.broadcast_to(self.ring_power[:, None, None], (*first.shape, len(second)))
        if self.pipelines > 1:
            same_stage = (cell // self.pipelines)[:, :, None] == (partner_cell // self.pipelines)[:, None, :]
            rise = self._rise_at_first(first, second) + self._rise_at_second(first, second)
            power = np.maximum(power + np.where(same_stage, 0.0, rise), TINY)
        energies = self._ring_scale_s * self._root(power)
        if self.stages > 1:
            energies = energies + self._pipelines_after_exchange_s(first, second, cell, partner_cell)
        return np.where(first[:, :, None] == second, np.inf, energies)

    def exchange(self, chains: IntArray, first: IntArray, second: IntArray) -> None:
        """Exchange two nodes in each of some mappings.

        Args:
            chains: [k] mappings.
            first: [k] nodes.
            second: [k] nodes, each different from the first.
        """
        cell, partner_cell = self.line_cell[chains, first], self.line_cell[chains, second]
        self.lines[chains, cell], self.lines[chains, partner_cell] = second, first
        differ = np.flatnonzero(cell // self.pipelines != partner_cell // self.pipelines)
        for leaving, entering in ((first, second), (second, first)):
            self._replace_in_ring(chains[differ], leaving[differ], entering[differ])
        self._refresh(chains)

    def _rise_at_first(self, first: IntArray, second: IntArray) -> FloatArray:
        """[K, m, c] change of power of the ring of each first node if a second node replaces it."""
        others, following = self._others(np.arange(self.num_chains)[:, None], first)
        between = self._power[others, following]
        gone = self._power[others[..., -1], first] + self._power[first, others[..., 0]] - between[..., -1]
        everybody = len(second) == self.num_nodes
        out_of = self._power if everybody else self._power[:, second]
        into = self._power_into if everybody else self._power_into[:, second]
        least = np.full((*first.shape, len(second)), np.inf)
        for place in range(self.pipelines - 1):
            harm = out_of[others[..., place]] + into[following[..., place]]
            np.minimum(least, harm - between[..., place, None], out=least)
        return np.asarray(least - gone[..., None])

    def _rise_at_second(self, first: IntArray, second: IntArray) -> FloatArray:
        """[K, m, c] change of power of the ring of each second node if a first node replaces it."""
        chain, size = np.arange(self.num_chains)[:, None], self.pipelines
        from_ring = self._power_into[first[:, :, None], self.rings[:, None, :]]
        to_ring = self._power[first[:, :, None], self.rings[:, None, :]]
        skipped = self._power[self.rings[:, self._cell_before], self.rings[:, self._next_cell]]
        gone = self.link_power[:, self._cell_before] + self.link_power - skipped
        harm = from_ring + to_ring[..., self._next_cell] - self.link_power[:, None, :]
        instead = from_ring[..., self._cell_before] + to_ring[..., self._next_cell] - skipped[:, None, :]
        elsewhere = _least_of_the_others(harm.reshape(*first.shape, self.stages, size)).reshape(harm.shape)
        rise = np.minimum(instead, elsewhere) - gone[:, None, :]
        return np.asarray(np.take_along_axis(rise, self.ring_cell[chain, second][:, None, :], axis=2))

    def _pipelines_after_exchange_s(
        self, first: IntArray, second: IntArray, cell: IntArray, partner_cell: IntArray
    ) -> FloatArray:
        """[K, m, c] norm of the pipeline times after the exchange."""
        chain = np.arange(self.num_chains)[:, None]
        before, after = self._neighbours()
        here, there = (
            (before[chain, cell], after[chain, cell]),
            (before[chain, partner_cell], after[chain, partner_cell]),
        )
        node, other = first[:, :, None], second[None, None, :]
        hop_to = self._hop_s[:, second]
        rise = hop_to[here[0]] + hop_to[here[1]]
        rise -= (self._hop_s[here[0], first] + self._hop_s[here[1], first])[..., None]
        partner_rise = self._hop_s[node, there[0][:, None]] + self._hop_s[node, there[1][:, None]]
        partner_rise -= (self._hop_s[there[0], second] + self._hop_s[there[1], second])[:, None]
        pipeline, partner_pipeline = cell % self.pipelines, partner_cell % self.pipelines
        same = pipeline[:, :, None] == partner_pipeline[:, None, :]
        # Neighbours keep the hop between them, which both rises count as gone.
        kept = np.where((here[0][..., None] == other) | (here[1][..., None] == other), 2.0 * hop_to[first], 0.0)
        now, partner_now = (
            self.pipeline_s[chain, pipeline][..., None],
            self.pipeline_s[chain, partner_pipeline][:, None],
        )
        slowest = self.slowest_s[:, None, None]
        new = self._raised((now + rise + np.where(same, partner_rise + kept, 0.0)) / slowest)
        change = new - self._raised(now / slowest)
        partner_change = self._raised((partner_now + partner_rise) / slowest) - self._raised(partner_now / slowest)
        power = self.pipeline_power[:, None, None] + change + np.where(same, 0.0, partner_change)
        return np.asarray(slowest * self._root(np.maximum(power, TINY)))

    def _others(self, chains: IntArray, nodes: IntArray) -> tuple[IntArray, IntArray]:
        """[…, d − 1] the other nodes of a node's ring, from its successor on, and the successors of each among them."""
        cell = self.ring_cell[chains, nodes][..., None]
        start = cell - cell % self.pipelines
        turned = start + (cell - start + np.arange(1, self.pipelines)) % self.pipelines
        others = self.rings[chains[..., None], turned]
        return others, np.roll(others, -1, axis=-1)

    def _replace_in_ring(self, chains: IntArray, leaving: IntArray, entering: IntArray) -> None:
        if self.pipelines == 1:
            self.rings[chains, self.ring_cell[chains, leaving]] = entering
            return
        others, following = self._others(chains, leaving)
        node = entering[:, None]
        harm = self._power[others, node] + self._power[node, following] - self._power[others, following]
        turned = (harm.argmin(axis=1)[:, None] + 1 + np.arange(self.pipelines - 1)) % (self.pipelines - 1)
        ring = np.concatenate([node, np.take_along_axis(others, turned, axis=1)], axis=1)
        start = self.ring_cell[chains, leaving] // self.pipelines * self.pipelines
        self.rings[chains[:, None], start[:, None] + np.arange(self.pipelines)] = ring

    # --- exchange of segments of two pipelines ---------------------------------------------------------------------

    def segment_energies_s(self, first: IntArray, second: IntArray, start: IntArray, stop: IntArray) -> FloatArray:
        """[K, m] energies if two pipelines exchanged their nodes of stages start … stop − 1. No ring changes.

        Args:
            first: [K, m] pipelines.
            second: [K, m] pipelines, each different from the first.
            start: [K, m] first stage of the segment.
            stop: [K, m] stage after the segment, at most P.
        """
        chain, size = np.arange(self.num_chains)[:, None], self.pipelines
        padded = self._padded_lines()
        hops = self._hop_s[padded[:, :-1], padded[:, 1:]]
        upto = np.concatenate([np.zeros((self.num_chains, 1, size)), hops.cumsum(axis=1)], axis=1)
        now = [self.pipeline_s[chain, pipeline] for pipeline in (first, second)]
        inside = [upto[chain, stop, pipeline] - upto[chain, start + 1, pipeline] for pipeline in (first, second)]
        nodes = [
            [padded[chain, stage, pipeline] for stage in (start, start + 1, stop, stop + 1)]
            for pipeline in (first, second)
        ]
        slowest = self.slowest_s[:, None]
        power = self.pipeline_power[:, None]
        for own, other in ((0, 1), (1, 0)):
            joints = self._hop_s[nodes[own][0], nodes[own][1]] + self._hop_s[nodes[own][2], nodes[own][3]]
            seams = self._hop_s[nodes[own][0], nodes[other][1]] + self._hop_s[nodes[other][2], nodes[own][3]]
            new = now[own] - inside[own] - joints + inside[other] + seams
            power = power + self._raised(new / slowest) - self._raised(now[own] / slowest)
        ring_s = self._ring_scale_s * self._root(self.ring_power)
        return np.asarray(ring_s[:, None] + slowest * self._root(np.maximum(power, TINY)))

    def exchange_segments(
        self, chains: IntArray, first: IntArray, second: IntArray, start: IntArray, stop: IntArray
    ) -> None:
        """Exchange segments of two pipelines in each of some mappings; all arguments [k]."""
        stage = np.arange(self.stages)
        inside = (stage >= start[:, None]) & (stage < stop[:, None])
        cells = stage * self.pipelines + first[:, None], stage * self.pipelines + second[:, None]
        row = chains[:, None]
        old = self.lines[row, cells[0]], self.lines[row, cells[1]]
        self.lines[row, cells[0]] = np.where(inside, old[1], old[0])
        self.lines[row, cells[1]] = np.where(inside, old[0], old[1])
        self._refresh(chains)

    # --- exchange of neighbouring runs of a ring -------------------------------------------------------------------

    def ring_run_energies_s(self, stage: IntArray, cuts: IntArray) -> FloatArray:
        """[K, m] energies if two neighbouring runs of a ring were exchanged.

        No run is reversed, because links are directed: this is or-opt for short runs and 3-opt for long ones. Three
        links are replaced.

        Args:
            stage: [K, m] stage of the ring.
            cuts: [3, K, m] sorted positions a ≤ b ≤ c: the runs a … b − 1 and b … c − 1 are exchanged.
        """
        chain, size = np.arange(self.num_chains)[:, None], self.pipelines
        ahead = [self.rings[chain, stage * size + (cut - 1) % size] for cut in cuts]
        behind = [self.rings[chain, stage * size + cut % size] for cut in cuts]
        change = -sum(self._power[ahead[cut], behind[cut]] for cut in range(3))
        change = change + self._power[ahead[0], behind[1]] + self._power[ahead[2], behind[0]]
        change = change + self._power[ahead[1], behind[2]]
        # Fewer than three different cuts (0 and d are the same one) exchange nothing.
        moves = (cuts[0] < cuts[1]) & (cuts[1] < cuts[2]) & (cuts[2] - cuts[0] < size)
        power = np.maximum(self.ring_power[:, None] + np.where(moves, change, 0.0), TINY)
        pipeline_s = self.slowest_s * self._root(self.pipeline_power)
        return np.asarray(pipeline_s[:, None] + self._ring_scale_s * self._root(power))

    def exchange_ring_runs(self, chains: IntArray, stage: IntArray, cuts: IntArray) -> None:
        """Exchange neighbouring runs in each of some mappings: stage [k], cuts [3, k]."""
        begin, middle, end = cuts[:, :, None]
        place = np.arange(self.pipelines)
        seam = begin + end - middle
        source = np.where((place >= begin) & (place < seam), place + middle - begin, place)
        source = np.where((place >= seam) & (place < end), place - (end - middle), source)
        start = stage[:, None] * self.pipelines
        self.rings[chains[:, None], start + place] = self.rings[chains[:, None], start + source]
        self._refresh(chains)

    # --- sums ------------------------------------------------------------------------------------------------------

    def _refresh(self, chains: IntArray) -> None:
        """Recompute everything derived from lines and rings in some mappings."""
        row, grid = chains[:, None], (len(chains), self.stages, self.pipelines)
        lines, rings = self.lines[chains], self.rings[chains]
        self.line_cell[row, lines] = self._cells
        self.ring_cell[row, rings] = self._cells
        links = self._power[rings, rings[:, self._next_cell]]
        times = self.costs.pipeline_times_s(lines.reshape(grid))
        slowest = times.max(axis=1)
        scale = np.where(slowest > 0.0, slowest, 1.0)
        ring_power, pipeline_power = links.sum(axis=1), self._raised(times / scale[:, None]).sum(axis=1)
        self.link_power[chains], self.pipeline_s[chains], self.slowest_s[chains] = links, times, scale
        self.ring_power[chains], self.pipeline_power[chains] = ring_power, pipeline_power
        norms = self._ring_scale_s * self._root(np.stack([ring_power, links.max(axis=1)]))
        self.energy_s[chains] = norms[0] + scale * self._root(pipeline_power)
        self.objective_s[chains] = norms[1] + slowest

    def _padded_lines(self) -> IntArray:
        """[K, P + 2, d] with the dummy node before the first and behind the last stage."""
        grid = self.lines.reshape(self.num_chains, self.stages, self.pipelines)
        return np.pad(grid, ((0, 0), (1, 1), (0, 0)), constant_values=self.num_nodes)

    def _neighbours(self) -> tuple[IntArray, IntArray]:
        """[K, n] nodes before and behind each cell in its pipeline."""
        padded = self._padded_lines().reshape(self.num_chains, -1)
        return padded[:, : self.num_nodes], padded[:, 2 * self.pipelines :]

    def _raised(self, values: FloatArray) -> FloatArray:
        return raised(np.minimum(values, self._max_ratio), self._doublings)

    def _root(self, values: FloatArray) -> FloatArray:
        return rooted(values, self._doublings)


def _least_of_the_others(values: FloatArray) -> FloatArray:
    """[…, d] least value of each ring without positions i and i − 1; ∞ where nothing is left.

    Minima over windows of d − 2 positions from i + 1 on, computed by doubling.
    """
    size = values.shape[-1]
    length = size - 2
    if length < 1:
        return np.full(values.shape, np.inf)
    around = np.concatenate([values, values], axis=-1)[..., 1:-1]
    width = 1
    while 2 * width <= length:
        around = np.minimum(around[..., :-width], around[..., width:])
        width *= 2
    return np.asarray(np.minimum(around[..., :size], around[..., length - width : length - width + size]))
