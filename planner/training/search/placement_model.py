"""What one configuration's step takes under many rank mappings at once.

A step depends on a mapping through few numbers: for each kind of group that crosses nodes the seconds per byte of its
slowest link, x_g, and the messages of the slowest pipeline, y. The estimator is asked once which groups there are; the
numbers of any number of mappings come from NumPy, and the estimator prices each distinct set of
numbers once. So the step under a mapping *is* the estimator's step; there is no second model.

For the search, T ≈ T₀ + y − y₀ + Σ_g (φ_g(x_g) − T₀) with φ_g tabulated at :data:`TABLE_POINTS` values of x_g, the
other numbers as under a starting mapping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.cluster.network import Network
from meshplan.planner.cluster.network_model import (
    BestLinks,
    GivenRates,
    Group,
    Messages,
    NetworkModel,
    Orders,
    slot_links,
    slowest_pipeline_s,
)
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.norms import raised, rooted
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

TABLE_POINTS = 48
# The search sees a mix of the worst and the power mean of all links, so that it can walk where the worst stays put.
MEAN_SHARE = 0.25
POWER_DOUBLINGS = 3
# Orders looked at together; keeps an array of links near the processor's cache.
ORDERS_AT_ONCE = 8192


@dataclass(kw_only=True, eq=False)
class _Listener(NetworkModel):
    """Notes what the estimator asks."""

    domain_size: int
    groups: dict[Group, None]
    messages: list[Messages]

    def seconds_per_byte(self, group: Group, rows: IntArray) -> float:
        self.groups[group] = None
        return 1.0

    def latency_s(self, group: Group, rows: IntArray) -> float:
        return 0.0

    def pipeline_s(self, rows: IntArray, asked: Messages) -> float:
        self.messages.append(asked)
        return 0.0


class PlacementModel:
    """One configuration on one network.

    Args:
        problem: its machine has a network.
        config: the choices.
    """

    def __init__(self, problem: TrainingProblem, config: TrainingConfig) -> None:
        if problem.machine.network is None:
            raise ValueError("a placement needs a network")
        self.problem, self.config = problem, config
        self.network: Network = problem.machine.network
        self.domain_size = problem.machine.domain_size
        self.num_slots = -(-config.world_size // self.domain_size)
        listener = _Listener(domain_size=self.domain_size, groups={}, messages=[])
        self._candidates = candidates_of(problem, config)
        self._estimate(listener, self._candidates)
        self.messages = listener.messages[0] if listener.messages else None
        self.groups: tuple[Group, ...] = tuple(listener.groups)
        self._silent: tuple[Group, ...] = ()
        heard = self._heard()
        self._silent = tuple(group for group in self.groups if group not in heard)
        self.groups = heard

    @property
    def moves(self) -> bool:
        """Whether any mapping can differ from another."""
        return bool(self.groups) or (self.messages is not None and self.num_slots > 1)

    def _heard(self) -> tuple[Group, ...]:
        """The groups whose links make a difference; the estimator asks for others that its choices then leave out."""
        count = len(self.groups)
        rows = np.zeros((count + 1, 2 * count + 1))
        usable = np.array(self.network.usable)
        rows[:, :count] = 1.0 / float(self.network.bytes_per_s[np.ix_(usable, usable)].min())
        rows[np.arange(count) + 1, np.arange(count)] = 0.0
        steps = self.priced(rows)
        return tuple(
            group
            for group, step in zip(self.groups, steps[1:], strict=True)
            if step != steps[0] and len(slot_links(group)[0])
        )

    def _estimate(self, network_model: NetworkModel, candidates: Candidates) -> FloatArray:
        machine = replace(self.problem.machine, network_model=network_model)
        problem = self.problem
        estimate = estimate_training(problem.shape, machine, problem.workload, candidates, problem.calibration)
        return np.asarray(estimate.step_s)

    # --- exactly ----------------------------------------------------------------------------------------------------

    def numbers(self, orders: IntArray) -> FloatArray:
        """[k, 2·groups + 1] seconds per byte of each kind of group, their latencies, the slowest pipeline's messages.

        Args:
            orders: [k, ≥ slots] node of each slot.
        """
        chunks = [
            self._numbers(Orders(network=self.network, orders=chunk, domain_size=self.domain_size))
            for chunk in _chunks(orders[:, : self.num_slots])
        ]
        return np.concatenate(chunks)

    def _numbers(self, orders: Orders) -> FloatArray:
        columns = [orders.seconds_per_byte(group) for group in self.groups]
        columns += [orders.latency_s(group) for group in self.groups]
        return np.stack([*columns, self._messages_s(orders)], axis=1)

    def _messages_s(self, orders: Orders) -> FloatArray:
        asked = self.messages
        if asked is None:
            return np.zeros(len(orders.orders))
        hops = self.hops_s(orders)
        return np.asarray(slowest_pipeline_s(hops, asked))

    def hops_s(self, orders: Orders) -> FloatArray:
        """[k, P − 1, r] stage boundaries of each pipeline; see :meth:`Orders.hops_s`."""
        asked = self.messages
        if asked is None:
            raise ValueError("one stage has no boundaries")
        return orders.hops_s(asked)

    def priced(self, numbers: FloatArray) -> FloatArray:
        """[k] step of each row of :meth:`numbers`, by the estimator."""
        distinct, which = np.unique(numbers, axis=0, return_inverse=True)
        rows = np.zeros(len(distinct), dtype=np.int64)
        silent = dict.fromkeys(self._silent, np.zeros(len(distinct)))
        network_model = GivenRates(
            spacing={group: distinct[:, column] for column, group in enumerate(self.groups)} | silent,
            latency={group: distinct[:, len(self.groups) + column] for column, group in enumerate(self.groups)}
            | silent,
            messages_s=distinct[:, -1],
            domain_size=self.domain_size,
        )
        return np.asarray(self._estimate(network_model, self._candidates.take(rows))[which.ravel()])

    def steps_s(self, orders: IntArray) -> FloatArray:
        """[k] step under each mapping."""
        return self.priced(self.numbers(orders))

    # --- bounds -----------------------------------------------------------------------------------------------------

    def least_step_s(self) -> float:
        """No mapping is faster: every kind of group at the best rate that it can have, each by itself."""
        best = BestLinks(network=self.network, domain_size=self.domain_size)
        first = np.zeros(1, dtype=np.int64)
        spacing = [float(best.seconds_per_byte(group, first)) for group in self.groups]
        latency = [float(best.latency_s(group, first)) for group in self.groups]
        messages = 0.0 if self.messages is None else best.pipeline_s(first, self.messages)
        return float(self.priced(np.array([[*spacing, *latency, messages]]))[0])

    # --- for the search ---------------------------------------------------------------------------------------------

    def tabulate(self, order: IntArray) -> Energy:
        """The separable stand-in around one mapping."""
        start = self.numbers(order[None])[0]
        usable = np.array(self.network.usable)
        rates = self.network.bytes_per_s[np.ix_(usable, usable)][~np.eye(len(usable), dtype=bool)]
        crowd = max((len(slot_links(group)[0]) for group in self.groups), default=1)
        slowest = min([float(rates.min()), *(trunk.bytes_per_s / crowd for trunk in self.network.trunks)])
        grid = np.geomspace(1.0 / float(rates.max()) / self.num_slots, 1.0 / slowest, TABLE_POINTS)
        rows = np.tile(start, (len(self.groups) * TABLE_POINTS + 1, 1))
        for column in range(len(self.groups)):
            rows[1 + column * TABLE_POINTS : 1 + (column + 1) * TABLE_POINTS, column] = grid
        steps = self.priced(rows)
        tables = (steps[1:] - steps[0]).reshape(len(self.groups), TABLE_POINTS)
        return Energy(model=self, grid=grid, tables=tables, base_s=float(steps[0] - start[-1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Energy:
    """The stand-in that the search walks on: smooth, separable, close to the step.

    Args:
        model: of the configuration.
        grid: [points] seconds per byte.
        tables: [groups, points] change of the step.
        base_s: step of the starting mapping without its messages.
    """

    model: PlacementModel
    grid: FloatArray
    tables: FloatArray
    base_s: float

    def __call__(self, orders: IntArray) -> tuple[FloatArray, FloatArray]:
        """([k] stand-in for the step, [k] the same with a share of all links' mean) of each mapping."""
        view = Orders(network=self.model.network, orders=orders, domain_size=self.model.domain_size)
        spacing = self.model.network.ring_s_per_byte
        plain = np.full(len(orders), self.base_s)
        smooth = plain.copy()
        for group, table in zip(self.model.groups, self.tables, strict=True):
            worst = view.seconds_per_byte(group)
            senders, receivers = slot_links(group)
            mean = _power_mean(spacing[orders[:, senders], orders[:, receivers]])
            plain = plain + np.interp(worst, self.grid, table)
            smooth = smooth + np.interp((1.0 - MEAN_SHARE) * worst + MEAN_SHARE * mean, self.grid, table)
        if self.model.messages is not None:
            hops = self.model.hops_s(view)
            worst = slowest_pipeline_s(hops, self.model.messages)
            mean = (1.0 + self.model.messages.waits / (hops.shape[1] + 1)) * hops.sum(axis=1).mean(axis=1)
            plain, smooth = plain + worst, smooth + (1.0 - MEAN_SHARE) * worst + MEAN_SHARE * mean
        return plain, smooth


def _power_mean(values: FloatArray) -> FloatArray:
    """[k] power mean over the last axis, exponent 2^:data:`POWER_DOUBLINGS`."""
    top = values.max(axis=1, keepdims=True)
    scaled = raised(values / np.where(top > 0.0, top, 1.0), POWER_DOUBLINGS)
    return np.asarray(rooted(scaled.mean(axis=1), POWER_DOUBLINGS) * top[:, 0])


def _chunks(orders: IntArray) -> list[IntArray]:
    return [orders[start : start + ORDERS_AT_ONCE] for start in range(0, len(orders), ORDERS_AT_ONCE)]
