"""The allocation question as users write it: services, a market, SLOs; every error at once with its path.

A document of the kind ``gpu-allocation`` with ``gpu_types`` gives capacities by hand
(:mod:`meshplan.planner.gpu_allocation.replicas.problem`); one with ``market`` gives models and workloads, read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from meshplan.planner.core.reading.spec_fields import MAX_USD, Count, Dollars, SpecModel, TimeInSeconds, Whole
from meshplan.planner.core.reading.spec_reader import read_spec
from meshplan.planner.gpu_allocation.nodes.problem import FleetObjective, ScenarioPolicy
from meshplan.planner.serving.problem.pins import SchemeName
from meshplan.planner.serving.problem.problem import MAX_UTILIZATION
from meshplan.planner.serving.problem.slo import Slo, known_slos, slos_of
from meshplan.planner.serving.problem.spec import KvCacheFormat, Latency
from meshplan.planner.serving.problem.workload.spec import MAX_RATE_PER_S, Tokens

MAX_BUCKETS, MAX_HOURS, MAX_NODES = 4096, 8784, 1_000_000
_OTHER_CURRENCY = re.compile(r"(?P<currency>[a-z]{3})_per_hour(_per_node)?|currency")
Rate = Annotated[float, Field(ge=0, le=MAX_RATE_PER_S, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Usd = Annotated[float, Field(ge=0, le=MAX_USD, allow_inf_nan=False)]
Nodes = Annotated[int, Whole(least=0, most=MAX_NODES)]
Range = Annotated[list[Tokens], Field(min_length=2, max_length=2)]
Edges = Annotated[list[Tokens], Field(min_length=1, max_length=64)]


class LengthBucketSpec(SpecModel):
    """Requests of similar size."""

    input_tokens: Range = Field(description="least and most prompt tokens")
    output_tokens: Range = Field(description="least and most generated tokens")
    request_rate_per_s: Rate

    @model_validator(mode="after")
    def _ordered(self) -> LengthBucketSpec:
        for name in ("input_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: the least, {low}, is above the most, {high}; swap them")
        return self


class AllocationWorkloadSpec(SpecModel):
    """Requests by size: a histogram, or a trace that is cut into one."""

    buckets: Annotated[list[LengthBucketSpec], Field(min_length=1, max_length=MAX_BUCKETS)] | None = None
    trace: str | None = Field(default=None, description="CSV or JSON lines of arrival_s,input_length,output_length")
    input_edges: Edges | None = Field(default=None, description="prompt tokens at which a trace is cut into buckets")
    output_edges: Edges | None = Field(default=None, description="generated tokens at which a trace is cut")
    request_rate_per_s: Annotated[float, Field(gt=0, le=MAX_RATE_PER_S, allow_inf_nan=False)] | None = Field(
        default=None, description="of all buckets together: scales the histogram or the trace"
    )
    burstiness: Annotated[float, Field(ge=1, le=100)] = Field(
        default=1.0, description="coefficient of variation of the gaps between arrivals; 1 is Poisson"
    )
    prefix_hit_rate: Share = Field(default=0.0, description="share of prompt tokens found in the prefix cache")
    router_knows: Literal["lengths", "input_length"] = Field(
        default="lengths",
        description="what requests are routed by: prompt and (predicted) answer, or the prompt alone",
    )

    @model_validator(mode="after")
    def _one_form(self) -> AllocationWorkloadSpec:
        if (self.buckets is None) == (self.trace is None):
            raise ValueError("give buckets (a histogram) or a trace, not both and not neither")
        if self.trace is None and (self.input_edges or self.output_edges):
            raise ValueError("input_edges and output_edges cut a trace; buckets bring their own")
        for name in ("input_edges", "output_edges"):
            edges = getattr(self, name) or []
            if any(low >= high for low, high in pairwise(edges)):
                raise ValueError(f"{name} must rise: {edges}")
        return self


class ServiceSpec(SpecModel):
    """One model and what is asked of it."""

    name: str = Field(default="", description="unique; the model's name where left out")
    model: str = Field(min_length=1, description="model of the catalog, or path of a Hugging Face config.json")
    workload: AllocationWorkloadSpec
    slo: Annotated[dict[str, Latency], AfterValidator(known_slos)] = Field(
        min_length=1, description="such as {ttft_p99_s: 3.0, tpot_p95_s: 50 ms}"
    )
    quantization: list[SchemeName] | None = Field(
        default=None, min_length=1, description="formats that replicas may choose from; default: as published"
    )
    kv_cache: KvCacheFormat = "bf16"

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The SLOs on latency."""
        return slos_of(self.slo)


class OfferSpec(SpecModel):
    """Nodes of one type: an offer for each provider, region and terms that are listed here and priced."""

    type: str = Field(min_length=1, description="node type of the catalog, such as aws-g5-xlarge")
    max_nodes: Nodes | None = Field(default=None, description="of each price that matches; none: any number")
    present_nodes: Nodes = Field(default=0, description="that are rented at present")
    providers: Annotated[list[str], Field(min_length=1)] | None = None
    regions: Annotated[list[str], Field(min_length=1)] | None = None
    terms: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="such as [on-demand, spot]; default: on-demand"
    )
    usd_per_hour_per_node: Dollars | None = Field(default=None, description="your price; overrides the catalog's")
    interruption_headroom: Share | None = Field(
        default=None, description="share of a spot replica's capacity kept free for the traffic of interrupted ones"
    )
    zones: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="parts of the region, each a separate offer with its own max_nodes"
    )
    interruptions_per_hour: Annotated[float, Field(ge=0, le=60)] | None = Field(
        default=None, description="how often a spot node is taken away; the replay takes it away as often"
    )
    interruption_s: Annotated[float, Field(gt=0, le=86400), TimeInSeconds()] | None = Field(
        default=None, description="until a replacement of an interrupted node serves"
    )

    @model_validator(mode="after")
    def _rate_and_duration(self) -> OfferSpec:
        if (self.interruptions_per_hour is None) != (self.interruption_s is None):
            raise ValueError("interruptions_per_hour and interruption_s go together: how often, and for how long")
        return self

    @model_validator(mode="before")
    @classmethod
    def _dollars_only(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            match = _OTHER_CURRENCY.fullmatch(str(key))
            if match and match["currency"] != "usd":
                raise ValueError(
                    f"{key}: prices are in USD here, and no exchange rates are kept; convert to usd_per_hour_per_node"
                )
        return value


class QuotaSpec(SpecModel):
    """A limit on several offers together; what is left out is any."""

    type: str | None = Field(default=None, description="node type of the catalog")
    provider: str | None = None
    region: str | None = None
    zone: str | None = None
    terms: str | None = None
    max_devices: Nodes

    @property
    def name(self) -> str:
        """What it is on."""
        return (
            " ".join(part for part in (self.type, self.provider, self.region, self.zone, self.terms) if part)
            or "all offers"
        )


class MarketSpec(SpecModel):
    """What can be rented."""

    offers: Annotated[list[OfferSpec], Field(min_length=1, max_length=64)]
    quotas: Annotated[list[QuotaSpec], Field(max_length=64)] = Field(default_factory=list)
    rent: Literal["node", "device"] = Field(
        default="node", description="what is rented: whole nodes, or single devices at a share of the node's price"
    )


class AllocationConstraintsSpec(SpecModel):
    """Limits on the fleet."""

    target: Literal["vllm", "sglang", "trtllm", "llama.cpp"] = Field(
        default="vllm", description="engine whose rules replicas obey"
    )
    max_utilization: Annotated[float, Field(gt=0, le=1)] = MAX_UTILIZATION
    min_spare_replicas: Annotated[int, Whole(least=0, most=1000)] = Field(
        default=0, description="replicas of each kind in use that carry no load: N + this many"
    )
    max_devices_per_replica: Count | None = None
    routing_steps: Annotated[int, Whole(most=10_000)] | None = Field(
        default=None, description="shares are multiples of one over this: 100 for a router that takes whole percents"
    )
    disaggregated: bool = Field(default=False, description="prefill and decode may run on different offers")
    max_usd_per_hour: Dollars | None = None
    max_power_w: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class ScenarioSpec(SpecModel):
    """Traffic of one time of day, as a multiple of the workload's."""

    name: str = Field(min_length=1)
    rate_factor: Annotated[float, Field(ge=0, le=MAX_RATE_PER_S, allow_inf_nan=False)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(default=1.0, description="hours, or a share")


class ScenariosSpec(SpecModel):
    """Several times of day."""

    policy: ScenarioPolicy = Field(
        default=ScenarioPolicy.ROBUST, description="robust: one fleet for all; expected: one each, least mean cost"
    )
    cases: Annotated[list[ScenarioSpec], Field(min_length=1, max_length=24)]


class SwitchingSpec(SpecModel):
    """What changing the fleet costs."""

    start_usd: Usd = Field(default=0.0, description="of a unit (node or device) that is started")
    stop_usd: Usd = Field(default=0.0, description="of a unit that is given back")
    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="over which the step from present_nodes is spread"
    )


class ScheduleSpec(SpecModel):
    """Traffic hour by hour, as multiples of the workload's: a day (24) up to a leap year (8,784)."""

    hourly_rate_factor: Annotated[
        list[Annotated[float, Field(ge=0, le=MAX_RATE_PER_S, allow_inf_nan=False)]],
        Field(min_length=2, max_length=MAX_HOURS),
    ]


class ReplaySpec(SpecModel):
    """How the plan is checked by simulation."""

    num_requests: Annotated[int, Whole(least=500, most=1_000_000)] = Field(
        default=5000, description="of each service in each of the runs"
    )
    burstiness: Annotated[float, Field(ge=1, le=100)] | None = Field(
        default=None, description="of the replayed arrivals; default: the workload's"
    )
    enabled: bool = True


class AllocationSpec(SpecModel):
    """An allocation question: one service in place, or several."""

    kind: Literal["gpu-allocation"]
    name: str = ""
    model: str | None = None
    workload: AllocationWorkloadSpec | None = None
    slo: Annotated[dict[str, Latency], AfterValidator(known_slos)] | None = None
    quantization: list[SchemeName] | None = Field(default=None, min_length=1)
    kv_cache: KvCacheFormat = "bf16"
    services: Annotated[list[ServiceSpec], Field(min_length=1, max_length=16)] | None = None
    market: MarketSpec
    objective: FleetObjective = FleetObjective.COST
    constraints: AllocationConstraintsSpec = AllocationConstraintsSpec()
    scenarios: ScenariosSpec | None = None
    switching: SwitchingSpec = SwitchingSpec()
    schedule: ScheduleSpec | None = None
    replay: ReplaySpec = ReplaySpec()

    @model_validator(mode="after")
    def _services(self) -> AllocationSpec:
        single = {"model": self.model, "workload": self.workload, "slo": self.slo}
        given = [name for name, part in single.items() if part is not None]
        if self.services is not None and given:
            raise ValueError(
                f"give services, or {', '.join(single)} in place; {', '.join(given)} given in addition to services"
            )
        missing = [name for name in single if name not in given]
        if self.services is None and missing:
            raise ValueError(f"{', '.join(missing)} missing: give model, workload and slo, or a list of services")
        if self.slo is not None and not self.slo:
            raise ValueError("slo is empty: without an SLO every replica serves any rate; give {ttft_p99_s: …}")
        names = [service.name or service.model for service in self.services or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two services are called {', '.join(twice)}; give each another name")
        if self.scenarios is not None and self.schedule is not None:
            raise ValueError("scenarios and schedule both describe how traffic changes; give one of them")
        return self

    @property
    def all_services(self) -> tuple[ServiceSpec, ...]:
        """The services, named."""
        if self.services is not None:
            return tuple(one.model_copy(update={"name": one.name or one.model}) for one in self.services)
        if self.model is None or self.workload is None or self.slo is None:
            raise AssertionError("the validator has checked them")
        return (
            ServiceSpec(
                name=self.model,
                model=self.model,
                workload=self.workload,
                slo=self.slo,
                quantization=self.quantization,
                kv_cache=self.kv_cache,
            ),
        )


def is_market_question(document: Mapping[str, Any]) -> bool:
    """Whether a document asks from models and workloads, and not from capacities given by hand."""
    return "gpu_types" not in document and bool({"market", "model", "services", "workload"} & document.keys())


def read_allocation_spec(document: Mapping[str, Any]) -> AllocationSpec:
    """Validate a document; every problem at once.

    Raises:
        SpecError: with the path and the fix of each problem.
    """
    return read_spec(AllocationSpec, document)
