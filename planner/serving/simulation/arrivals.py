"""From a workload to requests: arrival times, prompt lengths and output lengths.

Under open arrivals, prompts, answers, gaps and prefixes come from a stream of random numbers each, so that with one
seed a longer run begins with the requests of a shorter one, and two rates have the same requests in the same order
(common random numbers).

A rate is everywhere the realised one, requests after the first over the time from the first to the last: drawn gaps are
stretched to it (for Poisson arrivals the process given its count), and :func:`scaled` keeps to it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.serving.problem.requests import DEFAULT_NUM_REQUESTS, Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.workload.lengths import LengthDistribution, shared_tokens

# Requests in a closed loop, per request in flight: the rule of the public serving benchmarks of 2025.
REQUESTS_PER_CONCURRENCY = 10
# Columns of the requests besides the arrivals.
COLUMNS = ("input_length", "output_length", "cached_tokens", "prefix", "priority")
# Most invalid requests that are listed one by one.
MAX_NAMED = 5


def make_requests(workload: ServingWorkload, *, seed: int = 0) -> Requests:
    """The requests of a run.

    Lengths are uniform in [length_ratio, 1] × nominal, rounded, at least 1; fixed where the ratio is 1; or drawn from
    the distributions that the workload describes. The gaps of
    POISSON are exponential with mean 1/rate; of GAMMA they have the shape 1/burstiness², so that burstiness is their
    coefficient of variation (arXiv:2302.11665, §6). A trace is replayed as it is: its first requests if a
    number is given, at another rate if one is given.

    Raises:
        SpecError: the workload lacks a value that its kind of arrival needs, or has invalid values.
    """
    problems = _workload_problems(workload)
    if problems:
        raise SpecError(problems, of="the workload")
    if workload.arrival is Arrival.TRACE:
        assert workload.trace is not None  # noqa: S101  (checked with the rest of the workload)
        return _replayed(workload, workload.trace)
    rng = np.random.default_rng(seed)
    is_open = workload.arrival in (Arrival.POISSON, Arrival.GAMMA)
    of_inputs, of_outputs, of_gaps, of_prefixes = rng.spawn(4) if is_open else [rng] * 4
    num = default_num_requests(workload)
    inputs = _lengths(of_inputs, workload.input_lengths, workload.input_length, workload.length_ratio, num)
    outputs = _lengths(of_outputs, workload.output_lengths, workload.output_length, workload.length_ratio, num)
    closed = workload.arrival is Arrival.CLOSED_LOOP
    arrivals = _arrivals(of_gaps, workload, num)
    prefixes = workload.num_prefixes
    return Requests(
        arrival_s=arrivals,
        input_length=inputs,
        output_length=outputs,
        concurrency=workload.concurrency if closed else None,
        think_s=workload.think_s,
        cached_tokens=_cached(inputs, workload.prefix_hit_rate, workload.prefix_tokens),
        prefix=None if prefixes is None else of_prefixes.integers(0, prefixes, num),
        finds_warm_caches=prefixes is not None,
    )


def default_num_requests(workload: ServingWorkload) -> int:
    """Number of requests of a run: as given, or by the kind of arrival."""
    if workload.num_requests is not None:
        return workload.num_requests
    if workload.trace is not None:
        return len(workload.trace)
    if workload.arrival is Arrival.CLOSED_LOOP and workload.concurrency:
        return REQUESTS_PER_CONCURRENCY * workload.concurrency
    if workload.arrival is Arrival.STATIC_BATCH and workload.concurrency:
        return workload.concurrency
    return DEFAULT_NUM_REQUESTS


def check_requests(requests: Requests) -> None:
    """Reject invalid requests.

    Raises:
        SpecError: no requests at all; arrays of different length; arrivals that are negative, unsorted or not
            finite; prompts or answers without a token; more cached tokens than prompt tokens.
    """
    problems = request_problems(requests)
    if problems:
        raise SpecError(problems, of="the requests")


def request_problems(requests: Requests) -> list[Problem]:
    """Problems of the requests: each kind once, with the first positions."""
    num = len(requests)
    if not num:
        return [Problem(path="", message="there are no requests; give at least one")]
    found: list[Problem] = []
    for name in COLUMNS:
        column = getattr(requests, name)
        if column is not None and len(column) != num:
            found.append(Problem(path=name, message=f"{len(column)} values for {num} arrivals; give one each"))
    if requests.blocks is not None and len(requests.blocks) != num:
        found.append(Problem(path="blocks", message=f"of {len(requests.blocks)} requests for {num} arrivals"))
    if found:
        return found
    arrival = np.asarray(requests.arrival_s, dtype=float)
    checks: list[tuple[str, NDArray[np.bool_], str]] = [
        ("arrival_s", ~np.isfinite(arrival), "must be a finite number of seconds"),
        ("arrival_s", arrival < 0.0, "must not be negative; count seconds from the start"),
        ("arrival_s", np.diff(arrival, prepend=arrival[0]) < 0.0, "is earlier than the one before; sort by arrival"),
        ("input_length", requests.input_length < 1, "a prompt has at least 1 token"),
        ("output_length", requests.output_length < 1, "an answer has at least 1 token; drop requests without one"),
    ]
    if requests.cached_tokens is not None:
        cached = requests.cached_tokens
        wrong = (cached < 0) | (cached > requests.input_length)
        checks.append(("cached_tokens", wrong, "must lie between 0 and the prompt's tokens"))
    for name, wrong, message in checks:
        found.extend(_named(name, np.asarray(getattr(requests, name)), wrong, message))
    if requests.concurrency is not None and requests.concurrency < 1:
        found.append(Problem(path="concurrency", message=f"{requests.concurrency} is not a number in flight; give ≥ 1"))
    return found


def scaled(requests: Requests, rate_per_s: float) -> Requests:
    """The same requests in the same order at another mean rate: all arrival times scaled by one factor.

    Raises:
        SpecError: all requests arrive at once, so that there is no rate to scale.
    """
    span = float(requests.arrival_s[-1] - requests.arrival_s[0])
    if span <= 0.0 or requests.concurrency is not None:
        message = "all requests arrive at once: a rate needs arrivals that are spread over time"
        raise SpecError.at("arrival_s", message, of="the requests")
    return replace(requests, arrival_s=requests.arrival_s * (_rate(requests.arrival_s) / rate_per_s))


def _named(name: str, values: NDArray[np.generic], wrong: NDArray[np.bool_], message: str) -> list[Problem]:
    positions = np.flatnonzero(wrong)
    found = [Problem(path=f"{name}[{i}]", message=f"{values[i]} {message}") for i in positions[:MAX_NAMED]]
    if len(positions) > MAX_NAMED:
        found.append(Problem(path=name, message=f"… and {len(positions) - MAX_NAMED} more like these"))
    return found


def _workload_problems(workload: ServingWorkload) -> list[Problem]:
    found: list[Problem] = []

    def need(path: str, is_right: bool, message: str) -> None:
        if not is_right:
            found.append(Problem(path=path, message=message))

    kind = workload.arrival
    if kind in (Arrival.CLOSED_LOOP, Arrival.STATIC_BATCH):
        count = workload.concurrency
        need("concurrency", count is not None and count >= 1, f"{kind.value} needs concurrency ≥ 1, not {count}")
    if kind in (Arrival.POISSON, Arrival.GAMMA):
        rate = workload.request_rate_per_s
        need("request_rate_per_s", _positive(rate), f"{kind.value} needs a rate above 0 requests/s, not {rate}")
    if kind is Arrival.GAMMA:
        spread = workload.burstiness
        need("burstiness", _positive(spread), f"a coefficient of variation is above 0, not {spread}")
    if kind is Arrival.TRACE:
        need("trace", workload.trace is not None, "trace replay needs a trace")
        found.extend([] if workload.trace is None else request_problems(workload.trace))
        rate = workload.request_rate_per_s
        need("request_rate_per_s", rate is None or _positive(rate), f"a rate is above 0 requests/s, not {rate}")
        count, recorded = workload.num_requests, 0 if workload.trace is None else len(workload.trace)
        message = f"{count} requests of a trace that has {recorded}: give 1 … {recorded}, or leave it out"
        need("num_requests", count is None or 1 <= count <= recorded, message)
        return found
    for path, length in (("input_length", workload.input_length), ("output_length", workload.output_length)):
        need(path, math.isfinite(length) and length >= 1, f"{length} tokens: at least 1 token is needed")
    ratio, share = workload.length_ratio, workload.prefix_hit_rate
    need("length_ratio", 0.0 < ratio <= 1.0, f"{ratio} is not a share of the nominal length; give 0 < ratio ≤ 1")
    need("prefix_hit_rate", 0.0 <= share <= 1.0, f"{share} is not a share; give 0 … 1")
    prefixes = workload.num_prefixes
    need("num_prefixes", prefixes is None or prefixes >= 1, f"{prefixes} prefixes: give at least 1, or leave it out")
    count = workload.num_requests
    need("num_requests", count is None or count >= 1, f"{count} requests: give at least 1, or leave it out")
    return found


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0.0


def _replayed(workload: ServingWorkload, trace: Requests) -> Requests:
    num = default_num_requests(workload)
    if num < len(trace):
        columns = {name: getattr(trace, name) for name in COLUMNS}
        first: dict[str, Any] = {name: None if column is None else column[:num] for name, column in columns.items()}
        blocks = None if trace.blocks is None else trace.blocks.first(num)
        trace = replace(trace, arrival_s=trace.arrival_s[:num], blocks=blocks, answered=None, **first)
    return trace if workload.request_rate_per_s is None else scaled(trace, workload.request_rate_per_s)


def _lengths(
    rng: np.random.Generator, described: LengthDistribution | None, nominal: float, ratio: float, num: int
) -> NDArray[np.int64]:
    if described is not None:
        return described.at(rng.random(num))
    drawn = rng.uniform(ratio * nominal, nominal, num)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def _cached(inputs: NDArray[np.int64], share: float, tokens: int | None) -> NDArray[np.int64] | None:
    return shared_tokens(inputs, share, tokens) if share > 0.0 or tokens is not None else None


def _arrivals(rng: np.random.Generator, workload: ServingWorkload, num: int) -> NDArray[np.float64]:
    rate = workload.request_rate_per_s
    if workload.arrival not in (Arrival.POISSON, Arrival.GAMMA) or rate is None:
        return np.zeros(num)
    return open_arrivals(rng, num, rate, burstiness=workload.burstiness if workload.arrival is Arrival.GAMMA else 1.0)


def open_arrivals(rng: np.random.Generator, num: int, rate_per_s: float, *, burstiness: float) -> NDArray[np.float64]:
    """[num] arrival times, s, at a realised rate; gaps of a Gamma distribution, exponential for a burstiness of 1.

    Args:
        rng: source of the gaps.
        num: arrivals.
        rate_per_s: realised rate.
        burstiness: coefficient of variation of the gaps.
    """
    arrivals = np.cumsum(rng.gamma(1.0 / burstiness**2, burstiness**2, num))
    spread_over_time = arrivals[-1] > arrivals[0]  # the gaps of a very bursty stream may all vanish
    return arrivals * ((_rate(arrivals) if spread_over_time else 1.0) / rate_per_s)


def _rate(arrival_s: NDArray[np.float64]) -> float:
    """Realised rate, requests/s: those after the first over the time from the first to the last."""
    return (len(arrival_s) - 1) / float(arrival_s[-1] - arrival_s[0])
