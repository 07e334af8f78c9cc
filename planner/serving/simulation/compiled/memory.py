"""What a compiled run works on: arrays of numbers instead of objects.

Names are those of :class:`~meshplan.planner.serving.simulation.worker.Worker`,
:class:`~meshplan.planner.serving.simulation.decode_batch.DecodeBatch`,
:class:`~meshplan.planner.serving.simulation.request_state.RequestState`,
:class:`~meshplan.planner.serving.simulation.admission.AdmissionQueue` and
:class:`~meshplan.planner.serving.simulation.routing.Pool`, which say what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray
from meshplan.planner.serving.estimator.table import Table
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.simulation.compiled.member import Handover, Member
from meshplan.planner.serving.simulation.request_state import RequestState, may_pass, num_slots
from meshplan.planner.serving.simulation.run import NUM_COLUMNS

# Rows of ``tables``: a worker's seconds by tokens, by sequences, by decoding requests.
DENSE, EXPERTS, OUTPUTS, DECODE_FIXED, DECODE_CONTEXT, DECODE = range(6)
# Rows of ``queues``: ranks that wait for a slot (a heap); arrivals that no poll has seen, in order, as lag × number of
# requests + rank; those that iterations prepared ahead do not include (a heap of first iteration × number of requests +
# rank); ranks held back for others.
READY, UNSEEN, PREPARED, HELD = range(4)
# Rows of ``batches``: the heap of ends of decodes; rank, finished tokens and length of each prompt in prefill.
FINISHING, PREFILL_RANK, PREFILL_DONE, PREFILL_LENGTH = range(4)
# Rows of ``ranks``: requests of each attention data-parallel rank; prompts and tokens that it prefills in an iteration.
RUNNING, PROMPTS, TOKENS = range(3)
# Routers.
ROUND_ROBIN, LEAST_CONNECTIONS, LEAST_LOADED = range(3)
# Roles of workers.
MIXED, PREFILL, DECODE_ONLY = range(3)
_ROLES = {Role.MIXED: MIXED, Role.PREFILL: PREFILL, Role.DECODE: DECODE_ONLY}
# First size of the records, in segments for each request: they double where that is too few.
SEGMENTS_PER_REQUEST = 3
NONE = -1

_COUNT, _REAL = np.int64, np.float64
_REQUEST = np.dtype(
    [
        *((name, _REAL) for name in ("planned_s", "arrival_s", "admitted_s", "first_token_s", "finish_s")),
        *((name, _REAL) for name in ("joined_s", "last_token_s", "anchor", "think_s", "queued_s")),
        *((name, _COUNT) for name in ("input_length", "output_length", "cached_tokens", "found_tokens", "rank")),
        *((name, _COUNT) for name in ("by_rank", "generated", "target", "offset", "following", "routed_to")),
        *((name, _COUNT) for name in ("attention_rank", "has_kv")),
    ]
)
_WORKER = np.dtype(
    [
        *((name, _REAL) for name in ("speed", "clock", "wake_s", "next_arrival", "context", "tokens", "weight")),
        *((name, _REAL) for name in ("lag", "enough_tokens", "prefill_fixed_s", "prefill_pair_s")),
        *((name, _REAL) for name in ("prefill_least_s", "front_end_s", "expected_output", "link_free_s")),
        *((name, _COUNT) for name in ("number", "is_plain", "most_per_step", "block", "num_blocks", "budget", "slots")),
        *((name, _COUNT) for name in ("concurrent_batches", "pipeline", "verified", "graphed", "is_chunked")),
        *(
            (name, _COUNT)
            for name in ("launches_ahead", "is_caching", "is_open", "receive_interval", "batch_wait_steps")
        ),
        *(
            (name, _COUNT)
            for name in ("balance_wait_steps", "pauses", "steps", "grown", "num_decoding", "prompt_blocks")
        ),
        *((name, _COUNT) for name in ("room", "whole_blocks", "head", "tail", "num_ready", "num_unseen")),
        *((name, _COUNT) for name in ("num_prepared", "num_held", "num_arrived", "polled", "admitted", "held_since")),
        *((name, _COUNT) for name in ("num_iterations", "num_prefilling", "num_pauses", "num_preemptions")),
        *((name, _COUNT) for name in ("has_left", "num_requests", "num_sent", "num_ranks", "most_on_rank")),
        *((name, _COUNT) for name in ("role", "holds_slots", "num_sending", "num_with_kv")),
    ]
)
_LEDGER = np.dtype(
    [
        *((name, _REAL) for name in ("until_s", "kv_bytes_per_token", "bandwidth", "latency_s", "reads_prompt_s")),
        *((name, _COUNT) for name in ("may_pass", "router", "position", "num_planned", "num_started")),
        *((name, _COUNT) for name in ("num_records", "num_gaps", "num_leaving", "num_arriving", "num_sending")),
        *((name, _COUNT) for name in ("worker", "lazily", "request", "is_closed", "first_decode", "is_shared")),
        *((name, _COUNT) for name in ("hides_first", "num_routed", "num_handed_over")),
    ]
)


class Memory(NamedTuple):
    """Everything that a run reads and writes; W workers, n requests.

    Args:
        requests: [n] records.
        order: [m] requests that some worker can serve, in order of arrival; those from ``ledger.position`` on are to
            come. Of a closed loop the first ``ledger.num_planned`` come by themselves, those from
            ``ledger.num_started`` on when others leave.
        workers: [W] records.
        tables: [W, 6, …] seconds; the last index is tokens, sequences or requests.
        queues: [W, 4, n + 1].
        batches: [W, 4, most slots + 1].
        residues: [W, tokens of a block] offsets by residue.
        ranks: [W, 3, most ranks].
        rank_pairs: [W, most ranks] pairs that the prompts of a rank attend in this iteration.
        with_kv: [W, most slots + 2] requests that came with their KV cache and have not decoded yet, in that order.
        pauses: [W, 2, most slots + 2] time and number of requests that wait for the prefill of others since.
        leaving_s: [E] heap of times at which requests leave their workers.
        leaving: [E] beside it, request × W + worker.
        arriving_s: [n + 1] heap of times at which requests arrive that others have started or that were prefilled.
        arriving: [n + 1] beside it, 2 × request, + 1 where it was prefilled.
        sending_s: [n + 1] heap of times at which KV caches have left their workers.
        sending: [n + 1] beside it, request × W + worker.
        records: [R, columns of a segment + 1] the last column is the worker.
        gaps: [G, 3] single gaps between tokens: worker, s, number of tokens.
        ledger: [1] record: what is between workers, and where a run that was interrupted goes on.
    """

    requests: NDArray[Any]
    order: IntArray
    workers: NDArray[Any]
    tables: FloatArray
    queues: IntArray
    batches: IntArray
    residues: IntArray
    ranks: IntArray
    rank_pairs: FloatArray
    with_kv: IntArray
    pauses: FloatArray
    leaving_s: FloatArray
    leaving: IntArray
    arriving_s: FloatArray
    arriving: IntArray
    sending_s: FloatArray
    sending: IntArray
    records: FloatArray
    gaps: FloatArray
    ledger: NDArray[Any]


def memory_of(
    requests: Requests,
    members: Sequence[Member],
    *,
    served: BoolArray,
    kv_block_tokens: int,
    router: int,
    pauses: bool,
    handover: Handover | None,
) -> Memory:
    """A run that has not begun.

    Args:
        requests: of open arrivals, or of a closed loop.
        members: the workers.
        served: [n] whether a request can be served at all.
        kv_block_tokens: tokens of a block of KV cache.
        router: of this module's names.
        pauses: there is a router, which must see a worker whenever a request leaves it.
        handover: how KV caches reach workers that only decode; None where there are none.
    """
    num, slots = len(requests), [num_slots(member.cost, member.limits) for member in members]
    most, ranks = max(slots) + 2, max(member.cost.attention_ranks for member in members)
    first = SEGMENTS_PER_REQUEST * num + 1024
    order = np.flatnonzero(served).astype(_COUNT)
    planned = min(requests.concurrency or len(order), len(order))
    order[:planned] = order[:planned][np.argsort(requests.arrival_s[order[:planned]], kind="stable")]
    workers = _workers(members, slots, kv_block_tokens, pauses)
    workers["expected_output"] = np.where(workers["role"] == PREFILL, 0.0, float(np.mean(requests.output_length)))
    ledger = _ledger(requests, members, handover)
    ledger["router"], ledger["num_planned"], ledger["num_started"] = router, planned, planned
    if router == NONE:  # no arrival is an event: the worker has them in its queue, or gets them as others leave
        ledger["position"] = planned
    if handover is not None and handover.holds_slots:
        workers["holds_slots"] = workers["role"] == PREFILL
    return Memory(
        requests=_requests(requests),
        order=order,
        workers=workers,
        tables=_tables(members, [min(one, num) for one in slots]),
        queues=np.empty((len(members), 4, num + 1), dtype=_COUNT),
        batches=np.empty((len(members), 4, most), dtype=_COUNT),
        residues=np.zeros((len(members), kv_block_tokens), dtype=_COUNT),
        ranks=np.zeros((len(members), 3, ranks), dtype=_COUNT),
        rank_pairs=np.zeros((len(members), ranks)),
        with_kv=np.empty((len(members), most), dtype=_COUNT),
        pauses=np.empty((len(members), 2, most)),
        leaving_s=np.empty(len(members) * most),
        leaving=np.empty(len(members) * most, dtype=_COUNT),
        arriving_s=np.empty(num + 1),
        arriving=np.empty(num + 1, dtype=_COUNT),
        sending_s=np.empty(num + 1),
        sending=np.empty(num + 1, dtype=_COUNT),
        records=np.empty((first, NUM_COLUMNS + 1)),
        gaps=np.empty((first, 3)),
        ledger=ledger,
    )


def _ledger(requests: Requests, members: Sequence[Member], handover: Handover | None) -> NDArray[Any]:
    """What is between workers, before anything has happened."""
    ledger = np.zeros(1, dtype=_LEDGER)
    ledger["worker"], ledger["request"] = NONE, NONE
    ledger["may_pass"], ledger["is_closed"] = may_pass(requests), requests.concurrency is not None
    ledger["first_decode"] = sum(member.role is not Role.DECODE for member in members)
    if handover is not None:
        ledger["kv_bytes_per_token"], ledger["bandwidth"] = handover.kv_bytes_per_token, handover.bandwidth_bytes_per_s
        ledger["latency_s"], ledger["reads_prompt_s"] = handover.latency_s, handover.reads_prompt_s_per_token
        ledger["is_shared"], ledger["hides_first"] = handover.is_shared, handover.hides_first_token
    return ledger


def _requests(requests: Requests) -> NDArray[Any]:
    state = RequestState(requests)
    found = np.zeros(len(requests), dtype=_REQUEST)
    for name in ("arrival_s", "admitted_s", "first_token_s", "finish_s", "joined_s", "last_token_s"):
        found[name] = math.inf
    found["planned_s"], found["think_s"], found["following"] = requests.arrival_s, requests.think_times_s(), NONE
    for name in ("input_length", "output_length", "cached_tokens", "rank", "by_rank"):
        found[name] = getattr(state, name)
    return found


def _workers(members: Sequence[Member], slots: Sequence[int], block: int, pauses: bool) -> NDArray[Any]:
    found = np.zeros(len(members), dtype=_WORKER)
    for number, (member, most, worker) in enumerate(zip(members, slots, found, strict=True)):
        cost, limits = member.cost, member.limits
        rules, speed = limits.admission, cost.tokens_per_step
        budget = limits.max_batched_tokens
        blocks = member.kv_capacity_tokens // block
        values = {
            "number": number,
            "speed": speed,
            "is_plain": speed == 1.0,
            "most_per_step": math.ceil(speed),
            "block": block,
            "num_blocks": blocks,
            "room": blocks * block,
            "budget": budget,
            "slots": most,
            "num_ranks": cost.attention_ranks,
            "most_on_rank": -(-most // cost.attention_ranks),
            "weight": member.weight,
            "role": _ROLES[member.role],
            "concurrent_batches": cost.concurrent_batches,
            "pipeline": cost.pipeline_parallel,
            "verified": cost.verified_tokens,
            "prefill_fixed_s": cost.prefill_fixed_s,
            "prefill_pair_s": cost.prefill_pair_s,
            "prefill_least_s": cost.prefill_least_s,
            "front_end_s": cost.front_end_s,
            "graphed": cost.graphed_tokens,
            "launches_ahead": cost.launches_ahead,
            "is_chunked": limits.chunked_prefill,
            "is_caching": limits.prefix_caching,
            "is_open": rules.is_immediate and not cost.admission_steps,
            "lag": cost.admission_steps,
            "receive_interval": rules.receive_interval,
            "batch_wait_steps": rules.batch_wait_steps,
            "balance_wait_steps": rules.balance_wait_steps,
            "enough_tokens": rules.batch_wait_share * (budget * cost.concurrent_batches),
            "pauses": pauses,
            "head": NONE,
            "tail": NONE,
            "next_arrival": math.inf,
        }
        for name, value in values.items():
            worker[name] = value
    return found


def _tables(members: Sequence[Member], slots: Sequence[int]) -> FloatArray:
    each = []
    for member, most in zip(members, slots, strict=True):
        cost = member.cost
        seconds = (cost.dense_s, cost.experts_s, cost.outputs_s, cost.decode_fixed_s, cost.decode_context_s)
        each.append([*(_whole(table) for table in seconds), np.array([cost.decode_s(n) for n in range(most + 1)])])
    found = np.full((len(each), 6, max(len(table) for tables in each for table in tables)), math.nan)
    for number, tables in enumerate(each):
        for row, table in enumerate(tables):
            found[number, row, : len(table)] = table
    return found


def _whole(table: Sequence[float]) -> FloatArray:
    """Every entry of a table of seconds."""
    return table.whole() if isinstance(table, Table) else np.array(table, dtype=float)
