"""The requests of a measured serving run: closed loop, static batch, all at once, at a rate, or a recorded trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.constants.serving_benchmarks import client_of, prompts_drawn_in
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.serving.measured.drawn import LENGTH_FORMS, attended_history, drawn_requests, is_described
from meshplan.planner.serving.problem.requests import Arrival, Requests, Sampling, ServingWorkload
from meshplan.planner.serving.problem.trace import read_trace
from meshplan.planner.validation.fields import Section, UnsupportedError, has_caveat, shown

# Requests of a closed-loop benchmark over those in flight, and its lengths: uniform from this share of nominal (the
# public harness behind the silicon rows: --random-range-ratio 0.8, --num-prompts 10 × concurrency).
PROMPTS_PER_CONCURRENCY = 10
LENGTH_RATIO = 0.8
VARIED_MARK = "vary between 0.8 and 1.0"
DEFAULT_NUM_REQUESTS = 1000
# Arrivals whose requests a row may describe one by one, or by their distribution.
DRAWN = (Arrival.POISSON, Arrival.ALL_AT_ONCE)
CSV_SUFFIXES = (".csv.gz", ".csv")
TRACE_SUFFIXES = (*CSV_SUFFIXES, ".jsonl.gz", ".jsonl")
# The rate that a load generator is told and the one of the n gaps that it drew differ by a share of 1/√n, the relative
# standard deviation of a Poisson count; by more than three of these only in one of 370 runs.
NOMINAL_DEVIATIONS = 3.0


def recorded_traces(rows: Iterable[Mapping[str, Any]], folder: Path | None) -> dict[str, Requests]:
    """The traces that rows name, by their type; those whose file is not in the folder are left out.

    A file is TYPE.csv or TYPE.jsonl, or else the first CSV that has the type in its name.

    Raises:
        SpecError: malformed lines, or times of answers that are out of order.
    """
    if folder is None:
        return {}
    workloads = [row.get("workload") for row in rows]
    wanted = {name for w in workloads if isinstance(w, dict) and (name := _trace_name(w))}
    files = sorted(path for path in folder.iterdir() if path.name.endswith(TRACE_SUFFIXES)) if folder.is_dir() else []
    found = {}
    for kind in sorted(wanted):
        exactly = [path for path in files if _stem(path.name) == kind]
        matching = exactly or [path for path in files if kind in path.name and path.name.endswith(CSV_SUFFIXES)]
        if matching:
            found[kind] = read_trace(matching[0], with_answers=True)
    return found


def _trace_name(workload: Mapping[str, Any]) -> str | None:
    """The kind of a trace, or its file's name without what all files end in; None without a trace."""
    named = workload.get("trace_type") or workload.get("trace")
    return _stem(named) if isinstance(named, str) else None


def _stem(name: str) -> str:
    """The name of a trace's file without its ending."""
    return next((name.removesuffix(end) for end in TRACE_SUFFIXES if name.endswith(end)), name)


def observed_workload(
    row: Mapping[str, Any], asked: Section, traces: Mapping[str, Requests], *, caches_prefixes: bool = True
) -> ServingWorkload:
    """The requests of a row, and how it has tokens drawn: as it says, or as its benchmark's client is known to.

    Args:
        row: the observation.
        asked: its ``workload``.
        traces: recorded requests by ``trace_type``.
        caches_prefixes: the server keeps what prompts have in common.

    Raises:
        UnsupportedError: with the reason.
    """
    return replace(_requested(row, asked, traces, caches_prefixes), sampling=_sampling(row, asked))


def _sampling(row: Mapping[str, Any], asked: Section) -> Sampling | None:
    if asked.states("sampling"):
        stated = Section(asked.values, "sampling")
        top_p = stated.number("top_p") if stated.states("top_p") else 1.0
        if top_p > 1.0:
            raise stated.wrong("top_p", "a number above 0, at most 1")
        return Sampling(top_p=top_p, penalties=stated.flag("penalties", default=False))
    client = client_of(_title(row))
    return None if client is None else Sampling(top_p=client.top_p, penalties=client.penalties)


def _title(row: Mapping[str, Any]) -> str:
    return str(Section(row, "source", required=False).values.get("title", ""))


def _requested(
    row: Mapping[str, Any], asked: Section, traces: Mapping[str, Requests], caches_prefixes: bool
) -> ServingWorkload:
    arrival = asked.one_of("arrival", {item.value: item for item in Arrival})
    trace_name = _trace_name(asked.values)
    if trace_name is not None:
        return _replayed(asked, arrival, traces.get(trace_name), trace_name)
    if arrival in DRAWN and is_described(asked):
        pool = prompts_drawn_in(_title(row))
        drawn = _drawn(drawn_requests(asked, arrival, pool, caches_prefixes=caches_prefixes))
        return replace(drawn, shared_history=attended_history(asked, caches_prefixes=caches_prefixes))
    made = partial(
        ServingWorkload,
        arrival=arrival,
        input_length=asked.whole("input_length"),
        output_length=asked.whole("output_length"),
    )
    if arrival is Arrival.CLOSED_LOOP:
        concurrency = asked.whole("concurrency")
        return made(
            length_ratio=LENGTH_RATIO if has_caveat(row, VARIED_MARK) else 1.0,
            concurrency=concurrency,
            num_requests=asked.whole("num_requests", PROMPTS_PER_CONCURRENCY * concurrency),
        )
    if arrival is Arrival.STATIC_BATCH:
        size = asked.whole("batch_size")
        return made(concurrency=size, num_requests=size)
    if arrival is Arrival.ALL_AT_ONCE:
        return made(num_requests=asked.whole("num_requests"))
    return made(
        request_rate_per_s=_rate(asked),
        num_requests=asked.whole("num_requests", DEFAULT_NUM_REQUESTS),
    )


# Keys of a workload that the simulation reads, or that another of them says as well.
USED = frozenset(
    {"arrival", "batch_size", "concurrency", "disaggregated", "kv_block_size", "kv_blocks", "max_num_batched_tokens"}
    | {"max_num_seqs", "num_requests", "num_shared_prefixes", "prefix_caching", "prefix_reuse_fraction", "prompt_set"}
    | {"quantization", "request_rate_per_s", "shared_prefix_tokens", "stage", "stages", "steady_state", "trace"}
    | {"trace_type", "question_tokens", "num_requests_in_stage", "dataset", "seed", "users_per_prefix"}
    | {"cuda_graphs", "gpu_memory_utilization", "output_length_counted_mean", "sampling"}
    | {f"{name}{form}" for name in ("input_length", "output_length") for form in LENGTH_FORMS}
)


def _drawn(requests: Requests) -> ServingWorkload:
    """A workload of requests one by one: recorded, or drawn as a row describes them."""
    return ServingWorkload(
        arrival=Arrival.TRACE,
        input_length=float(requests.input_length.mean()),
        output_length=float(requests.output_length.mean()),
        num_requests=len(requests),
        trace=requests,
    )


def _replayed(asked: Section, arrival: Arrival, trace: Requests | None, name: str) -> ServingWorkload:
    """The recorded requests at the row's rate, their lengths scaled to the means that the row states.

    A recording of the row's own run is replayed as it came: it says when requests were answered, and the row's rate is
    none or the one that its load generator was told.
    """
    if trace is None:
        raise UnsupportedError(f"the trace {shown(name)} is not at hand (--traces DIR)")
    if asked.states("prefix_reuse_fraction") and trace.cached_tokens is None:
        share = min(asked.number("prefix_reuse_fraction"), 1.0)
        trace = replace(trace, cached_tokens=np.floor(trace.input_length * share).astype(np.int64))
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    if span_s <= 0.0:
        raise UnsupportedError(
            f"the requests of the trace {shown(name)} all arrive at once, so that they have no rate; such a run is one "
            f"of arrival {Arrival.ALL_AT_ONCE.value} with num_requests {len(trace)} and its lengths"
        )
    recorded = (len(trace) - 1) / span_s
    if arrival is Arrival.TRACE and trace.answered is not None and _is_nominal(asked, recorded, len(trace) - 1):
        return replace(_drawn(trace), request_rate_per_s=recorded)
    rate = _rate(asked)
    trace = replace(trace, answered=None)  # of a run at another rate
    served = replace(
        trace,
        arrival_s=(trace.arrival_s - trace.arrival_s[0]) * recorded / rate,
        input_length=_stretched(trace.input_length, asked.values.get("input_length_mean")),
        output_length=_stretched(trace.output_length, asked.values.get("output_length_mean")),
    )
    return ServingWorkload(
        arrival=Arrival.TRACE,
        input_length=float(served.input_length.mean()),
        output_length=float(served.output_length.mean()),
        request_rate_per_s=rate,
        num_requests=len(served),
        trace=served if arrival is not Arrival.TRACE else trace,
    )


def _is_nominal(asked: Section, recorded: float, num_gaps: int) -> bool:
    """Whether the rate of a row, if it states one, may be what a load generator was told that sent the recorded one."""
    is_stated = asked.states("request_rate_per_s")
    return not is_stated or abs(recorded / _rate(asked) - 1.0) <= NOMINAL_DEVIATIONS / math.sqrt(num_gaps)


def _stretched(lengths: IntArray, mean: Any) -> IntArray:
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not mean > 0:
        return lengths
    return np.maximum(np.rint(lengths * (mean / lengths.mean())), 1).astype(np.int64)


def _rate(asked: Section) -> float:
    rate = asked.values.get("request_rate_per_s")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise asked.wrong("request_rate_per_s", "a number above 0")
    return float(rate)
