"""Kinds of workers that may stand together, and how many of each: the space of deployments, opened by its bounds.

A *family* is what a deployment is made of: one kind of mixed worker, several kinds of mixed workers behind one router
(one kind for each node type in use), or a kind of prefill and a kind of decode worker. Its members differ in the number
c of each kind. With r the best rate of a worker by its bound (no simulation reaches more), a member
carries at most::

    R(c) = Σ c_i·r_i                     mixed kinds
    R(c) = min(c_prefill·r, c_decode·r)  prefill and decode

*Given rate λ.* Members with R(c) < λ are ruled out: their queue grows for ever. The search starts from the least
members that carry λ and adds workers where one violates an SLO; more workers under the same load are taken never to be
worse, so nothing below a violation is looked at again.

*Given concurrency.* Every number of workers up to the number of requests.

*Free load.* One more identical worker adds its rate, so for the highest rate no device stays idle, and for a ratio
(tokens per device, per dollar) a union of kinds lies between its parts (the mediant): one kind, or a pair, is best.

Every bound here is on the score of :func:`~meshplan.planner.serving.search.candidates.score_at`, smaller is better, and
no member of a family scores below the family's bound.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.nodes import by_node_type, devices_taken, fit_nodes, nodes_needed, usd_per_hour
from meshplan.planner.serving.problem.problem import ServingObjective, ServingProblem
from meshplan.planner.serving.search.scores import INFINITE, score_at
from meshplan.planner.serving.search.workers import PricedWorker

Counts = tuple[int, ...]
# Ratios of prefill to decode workers are tried up to this many decode workers; a larger deployment repeats them.
MOST_IN_RATIO = 64
# Rates are sums of floating-point numbers.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a deployment is made of; see the module's text.

    Args:
        problem: the question.
        kinds: one or several mixed workers, or a prefill and a decode worker.
    """

    problem: ServingProblem
    kinds: tuple[PricedWorker, ...]

    @property
    def is_disaggregated(self) -> bool:
        """A prefill and a decode worker."""
        return self.kinds[0].placed.role is not Role.MIXED

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Most requests/s of one worker of each kind within the SLOs."""
        return tuple(kind.best_rate_per_s for kind in self.kinds)

    def rate(self, counts: Counts) -> float:
        """R(c), requests/s."""
        each = [count * rate for count, rate in zip(counts, self.rates, strict=True)]
        return min(each) if self.is_disaggregated else sum(each)

    def _groups(self, counts: Counts) -> dict[str, list[tuple[int, int]]]:
        return by_node_type(
            (name, size, count)
            for kind, count in zip(self.kinds, counts, strict=True)
            for name, _, size in kind.placed.sides
        )

    def _instances(self, counts: Counts) -> int:
        """Devices of a member, or instances of devices that are cut."""
        return sum(count * kind.num_devices for kind, count in zip(self.kinds, counts, strict=True))

    def num_devices(self, counts: Counts) -> int:
        """Devices of a member, whole ones."""
        cut = self.kinds[0].placed.machine.instances_per_device  # that of all kinds
        return -(-self._instances(counts) // cut)

    def counted_devices(self, counts: Counts) -> int:
        """Devices that the objective counts: those in use, the parts of nodes that they take, or whole rented nodes."""
        problem, used = self.problem, self.num_devices(counts)
        if problem.limits.rents_devices or problem.objective is not ServingObjective.THROUGHPUT_PER_DEVICE:
            return used
        groups, whole = self._groups(counts), problem.pays_idle_devices
        found = sum(devices_taken(of, problem.machines[name], whole_nodes=whole) for name, of in groups.items())
        return max(min(found, problem.num_devices), used)

    def usd_per_hour(self, counts: Counts) -> float | None:
        """Price of the nodes of a member; None without prices."""
        by_device, most = self.problem.limits.rents_devices, self.problem.num_devices
        return usd_per_hour(self._groups(counts), self.problem.machines, by_device=by_device, most=most)

    def power_w(self, counts: Counts, rates: Sequence[float]) -> float | None:
        """Average power of a member whose kinds finish ``rates`` requests/s; None without board powers."""
        power = 0.0
        for kind, count, rate in zip(self.kinds, counts, rates, strict=True):
            watts = kind.power_w(rate / count, self.problem.power.constants)
            if watts is None:
                return None
            power += watts * count
        return power

    def shares(self, counts: Counts, rate: float) -> tuple[float, ...]:
        """Requests/s that each kind finishes: mixed kinds by their speed, prefill and decode workers all of them."""
        if self.is_disaggregated:
            return (rate, rate)
        most = self.rate(counts)
        return tuple(rate * count * each / most for count, each in zip(counts, self.rates, strict=True))

    def simplicity(self, counts: Counts) -> tuple[float, ...]:
        """What an operator would rather not have, the worst first: kinds of workers (attention and FFN apart are two),
        a dearer rent (or, without prices, more devices), partly used nodes, devices cut by MIG, a worker over several
        nodes, pipeline stages (the most of a worker, then those of all kinds), a router, attention data-parallel ranks,
        drafts and how many, power limits.

        Of plans that cannot be told apart a team runs tensor parallelism, or copies behind a router, before it splits
        a model over stages; workers within a node before one that starts on several and stops with any of them; and one
        tensor-parallel group before ranks that keep requests of their own and wait for each other at every mixture of
        experts.
        """
        machines, drafts = self.problem.machines, self.problem.speculation
        idle = sum(
            nodes_needed(found, machines[name].domain_size) * machines[name].domain_size
            - sum(size * count for size, count in found)
            for name, found in self._groups(counts).items()
        )
        usd = self.usd_per_hour(counts)
        stages = [kind.placed.layout.pipeline_parallel for kind in self.kinds]
        return (
            float(sum(len(kind.placed.sides) for kind in self.kinds)),
            float(self.num_devices(counts)) if usd is None else usd,
            float(idle > 0),
            float(self.kinds[0].placed.machine.instances_per_device),
            float(max(-(-kind.num_devices // kind.placed.machine.domain_size) for kind in self.kinds)),
            float(max(stages)),
            float(sum(stages)),
            float(sum(counts) > 1),
            float(max(kind.placed.layout.attention_data_parallel for kind in self.kinds)),
            0.0 if drafts is None else float(drafts.num_draft_tokens),
            max(kind.placed.withheld_share for kind in self.kinds),
        )

    def fits(self, counts: Counts) -> bool:
        """Whether there is a worker of each kind, the nodes suffice, and every pinned number of workers is kept."""
        problem = self.problem
        if min(counts) < 1:
            return False
        for kind, count in zip(self.kinds, counts, strict=True):
            if (
                problem.pinned.of(kind.placed.role).get("num_workers", count) != count
                or count > kind.placed.most_workers
            ):
                return False
        most = problem.limits.max_devices
        if most is not None and self._instances(counts) > most:
            return False
        return fit_nodes(self._groups(counts), problem.machines) and self._joined(counts)

    def _joined(self, counts: Counts) -> bool:
        """Whether KV caches have a way from prefill to decode workers: a network, or one node for all."""
        machines = {kind.placed.node_type: kind.placed.machine for kind in self.kinds}
        if not self.is_disaggregated or all(machine.is_joined for machine in machines.values()):
            return True
        return len(machines) == 1 and self.num_devices(counts) <= next(iter(machines.values())).domain_size

    def most(self, which: int) -> int:
        """Most workers of one kind if it had the devices alone."""
        kind = self.kinds[which]
        machine, size = kind.placed.machine, kind.num_devices
        if kind.placed.ffn is not None:
            return self._most_separated(which)
        have = min(machine.num_devices, self.problem.limits.max_devices or machine.num_devices)
        if size >= machine.domain_size:
            most = machine.num_devices // (-(-size // machine.domain_size) * machine.domain_size)
        else:
            whole, rest = divmod(machine.num_devices, machine.domain_size)
            most = whole * (machine.domain_size // size) + rest // size
        return min(most, have // size, kind.placed.most_workers)

    def _most_separated(self, which: int) -> int:
        """No more workers of a kind with FFN devices have the devices they need, nodes left aside."""
        kind, needed, have = self.kinds[which], Counter[str](), dict[str, int]()
        for name, machine, size in kind.placed.sides:
            needed[name] += size
            have[name] = machine.num_devices
        most = min(have[name] // size for name, size in needed.items())
        return min(most, (self.problem.limits.max_devices or self.problem.num_devices) // kind.num_devices)

    def pinned(self, which: int) -> int | None:
        """The pinned number of workers of one kind."""
        return self.problem.pinned.of(self.kinds[which].placed.role).get("num_workers")

    def score(self, counts: Counts) -> float:
        """Bound on the score of a member."""
        problem, workload = self.problem, self.problem.workload
        rate = self.offered_or_most(counts)
        needs_power = problem.objective is ServingObjective.ENERGY
        needs_price = problem.objective is ServingObjective.USD_PER_MILLION_TOKENS
        return score_at(
            problem.objective,
            num_devices=self.counted_devices(counts),
            usd_per_hour=self.usd_per_hour(counts) if needs_price else None,
            power_w=self.power_w(counts, self.shares(counts, rate)) if needs_power else None,
            request_rate_per_s=rate,
            tokens_per_s=rate * workload.mean_lengths[1],
        )

    def offered_or_most(self, counts: Counts) -> float:
        """The given rate; where none is given, a bound on the rate of a member, requests/s."""
        workload = self.problem.workload
        if workload.request_rate_per_s is not None:
            return workload.request_rate_per_s
        most = self.rate(counts)
        return most if workload.concurrency is None else min(most, self._closed_rate(counts))

    def _closed_rate(self, counts: Counts) -> float:
        """Rate of a closed loop, bounded by the requests in flight at each worker, spread evenly."""
        concurrency = self.problem.workload.concurrency or 0
        if len(counts) > 1 and not self.is_disaggregated:
            return INFINITE
        kind, count = self.kinds[-1], counts[-1]  # the one that decodes
        counts_of = kind.steady.num_seqs
        at = min(int(np.searchsorted(counts_of, -(-concurrency // count))), len(counts_of) - 1)
        return count * float(kind.most_rate_per_s[at])

    # --- members ----------------------------------------------------------------------------------------------------

    def first(self) -> list[Counts]:
        """Members that the search begins with; :meth:`following` reaches the others, whose bounds are no better."""
        if not all(rate > 0.0 for rate in self.rates):
            return []
        workload = self.problem.workload
        if workload.request_rate_per_s is not None:
            found = self._least(workload.request_rate_per_s)
        elif workload.concurrency is not None and not self.is_disaggregated:
            found = self._up_to(workload.concurrency)
        elif self.is_disaggregated:
            found = self._balanced()
        else:
            found = self._full()
        return [counts for counts in found if self.fits(counts)]

    def _least(self, rate: float) -> list[Counts]:
        """The least members that carry a rate."""
        pinned = [self.pinned(which) for which in range(len(self.kinds))]
        needed = [max(math.ceil(rate / each * (1.0 - ROUNDING)), 1) for each in self.rates]
        if self.is_disaggregated or len(self.kinds) == 1:
            counts = tuple(pin or least for pin, least in zip(pinned, needed, strict=True))
            return [counts]
        found = []
        most = [min(self.most(which), needed[which]) for which in range(len(self.kinds) - 1)]
        for head in itertools.product(*(range(1, number + 1) for number in most)):
            left = rate - sum(count * each for count, each in zip(head, self.rates, strict=False))
            last = math.ceil(left / self.rates[-1] * (1.0 - ROUNDING))
            # One worker less of any other kind would do as well with so much to spare.
            if last >= 1:
                found.append((*head, last))
        return found

    def _up_to(self, concurrency: int) -> list[Counts]:
        """Numbers of workers of a closed loop, of which no bound rules out an even share of the requests."""
        if len(self.kinds) > 1:
            return []
        kind, found = self.kinds[0], list[Counts]()
        for count in range(1, min(self.most(0), concurrency) + 1):
            at = min(int(np.searchsorted(kind.steady.num_seqs, -(-concurrency // count))), len(kind.may_meet) - 1)
            if kind.may_meet[at]:
                found.append((count,))
        return found

    def _full(self) -> list[Counts]:
        """Members to which no worker can be added."""
        most = [self.most(which) for which in range(len(self.kinds))]
        pinned = [self.pinned(which) for which in range(len(self.kinds))]
        if None not in pinned:
            return [tuple(pin or 1 for pin in pinned)]
        limit = self.problem.limits.max_devices
        total = sum(number * kind.num_devices for number, kind in zip(most, self.kinds, strict=True))
        if len(most) == 1:
            return [(most[0],), *self._whole_nodes(most[0])]
        if limit is None or total <= limit:
            return [tuple(most)]
        found = []
        for head in itertools.product(*(range(1, number + 1) for number in most[:-1])):
            used = sum(count * kind.num_devices for count, kind in zip(head, self.kinds, strict=False))
            last = min((limit - used) // self.kinds[-1].num_devices, most[-1])
            if last >= 1:
                found.append((*head, last))
        return found

    def _whole_nodes(self, most: int) -> list[Counts]:
        """The most workers that leave no rented node in part unused, where that is fewer."""
        kind = self.kinds[0]
        each = kind.placed.machine.domain_size // kind.num_devices
        whole = most // each * each if each > 1 else most
        return [(whole,)] if 0 < whole < most else []

    def _balanced(self) -> list[Counts]:
        """Pairs of which neither kind is there without use: for every number of decode workers those prefill workers
        that finish about as much, and for every number of prefill workers the fewest decode workers that do.
        """
        if self._fills:
            return self._filling()
        prefill, (firsts, seconds) = self.rates[0], map(self._tried, (0, 1))
        able = {second: self._decoded(second) for second in seconds}
        found = set[Counts]()
        for second, rate in able.items():
            ratio = math.floor(rate / prefill)
            found |= {(first, second) for first in (ratio, ratio + 1) if first in firsts}
        for first in firsts:
            enough = (second for second, rate in able.items() if rate >= first * prefill * (1.0 - ROUNDING))
            found |= {(first, second) for second in itertools.islice(enough, 1)}
        return sorted(found)

    def _tried(self, which: int) -> Sequence[int]:
        """Numbers of workers of one kind that are tried beside the other's."""
        pin = self.pinned(which)
        return range(1, min(self.most(which), MOST_IN_RATIO) + 1) if pin is None else range(pin, pin + 1)

    def _decoded(self, second: int) -> float:
        """No more requests/s leave so many decode workers."""
        rate = second * self.rates[1]
        return rate if self.problem.workload.concurrency is None else min(rate, self._closed_rate((1, second)))

    def _filling(self) -> list[Counts]:
        """For every number of decode workers the most prefill workers that the devices have room for."""
        found, most = list[Counts](), self.most(0)
        for second in range(1, self.most(1) + 1) if self.pinned(1) is None else self._tried(1):
            firsts = range(most, 0, -1) if self.pinned(0) is None else self._tried(0)
            found += itertools.islice(((first, second) for first in firsts if self.fits((first, second))), 1)
        return found

    def beyond(self, counts: Counts) -> Iterator[Counts]:
        """Pairs of one more worker, where no rate is given that fewer carry: their bounds are no better, but what they
        reach may be nearer to them.
        """
        if self.is_disaggregated and self.problem.workload.request_rate_per_s is None and not self._fills:
            yield from self.following(counts)

    @property
    def _fills(self) -> bool:
        """The objective is the highest rate: no device stays idle that another worker could use."""
        return self.problem.has_free_load and self.problem.objective is ServingObjective.MAX_REQUEST_RATE

    def following(self, counts: Counts, *, wants_prefill: bool = True) -> Iterator[Counts]:
        """Members with one more worker, for a member that violates an SLO under a given load.

        Args:
            counts: the member that violates it.
            wants_prefill: more prefill workers may help; they do not where only the time between tokens is too long.
        """
        for which in range(len(counts)):
            if self.is_disaggregated and not which and not wants_prefill:
                continue
            more = (*counts[:which], counts[which] + 1, *counts[which + 1 :])
            if self.fits(more):
                yield more

    @property
    def most_rate(self) -> float:
        """No member carries more, requests/s; 0 where there is none."""
        if self.is_disaggregated and not self.fits(tuple(self.pinned(which) or 1 for which in range(len(self.kinds)))):
            return 0.0
        most = [self.most(which) for which in range(len(self.kinds))]
        if not self.is_disaggregated:
            return self.rate(tuple(most))
        apart = min(number * rate for number, rate in zip(most, self.rates, strict=True))
        if len({name for kind in self.kinds for name, _, _ in kind.placed.sides}) > 1:
            return apart
        needed = sum(kind.num_devices / rate for kind, rate in zip(self.kinds, self.rates, strict=True) if rate > 0.0)
        there = self.kinds[0].placed.machine.num_devices
        have = min(there, self.problem.limits.max_devices or there)
        return min(apart, have / needed) if apart > 0.0 else 0.0

    # --- the bound of the family --------------------------------------------------------------------------------------

    @cached_property
    def bound(self) -> float:
        """No member has a better score: as if parts of workers and of nodes could be had."""
        problem, workload = self.problem, self.problem.workload
        rate = workload.request_rate_per_s
        objective = problem.objective
        if objective is ServingObjective.MAX_REQUEST_RATE:
            most = self.most_rate
            return 1.0 / (rate or most) if rate or most else INFINITE
        if not all(each > 0.0 for each in self.rates):
            return INFINITE
        costs = [self._cost(kind, each) / each for kind, each in zip(self.kinds, self.rates, strict=True)]
        per_rate = sum(costs) if self.is_disaggregated else min(costs)
        ones = sum(self._cost(kind, 0.0) for kind in self.kinds)
        if rate is not None:
            least = self._cost_of(rate, per_rate, ones)
        elif objective is ServingObjective.NUM_DEVICES:
            least = ones
        else:
            least = per_rate
        if objective is ServingObjective.NUM_DEVICES:
            return least
        rate = rate or 1.0
        tokens_per_s = rate * workload.mean_lengths[1]
        usd = objective is ServingObjective.USD_PER_MILLION_TOKENS
        return score_at(
            objective,
            num_devices=least,
            usd_per_hour=least if usd else None,
            power_w=least,
            request_rate_per_s=rate,
            tokens_per_s=tokens_per_s,
        )

    def _cost_of(self, rate: float, per_rate: float, ones: float) -> float:
        """Least cost of a given rate with at least one worker of each kind."""
        if self.is_disaggregated or self.problem.objective is ServingObjective.ENERGY:
            return max(per_rate * rate, ones)
        return ones + max(rate - sum(self.rates), 0.0) * per_rate

    def _cost(self, kind: PricedWorker, rate_per_s: float) -> float:
        """What the objective counts of one worker at a rate: devices, USD/h, or W, which grow less than the rate does:
        least for a request at the best rate, and least of all at none.
        """
        match self.problem.objective:
            case ServingObjective.USD_PER_MILLION_TOKENS:
                return sum(size * (machine.usd_per_hour_per_device or 0.0) for _, machine, size in kind.placed.sides)
            case ServingObjective.ENERGY:
                return kind.power_w(rate_per_s, self.problem.power.constants) or 0.0
            case _:
                return kind.device_share
