"""The least step of layouts that must use both sides of a slow cut.

*Notation.* The cut separates the usable nodes into sides: the parts that stay connected by links faster than the
slowest ones without which the network falls apart. A layout with more slots than the largest side has nodes uses at
least two sides. P stages of r pipelines (in slots); e_n is the best rate of a link across when n of them are in use at
once and share what they cross.

*Bound.* Under any mapping one of these holds, and the step is at least the least over them:

- no group within a stage crosses: each stage lies on one side, so that all r pipelines cross at one boundary: one hop
  at e_r;
- a pipeline crosses and so does a group of some kind: one hop and that kind at e_1;
- no pipeline crosses: the sides hold whole pipelines, so that a group of some kind crosses in every stage, at e_P.

Every other group runs at a rate that no mapping beats (:class:`~meshplan.planner.cluster.network_model.BestLinks`).

Assumes: the groups that the estimator prices connect the ranks of a stage. Sharing counts only where there are two
sides, and one trunk carries all that crosses; kinds that cross together count one at a time, without the cut's latency,
so that a kind that carries nothing shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from meshplan.planner.cluster.network import Network, strongly_connected
from meshplan.planner.cluster.network_model import (
    ALL_TO_ALL,
    BestLinks,
    Messages,
    NetworkModel,
    slot_boundaries,
    slowest_pipeline_s,
)
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.problem import TrainingProblem

# Kind, sizes and strides of the groups of one collective, as the estimator asks for them.
Asked = tuple[str, bytes, bytes]
# A cut whose links have at least this share of the fastest link's rate is not worth the pricing: it changes little.
SLOW_SHARE = 0.25
# How much slower a link is made to see whether anything is sent over it.
PROBE = 1e3


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """The slowest cut of a network.

    Args:
        network: the links.
        crosses: [n, n] whether a link leads from one side to another, between usable nodes.
        largest: nodes of the largest side.
        trunk_bytes_per_s: the least trunk that all crossing links share one way, between two sides; ∞ without one.
    """

    network: Network
    crosses: BoolArray
    largest: int
    trunk_bytes_per_s: float

    def rates(self, sharing: int) -> FloatArray:
        """[crossing links] rate with so many of them in use at once."""
        rates = np.asarray(self.network.bytes_per_s, dtype=np.float64).copy()
        for trunk in self.network.trunks:
            over = np.outer(trunk.senders, trunk.receivers)
            rates[over] = np.minimum(rates[over], trunk.bytes_per_s)
        return np.minimum(rates, self.trunk_bytes_per_s / sharing)

    @property
    def is_slow(self) -> bool:
        """Whether it decides about plans."""
        return self.group_bytes_per_s(1) < SLOW_SHARE * float(self.network.between_usable.max())

    def group_bytes_per_s(self, sharing: int) -> float:
        """The best rate of a link across, in its slower direction."""
        rates = self.rates(sharing)
        return float(np.minimum(rates, rates.T)[self.crosses].max())

    def hop_s(self, sent_bytes: float, sharing: int) -> float:
        """The least round trip across."""
        one_way = sent_bytes / self.rates(sharing) + self.network.latency_s
        return float((one_way + one_way.T)[self.crosses].min())


def slowest_cut(network: Network) -> Cut | None:
    """The cut whose links are slowest; None for a single node."""
    usable = np.array(network.usable)
    if len(usable) <= 1:
        return None
    rates = np.asarray(network.bytes_per_s, dtype=np.float64).copy()
    for trunk in network.trunks:
        over = np.outer(trunk.senders, trunk.receivers)
        rates[over] = np.minimum(rates[over], trunk.bytes_per_s)
    rates = np.minimum(rates, rates.T)[np.ix_(usable, usable)]
    levels = np.unique(rates[~np.eye(len(usable), dtype=bool)])
    low, high = 0, len(levels) - 1  # the first level above which the nodes are no longer connected
    while low < high:
        middle = (low + high) // 2
        if strongly_connected(rates > levels[middle]).max() > 0:
            high = middle
        else:
            low = middle + 1
    side = np.full(network.num_nodes, -1, dtype=np.int64)
    side[usable] = strongly_connected(rates > levels[low])
    held = side >= 0
    crosses = (side[:, None] != side[None, :]) & held[:, None] & held[None, :]
    shared = float("inf")
    if side.max() == 1:
        for trunk in network.trunks:
            for sender in (0, 1):
                if trunk.senders[side == sender].all() and trunk.receivers[side == 1 - sender].all():
                    shared = min(shared, trunk.bytes_per_s)
    return Cut(
        network=network,
        crosses=crosses,
        largest=int(np.bincount(side[held]).max()),
        trunk_bytes_per_s=shared,
    )


@dataclass(kw_only=True, eq=False)
class _Crossing(NetworkModel):
    """Best links, but one kind of group or one hop of a pipeline crosses the cut.

    Args:
        best: rates that no mapping can beat.
        cut: what is crossed.
        kind: the groups that cross; None where none does.
        pipelines: how many pipelines cross at one boundary: 0, 1, or -1 for all of them.
        stages_cross: the groups of all stages cross at once.
        slowed: divides the rate across.
        asked: filled with what the estimator asks for.
        impossible: rows that have no such crossing, filled while pricing.
    """

    best: BestLinks
    cut: Cut
    domain_size: int
    stages: int
    kind: Asked | None = None
    pipelines: int = 0
    stages_cross: bool = False
    slowed: float = 1.0
    asked: dict[Asked, None] = field(default_factory=dict)
    impossible: set[int] = field(default_factory=set)

    def rates(self, kind: str, size: IntArray, stride: IntArray, world_size: IntArray) -> tuple[FloatArray, FloatArray]:
        """See :class:`NetworkModel`."""
        rate, latency = self.best.rates(kind, size, stride, world_size)
        key = (kind, np.asarray(size, dtype=np.int64).tobytes(), np.asarray(stride, dtype=np.int64).tobytes())
        self.asked[key] = None
        if key != self.kind:
            return rate, latency
        far = np.isfinite(rate)
        self.impossible.update(np.flatnonzero(~far).tolist())
        alone = world_size // self.stages % self.domain_size != 0
        most = np.where(
            alone | (not self.stages_cross),
            self.cut.group_bytes_per_s(1),
            self.cut.group_bytes_per_s(self.stages),
        )
        if kind == ALL_TO_ALL:
            most = most * np.maximum(size - 1, 1)
        most = most / self.slowed
        return np.where(far, np.minimum(rate, most), rate), latency

    def pipeline_s(self, rows: IntArray, asked: Messages) -> float:
        """See :class:`NetworkModel`."""
        least = self.best.pipeline_s(rows, asked)
        if not self.pipelines:
            return least
        before, _ = slot_boundaries(asked.num_stages, asked.stage_devices, self.domain_size, wraps=asked.wraps)
        inside = self.best.pipeline_s(rows, replace(asked, num_stages=2, wraps=False, waits=0.0))
        hops = np.minimum(np.full((len(before), 1), inside), asked.inside_s)
        together = before.shape[1] if self.pipelines < 0 else 1
        hops[0] = self.cut.hop_s(asked.sent_bytes, together)
        return max(least, float(slowest_pipeline_s(hops[None], asked)[0]))


class CutBound:
    """Steps of candidates that no mapping can beat, with what must cross the slowest cut.

    Args:
        problem: the question, its network under :class:`BestLinks`.
    """

    def __init__(self, problem: TrainingProblem) -> None:
        self.problem = problem
        network = problem.machine.network
        cut = None if network is None else slowest_cut(network)
        self._cut = cut if cut is not None and cut.is_slow else None

    def least_step_s(self, batch: Candidates, step_s: FloatArray, hopeful: BoolArray) -> FloatArray:
        """Raise the steps of the candidates that use more nodes than one side has, [n].

        Args:
            batch: the candidates.
            step_s: their steps under the best links.
            hopeful: the candidates for which it matters.
        """
        if self._cut is None:
            return step_s
        slots = -(-batch.world_size // self.problem.machine.domain_size)
        rows = np.flatnonzero(hopeful & (slots > self._cut.largest))
        if not len(rows):
            return step_s
        forced = batch.take(rows)
        plain = np.asarray(step_s, dtype=np.float64)[rows]
        least = np.minimum.reduce(list(self._ways_across(forced, self._cut, plain)))
        raised = np.asarray(step_s, dtype=np.float64).copy()
        raised[rows] = np.where(np.isfinite(least), np.maximum(plain, least), plain)
        return raised

    def _ways_across(self, forced: Candidates, cut: Cut, plain: FloatArray) -> Iterator[FloatArray]:
        """The least step for each way across, [n]; infinite for candidates that cannot go that way.

        A kind of group whose rate makes no difference carries nothing, so that it connects no ranks.
        """
        stages = forced.split.pipeline_parallel
        yield np.full(len(forced), np.inf)
        first, asked = self._priced(forced, cut, stages=stages, pipelines=-1)
        if stages > 1:
            yield first
        for kind in asked:
            alone, _ = self._priced(forced, cut, stages=stages, kind=kind, stages_cross=True)
            carries = alone > plain
            if not carries.all():  # nothing to send, or a rate that it has anyway: a slower one tells
                slower, _ = self._priced(forced, cut, stages=stages, kind=kind, stages_cross=True, slowed=PROBE)
                carries = slower > plain
            if not carries.any():
                continue
            yield np.where(carries, alone, np.inf)
            if stages > 1:
                yield np.where(carries, self._priced(forced, cut, stages=stages, kind=kind, pipelines=1)[0], np.inf)

    def _priced(
        self,
        forced: Candidates,
        cut: Cut,
        *,
        stages: int,
        kind: Asked | None = None,
        pipelines: int = 0,
        stages_cross: bool = False,
        slowed: float = 1.0,
    ) -> tuple[FloatArray, tuple[Asked, ...]]:
        """Steps with one way across, and the groups that the estimator asked for."""
        problem, domain = self.problem, self.problem.machine.domain_size
        best = BestLinks(network=cut.network, domain_size=domain)
        crossing = _Crossing(
            best=best,
            cut=cut,
            domain_size=domain,
            stages=stages,
            kind=kind,
            pipelines=pipelines,
            stages_cross=stages_cross,
            slowed=slowed,
        )
        machine = replace(problem.machine, network_model=crossing)
        estimate = estimate_training(problem.shape, machine, problem.workload, forced, problem.calibration)
        step_s = np.asarray(estimate.step_s, dtype=np.float64).copy()
        step_s[sorted(crossing.impossible)] = np.inf
        return step_s, tuple(crossing.asked)
