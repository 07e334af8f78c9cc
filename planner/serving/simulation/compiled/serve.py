"""A long run in machine code: requests and workers in, the record of a run out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from meshplan.planner.core.arrays import BoolArray, FloatArray
from meshplan.planner.serving.problem.config import Router
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.compiled.events import queue_all, run_alone, run_together
from meshplan.planner.serving.simulation.compiled.member import Handover, Member
from meshplan.planner.serving.simulation.compiled.memory import (
    LEAST_CONNECTIONS,
    LEAST_LOADED,
    NONE,
    ROUND_ROBIN,
    Memory,
    memory_of,
)
from meshplan.planner.serving.simulation.early_stopping import EarlyStopping
from meshplan.planner.serving.simulation.run import NUM_COLUMNS, Segments, ServingRun, WorkerRun

_ROUTERS = {
    Router.ROUND_ROBIN: ROUND_ROBIN,
    Router.LEAST_CONNECTIONS: LEAST_CONNECTIONS,
    Router.LEAST_LOADED: LEAST_LOADED,
    Router.PREFIX_AWARE: LEAST_LOADED,  # no worker holds a prefix here
}


class _Seen:
    """The times so far, as early stopping looks at them."""

    def __init__(self, memory: Memory) -> None:
        self.arrival_s, self.output_length = memory.requests["arrival_s"], memory.requests["output_length"]
        self.first_token_s, self.finish_s = memory.requests["first_token_s"], memory.requests["finish_s"]

    def __len__(self) -> int:
        return len(self.arrival_s)


def serve(
    requests: Requests,
    members: Sequence[Member],
    served: BoolArray,
    *,
    kv_block_tokens: int,
    router: Router | None,
    stopping: EarlyStopping | None,
    handover: Handover | None = None,
) -> ServingRun:
    """Serve requests of open arrivals or of a closed loop by mixed workers, or by prefill and decode workers.

    Args:
        requests: checked; prefixes are not looked up: each request finds its ``cached_tokens``.
        members: the workers; those that prefill before those that decode.
        served: [n] whether a request can be served at all.
        kv_block_tokens: tokens of a block of KV cache.
        router: how requests reach the workers; None: there is one worker and no router.
        stopping: stops a run of open arrivals that is certain to violate an SLO.
        handover: how KV caches reach workers that only decode; None where there are none.

    Raises:
        SloViolatedError: the run was stopped early.
    """
    code = NONE if router is None else _ROUTERS[router]
    memory = memory_of(
        requests,
        members,
        served=served,
        kv_block_tokens=kv_block_tokens,
        router=code,
        pauses=router is not None,
        handover=handover,
    )
    is_open = requests.concurrency is None
    moments = stopping.moments(requests.arrival_s) if stopping is not None and is_open else []
    if router is None:
        queue_all(memory)
    for request in moments:
        if router is not None and not served[request]:
            continue  # it never arrives
        at_s = float(requests.arrival_s[request])
        memory = _advanced(memory, at_s, request)
        assert stopping is not None  # noqa: S101  (there are moments)
        stopping.look(_Seen(memory), at_s)
    memory = _advanced(memory, math.inf, NONE)
    return _finished(requests, memory, members)


def _advanced(memory: Memory, until_s: float, until_request: int) -> Memory:
    """Run until a time (one worker), or until a request has arrived; arrays of records grow whenever they are full."""
    is_alone = memory.ledger[0]["router"] == NONE
    while not (run_alone(memory, until_s) if is_alone else run_together(memory, until_request)):
        memory = memory._replace(records=_larger(memory.records), gaps=_larger(memory.gaps))
    return memory


def _larger(table: FloatArray) -> FloatArray:
    found = np.empty((2 * len(table) + 1024, table.shape[1]))
    found[: len(table)] = table
    return found


def _finished(requests: Requests, memory: Memory, members: Sequence[Member]) -> ServingRun:
    ledger, seen = memory.ledger[0], memory.requests
    records, gaps = memory.records[: ledger["num_records"]], memory.gaps[: ledger["num_gaps"]]
    workers = []
    for number, worker in enumerate(memory.workers):
        alone = len(members) == 1
        table = records if alone else records[records[:, NUM_COLUMNS] == number]
        own = gaps if alone else gaps[gaps[:, 0] == number]
        names = Segments.__dataclass_fields__
        workers.append(
            WorkerRun(
                segments=Segments(**{name: table[:, column] for column, name in enumerate(names)}),
                gap_s=own[:, 1],
                gap_count=own[:, 2],
                kv_capacity_tokens=int(worker["num_blocks"] * worker["block"]),
                num_preemptions=int(worker["num_preemptions"]),
            )
        )
    finish = seen["finish_s"].copy()
    return ServingRun(
        arrival_s=seen["arrival_s"].copy(),
        input_length=requests.input_length,
        output_length=requests.output_length,
        is_served=np.isfinite(finish),
        admitted_s=seen["admitted_s"].copy(),
        first_token_s=seen["first_token_s"].copy(),
        finish_s=finish,
        workers=tuple(workers),
    )
