"""From an allocation spec to a question with everything looked up; every invalid value is reported at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError, UnknownEntryError
from meshplan.catalogs.hardware import NodeType, Price
from meshplan.planner.cluster.lookup import ANY
from meshplan.planner.core.problems import Problems
from meshplan.planner.gpu_allocation.nodes.problem import FleetObjective, Offer, Quota
from meshplan.planner.gpu_allocation.question import (
    AllocationQuestion,
    Service,
    SizedBucket,
    cut_trace,
    histogram,
    indistinct,
)
from meshplan.planner.gpu_allocation.spec import AllocationSpec, OfferSpec, QuotaSpec, ServiceSpec
from meshplan.planner.serving.problem.requests import Requests
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.trace import read_trace
from meshplan.planner.serving.resolve import ResolvedServing, resolve_serving

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

SPOT, ON_DEMAND = "spot", "on-demand"


def resolve_allocation(spec: AllocationSpec, catalog: Catalog, base: Path) -> AllocationQuestion:
    """Look everything up.

    Args:
        spec: the question.
        catalog: where the names are looked up.
        base: folder against which model and trace paths are resolved.

    Raises:
        SpecError: unknown names, offers without a price, impossible choices: all of them.
    """
    problems = Problems()
    offers, prices, nodes = _offers(spec, catalog, problems)
    services: list[Service] = []
    sources: dict[str, str] = {}
    for index, service in enumerate(spec.all_services):
        path = f"services[{index}]." if spec.services is not None else ""
        found = _service(spec, service, path, nodes, catalog, base, problems)
        if found is not None:
            services.append(found[0])
            sources.update(found[1].sources)
    if services and not sum(service.request_rate_per_s for service in services) > 0.0:
        problems.say("workload", "every rate is 0: no request arrives, so no fleet is needed; give a rate above 0")
    if spec.schedule is not None and not any(spec.schedule.hourly_rate_factor):
        message = "every hour is 0: no request arrives, so no fleet is needed; give an hour above 0"
        problems.say("schedule.hourly_rate_factor", message)
    quotas = []
    for index, asked in enumerate(spec.market.quotas):
        meant = tuple(o for o, offer in enumerate(offers) if _is_under(asked, offer))
        if offers and not meant:
            problems.say(f"market.quotas[{index}]", f"no offer is of {asked.name}; leave it out or name one")
        quotas.append(Quota(name=asked.name, offers=meant, max_devices=asked.max_devices))
    problems.check()
    for name, price in prices.items():
        sources[f"price of {name}"] = f"{price.provider} {price.terms} {price.date}: {price.source}"
    return AllocationQuestion(
        spec=spec, services=tuple(services), offers=tuple(offers), quotas=tuple(quotas), prices=prices, sources=sources
    )


# --- offers -----------------------------------------------------------------------------------------------------------


def _offers(
    spec: AllocationSpec, catalog: Catalog, problems: Problems
) -> tuple[list[Offer], dict[str, Price], dict[str, NodeType]]:
    """Offers, their prices by name, and the node types by catalog name."""
    offers: list[Offer] = []
    prices: dict[str, Price] = {}
    nodes: dict[str, NodeType] = {}
    for index, asked in enumerate(spec.market.offers):
        path = f"market.offers[{index}]"
        try:
            node = catalog.node_type(asked.type)
        except UnknownEntryError as error:
            problems.say(f"{path}.type", f"{error} (see: meshplan catalog list nodes)")
            continue
        nodes[node.slug] = node
        found = _prices(asked, node, path, problems)
        _check_interruptions(asked, found, path, problems)
        for price in found:
            if spec.objective is FleetObjective.POWER and node.device.tdp_w is None:
                problems.say(f"{path}.type", f"the board power of {node.device.name} is not known; leave it out")
            zones: list[str | None] = [None] if asked.zones is None else [*asked.zones]
            for zone in zones:
                offer = _offer(spec, asked, node, price, zone)
                if offer.name in prices:
                    problems.say(path, f"{offer.name} is offered twice; put both into one entry")
                prices[offer.name] = price
                offers.append(offer)
    return offers, prices, nodes


def _check_interruptions(asked: OfferSpec, found: list[Price], path: str, problems: Problems) -> None:
    """What is said of interruptions belongs to spot nodes, and spot nodes need it."""
    spot = any(price.terms == SPOT for price in found)
    if spot and asked.interruption_headroom is None and asked.interruptions_per_hour is None:
        problems.say(
            f"{path}.interruption_headroom",
            "spot nodes are interrupted: give the share of a replica's capacity that stays free for the "
            "traffic of interrupted ones, such as 0.2 (0 for none), or how often (interruptions_per_hour) and "
            "for how long (interruption_s) they are, and the simulation finds the share",
        )
    if found and not spot and (asked.interruption_headroom or asked.interruptions_per_hour):
        name = "interruption_headroom" if asked.interruption_headroom else "interruptions_per_hour"
        terms = ", ".join(sorted({price.terms for price in found}))
        message = (
            f"only spot nodes are interrupted and this entry has none ({terms}); add terms: [spot] or leave it out"
        )
        problems.say(f"{path}.{name}", message)


def _prices(asked: OfferSpec, node: NodeType, path: str, problems: Problems) -> list[Price]:
    """The newest price of each provider, region and terms that the entry admits."""
    if asked.usd_per_hour_per_node is not None:
        terms = asked.terms or [ON_DEMAND]
        if any(len(several or []) > 1 for several in (asked.providers, terms, asked.regions)):
            message = "one price for several providers, terms or regions; give an entry each"
            problems.say(f"{path}.usd_per_hour_per_node", message)
        region = (asked.regions or [ANY])[0]
        own = asked.usd_per_hour_per_node
        provider = (asked.providers or ["yours"])[0]
        return [Price(usd_per_hour=own, provider=provider, region=region, terms=terms[0], date="", source="the spec")]
    fitting = [
        price
        for price in node.prices
        if (asked.providers is None or price.provider in asked.providers)
        and (asked.regions is None or price.region in (*asked.regions, ANY))
        and price.terms in (asked.terms or [ON_DEMAND])
    ]
    for name, wanted, known in (
        ("providers", asked.providers, [price.provider for price in node.prices]),
        ("regions", asked.regions, [price.region for price in node.prices]),
        ("terms", asked.terms, [price.terms for price in node.prices]),
    ):
        missing = [one for one in wanted or [] if one not in known and not (name == "regions" and ANY in known)]
        if missing:
            listed = ", ".join(sorted(set(known))) or "none"
            message = f"no price of {node.slug} for {', '.join(missing)} (known: {listed})"
            problems.say(f"{path}.{name}", f"{message}; give usd_per_hour_per_node")
    if not fitting and not any(problem.path.startswith(path) for problem in problems):
        listed = "; ".join(f"{p.provider} {p.region} {p.terms}" for p in node.prices) or "none"
        problems.say(path, f"no price of {node.slug} fits (known: {listed}); give usd_per_hour_per_node")
    newest: dict[tuple[str, str, str], Price] = {}
    for price in sorted(fitting, key=lambda price: (price.date, -price.usd_per_hour)):
        newest[price.provider, price.region, price.terms] = price
    return list(newest.values())


def _offer(spec: AllocationSpec, asked: OfferSpec, node: NodeType, price: Price, zone: str | None) -> Offer:
    by_device = spec.market.rent == "device"
    size = node.num_devices if by_device else 1
    watt = node.device.tdp_w
    devices = node.num_devices // size
    parts = [node.slug, *(part for part in (price.provider, price.region) if part not in (ANY, "yours"))]
    parts += [] if zone is None else [zone]
    if price.terms != ON_DEMAND:
        parts.append(price.terms)
    # The provider is often the first word of the node type: it is not repeated.
    if len(parts) > 1 and parts[0].startswith(f"{parts[1]}-"):
        del parts[1]
    return Offer(
        name="/".join(parts),
        usd_per_hour=price.usd_per_hour / size,
        num_devices=devices,
        max_count=None if asked.max_nodes is None else asked.max_nodes * size,
        node_type=node.slug,
        provider=price.provider,
        region=None if price.region == ANY else price.region,
        zone=zone,
        terms=price.terms,
        interruption_headroom=(asked.interruption_headroom or 0.0) if price.terms == SPOT else 0.0,
        interruptions_per_hour=(asked.interruptions_per_hour or 0.0) if price.terms == SPOT else 0.0,
        interruption_s=(asked.interruption_s or 0.0) if price.terms == SPOT else 0.0,
        power_w=None if watt is None else watt * devices,
        present=asked.present_nodes * size,
    )


def _is_under(quota: QuotaSpec, offer: Offer) -> bool:
    wanted = (
        (quota.type, offer.node_type),
        (quota.provider, offer.provider),
        (quota.region, offer.region),
        (quota.zone, offer.zone),
        (quota.terms, offer.terms),
    )
    return all(want is None or want == have for want, have in wanted)


# --- services ---------------------------------------------------------------------------------------------------------


def _service(
    spec: AllocationSpec,
    service: ServiceSpec,
    path: str,
    nodes: Mapping[str, NodeType],
    catalog: Catalog,
    base: Path,
    problems: Problems,
) -> tuple[Service, ResolvedServing] | None:
    """One service with its problem; None where something is missing, which is reported."""
    trace: Requests | None = None
    try:
        if service.workload.trace is not None:
            trace = read_trace(base / service.workload.trace)
    except SpecError as error:
        for problem in error.problems:
            problems.say(f"{path}workload.trace", str(problem))
        return None
    buckets = histogram(service.workload) if trace is None else cut_trace(trace, service.workload)
    if trace is not None and not sum(bucket.request_rate_per_s for bucket in buckets) > 0.0:
        message = "all requests of the trace arrive at once: it has no rate; give workload.request_rate_per_s"
        problems.say(f"{path}workload.request_rate_per_s", message)
        return None
    if spec.constraints.disaggregated and any(slo.metric == "e2e" for slo in service.slos):
        message = "disaggregated prefill and decode are planned by ttft and tpot; give SLOs on those, not on e2e"
        problems.say(f"{path}slo", message)
    if not nodes:
        return None
    try:
        resolved = resolve_serving(read_serving_spec(_serving_document(spec, service, nodes, buckets)), catalog, base)
    except SpecError as error:
        for problem in error.problems:
            problems.say(f"{path}{problem.path}", problem.message)
        return None
    made = Service(
        name=service.name,
        problem=resolved.problem,
        buckets=buckets,
        burstiness=service.workload.burstiness,
        trace=trace,
        tied=indistinct(buckets) if service.workload.router_knows == "input_length" else (),
    )
    return made, resolved


def _serving_document(
    spec: AllocationSpec, service: ServiceSpec, nodes: Mapping[str, NodeType], buckets: tuple[SizedBucket, ...]
) -> dict[str, Any]:
    """The service as a serving question on one replica's worth of every node type, at its longest requests."""
    widest = spec.constraints.max_devices_per_replica or 1
    longest = max(buckets, key=lambda one: one.range.input_tokens[1] + one.range.output_tokens[1]).range
    document: dict[str, Any] = {
        "kind": "serving",
        "model": service.model,
        "cluster": {
            "nodes": [
                {"type": name, "count": math.ceil(max(widest, node.num_devices) / node.num_devices)}
                for name, node in nodes.items()
            ]
        },
        "workload": {
            "input_length": longest.input_tokens[1],
            "output_length": longest.output_tokens[1],
            "request_rate_per_s": max(service.workload.request_rate_per_s or 1.0, 1e-9),
            "prefix_hit_rate": service.workload.prefix_hit_rate,
        },
        "slo": dict(service.slo),
        "kv_cache": service.kv_cache,
        "constraints": {"target": spec.constraints.target},
        "fixed": {"mode": "disaggregated"} if spec.constraints.disaggregated else {},
    }
    if service.quantization is not None:
        document["quantization"] = list(service.quantization)
    return document
