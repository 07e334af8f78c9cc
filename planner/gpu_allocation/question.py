"""An allocation question with everything looked up: services, their requests by size, and offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.hardware import Price
from meshplan.planner.gpu_allocation.nodes.problem import Offer, Quota
from meshplan.planner.gpu_allocation.replicas.problem import Bucket
from meshplan.planner.gpu_allocation.spec import AllocationSpec, AllocationWorkloadSpec
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.slo import Slo

# Shares of a trace's requests at which it is cut, where the spec gives no edges: finer where sizes are rare and dear.
QUANTILES = (0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedBucket:
    """Requests of similar size of one service.

    Args:
        range: least and most tokens.
        request_rate_per_s: arriving requests per second.
        input_length: mean prompt tokens.
        output_length: mean generated tokens.
    """

    range: Bucket
    request_rate_per_s: float
    input_length: float
    output_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model and what is asked of it.

    Args:
        name: unique in the question.
        problem: model, machines, SLOs, engine, constants; its workload is that of no bucket.
        buckets: requests by size.
        burstiness: coefficient of variation of the gaps between arrivals.
        trace: recorded requests; None for a histogram.
        tied: groups of its buckets that the router cannot distinguish.
    """

    name: str
    problem: ServingProblem
    buckets: tuple[SizedBucket, ...]
    burstiness: float
    trace: Requests | None
    tied: tuple[tuple[int, ...], ...] = ()

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The SLOs on latency."""
        return self.problem.slos

    @property
    def request_rate_per_s(self) -> float:
        """Arriving requests per second, all buckets together."""
        return sum(bucket.request_rate_per_s for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationQuestion:
    """Everything looked up.

    Args:
        spec: the question as it was written.
        services: at least one.
        offers: what can be rented.
        quotas: limits on several of them together.
        prices: name of the offer → its price, with the source.
        sources: what → citation.
    """

    spec: AllocationSpec
    services: tuple[Service, ...]
    offers: tuple[Offer, ...]
    quotas: tuple[Quota, ...]
    prices: Mapping[str, Price]
    sources: Mapping[str, str]


def histogram(workload: AllocationWorkloadSpec) -> tuple[SizedBucket, ...]:
    """The buckets of a spec; lengths are taken to be uniform within them."""
    given = workload.buckets or []
    total = sum(bucket.request_rate_per_s for bucket in given)
    factor = 1.0
    if workload.request_rate_per_s is not None and total > 0.0:
        factor = workload.request_rate_per_s / total
    return tuple(
        SizedBucket(
            range=Bucket(
                input_tokens=(bucket.input_tokens[0], bucket.input_tokens[1]),
                output_tokens=(bucket.output_tokens[0], bucket.output_tokens[1]),
            ),
            request_rate_per_s=factor * bucket.request_rate_per_s,
            input_length=sum(bucket.input_tokens) / 2.0,
            output_length=sum(bucket.output_tokens) / 2.0,
        )
        for bucket in given
    )


def cut_trace(trace: Requests, workload: AllocationWorkloadSpec) -> tuple[SizedBucket, ...]:
    """The buckets of a trace: cut at the spec's edges, or at :data:`QUANTILES` of its lengths; empty ones are left out.

    A bucket's range is that of the requests in it, its lengths are their means.
    """
    rows = _cut(trace.input_length, workload.input_edges)
    columns = _cut(trace.output_length, workload.output_edges)
    span = float(trace.arrival_s[-1] - trace.arrival_s[0])
    recorded = (len(trace) - 1) / span if span > 0.0 else 0.0
    rate = workload.request_rate_per_s or recorded
    buckets = []
    for row in np.unique(rows).tolist():
        for column in np.unique(columns).tolist():
            inside = (rows == row) & (columns == column)
            if not inside.any():
                continue
            prompts, answers = trace.input_length[inside], trace.output_length[inside]
            buckets.append(
                SizedBucket(
                    range=Bucket(
                        input_tokens=(int(prompts.min()), int(prompts.max())),
                        output_tokens=(int(answers.min()), int(answers.max())),
                    ),
                    request_rate_per_s=rate * float(inside.mean()),
                    input_length=float(prompts.mean()),
                    output_length=float(answers.mean()),
                )
            )
    return tuple(buckets)


def indistinct(buckets: Sequence[SizedBucket]) -> tuple[tuple[int, ...], ...]:
    """Groups of buckets that a router cannot distinguish by the prompt: those whose prompt lengths overlap."""
    order = sorted(range(len(buckets)), key=lambda b: buckets[b].range.input_tokens)
    groups: list[list[int]] = []
    most = -1
    for b in order:
        low, high = buckets[b].range.input_tokens
        if groups and low <= most:
            groups[-1].append(b)
        else:
            groups.append([b])
        most = max(most, high)
    return tuple(tuple(sorted(group)) for group in groups)


def _cut(lengths: NDArray[np.int64], edges: list[int] | None) -> NDArray[np.int64]:
    """[n] number of the bucket; an edge is the most that its bucket holds."""
    cuts = np.unique(np.quantile(lengths, QUANTILES).round()) if edges is None else np.array(edges, dtype=float)
    return np.searchsorted(cuts, lengths, side="left")
