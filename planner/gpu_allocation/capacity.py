"""Request rate that one replica of each kind sustains for each bucket within the SLOs: a closed form, without queueing.

A kind is an offer, a layout and formats. For a bucket of mean lengths s, o its curve over the running requests n is
rate(n), tpot(n) and the time to the first token (:mod:`meshplan.planner.serving.estimator.steady_state`). The capacity
is

    max { rate(n) : tpot(n) ≤ tpot limit, first(n) ≤ ttft limit, first(n) + (o − 1)·tpot(n) ≤ e2e limit }

with the first token and the end-to-end time of the *longest* request of the bucket, so that a bucket counts as served
only where all of it is. Queueing is left out: the utilisation ceiling and the capacity margins that the simulation asks
for (:mod:`meshplan.planner.gpu_allocation.replay`) make up for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.gpu_allocation.nodes.problem import Offer, ReplicaKind
from meshplan.planner.gpu_allocation.question import AllocationQuestion, Service, SizedBucket
from meshplan.planner.serving.estimator.exchange.collectives import Exchange
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token
from meshplan.planner.serving.problem.config import Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.search.layouts import PlacedWorker, placed_workers
from meshplan.planner.serving.search.workers import PricedWorker, price_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One replica on one bucket, by running requests.

    Args:
        rate_per_s: [n] requests finished.
        tpot_s: [n] per output token.
        first_s: [n] to the first token of the longest request.
        steps: output tokens of the longest request after the first.
    """

    rate_per_s: FloatArray
    tpot_s: FloatArray
    first_s: FloatArray
    steps: float

    def capacity(self, slos: Sequence[Slo]) -> float:
        """Most requests/s within the SLOs; 0 where even one request alone violates one."""
        kept = np.ones(len(self.rate_per_s), dtype=bool)
        for slo in slos:
            kept &= self._value(slo.metric) <= slo.limit_s
        return float(self.rate_per_s[kept].max(initial=0.0))

    def least(self, metric: str) -> float:
        """The latency of one request alone, s."""
        return float(self._value(metric)[0])

    def _value(self, metric: str) -> FloatArray:
        if metric == "ttft":
            return self.first_s
        return self.tpot_s if metric in ("tpot", "itl") else self.first_s + self.steps * self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A kind of replica, with what it takes to run it.

    Args:
        name: name of the kind without the offer, such as ``llama-3.1-8b TP2``.
        service: index of its service.
        node_type: where it lies.
        layout: its degrees.
        quantization: its formats.
        role: see :class:`Role`.
        curves: bucket of the question → curve; those that do not fit its memory are left out.
    """

    name: str
    service: int
    node_type: str
    layout: Layout
    quantization: Quantization
    role: Role
    curves: Mapping[int, Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """A replica on an offer: one kind of the fleet problem.

    Args:
        kind: as the solver sees it.
        replica: what runs.
    """

    kind: ReplicaKind
    replica: Replica


def replicas(question: AllocationQuestion, rejected: Counter[str]) -> list[Replica]:
    """Every layout of every service on every node type, with its curve on each bucket.

    Args:
        question: with everything looked up.
        rejected: reason → number of layouts rejected for it; grows.
    """
    found: list[Replica] = []
    first = 0
    for index, service in enumerate(question.services):
        found += _of_service(question, index, service, first, rejected)
        first += len(service.buckets)
    return found


def _of_service(
    question: AllocationQuestion, index: int, service: Service, first: int, rejected: Counter[str]
) -> list[Replica]:
    constraints = question.spec.constraints
    roles = [Role.MIXED, *([Role.PREFILL, Role.DECODE] if constraints.disaggregated else [])]
    found = []
    for role in roles:
        curves: dict[tuple[str, Layout, Quantization], dict[int, Curve]] = {}
        for b, bucket in enumerate(service.buckets):
            for place, curve in _curves(service, bucket, role, constraints.max_devices_per_replica, rejected):
                key = (place.node_type, place.layout, place.quantization)
                curves.setdefault(key, {})[first + b] = curve
        found += [
            Replica(
                name=_name(question, service, layout, quantization, role),
                service=index,
                node_type=node_type,
                layout=layout,
                quantization=quantization,
                role=role,
                curves=of_bucket,
            )
            for (node_type, layout, quantization), of_bucket in curves.items()
        ]
    return found


def _curves(
    service: Service, bucket: SizedBucket, role: Role, most_devices: int | None, rejected: Counter[str]
) -> list[tuple[PlacedWorker, Curve]]:
    """The workers of a role that hold a bucket's longest request, each with its curve."""
    mean = _sized(service, bucket.input_length, bucket.output_length)
    longest = _sized(service, bucket.range.input_tokens[1], bucket.range.output_tokens[1])
    places = list(placed_workers(longest, role, rejected))
    if role is not Role.MIXED:
        linked = [place for place in places if place.machine.scale_out_bytes_per_s > 0.0]
        if len(linked) < len(places):
            rejected["no network that KV caches could go over from prefill to decode"] += len(places) - len(linked)
        places = linked
    fit = {
        (place.node_type, place.layout, place.quantization): place
        for place in _within_limits(places, most_devices, rejected)
    }
    found = []
    for place in placed_workers(mean, role, Counter()):
        key = (place.node_type, place.layout, place.quantization)
        if key in fit:
            priced = price_worker(mean, place)
            alone = price_worker(longest, fit[key]).first_token_s
            found.append((place, _curve(service, bucket, priced, alone)))
    return found


def _sized(service: Service, prompt: float, output: float) -> ServingProblem:
    workload = replace(service.problem.workload, input_length=float(prompt), output_length=float(output))
    return replace(service.problem, workload=workload)


def _within_limits(places: list[PlacedWorker], most_devices: int | None, rejected: Counter[str]) -> list[PlacedWorker]:
    """Workers no larger than a scale-up domain unless the spec allows it, and as large a part of each of their hosts.

    Pipelines stay: without an all-reduce between devices a worker of stages may serve more per device than one without.
    """
    allowed = [place for place in places if place.layout.num_devices <= (most_devices or place.machine.domain_size)]
    even = [place for place in allowed if _is_split_evenly(place)]
    if len(even) < len(allowed):
        rejected["engines want as many devices on each host of a worker"] += len(allowed) - len(even)
    return even


def _is_split_evenly(place: PlacedWorker) -> bool:
    size = place.layout.num_devices
    return size % -(-size // place.machine.devices_per_host) == 0


def _curve(service: Service, bucket: SizedBucket, priced: PricedWorker, first_alone_s: float) -> Curve:
    steady, place = priced.steady, priced.placed
    first = first_alone_s + priced.cost.admission_steps * (steady.tpot_s - steady.tpot_s[0])
    if place.role is Role.PREFILL:
        moved = kv_bytes_per_token(service.problem.shape, place.quantization) * bucket.range.input_tokens[1]
        first = first + Exchange(machine=place.machine).transfer_s(moved, devices=place.layout.num_devices)
    tpot = np.zeros_like(steady.tpot_s) if place.role is Role.PREFILL else steady.tpot_s
    if place.role is Role.DECODE:
        first = np.zeros_like(first)
    return Curve(
        rate_per_s=steady.rate_per_s,
        tpot_s=tpot,
        first_s=first,
        steps=max(bucket.range.output_tokens[1] - 1.0, 0.0),
    )


def _name(
    question: AllocationQuestion, service: Service, layout: Layout, quantization: Quantization, role: Role
) -> str:
    """Only what distinguishes kinds: the service where there are several, degrees above 1, formats to choose from."""
    degrees = (
        ("TP", layout.tensor_parallel),
        ("PP", layout.pipeline_parallel),
        ("DP", layout.attention_data_parallel),
        ("EP", layout.expert_parallel),
        ("CP", layout.context_parallel),
    )
    words = [service.name] if len(question.services) > 1 else []
    words += ["×".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "TP1"]
    if len(service.problem.quantizations) > 1:
        words.append(quantization.mlp)
    if role is not Role.MIXED:
        words.append(role.value)
    return " ".join(words)


def capacities(found: Sequence[Replica], num_buckets: int, slos: Sequence[Sequence[Slo]]) -> FloatArray:
    """[replicas, buckets] most requests/s within the SLOs of each replica's service.

    Args:
        found: kinds of replicas.
        num_buckets: buckets of the question, all services together.
        slos: [services] SLOs on latency.
    """
    table = np.zeros((len(found), num_buckets))
    for r, replica in enumerate(found):
        for b, curve in replica.curves.items():
            table[r, b] = curve.capacity(slos[replica.service])
    return table


def offerings(
    found: Sequence[Replica], offers: Sequence[Offer], capacity: FloatArray
) -> tuple[list[Offering], FloatArray]:
    """The kinds that no other kind dominates, and their rows of capacities.

    On one offer a kind is dominated by one whose number of devices divides its own and which serves, per device, at
    least as much of every bucket.
    """
    kept: list[Offering] = []
    rows: list[FloatArray] = []
    for o, offer in enumerate(offers):
        here = [r for r, replica in enumerate(found) if replica.node_type == offer.node_type and capacity[r].any()]
        here = [r for r in here if not any(_dominates(found, capacity, other, r) for other in here if other != r)]
        for r in here:
            kind = ReplicaKind(
                name=f"{offer.name} {found[r].name}",
                offer=o,
                num_devices=found[r].layout.num_devices,
                service=found[r].service,
                role=found[r].role,
            )
            kept.append(Offering(kind=kind, replica=found[r]))
            rows.append(capacity[r])
    return kept, np.array(rows).reshape(len(kept), capacity.shape[1])


def _dominates(found: Sequence[Replica], capacity: FloatArray, a: int, b: int) -> bool:
    """Whether kind a dominates kind b; of two equals the first does."""
    one, other = found[a], found[b]
    size, larger = one.layout.num_devices, other.layout.num_devices
    if one.service != other.service or one.role is not other.role or larger % size:
        return False
    per_device, compared = capacity[a] / size, capacity[b] / larger
    if not (per_device >= compared).all():
        return False
    return a < b or size < larger or bool((per_device > compared).any())


def pool_of(replica: Replica, service: Service, num_workers: int) -> Pool:
    """The workers of one kind, with the engine's default limits."""
    problem = service.problem
    device = problem.machines[replica.node_type].device
    limits = problem.rules.default_limits(device)
    ranks = replica.layout.attention_data_parallel
    caching = limits.prefix_caching and problem.workload.prefix_hit_rate > 0.0
    return Pool(
        role=replica.role,
        layout=replica.layout,
        num_workers=num_workers,
        limits=replace(limits, max_num_seqs=limits.max_num_seqs * ranks, prefix_caching=caching),
        quantization=replica.quantization,
        node_type=replica.node_type,
    )
