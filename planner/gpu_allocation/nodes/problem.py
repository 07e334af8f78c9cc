"""A fleet that is rented by the node: replicas of several shapes share nodes, and the question may hold more than cost.

Where a plain :class:`~meshplan.planner.gpu_allocation.replicas.problem.GpuAllocationProblem` rents replicas, this one
rents *units* (a node, or a device where a provider sells single ones) of *offers*, and lays replicas of several *kinds*
on them. What it adds, each part optional:

* replica shapes that share an offer: a tensor-parallel group of four devices is a kind;
* scenarios of traffic (peak and off-peak), carried by one fleet (robust) or by one each (expected cost);
* several models: a bucket belongs to a model, and a kind serves the buckets of its model only;
* prefill and decode in kinds of different offers (Splitwise, Patel et al., arXiv:2311.18677);
* limits on power and money, and the cost of changing the present fleet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from meshplan.planner.gpu_allocation.replicas.problem import Bucket, GpuAllocationProblem, GpuType
from meshplan.planner.serving.problem.config import Role

RESERVED = "reserved"


class ScenarioPolicy(Enum):
    """How several scenarios of traffic are met."""

    ROBUST = "robust"  # one fleet and one set of replicas; only the routing follows the traffic
    EXPECTED = "expected"  # a fleet for each scenario, reserved offers in all of them; least mean cost


class FleetObjective(Enum):
    """What the fleet is least in."""

    COST = "cost"  # USD/h
    POWER = "power"  # W at full load
    NUM_DEVICES = "num_devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One thing that a provider rents out.

    Args:
        name: unique in the problem.
        usd_per_hour: price of one unit.
        num_devices: accelerators per unit, which is the smallest amount rented.
        max_count: most units; None for any number.
        node_type: catalog name; empty where there is none.
        provider: who rents it out.
        region: where it is.
        zone: part of the region.
        terms: ``on-demand``, ``spot``, ``reserved`` …
        interruption_headroom: share of each replica's capacity kept free for the traffic of interrupted ones.
        interruptions_per_hour: how often one unit is taken away; what the replay plays.
        interruption_s: until a replacement serves.
        power_w: power of a unit at full load; None where unknown.
        present: units rented at present.
    """

    name: str
    usd_per_hour: float
    num_devices: int = 1
    max_count: int | None = None
    node_type: str = ""
    provider: str = ""
    region: str | None = None
    zone: str | None = None
    terms: str = "on-demand"
    interruption_headroom: float = 0.0
    interruptions_per_hour: float = 0.0
    interruption_s: float = 0.0
    power_w: float | None = None
    present: int = 0

    @property
    def is_fixed(self) -> bool:
        """Rented in every scenario: it cannot be given back for an hour."""
        return self.terms.startswith(RESERVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A limit on several offers together, such as an account's in a region.

    Args:
        name: as it is shown.
        offers: their indices.
        max_devices: most accelerators of all of them.
    """

    name: str
    offers: tuple[int, ...]
    max_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """One way to lay a replica on an offer's devices.

    Args:
        name: unique in the problem.
        offer: index of its offer.
        num_devices: devices of one replica.
        service: whose requests it serves; kinds of one service only are paired.
        role: MIXED serves whole requests; PREFILL and DECODE serve a request together. A service has at most one kind
            in use of each, on offers of one provider and region: engines pair one prefill with one decode pool, over
            a network.
        headroom: share of its capacity that the plan leaves free beyond the utilisation ceiling.
    """

    name: str
    offer: int
    num_devices: int = 1
    service: int = 0
    role: Role = Role.MIXED
    headroom: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Traffic of one time of day.

    Args:
        name: such as ``peak``.
        request_rate_per_s: [buckets] requests/s.
        weight: share of the time; the weights of a problem sum to 1.
    """

    name: str
    request_rate_per_s: tuple[float, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetProblem:
    """The whole question.

    Args:
        name: name of the instance.
        offers: what can be rented.
        kinds: what can be laid on it.
        buckets: sizes of requests.
        scenarios: at least one.
        max_request_rate_per_s: [kinds][buckets] requests/s that one replica serves within the objective when it serves
            that bucket alone (prefill and decode kinds: its phase of them); 0 when it cannot.
        max_utilization: share of its capacity to which a replica may be filled, in (0, 1].
        min_spare_replicas: replicas of each kind in use that carry no load in the plan.
        policy: see :class:`ScenarioPolicy`.
        objective: see :class:`FleetObjective`.
        max_power_w: limit on the power of all units rented.
        max_usd_per_hour: limit on the rent of all units, in every scenario.
        start_usd: cost of each unit beyond those present.
        stop_usd: cost of each present unit that is given back.
        switch_hours: hours over which the cost of switching is spread.
        tied: groups of buckets that the router cannot distinguish (it sees a prompt, not its answer): they have the
            same shares. Buckets in no group are routed by themselves.
        quotas: limits on several offers together.
        routing_steps: the router's shares are whole multiples of one over this; None for any share.
    """

    name: str
    offers: tuple[Offer, ...]
    kinds: tuple[ReplicaKind, ...]
    buckets: tuple[Bucket, ...]
    scenarios: tuple[Scenario, ...]
    max_request_rate_per_s: tuple[tuple[float, ...], ...]
    max_utilization: float = 1.0
    min_spare_replicas: int = 0
    policy: ScenarioPolicy = ScenarioPolicy.ROBUST
    objective: FleetObjective = FleetObjective.COST
    max_power_w: float | None = None
    max_usd_per_hour: float | None = None
    start_usd: float = 0.0
    stop_usd: float = 0.0
    switch_hours: float = 1.0
    tied: tuple[tuple[int, ...], ...] = ()
    quotas: tuple[Quota, ...] = ()
    routing_steps: int | None = None

    @property
    def routed_together(self) -> tuple[tuple[int, ...], ...]:
        """Every bucket in exactly one group."""
        grouped = {b for group in self.tied for b in group}
        return (*self.tied, *((b,) for b in range(len(self.buckets)) if b not in grouped))

    def fill(self, kind: int) -> float:
        """Share of its capacity to which a replica of a kind may be filled."""
        one = self.kinds[kind]
        offer = self.offers[one.offer]
        return self.max_utilization * (1.0 - offer.interruption_headroom) * (1.0 - one.headroom)

    @property
    def num_stages(self) -> int:
        """Fleets to decide: one for all scenarios, or one each."""
        return len(self.scenarios) if self.policy is ScenarioPolicy.EXPECTED else 1

    def stage_of(self, scenario: int) -> int:
        """Which fleet carries a scenario."""
        return scenario if self.policy is ScenarioPolicy.EXPECTED else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAllocation:
    """The decision.

    Args:
        units: [stages][offers] units to rent.
        replicas: [stages][kinds] replicas, spares included.
        routing: [scenarios][kinds][buckets] share of each bucket's requests; over the MIXED and PREFILL kinds they sum
            to 1 where there is traffic, and those of the DECODE kinds to what the PREFILL kinds have.
        utilization: [scenarios][kinds] load over what the usable replicas serve.
    """

    units: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...]
    routing: tuple[tuple[tuple[float, ...], ...], ...]
    utilization: tuple[tuple[float, ...], ...]


def lifted(problem: GpuAllocationProblem) -> FleetProblem:
    """A plain problem in these terms: an offer and a kind for each type."""
    return FleetProblem(
        name=problem.name,
        offers=tuple(
            Offer(
                name=one.name,
                usd_per_hour=one.usd_per_hour,
                max_count=one.max_count,
                region=one.region,
                terms=one.terms,
                interruption_headroom=one.interruption_headroom,
            )
            for one in problem.gpu_types
        ),
        kinds=tuple(ReplicaKind(name=one.name, offer=g) for g, one in enumerate(problem.gpu_types)),
        buckets=problem.buckets,
        scenarios=(Scenario(name=problem.name, request_rate_per_s=problem.request_rate_per_s),),
        max_request_rate_per_s=problem.max_request_rate_per_s,
        max_utilization=problem.max_utilization,
        min_spare_replicas=problem.min_spare_replicas,
    )


def as_plain(problem: FleetProblem) -> GpuAllocationProblem | None:
    """The plain problem that has the same answer; None where replicas of several kinds compete for one offer's units.

    A replica then costs the units that it fills, and kinds meet nowhere but in the routing.
    """
    extras = (problem.max_power_w, problem.max_usd_per_hour)
    if len(problem.scenarios) > 1 or problem.tied or problem.quotas or any(extra is not None for extra in extras):
        return None
    if problem.objective is not FleetObjective.COST or any(kind.role is not Role.MIXED for kind in problem.kinds):
        return None
    if problem.start_usd or problem.stop_usd or problem.routing_steps is not None:
        return None
    types = []
    for g, kind in enumerate(problem.kinds):
        offer = problem.offers[kind.offer]
        alone = sum(other.offer == kind.offer for other in problem.kinds) == 1
        if kind.num_devices % offer.num_devices or not (alone or offer.max_count is None):
            return None
        each = kind.num_devices // offer.num_devices
        types.append(
            GpuType(
                name=kind.name,
                usd_per_hour=offer.usd_per_hour * each,
                max_count=None if offer.max_count is None else offer.max_count // each,
                region=offer.region,
                terms=offer.terms if offer.terms in ("on-demand", "spot", "reserved") else "reserved",
                interruption_headroom=1.0 - problem.fill(g) / problem.max_utilization,
            )
        )
    return GpuAllocationProblem(
        name=problem.name,
        gpu_types=tuple(types),
        buckets=problem.buckets,
        request_rate_per_s=problem.scenarios[0].request_rate_per_s,
        max_request_rate_per_s=problem.max_request_rate_per_s,
        max_utilization=problem.max_utilization,
        min_spare_replicas=problem.min_spare_replicas,
    )
