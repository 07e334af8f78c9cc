"""Many rank mappings side by side, changed by small moves: what the local search of rank mappings works on.

:class:`MappingStates` proposes one move in each of K mappings, shows the energies, and keeps or undoes each of
them. A richer objective (shared NICs, tensor or expert groups) replaces this class and leaves the search alone.

The energy replaces both maxima of the objective by norms, Σ(xᵖ)^(1/p): it sees the second-slowest pipeline and the
number of slow ring links too, so that the search can walk where the maximum itself is flat.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.solvers.rank_mapping_objective import Floats, Ints, LinkCosts

Bools = NDArray[np.bool_]

# Powers of link costs are kept below 10^250, so that the sum of all of them stays a finite double.
MAX_POWER_DECADES = 250.0

TINY = 1e-300  # keeps zero costs out of denominators
NUM_NEAREST = 12  # candidates a node, for moves that look for a better neighbour


class MappingStates:
    """K mappings; cell q·d + r is stage q of pipeline r, ring cell q·d + i is place i in the ring of stage q.

    Args:
        costs: of the links, seconds.
        lines: [K, P, d] node of each (stage, pipeline).
        rings: [K, P, d] nodes of each stage in ring order.
        ring_scale_s: a ring time near the best one; powers are taken of link cost / scale.
    """

    def __init__(self, costs: LinkCosts, lines: Ints, rings: Ints, *, ring_scale_s: float) -> None:
        self.costs = costs
        self.num_chains, self.stages, self.pipelines = lines.shape
        self.num_nodes = costs.num_nodes
        self.chain = np.arange(self.num_chains)
        self.lines = lines.reshape(self.num_chains, -1).copy()
        self.rings = rings.reshape(self.num_chains, -1).copy()
        cells = np.broadcast_to(np.arange(self.num_nodes), self.lines.shape)
        self.line_cell, self.ring_cell = np.empty_like(self.lines), np.empty_like(self.rings)
        np.put_along_axis(self.line_cell, self.lines, cells, axis=1)
        np.put_along_axis(self.ring_cell, self.rings, cells, axis=1)
        self.pipeline_s = costs.pipeline_times_s(lines)
        self._ring_scale_s = ring_scale_s if ring_scale_s > 0.0 else 1.0
        self._along = np.arange(self.pipelines)
        self._stage_start = np.arange(self.stages) * self.pipelines
        self._chain_2d, self._chain_3d = self.chain[:, None], self.chain[:, None, None]
        self.near_by_hop, self.near_by_ring = _nearest(costs.hop_s), _nearest(costs.ring_s)
        self._settle: Callable[[Bools], None] = lambda _: None
        self.set_exponent(1)

    def set_exponent(self, doublings: int) -> None:
        """Use the norm with p = 2**doublings; powers and roots are then repeated squares and square roots."""
        self._doublings = doublings
        self._max_ratio = 10.0 ** (MAX_POWER_DECADES / 2.0**doublings)
        self._power = self._raised(np.minimum(self.costs.ring_s / self._ring_scale_s, self._max_ratio))
        following = self._stage_start[:, None] + np.roll(self._along, -1)
        self.link_power = self._power[self.rings, self.rings[:, following.ravel()]]
        self.ring_energy, self.pipeline_energy = self._ring_energies(), self._pipeline_energies()

    @property
    def energy_s(self) -> Floats:
        """[K] smooth stand-in for the objective, seconds."""
        return self.ring_energy + self.pipeline_energy

    def objective_s(self) -> Floats:
        """[K] true objective, seconds."""
        return np.asarray(self.pipeline_s.max(axis=1) + self._ring_scale_s * self._root(self.link_power.max(axis=1)))

    def slowest_pipeline(self) -> Ints:
        """[K] pipeline that binds."""
        return np.asarray(self.pipeline_s.argmax(axis=1))

    def slowest_ring_cell(self) -> Ints:
        """[K] ring cell whose outgoing link binds."""
        return np.asarray(self.link_power.argmax(axis=1))

    def most_promising(self, first: Ints, candidates: Ints) -> Ints:
        """[K] the candidate whose exchange with ``first`` raises the energy least, to first order.

        dE = E/p · dS/S for each of the two norms E = S^(1/p). Neighbours that are themselves exchanged are ignored:
        :meth:`exchange_nodes` evaluates the choice exactly.

        Args:
            first: [K] nodes.
            candidates: [K, m] nodes of other stages.
        """
        rows, chosen = self._chain_2d, first[:, None]
        ring_rise = self._entering_power(first[:, None], candidates) + self._entering_power(candidates, first[:, None])
        ring_rise = ring_rise * (self.ring_energy / np.maximum(self.link_power.sum(axis=1), TINY))[:, None]
        slowest = np.maximum(self.pipeline_s.max(axis=1), TINY)[:, None]
        here, there = self.line_cell[rows, chosen], self.line_cell[rows, candidates]
        now_here = self.pipeline_s[rows, here % self.pipelines]
        now_there = self.pipeline_s[rows, there % self.pipelines]
        change_here = self._hops_s(here, candidates) - self._hops_s(here, chosen)
        change_there = self._hops_s(there, chosen) - self._hops_s(there, candidates)
        new = np.stack([now_here + change_here, now_there + change_there]) / slowest
        new = np.clip(new, 0.0, self._max_ratio)
        old = np.stack([np.broadcast_to(now_here, now_there.shape), now_there]) / slowest
        pipeline_rise = (self._raised(new) - self._raised(old)).sum(axis=0) * slowest
        best = (ring_rise + pipeline_rise).argmin(axis=1)
        return np.asarray(candidates[self.chain, best])

    def _hops_s(self, cells: Ints, nodes: Ints) -> Floats:
        """Time of both hops of a pipeline cell if it held the node."""
        stage = cells // self.pipelines
        rows = self._chain_2d
        before = self.lines[rows, np.maximum(cells - self.pipelines, 0)]
        after = self.lines[rows, np.minimum(cells + self.pipelines, self.num_nodes - 1)]
        first_hop = np.where(stage > 0, self.costs.hop_s[before, nodes], 0.0)
        return np.asarray(first_hop + np.where(stage < self.stages - 1, self.costs.hop_s[nodes, after], 0.0))

    def _entering_power(self, leaving: Ints, entering: Ints) -> Floats:
        """[K, m] least change of a ring's powers when ``leaving`` goes and ``entering`` takes any place."""
        size, rows, chain = self.pipelines, self._chain_2d, self._chain_3d
        place = self.ring_cell[rows, leaving]
        start = (place - place % size)[:, :, None]
        turned = start + (place[:, :, None] - start + self._along[1:]) % size
        others = self.rings[chain, turned]
        following = np.roll(others, -1, axis=2)
        node = entering[:, :, None]
        between = self._power[others, following]
        harm = self._power[others, node] + self._power[node, following] - between
        gone = self._power[others[:, :, -1], leaving] + self._power[leaving, others[:, :, 0]] - between[:, :, -1]
        return np.asarray(harm.min(axis=2) - gone)

    def exchange_nodes(self, first: Ints, second: Ints) -> Floats:
        """Propose that two nodes of different stages change places; return the new energies.

        Each takes the other's pipeline cell, and enters the other's ring where it does least harm.

        Args:
            first: [K] nodes.
            second: [K] nodes, of another stage than ``first``.
        """
        rows, chain = self._chain_2d, self._chain_3d
        leaving = np.stack([first, second], axis=1)
        entering = leaving[:, ::-1]
        places = self.ring_cell[rows, leaving]
        ring_cells, new_rings = self._reinserted(places, entering)
        old_power = self.link_power[chain, ring_cells]
        self.link_power[chain, ring_cells] = self._power[new_rings, np.roll(new_rings, -1, axis=2)]

        line_cells = self.line_cell[rows, leaving]
        self.lines[rows, line_cells] = entering
        touched = line_cells % self.pipelines
        old_pipeline_s = self.pipeline_s[rows, touched]
        self.pipeline_s[rows, touched] = self._line_times_s(self._line_nodes(touched))
        ring_energy, pipeline_energy = self._ring_energies(), self._pipeline_energies()

        def settle(accepted: Bools) -> None:
            undo, keep = np.flatnonzero(~accepted), np.flatnonzero(accepted)
            self.link_power[undo[:, None, None], ring_cells[undo]] = old_power[undo]
            self.lines[undo[:, None], line_cells[undo]] = leaving[undo]
            self.pipeline_s[undo[:, None], touched[undo]] = old_pipeline_s[undo]
            self.rings[keep[:, None, None], ring_cells[keep]] = new_rings[keep]
            self.ring_cell[keep[:, None, None], new_rings[keep]] = ring_cells[keep]
            self.line_cell[keep[:, None], entering[keep]] = line_cells[keep]
            self.ring_energy = np.where(accepted, ring_energy, self.ring_energy)
            self.pipeline_energy = np.where(accepted, pipeline_energy, self.pipeline_energy)

        self._settle = settle
        return ring_energy + pipeline_energy

    def exchange_segments(self, first: Ints, second: Ints, start: Ints, stop: Ints) -> Floats:
        """Propose that two pipelines exchange their nodes in the stages start … stop − 1; return the new energies.

        Stages keep their nodes, so that no ring changes. A whole tail costs one pair of hops, a single stage two.
        """
        stage = np.arange(self.stages)
        inside = (stage >= start[:, None]) & (stage < stop[:, None])
        touched = np.stack([first, second], axis=1)
        nodes = self._line_nodes(touched)
        new = np.where(inside[:, None, :], nodes[:, ::-1], nodes)
        old_pipeline_s = self.pipeline_s[self._chain_2d, touched]
        self.pipeline_s[self._chain_2d, touched] = self._line_times_s(new)
        pipeline_energy = self._pipeline_energies()

        def settle(accepted: Bools) -> None:
            undo, keep = np.flatnonzero(~accepted), np.flatnonzero(accepted)
            self.pipeline_s[undo[:, None], touched[undo]] = old_pipeline_s[undo]
            cells = self._stage_start + touched[keep][:, :, None]
            self.lines[keep[:, None, None], cells] = new[keep]
            self.line_cell[keep[:, None, None], new[keep]] = cells
            self.pipeline_energy = np.where(accepted, pipeline_energy, self.pipeline_energy)

        self._settle = settle
        return self.ring_energy + pipeline_energy

    def exchange_ring_runs(self, stage: Ints, cuts: Ints) -> Floats:
        """Propose to exchange two neighbouring runs of one ring; return the new energies.

        No run is reversed, because links are directed: this is or-opt for short runs and 3-opt for long ones.

        Args:
            stage: [K] whose ring.
            cuts: [3, K] sorted places a ≤ b ≤ c: the runs a … b − 1 and b … c − 1 change places.
        """
        begin, middle, end = cuts[:, :, None]
        place = self._along
        seam = begin + end - middle
        source = np.where((place >= begin) & (place < seam), place + middle - begin, place)
        source = np.where((place >= seam) & (place < end), place - (end - middle), source)
        start = stage[:, None] * self.pipelines
        cells = start + place
        new = self.rings[self._chain_2d, start + source]
        old_power = self.link_power[self._chain_2d, cells]
        self.link_power[self._chain_2d, cells] = self._power[new, np.roll(new, -1, axis=1)]
        ring_energy = self._ring_energies()

        def settle(accepted: Bools) -> None:
            undo, keep = np.flatnonzero(~accepted)[:, None], np.flatnonzero(accepted)[:, None]
            self.link_power[undo, cells[undo[:, 0]]] = old_power[undo[:, 0]]
            self.rings[keep, cells[keep[:, 0]]] = new[keep[:, 0]]
            self.ring_cell[keep, new[keep[:, 0]]] = cells[keep[:, 0]]
            self.ring_energy = np.where(accepted, ring_energy, self.ring_energy)

        self._settle = settle
        return ring_energy + self.pipeline_energy

    def settle(self, accepted: Bools) -> None:
        """Keep the proposed move in the chains ``accepted`` [K], undo it in the others."""
        self._settle(accepted)

    def copy_chains(self, target: Ints, source: Ints) -> None:
        """Overwrite the chains ``target`` by the chains ``source``."""
        for values in (self.lines, self.rings, self.line_cell, self.ring_cell):
            values[target] = values[source]
        for seconds in (self.pipeline_s, self.link_power, self.ring_energy, self.pipeline_energy):
            seconds[target] = seconds[source]

    def _reinserted(self, places: Ints, entering: Ints) -> tuple[Ints, Ints]:
        """Ring cells [K, 2, d] and their new nodes when the nodes at ``places`` [K, 2] leave and others enter.

        The remaining o₁ … o_{d−1} keep their circular order; the new node goes between the neighbours (oᵢ, oᵢ₊₁)
        with the least power(oᵢ, new) + power(new, oᵢ₊₁) − power(oᵢ, oᵢ₊₁).
        """
        size = self.pipelines
        start = (places - places % size)[:, :, None]
        cells = start + self._along
        node = entering[:, :, None]
        if size == 1:
            return cells, node
        turned = start + (places[:, :, None] - start + self._along[1:]) % size
        others = self.rings[self._chain_3d, turned]
        following = np.roll(others, -1, axis=2)
        harm = self._power[others, node] + self._power[node, following] - self._power[others, following]
        best = harm.argmin(axis=2)[:, :, None]
        order = (best + 1 + self._along[:-1]) % (size - 1)
        return cells, np.concatenate([node, np.take_along_axis(others, order, axis=2)], axis=2)

    def _line_nodes(self, pipelines: Ints) -> Ints:
        """[K, m, P] nodes of m pipelines in each chain."""
        return np.asarray(self.lines[self._chain_3d, self._stage_start + pipelines[:, :, None]])

    def _line_times_s(self, nodes: Ints) -> Floats:
        return np.asarray(self.costs.hop_s[nodes[..., :-1], nodes[..., 1:]].sum(axis=-1))

    def _ring_energies(self) -> Floats:
        return self._ring_scale_s * self._root(self.link_power.sum(axis=1))

    def _pipeline_energies(self) -> Floats:
        slowest = self.pipeline_s.max(axis=1)
        ratio = self.pipeline_s / np.where(slowest > 0.0, slowest, 1.0)[:, None]
        return np.asarray(slowest * self._root(np.maximum(self._raised(ratio).sum(axis=1), 1.0)))

    def _raised(self, values: Floats) -> Floats:
        for _ in range(self._doublings):
            values = values * values
        return values

    def _root(self, values: Floats) -> Floats:
        for _ in range(self._doublings):
            values = np.sqrt(values)
        return values


def _nearest(cost: Floats) -> Ints:
    """[n, m] the cheapest partners of each node as a sender, without itself."""
    return np.argsort(cost + np.diag(np.full(len(cost), np.inf)), axis=1, kind="stable")[
        :, : min(NUM_NEAREST, len(cost) - 1)
    ]
