"""What a layout costs at least that does not fit on one side of a slow cut: one case for each way in which it crosses.

*Notation.* Usable nodes are divided into parts A_1 … A_k that only slow links or trunks join. A job of p stages, each
of t·c·d ranks (tensor, context, data parallelism; data-parallel states sharded over s ranks), on more slots than the
largest part has nodes, has ranks in two parts. Blocks: t consecutive ranks (*tensor block*), t·c·s (*shard block*),
t·c·d (*stage*).

*Cases*, one of which holds for every layout over two parts:

1. some tensor block is split, and its ring over t ranks with it (:attr:`Way.TENSOR`);
2. no tensor block is, some shard block is. Member j of each of its t rings (stride t) is in tensor block j, hence in
   one part: all t rings cross, at the same members. Either no ring over copies (stride t·c·s) crosses in that stage:
   then ranks with the same place in their shard block share a part, and all d/s shard blocks of the stage are split
   like this one (:attr:`Way.SHARDS`); or one does, and with it t at the same members (:attr:`Way.SHARDS_AND_COPIES`);
3. no shard block is, some stage is (:attr:`Way.COPIES`): its t·c·s rings over copies cross likewise;
4. all stages are whole: two that follow each other lie in different parts (:attr:`Way.STAGES`), and all pipelines
   cross there.

In 2 and 3 either no pipeline crosses: then ranks with the same place in their stage share a part, every stage is
split like the first, and p times as many rings cross at the same members; or one does (``…_AND_PIPELINES``). In 3 two
stages at least are split then where the blocks that fit into two parts leave no other way, and their rings share the
trunks (:func:`fewest_split_stages`). A ring over all ranks of a stage with stride t is split wherever the stage is and
no tensor block.

*Price.* A ring that crosses from part i to part j does so over some link between them, and V rings at the same members
over every trunk that takes all traffic from i to j (either way round): per byte of the ring no less than

    min over {i, j} of max(least share · fastest link, V / trunk)

and its latency is the least between two parts. A boundary of V pipelines takes sent·(there + back) + both latencies,
with each way max(fastest link, V / trunk). In a closed loop (interleaved chunks) a pipeline crosses twice. Everything
else is priced as if no mapping were better (:class:`~meshplan.planner.cluster.network.network_model.BestLinks`).

Assumes: the estimated step does not fall when a group of ranks or a message gets slower; kinds of groups that are not
named above (experts) may stay inside the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np

from meshplan.planner.cluster.network.network import Network, strongly_connected
from meshplan.planner.cluster.network.network_model import BestLinks, NetworkModel
from meshplan.planner.cluster.network.orders import PipelineLayout
from meshplan.planner.cluster.network.rank_layout import ALL_TO_ALL, Degrees, fewest_on_a_slot, slot_boundaries
from meshplan.planner.cluster.network.slot_links import Group, slot_links
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

# Links between parts are this much slower, or shared by a trunk, before a cut is worth a search of its own. Assumed:
# twice is what an oversubscribed leaf switch takes away; below it the bound of the best links is close anyway.
LEAST_RATIO = 2.0


class Way(Enum):
    """How a layout crosses a cut; see the module docstring."""

    TENSOR = "a tensor-parallel group crosses"
    SHARDS = "all groups that share states cross"
    SHARDS_AND_PIPELINES = "all groups that share states cross in some stage, and pipelines"
    SHARDS_AND_COPIES = "groups that share states cross, and groups of copies"
    SHARDS_AND_COPIES_AND_PIPELINES = "groups that share states cross, groups of copies, and pipelines"
    COPIES = "groups of copies cross"
    COPIES_AND_PIPELINES = "groups of copies cross, and pipelines"
    STAGES = "whole stages lie on different sides"

    @property
    def splits_shards(self) -> bool:
        """Case 2."""
        return self.name.startswith("SHARDS")

    @property
    def crosses_copies(self) -> bool:
        """Whether some group of copies crosses."""
        return "COPIES" in self.name

    @property
    def crosses_pipelines(self) -> bool:
        """Whether some pipeline crosses."""
        return "PIPELINES" in self.name or self is Way.STAGES


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Parts of a network.

    Args:
        network: the links.
        parts: [usable] part of each usable node, from 0.
        domain_size: devices of a node, D.
    """

    network: Network
    parts: IntArray
    domain_size: int

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest part."""
        return int(np.bincount(self.parts).max())

    @cached_property
    def _members(self) -> list[IntArray]:
        usable = np.array(self.network.usable, dtype=np.int64)
        return [usable[self.parts == part] for part in range(int(self.parts.max()) + 1)]

    def _between(self, matrix: FloatArray) -> FloatArray:
        """[k, k] least entry from one part to another; infinite on the diagonal."""
        least = np.full((len(self._members), len(self._members)), np.inf)
        for i, own in enumerate(self._members):
            for j, other in enumerate(self._members):
                if i != j:
                    least[i, j] = matrix[np.ix_(own, other)].min()
        return least

    @cached_property
    def link_s_per_byte(self) -> FloatArray:
        """[k, k] inverse rate of the fastest link from one part to another."""
        return self._between(self.network.seconds_per_byte)

    @cached_property
    def ring_s_per_byte(self) -> FloatArray:
        """[k, k] the same of links in their slower direction."""
        return self._between(self.network.ring_s_per_byte)

    @cached_property
    def latency_s(self) -> FloatArray:
        """[k, k] least latency from one part to another."""
        return self._between(self.network.latency_s)

    @cached_property
    def trunk_s_per_byte(self) -> FloatArray:
        """[k, k] time of one byte over the slowest trunk that takes all traffic from one part to another; 0: none."""
        shared = np.zeros((len(self._members), len(self._members)))
        for trunk in self.network.trunks:
            sends = np.array([bool(trunk.senders[own].all()) for own in self._members])
            receives = np.array([bool(trunk.receivers[own].all()) for own in self._members])
            each = 1.0 / (self.domain_size * trunk.bytes_per_s)
            shared = np.maximum(shared, np.where(np.outer(sends, receives), each, 0.0))
        np.fill_diagonal(shared, 0.0)
        return shared

    def ring_least_s_per_byte(self, share: float, rings: int) -> float:
        """Inverse rate of a ring that crosses with others at the same members.

        Args:
            share: least bytes that a device sends over a link for each byte of the ring.
            rings: how many cross.
        """
        trunk = np.maximum(self.trunk_s_per_byte, self.trunk_s_per_byte.T)
        return float(np.maximum(share * self.ring_s_per_byte, rings * trunk).min())

    def round_trip_s(self, sent_bytes: FloatArray, pipelines: int) -> FloatArray:
        """Least time of a stage boundary, there and back, that so many pipelines cross between the same slots, [n]."""
        each = np.maximum(self.link_s_per_byte, pipelines * self.trunk_s_per_byte)
        per_byte, latency = each + each.T, self.latency_s + self.latency_s.T
        return np.asarray((np.multiply.outer(sent_bytes, per_byte) + latency).min(axis=(-2, -1)))


def slow_cut(network: Network, domain_size: int) -> Cut | None:
    """The cut of a network that costs most to cross; None where there is none worth a bound of its own.

    Where links differ: the parts that the links of a rate join, at the rate above the largest step between rates that
    leaves several parts. Else the nodes that no trunk parts.

    Args:
        network: the links.
        domain_size: devices of a node.
    """
    usable = np.array(network.usable, dtype=np.int64)
    if len(usable) < 2:  # noqa: PLR2004  (one node has no links)
        return None
    links = network.bytes_per_s[np.ix_(usable, usable)]
    both = np.minimum(links, links.T)
    rates = np.unique(both[np.isfinite(both)])
    for place in (np.argsort(-(rates[1:] / rates[:-1]), kind="stable") + 1).tolist():
        if rates[place] < LEAST_RATIO * rates[place - 1]:
            break
        parts = strongly_connected(both >= rates[place])
        if 0 < parts.max() < len(usable) - 1:
            return Cut(network=network, parts=parts, domain_size=domain_size)
    shared = np.zeros(links.shape, dtype=bool)
    for trunk in network.trunks:
        shared |= np.outer(trunk.senders[usable], trunk.receivers[usable])
    parts = strongly_connected(~(shared | shared.T))
    if 0 < parts.max() < len(usable) - 1:
        return Cut(network=network, parts=parts, domain_size=domain_size)
    return None


def fewest_split_stages(blocks: IntArray, stages: IntArray, first: IntArray, second: IntArray) -> IntArray:
    """Stages with blocks in both of two parts, at least, [n], where one stage has.

    With one such stage the blocks in the first part are r ∈ {1 … k − 1} beyond whole stages. Where all numbers of
    blocks that fit are multiples of k, a second stage has to be split as well.

    Args:
        blocks: blocks of a stage, k, [n].
        stages: p, [n].
        first: blocks that fit into the first part, [n].
        second: blocks that fit into the second part, [n].

    >>> fewest_split_stages(*(np.array([value]) for value in (2, 2, 2, 2)))  # two blocks of four in each part
    array([2])
    """
    least, most = np.maximum(blocks * stages - second, 0), np.minimum(first, blocks * stages)
    only_whole = (least == most) & (least % np.maximum(blocks, 1) == 0)
    return np.where(only_whole & (stages > 1), 2, 1)


@dataclass(kw_only=True, eq=False)
class CrossingLinks(NetworkModel):
    """Rates that no mapping can beat of layouts that cross a cut in one way.

    Args:
        cut: the parts.
        way: how it is crossed.
        best: rates that no mapping can beat.
        degrees: of the rows that are priced; None before they are known (:meth:`of`).
    """

    cut: Cut
    way: Way
    best: BestLinks
    degrees: Degrees | None = None
    _rings: dict[tuple[Group, int], float] = field(default_factory=dict)

    @property
    def domain_size(self) -> int:  # type: ignore[override]
        """Devices of a node."""
        return self.cut.domain_size

    def of(self, degrees: Degrees) -> CrossingLinks:
        """The same for some rows."""
        return replace(self, degrees=degrees)

    def is_possible(self, degrees: Degrees, *, any_sharding: bool = False) -> BoolArray:
        """Rows that can cross in this way, [n]; see :class:`NetworkModel`."""
        t, c, d, s, p = degrees.tensor, degrees.context, degrees.data, degrees.shard, degrees.stages
        world, most = t * c * d * p, self.cut.most_nodes * self.domain_size

        def crosses(size: IntArray, stride: IntArray) -> BoolArray:
            return np.asarray(fewest_on_a_slot(size, stride, world, self.domain_size) < size)

        possible = np.asarray(p > 1) if self.way.crosses_pipelines else np.ones(len(t), dtype=bool)
        if self.way is Way.TENSOR:
            return np.asarray(possible & crosses(t, np.ones_like(t)))
        if self.way is Way.STAGES:
            return np.asarray(possible & (t * c * d <= most))
        possible &= crosses(c * d, t)
        if any_sharding:
            return np.asarray(possible)
        if self.way.crosses_copies:
            possible &= crosses(d // s, t * c * s)
        within = crosses(c * s, t) if self.way.splits_shards else t * c * s <= most
        return np.asarray(possible & within)

    def slowest(self, group: Group, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """See :class:`NetworkModel`."""
        each, latency = self.best.slowest(group, rows)
        spacing = np.full(len(rows), each)
        latencies = np.full(len(rows), latency)
        rings = self._crossing_rings(group, rows)
        if rings.any():
            for count in np.unique(rings[rings > 0]).tolist():
                key = (group, count)
                if key not in self._rings:
                    share = float(slot_links(group).shares.min())
                    self._rings[key] = self.cut.ring_least_s_per_byte(share, count)
                spacing[rings == count] = max(float(each), self._rings[key])
            far = max(float(latency), float(self.cut.latency_s.min()))
            latencies[rings > 0] = far
        return spacing, latencies

    def _split_stages(self, own: Degrees) -> IntArray:
        """Stages that are split at least, [n]: all where no pipeline crosses; else :func:`fewest_split_stages`."""
        if not self.way.crosses_pipelines:
            return own.stages
        sizes = np.bincount(self.cut.parts) * self.domain_size
        if len(sizes) > 2 or not self.way.crosses_copies or self.way.splits_shards:  # noqa: PLR2004  (two parts)
            return np.ones(len(own.tensor), dtype=np.int64)
        block, blocks = own.tensor * own.context * own.shard, own.data // own.shard
        return fewest_split_stages(blocks, own.stages, sizes[0] // block, sizes[1] // block)

    def _crossing_rings(self, group: Group, rows: IntArray) -> IntArray:
        """Rings of the group that are known to cross at the same members, for each of some rows; 0: unknown."""
        if self.degrees is None or group.kind == ALL_TO_ALL or self.way is Way.STAGES:
            return np.zeros(len(rows), dtype=np.int64)
        own = self.degrees.take(rows)
        t, c, d, s = own.tensor, own.context, own.data, own.shard
        if self.way is Way.TENSOR:
            return np.asarray((group.stride == 1) & (group.size == t)).astype(np.int64)
        each = np.where(self.way.splits_shards and not self.way.crosses_copies, t * (d // s), t)
        split = (group.stride == t) & (group.size == c * d)
        if self.way.splits_shards:
            split |= (group.stride == t) & (group.size == c * s)
        rings = np.where(split, each, 0)
        if self.way.crosses_copies:
            copies = (group.stride == t * c * s) & (group.size == d // s)
            rings = np.where(copies, t if self.way.splits_shards else t * c * s, rings)
        return np.asarray(rings * self._split_stages(own))

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        """See :class:`NetworkModel`."""
        base = self.best.pipeline_s(asked, sent_bytes, inside_s, waits)
        if not self.way.crosses_pipelines:
            return base
        before, _ = slot_boundaries(asked.num_stages, asked.stage_devices, self.domain_size, wraps=asked.wraps)
        alike = asked.stage_devices // before.shape[1]
        far = self.cut.round_trip_s(sent_bytes, asked.stage_devices if self.way is Way.STAGES else alike)
        near = np.minimum(self.best.least_hop_s(sent_bytes, inside_s), inside_s)
        # Beside the boundary that crosses the slowest stage has another one; around a loop of two that crosses as well.
        alone, loop = asked.num_stages == 2, asked.wraps  # noqa: PLR2004  (stages on both sides of one boundary)
        beside = (far if loop else 0.0) if alone else near
        fill = far + (asked.num_stages - 2) * near
        return np.maximum(base, fill + waits * (far + beside) / 2.0)
