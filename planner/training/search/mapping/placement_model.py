"""Step time of one configuration under many rank mappings at once.

A step depends on a mapping through few numbers: for each kind of group that crosses nodes the inverse rate x_g of its
slowest group, and the message time y of the slowest pipeline. One run of the estimator lists the groups; NumPy computes
these numbers for many mappings, and the estimator prices each distinct set of numbers once. So the step under a mapping
*is* the estimator's step; there is no second model.

The search uses the surrogate T ≈ T₀ + y − y₀ + Σ_g (φ_g(x_g) − T₀), with φ_g tabulated at :data:`TABLE_POINTS` values
of x_g and the other numbers as under a starting mapping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshplan.planner.cluster.network.network import Network
from meshplan.planner.cluster.network.network_model import (
    BestLinks,
    GivenRates,
    NetworkModel,
)
from meshplan.planner.cluster.network.orders import Messages, Orders, PipelineLayout, slowest_pipeline_s
from meshplan.planner.cluster.network.slot_links import Group, slot_links
from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.rank_mapping.annealing import raised, rooted
from meshplan.planner.training.estimator.candidates import Candidates
from meshplan.planner.training.estimator.priced import candidates_of
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

TABLE_POINTS = 48
# Messages that no work hides, s.
LONG_S = 1e6
# Share of the power mean of all links in the energy, the rest is the worst link: a maximum alone is flat.
MEAN_SHARE = 0.25
POWER_DOUBLINGS = 3
# Orders evaluated together; keeps an array of links near the size of the processor's cache.
ORDERS_AT_ONCE = 8192


@dataclass(kw_only=True, eq=False)
class _Recorder(NetworkModel):
    """Records which groups and messages the estimator asks for."""

    domain_size: int
    groups: dict[Group, None]
    messages: list[Messages]

    def slowest(self, group: Group, rows: IntArray) -> tuple[float, float]:
        self.groups[group] = None
        return 1.0, 0.0

    def pipeline_s(
        self, asked: PipelineLayout, sent_bytes: FloatArray, inside_s: FloatArray, waits: FloatArray
    ) -> FloatArray:
        self.messages.append(asked.with_messages(sent_bytes[0], inside_s[0], waits[0]))
        return np.zeros(1)


class PlacementModel:
    """One configuration on one network.

    Args:
        problem: a problem whose machine has a network.
        config: the configuration.
    """

    def __init__(self, problem: TrainingProblem, config: TrainingConfig) -> None:
        if problem.machine.network is None:
            raise ValueError("a placement needs a network")
        self.problem, self.config = problem, config
        self.network: Network = problem.machine.network
        self.domain_size = problem.machine.domain_size
        self.num_slots = -(-config.world_size // self.domain_size)
        recorder = _Recorder(domain_size=self.domain_size, groups={}, messages=[])
        self._candidates = candidates_of(problem, config)
        self._estimate(recorder, self._candidates)
        # Where a schedule hides messages the estimator asks twice: for those that stay exposed, and for all.
        self.asked: tuple[Messages, ...] = tuple(recorder.messages)
        self.messages = self.asked[0] if self.asked else None
        self.groups: tuple[Group, ...] = tuple(recorder.groups)
        self._without_effect: tuple[Group, ...] = ()
        effective = self._effective_groups()
        self._without_effect = tuple(group for group in self.groups if group not in effective)
        self.groups = effective

    @property
    def moves(self) -> bool:
        """Whether the step depends on the mapping."""
        return bool(self.groups) or (self.messages is not None and self.num_slots > 1)

    @property
    def num_numbers(self) -> int:
        """Numbers through which the step depends on the mapping: columns of :meth:`numbers`."""
        return 2 * len(self.groups) + max(len(self.asked), 1)

    @cached_property
    def hidden_s(self) -> float:
        """Work that messages run behind, where the schedule hides them; 0 where it does not."""
        if len(self.asked) < 2:  # noqa: PLR2004  (exposed ones and all)
            return 0.0
        rows = np.zeros((2, self.num_numbers))
        rows[1, -1] = LONG_S
        free, bound = self.priced(rows).tolist()
        return float(LONG_S - (bound - free))

    def _effective_groups(self) -> tuple[Group, ...]:
        """The groups whose rates change the step; the estimator also asks for some that have no effect."""
        count = len(self.groups)
        rows = np.zeros((count + 1, self.num_numbers))
        usable = np.array(self.network.usable)
        rows[:, :count] = 1.0 / float(self.network.bytes_per_s[np.ix_(usable, usable)].min())
        rows[np.arange(count) + 1, np.arange(count)] = 0.0
        steps = self.priced(rows)
        return tuple(group for group, step in zip(self.groups, steps[1:], strict=True) if step != steps[0])

    def _estimate(self, network_model: NetworkModel, candidates: Candidates) -> FloatArray:
        machine = replace(self.problem.machine, network_model=network_model)
        problem = self.problem
        estimate = estimate_training(
            problem.shape, machine, problem.workload, candidates, problem.calibration, with_memory=False
        )
        return np.asarray(estimate.step_s)

    # --- exactly ----------------------------------------------------------------------------------------------------

    def numbers(self, orders: IntArray) -> FloatArray:
        """[k, numbers] inverse rate of each kind of group, their latencies, messages of the slowest pipeline.

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
        if self.asked:
            hops = self.hops_s(orders)
            columns += [np.asarray(slowest_pipeline_s(hops, asked)) for asked in self.asked]
        else:
            columns += [np.zeros(len(orders.orders))]
        return np.stack(columns, axis=1)

    def messages_s(self, hops_s: FloatArray) -> FloatArray:
        """[k] exposed messages of the slowest pipeline; see :meth:`hops_s`."""
        first = slowest_pipeline_s(hops_s, self.asked[0])
        return np.asarray(np.maximum(first, slowest_pipeline_s(hops_s, self.asked[-1]) - self.hidden_s))

    def hops_s(self, orders: Orders) -> FloatArray:
        """[k, P − 1, r] round trips over the stage boundaries of each pipeline; see :meth:`Orders.hops_s`."""
        asked = self.messages
        if asked is None:
            raise ValueError("one stage has no boundaries")
        return orders.hops_s(asked)

    def priced(self, numbers: FloatArray) -> FloatArray:
        """[k] step for each row of :meth:`numbers`, from the estimator."""
        distinct, which = np.unique(numbers, axis=0, return_inverse=True)
        rows = np.zeros(len(distinct), dtype=np.int64)
        unused = dict.fromkeys(self._without_effect, np.zeros(len(distinct)))
        network_model = GivenRates(
            spacing={group: distinct[:, column] for column, group in enumerate(self.groups)} | unused,
            latency={group: distinct[:, len(self.groups) + column] for column, group in enumerate(self.groups)}
            | unused,
            messages_s={asked: distinct[:, 2 * len(self.groups) + index] for index, asked in enumerate(self.asked)},
            domain_size=self.domain_size,
        )
        return np.asarray(self._estimate(network_model, self._candidates.take(rows))[which.ravel()])

    def steps_s(self, orders: IntArray) -> FloatArray:
        """[k] step under each mapping."""
        return self.priced(self.numbers(orders))

    # --- bounds -----------------------------------------------------------------------------------------------------

    def least_step_s(self) -> float:
        """Lower bound of the step under any mapping: every kind of group at the best rate that it alone can have."""
        best = BestLinks(network=self.network, domain_size=self.domain_size)
        first = np.zeros(1, dtype=np.int64)
        links = [best.slowest(group, first) for group in self.groups]
        messages = [best.messages_of(asked) for asked in self.asked] or [0.0]
        row = [*(link[0] for link in links), *(link[1] for link in links), *messages]
        return float(self.priced(np.array([row]))[0])

    # --- for the search ---------------------------------------------------------------------------------------------

    def tabulate(self, order: IntArray) -> Energy:
        """The separable surrogate around one mapping."""
        start = self.numbers(order[None])[0]
        usable = np.array(self.network.usable)
        rates = self.network.bytes_per_s[np.ix_(usable, usable)][~np.eye(len(usable), dtype=bool)]
        most_links = max((len(slot_links(group).senders) for group in self.groups), default=1)
        slowest = min([float(rates.min()), *(trunk.bytes_per_s / most_links for trunk in self.network.trunks)])
        shares = [slot_links(group).shares for group in self.groups]
        grids = np.array(
            [
                np.geomspace(share.min() / float(rates.max()) / self.num_slots, share.max() / slowest, TABLE_POINTS)
                for share in shares
            ]
        ).reshape(len(self.groups), TABLE_POINTS)
        rows = np.tile(start, (len(self.groups) * TABLE_POINTS + 1, 1))
        for column in range(len(self.groups)):
            rows[1 + column * TABLE_POINTS : 1 + (column + 1) * TABLE_POINTS, column] = grids[column]
        steps = self.priced(rows)
        tables = (steps[1:] - steps[0]).reshape(len(self.groups), TABLE_POINTS)
        messages_s = 0.0
        if self.asked:
            order_s = Orders(network=self.network, orders=order[None, : self.num_slots], domain_size=self.domain_size)
            messages_s = float(self.messages_s(self.hops_s(order_s))[0])
        return Energy(model=self, grids=grids, tables=tables, base_s=float(steps[0] - messages_s))


@dataclass(frozen=True, kw_only=True, eq=False)
class Energy:
    """The surrogate that the search minimises: smooth, separable, close to the step.

    Args:
        model: model of the configuration.
        grids: [groups, points] inverse rates, s/byte.
        tables: [groups, points] change of the step.
        base_s: step of the starting mapping without its messages.
    """

    model: PlacementModel
    grids: FloatArray
    tables: FloatArray
    base_s: float

    def __call__(self, orders: IntArray) -> tuple[FloatArray, FloatArray]:
        """[k] surrogate of the step, and [k] the same with a share of the mean over all links, for each mapping."""
        view = Orders(network=self.model.network, orders=orders, domain_size=self.model.domain_size)
        plain = np.full(len(orders), self.base_s)
        smooth = plain.copy()
        for group, grid, table in zip(self.model.groups, self.grids, self.tables, strict=True):
            worst = view.seconds_per_byte(group)
            mean = _power_mean(view.links_s_per_byte(group))
            plain = plain + np.interp(worst, grid, table)
            smooth = smooth + np.interp((1.0 - MEAN_SHARE) * worst + MEAN_SHARE * mean, grid, table)
        if self.model.messages is not None:
            hops = self.model.hops_s(view)
            worst = self.model.messages_s(hops)
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
