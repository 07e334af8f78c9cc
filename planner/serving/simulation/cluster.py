"""Several workers behind a router, aggregated or disaggregated.

Workers advance independently between interactions. A heap orders the next events: requests that leave a worker or
arrive at a pool, and workers with work to do. A worker's run of decode iterations starts only when no earlier event can
interrupt it, so that the router always sees the current state of every worker. In one pool of open arrivals only the
next arrival interrupts, so that a worker runs up to it; elsewhere every iteration is an event.

Disaggregated prefill and decode (arXiv:2401.09670, arXiv:2311.18677): the KV cache of a prefilled request,
kv_bytes_per_token × input, goes over a link that carries one cache after the other at full bandwidth. Link latency is
added to each transfer but does not occupy the link. The prefill worker's blocks are free as soon as the prefill is
done, as if the cache were copied to a send buffer; its slot is, too, or when the cache has arrived (``holds_slots``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.core.arrays import BoolArray
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits, Role, Router
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.arrivals import check_requests
from meshplan.planner.serving.simulation.compiled.choice import serve_compiled
from meshplan.planner.serving.simulation.compiled.member import Handover, Member
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.engine import (
    KV_BLOCK_TOKENS,
    check_limits,
    finished,
    in_flight_first,
    servable,
    simulate,
)
from meshplan.planner.serving.simulation.prefix_cache import KvTier, PrefixCache, TierShape
from meshplan.planner.serving.simulation.request_state import RequestState
from meshplan.planner.serving.simulation.routing import Pool
from meshplan.planner.serving.simulation.run import ServingRun
from meshplan.planner.serving.simulation.worker import Worker

# Kinds of events in the order in which simultaneous ones are handled: departures, KV caches that were sent, arrivals,
# prefixes fetched from the second tier, iterations.
LEAVES, SENT, ARRIVES, FETCHED, WORKS = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPool:
    """Identical workers.

    Args:
        cost: iteration times of a worker.
        limits: limits of its scheduler.
        kv_capacity_tokens: capacity of its KV cache over all attention data-parallel ranks.
        num_workers: behind the router.
        role: see :class:`Role`.
        tier: second tier of KV cache for prefixes; None: evicted prefixes are lost. Not for DECODE.
        weight: of each worker, for a router between several pools of one role.
    """

    cost: StepCost
    limits: EngineLimits
    kv_capacity_tokens: int
    num_workers: int = 1
    role: Role = Role.MIXED
    tier: TierShape | None = None
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLink:
    """The link over which KV caches go from prefill to decode workers.

    Args:
        kv_bytes_per_token: KV cache of all layers.
        bandwidth_bytes_per_s: rate of one link.
        latency_s: added to each transfer.
        reads_prompt_s_per_token: time of the decode server to tokenize the prompt before it asks for its cache; added
            to each transfer like the latency.
        is_shared: all prefill workers share one link; otherwise each has its own.
        holds_slots: a prefilled request keeps its slot at the prefill worker until its cache has arrived.
    """

    kv_bytes_per_token: float
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    reads_prompt_s_per_token: float = 0.0
    is_shared: bool = False
    holds_slots: bool = False

    def added_s(self, prompt_tokens: float) -> float:
        """What a transfer takes beyond the time in which it occupies the link, s."""
        return self.latency_s + self.reads_prompt_s_per_token * prompt_tokens

    def transfer_s(self, prompt_tokens: float) -> float:
        """From the end of a prefill to the cache at the decode worker where no other transfer is in the way, s."""
        return self.added_s(prompt_tokens) + self.kv_bytes_per_token * prompt_tokens / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSystem:
    """A serving system: pools of role MIXED behind one router, or one PREFILL and one DECODE with a link.

    Args:
        pools: see above, in this order.
        router: how requests reach the workers of a pool.
        link: between the pools; None for one pool.
        first_token_from_decode: the decode worker answers the client, who sees the first token only after the transfer
            and the first decode iteration.
        kv_block_tokens: tokens of a block of KV cache.
    """

    pools: tuple[SimulatedPool, ...]
    router: Router = Router.LEAST_LOADED
    link: KvLink | None = None
    first_token_from_decode: bool = False
    kv_block_tokens: int = KV_BLOCK_TOKENS


def simulate_system(requests: Requests, system: ServingSystem, stopping: EarlyStopping | None = None) -> ServingRun:
    """Serve the requests with all workers of a system. ``workers`` of the run are those of the pools, in order.

    Raises:
        SpecError: malformed requests or limits, or pools that do not make a system.
        SloViolatedError: the run was stopped early, because it is certain to violate an SLO.
    """
    pool = system.pools[0] if system.pools else None
    is_plain = pool is not None and pool.num_workers == 1 and pool.role is Role.MIXED and pool.tier is None
    if pool is not None and is_plain and len(system.pools) == 1:
        return simulate(
            requests,
            pool.cost,
            pool.limits,
            kv_capacity_tokens=pool.kv_capacity_tokens,
            kv_block_tokens=system.kv_block_tokens,
            stopping=stopping,
        )
    return simulate_together(requests, system, stopping)


def simulate_together(requests: Requests, system: ServingSystem, stopping: EarlyStopping | None = None) -> ServingRun:
    """As :func:`simulate_system`, without the faster path for a single worker."""
    _check_system(system)
    check_requests(requests)
    for pool in system.pools:
        check_limits(pool.limits, pool.cost, system.kv_block_tokens)
    served = _servable(requests, system)
    run = _compiled(requests, system, served, stopping)
    if run is not None:
        return run
    cluster = _Cluster(requests, system)
    cluster.run(served, stopping if requests.concurrency is None else None)
    return finished(requests, cluster.state, [worker for pool in cluster.pools for worker in pool.workers])


def _servable(requests: Requests, system: ServingSystem) -> BoolArray:
    """[n] whether every worker can serve a request."""
    block = system.kv_block_tokens
    fitting = [servable(requests, pool.cost, pool.role, pool.kv_capacity_tokens, block) for pool in system.pools]
    return np.asarray(np.logical_and.reduce(fitting))


def _compiled(
    requests: Requests, system: ServingSystem, served: BoolArray, stopping: EarlyStopping | None
) -> ServingRun | None:
    """A long run in machine code; None where that is not for it."""
    if any(pool.tier is not None for pool in system.pools):
        return None
    members = [
        Member(
            cost=pool.cost,
            limits=pool.limits,
            kv_capacity_tokens=pool.kv_capacity_tokens,
            role=pool.role,
            weight=pool.weight,
        )
        for pool in system.pools
        for _ in range(pool.num_workers)
    ]
    return serve_compiled(
        requests,
        members,
        served,
        kv_block_tokens=system.kv_block_tokens,
        router=system.router,
        stopping=stopping if requests.concurrency is None else None,
        handover=_handover(system),
    )


def _handover(system: ServingSystem) -> Handover | None:
    """How KV caches reach workers that only decode; None where there are none."""
    link = system.link
    if link is None or len(system.pools) == 1:
        return None
    return Handover(
        kv_bytes_per_token=link.kv_bytes_per_token,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        reads_prompt_s_per_token=link.reads_prompt_s_per_token,
        is_shared=link.is_shared,
        holds_slots=link.holds_slots,
        hides_first_token=system.first_token_from_decode,
    )


def _check_system(system: ServingSystem) -> None:
    problems = []
    roles = [pool.role for pool in system.pools]
    if set(roles) != {Role.MIXED} and roles != [Role.PREFILL, Role.DECODE]:
        named = ", ".join(role.value for role in roles) or "none"
        problems.append(Problem(path="pools", message=f"{named}: give mixed pools, or prefill and decode"))
    elif Role.DECODE in roles and (system.link is None or system.link.bandwidth_bytes_per_s <= 0.0):
        problems.append(
            Problem(path="link", message="disaggregated prefill and decode need a link with a bandwidth above 0")
        )
    for i, pool in enumerate(system.pools):
        if pool.num_workers < 1:
            problems.append(Problem(path=f"pools[{i}].num_workers", message=f"{pool.num_workers} workers: give ≥ 1"))
        if pool.tier is not None and (pool.role is Role.DECODE or not pool.limits.prefix_caching):
            message = "a tier keeps the prefixes of workers that prefill and have a prefix cache"
            problems.append(Problem(path=f"pools[{i}].tier", message=message))
    if problems:
        raise SpecError(problems, of="the serving system")


class _Cluster:
    def __init__(self, requests: Requests, system: ServingSystem) -> None:
        self.requests, self.system = requests, system
        self.state = RequestState(requests)
        self.think_s = requests.think_times_s().tolist()
        # (time, kind, request or worker, worker that is left or pool that is arrived at).
        self.events: list[tuple[float, int, int, int]] = []
        roles = dict.fromkeys(pool.role for pool in system.pools)
        self.pools = [self._pool(role) for role in roles]
        self.workers = [worker for pool in self.pools for worker in pool.workers]
        self.pool_of = [pool for pool in self.pools for _ in pool.workers]
        self.link_free_s = [0.0] * len(self.workers)
        self.tiers = self._tiers()
        self.following: Iterator[int] = iter(())
        # Arrivals that no completion starts, in order; the first of them is an event.
        self.arriving: Iterator[tuple[float, int]] = iter(())
        self.next_arrival_s = math.inf
        is_open, has_tiers = requests.concurrency is None, any(tier is not None for tier in self.tiers)
        self.only_arrivals_interrupt = is_open and len(self.pools) == 1 and not has_tiers

    def _tiers(self) -> list[KvTier | None]:
        """The second tier of each worker; those of a pool may share what they hold."""
        found, shared = list[KvTier | None](), dict[int, PrefixCache]()
        for worker, pool in zip(self.workers, self._of_workers(self.system.pools), strict=True):
            if worker.prefixes is None or pool.tier is None:
                found.append(None)
                continue
            tier = KvTier(self.state, pool.tier, worker.prefixes, shared.get(id(pool)))
            if pool.tier.is_shared:
                shared[id(pool)] = tier.held
            found.append(tier)
        return found

    @staticmethod
    def _of_workers(pools: Iterable[SimulatedPool]) -> list[SimulatedPool]:
        return [pool for pool in pools for _ in range(pool.num_workers)]

    def _pool(self, role: Role) -> Pool:
        """All workers of a role behind their router."""
        block, behind = self.system.kv_block_tokens, self._of_workers(p for p in self.system.pools if p.role is role)
        first = 0 if role is not Role.DECODE else self.system.pools[0].num_workers
        output = 0.0 if role is Role.PREFILL else float(np.mean(self.requests.output_length))
        workers = [
            Worker(
                pool.cost,
                pool.limits,
                self.state,
                kv_capacity_tokens=pool.kv_capacity_tokens,
                kv_block_tokens=block,
                role=pool.role,
                on_leave=partial(self._will_leave, first + j),
                pauses=True,
                holds_slots=role is Role.PREFILL and self.system.link is not None and self.system.link.holds_slots,
            )
            for j, pool in enumerate(behind)
        ]
        weights = [pool.weight for pool in behind]
        return Pool(workers, self.system.router, self.state, first=first, expected_output=output, weights=weights)

    def run(self, served: BoolArray, stopping: EarlyStopping | None) -> None:
        """Handle events until none is left, or the run is stopped early; ``served`` [n] says who can be served."""
        requests, events = self.requests, self.events
        first, self.following = in_flight_first(requests, served)
        arrivals = requests.arrival_s.tolist()
        self.arriving = iter(sorted((arrivals[request], request) for request in first))
        self._await_next()
        looks = set() if stopping is None else set(stopping.moments(requests.arrival_s))
        while events:
            now, kind, subject, where = heapq.heappop(events)
            if kind == LEAVES:
                self._leave(where, subject, now)
            elif kind == SENT:
                self.workers[where].run(now)
                self.workers[where].sent(now)
                self._wake(where)
            elif kind == ARRIVES:
                self._await_next()
                self._arrive(subject, now, where)
                if stopping is not None and where == 0 and subject in looks:
                    stopping.look(self.state, now)
            elif kind == FETCHED:
                self._enter(subject, now, where)
            elif self.workers[subject].wake_s == now:
                until_s = self.next_arrival_s if self.only_arrivals_interrupt else math.nextafter(now, math.inf)
                self.workers[subject].run(until_s, lazily=True)
                self._wake(subject)

    def _await_next(self) -> None:
        self.next_arrival_s, request = next(self.arriving, (math.inf, -1))
        if request >= 0:
            heapq.heappush(self.events, (self.next_arrival_s, ARRIVES, request, 0))

    def _wake(self, number: int) -> None:
        wake_s = self.workers[number].wake_s
        if wake_s < math.inf:
            heapq.heappush(self.events, (wake_s, WORKS, number, 0))

    def _arrive(self, request: int, now: float, which: int) -> None:
        state, pool = self.state, self.pools[which]
        if which == 0:
            state.arrival_s[request] = now
        else:
            hidden = self.system.first_token_from_decode
            state.arrive_prefilled(request, math.inf if hidden else state.first_token_s[request])
        number = pool.first + pool.choose(request)
        tier = self.tiers[number]
        here_s = now if tier is None else tier.arrive(request, now)
        if here_s > now:
            heapq.heappush(self.events, (here_s, FETCHED, request, number))
        else:
            self._enter(request, now, number)

    def _enter(self, request: int, now: float, number: int) -> None:
        """A request joins the queue of its worker."""
        worker, tier = self.workers[number], self.tiers[number]
        worker.run(now)
        worker.submit(request, now)
        if tier is not None:
            self.state.found_tokens[request] = tier.found.pop(request)
        self._wake(number)

    def _will_leave(self, number: int, request: int, at_s: float) -> None:
        """Called at the start of an iteration that ends a request: the departure becomes an event at its end."""
        heapq.heappush(self.events, (at_s, LEAVES, request, number))

    def _leave(self, number: int, request: int, now: float) -> None:
        self.pool_of[number].forget(request)
        if len(self.pools) > 1 and self.pool_of[number] is self.pools[0] and self.state.output_length[request] > 1:
            self.state.finish_s[request] = math.inf
            self._transfer(request, now, number)
            return
        following = next(self.following, None)
        if following is not None:
            heapq.heappush(self.events, (now + self.think_s[following], ARRIVES, following, 0))

    def _transfer(self, request: int, now: float, number: int) -> None:
        link = self.system.link
        assert link is not None  # noqa: S101  (checked with the system)
        which = 0 if link.is_shared else number
        start = max(now, self.link_free_s[which])
        tokens = self.state.input_length[request]
        seconds = link.kv_bytes_per_token * tokens / link.bandwidth_bytes_per_s
        self.link_free_s[which] = start + seconds
        heapq.heappush(self.events, (start + seconds + link.added_s(tokens), ARRIVES, request, 1))
        if link.holds_slots:
            heapq.heappush(self.events, (start + seconds + link.latency_s, SENT, request, number))
