"""Simulation of one worker: from requests to the times at which each was served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.core.arrays import BoolArray
from meshplan.planner.serving.estimator.step_cost import StepCost
from meshplan.planner.serving.problem.config import EngineLimits, Role
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.arrivals import check_requests
from meshplan.planner.serving.simulation.compiled.choice import serve_compiled
from meshplan.planner.serving.simulation.compiled.member import Member
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.request_state import RequestState, fits
from meshplan.planner.serving.simulation.run import Segments, ServingRun, WorkerRun
from meshplan.planner.serving.simulation.worker import Worker

# Tokens of a KV block: the default of vLLM (--block-size).
KV_BLOCK_TOKENS = 16


def simulate(
    requests: Requests,
    cost: StepCost,
    limits: EngineLimits,
    *,
    kv_capacity_tokens: int,
    kv_block_tokens: int = KV_BLOCK_TOKENS,
    role: Role = Role.MIXED,
    stopping: EarlyStopping | None = None,
) -> ServingRun:
    """Serve the requests with one worker, exact to an iteration (:mod:`meshplan.planner.serving.simulation.worker`).

    A request that the KV cache can never hold is rejected and counted; it takes no time. In a closed loop the next
    request starts ``think_s`` after a completion.

    Args:
        requests: in order of arrival.
        cost: tables of the worker's iterations.
        limits: limits of its scheduler.
        kv_capacity_tokens: capacity of the KV cache over all attention data-parallel ranks.
        kv_block_tokens: tokens of a block of KV cache.
        role: PREFILL ends a request with its first token; to DECODE requests arrive prefilled, with their first token
            already generated.
        stopping: stops a run of open arrivals that is certain to violate an SLO.

    Raises:
        SpecError: malformed requests or limits.
        SloViolatedError: the run was stopped early.
    """
    check_requests(requests)
    check_limits(limits, cost, kv_block_tokens)
    _check_role(requests, role)
    served = servable(requests, cost, role, kv_capacity_tokens, kv_block_tokens)
    if role is Role.MIXED:
        member = Member(cost=cost, limits=limits, kv_capacity_tokens=kv_capacity_tokens)
        block = kv_block_tokens
        run = serve_compiled(requests, [member], served, kv_block_tokens=block, router=None, stopping=stopping)
        if run is not None:
            return run
    return _event_by_event(
        requests,
        cost,
        limits,
        served,
        kv_tokens=kv_capacity_tokens,
        block=kv_block_tokens,
        role=role,
        stopping=stopping,
    )


def _event_by_event(
    requests: Requests,
    cost: StepCost,
    limits: EngineLimits,
    served: BoolArray,
    *,
    kv_tokens: int,
    block: int,
    role: Role,
    stopping: EarlyStopping | None,
) -> ServingRun:
    """The run in Python; ``served`` [n] says who can be served, the rest is as for :func:`simulate`."""
    state = RequestState(requests)
    first, following = in_flight_first(requests, served)

    def submit(request: int, at_s: float) -> None:
        state.arrival_s[request] = at_s
        if role is Role.DECODE:
            state.arrive_prefilled(request, at_s)
        worker.submit(request, at_s)

    think_s = requests.think_times_s().tolist()

    def start_next(_: int, at_s: float) -> None:
        request = next(following, None)
        if request is not None:
            submit(request, at_s + think_s[request])

    worker = Worker(
        cost,
        limits,
        state,
        kv_capacity_tokens=kv_tokens,
        kv_block_tokens=block,
        role=role,
        on_leave=None if requests.concurrency is None else start_next,
    )
    arrivals = requests.arrival_s.tolist()
    for request in first:
        submit(request, arrivals[request])
    if stopping is not None and requests.concurrency is None:
        for request in stopping.moments(requests.arrival_s):
            worker.run(arrivals[request])
            stopping.look(state, arrivals[request])
    worker.run()
    return finished(requests, state, [worker])


def in_flight_first(requests: Requests, served: BoolArray) -> tuple[list[int], Iterator[int]]:
    """Servable requests that arrive by themselves, and those of a closed loop that a completion starts, in order."""
    order = np.flatnonzero(served).tolist()
    in_flight = len(order) if requests.concurrency is None else requests.concurrency
    return order[:in_flight], iter(order[in_flight:])


def check_limits(limits: EngineLimits, cost: StepCost, kv_block_tokens: int) -> None:
    """Reject limits under which nothing can run.

    Raises:
        SpecError: no running request or no token budget.
        ValueError: blocks of no token, or an iteration that takes no time.
    """
    if kv_block_tokens < 1:
        raise ValueError(f"a block of KV cache holds {kv_block_tokens} tokens: give ≥ 1")
    if not 0.0 < cost.decode_s(1) < math.inf:
        raise ValueError(f"an iteration of one request takes {cost.decode_s(1)} s: the tables of the worker are wrong")
    wrong = [name for name in ("max_num_seqs", "max_batched_tokens") if getattr(limits, name) < 1]
    if wrong:
        problems = [
            Problem(path=name, message=f"{getattr(limits, name)} serves no request; give ≥ 1") for name in wrong
        ]
        raise SpecError(problems, of="the engine limits")


def _check_role(requests: Requests, role: Role) -> None:
    if role is Role.DECODE and requests.output_length.min() <= 1:
        message = "a request of 1 token is done after prefill: send a decode worker those with 2 or more"
        raise SpecError.at("output_length", message, of="the requests")


def servable(
    requests: Requests, cost: StepCost, role: Role, kv_capacity_tokens: int, kv_block_tokens: int
) -> BoolArray:
    """[n] whether a worker can serve a request at all; a PREFILL worker holds only the prompt."""
    if role is Role.PREFILL:
        requests = replace(requests, output_length=np.ones_like(requests.output_length))
    return fits(requests, kv_capacity_tokens, kv_block_tokens, cost.tokens_per_step)


def finished(requests: Requests, state: RequestState, workers: list[Worker]) -> ServingRun:
    """The state of the requests and the workers' records as arrays."""
    finish = np.array(state.finish_s)
    return ServingRun(
        arrival_s=np.array(state.arrival_s),
        input_length=requests.input_length,
        output_length=requests.output_length,
        is_served=np.isfinite(finish),
        admitted_s=np.array(state.admitted_s),
        first_token_s=np.array(state.first_token_s),
        finish_s=finish,
        workers=tuple(worker_run(worker) for worker in workers),
        found_tokens=np.array(state.found_tokens) if _knows_what_is_found(state, workers) else None,
    )


def _knows_what_is_found(state: RequestState, workers: list[Worker]) -> bool:
    """Whether requests say what they share, and no second worker looks for it again."""
    is_said = state.prefix is not None or state.block_tokens > 0
    return is_said and all(worker.role is not Role.DECODE for worker in workers)


def worker_run(worker: Worker) -> WorkerRun:
    """The iterations of a worker as arrays."""
    record = worker.record
    record.pack()
    return WorkerRun(
        segments=Segments.from_records(record.packed),
        gap_s=np.array(record.gap_s),
        gap_count=np.array(record.gap_count),
        kv_capacity_tokens=worker.num_blocks * worker.block,
        num_preemptions=worker.num_preemptions,
    )
