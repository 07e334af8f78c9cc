"""Entries of the catalog as rows and documents: what ``meshplan catalog list|show`` prints and HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.facts import ruling_facts

if TYPE_CHECKING:
    from meshplan.catalogs.constants.machines.small_machines import SmallMachine
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.facts import Fact
    from meshplan.catalogs.hardware import Device, Link, NodeType, Price
    from meshplan.catalogs.models.diffusion import DiffusionModel

Row = Mapping[str, Any]
# The dtype whose peak stands for a device in a listing; older devices lack the first.
_LISTED_DTYPES = ("bf16", "fp16")


class Section(StrEnum):
    """What can be listed."""

    DEVICES = "devices"
    LINKS = "links"
    NODES = "nodes"
    MODELS = "models"
    DIFFUSION_MODELS = "diffusion-models"
    MACHINES = "machines"
    PRICES = "prices"


def entry_rows(catalog: Catalog, section: Section, *, search: str = "") -> list[Row]:
    """Entries of a section; of several facts for one number the one in effect.

    Args:
        catalog: where they are.
        section: what is listed.
        search: words that an entry must hold, in any case and order.
    """
    words = search.lower().split()
    return [
        row
        for row in _rows(catalog, section)
        if all(word in " ".join(map(str, row.values())).lower() for word in words)
    ]


def _rows(catalog: Catalog, section: Section) -> list[Row]:
    match section:
        case Section.DEVICES:
            return [_device_row(device) for device in catalog.devices()]
        case Section.LINKS:
            return [_link_row(link) for link in catalog.links()]
        case Section.NODES:
            return [_node_row(node) for node in catalog.node_types()]
        case Section.MODELS:
            return list(catalog.models())
        case Section.DIFFUSION_MODELS:
            return [_diffusion_row(model) for model in _diffusion_models().values()]
        case Section.MACHINES:
            return [asdict(machine) for machine in _machines().values()]
        case Section.PRICES:
            return [_price_row(price, node.slug) for node in catalog.node_types() for price in node.prices]


def described(catalog: Catalog, name: str) -> dict[str, Any]:
    """The entry ``name`` of whatever kind, with all its facts.

    Raises:
        UnknownEntryError: there is none; the closest names are offered.
    """
    known: list[str] = []
    for device in catalog.devices():
        known.append(device.slug)
        if device.slug == name:
            texts = {"name": device.name, "vendor": device.vendor, "architecture": device.architecture}
            return {"kind": "device", "slug": name, **texts, "facts": _fact_rows(catalog, "device", name)}
    for link in catalog.links():
        known.append(link.slug)
        if link.slug == name:
            texts = {"name": link.name, "technology": link.technology}
            return {"kind": "link", "slug": name, **texts, "facts": _fact_rows(catalog, "link", name)}
    for node in catalog.node_types():
        known.append(node.slug)
        if node.slug == name:
            return _described_node(catalog, node)
    models = catalog.models()
    if any(model["slug"] == name for model in models):
        model = next(model for model in models if model["slug"] == name)
        return {"kind": "model", **model, "config": catalog.model(name)}
    models_of_images, machines = _diffusion_models(), _machines()
    if name in models_of_images:
        return _described_whole("diffusion_model", models_of_images[name])
    if name in machines:
        return _described_whole("machine", machines[name])
    raise UnknownEntryError(
        "catalog entry", name, [*known, *(model["slug"] for model in models), *models_of_images, *machines]
    )


def described_as_written(catalog: Catalog, name: str) -> dict[str, Any]:
    """The same of a name in one of the ways in which specs may write it: ``H100``, a Hugging Face id.

    Raises:
        UnknownEntryError: as above.
    """
    try:
        return described(catalog, name)
    except UnknownEntryError as unknown:
        from meshplan.catalogs.models.diffusion import diffusion_model  # start-up: as below

        for meant in (catalog.device, catalog.node_type, catalog.link, catalog.model_shape, diffusion_model):
            try:
                return described(catalog, meant(name).slug)
            except UnknownEntryError:
                continue
        raise unknown from None


def _diffusion_models() -> Mapping[str, DiffusionModel]:
    from meshplan.catalogs.models.diffusion import diffusion_models  # start-up: --help reads no YAML

    return diffusion_models()


def _machines() -> Mapping[str, SmallMachine]:
    from meshplan.catalogs.constants.machines.small_machines import small_machines  # start-up: as above

    return small_machines()


def _described_whole(kind: str, entry: DiffusionModel | SmallMachine) -> dict[str, Any]:
    """What ships as a whole, each figure under the entry's one source."""
    values = asdict(entry)
    texts = {name: values.pop(name) for name in ("slug", "name", "source")}
    return {"kind": kind, **texts, "values": values}


def _described_node(catalog: Catalog, node: NodeType) -> dict[str, Any]:
    return {
        "kind": "node_type",
        "slug": node.slug,
        "name": node.name,
        "device": node.device.slug,
        "scale_up_link": node.scale_up_link.slug,
        "scale_out_link": node.scale_out_link.slug if node.scale_out_link else None,
        "facts": _fact_rows(catalog, "node_type", node.slug),
        "prices": [_price_row(price, node.slug) for price in node.prices],
    }


def _fact_rows(catalog: Catalog, kind: str, slug: str) -> list[Row]:
    facts = catalog.facts(kind, slug)
    ruling = ruling_facts(facts)

    def row(fact: Fact) -> Row:
        evidence = fact.evidence
        return {
            "field": fact.field,
            "value": fact.value,
            "low": evidence.low,
            "high": evidence.high,
            "num_samples": evidence.num_samples,
            "level": evidence.level.value,
            "rules": ruling[fact.field] is fact,
            "date": evidence.date,
            "source": evidence.source,
            "origin": fact.origin,
        }

    return [row(fact) for fact in facts]


def _device_row(device: Device) -> Row:
    dtype = next((dtype for dtype in _LISTED_DTYPES if dtype in device.peak_flops_per_s), None)
    return {
        "slug": device.slug,
        "name": device.name,
        "vendor": device.vendor,
        "architecture": device.architecture,
        "memory_bytes": device.memory_bytes,
        "usable_memory_bytes": device.usable_memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "half_precision_flops_per_s": device.peak_flops_per_s[dtype] if dtype else None,
        "peak_flops_per_s": dict(device.peak_flops_per_s),
        "tdp_w": device.tdp_w,
    }


def _link_row(link: Link) -> Row:
    return {
        "slug": link.slug,
        "name": link.name,
        "technology": link.technology,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "latency_s": link.latency_s,
    }


def _diffusion_row(model: DiffusionModel) -> Row:
    size = model.defaults
    return {
        "slug": model.slug,
        "name": model.name,
        "makes": "videos" if model.is_video else "images",
        "parameters": model.parameters,
        "height": size.height,
        "width": size.width,
        "frames": size.frames,
        "steps": size.steps,
        "source": model.source,
    }


def _node_row(node: NodeType) -> Row:
    on_demand = [price.usd_per_hour for price in node.prices if price.terms == "on-demand"]
    return {
        "slug": node.slug,
        "name": node.name,
        "device": node.device.slug,
        "num_hosts": node.num_hosts,
        "devices_per_host": node.devices_per_host,
        "num_devices": node.num_devices,
        "scale_up_link": node.scale_up_link.slug,
        "scale_out_link": node.scale_out_link.slug if node.scale_out_link else None,
        "nics_per_host": node.nics_per_host,
        "scale_out_bytes_per_s_per_device": node.scale_out_bytes_per_s_per_device or None,
        "host_memory_bytes": node.host_memory_bytes,
        "on_demand_usd_per_hour": min(on_demand, default=None),
    }


def _price_row(price: Price, node_type: str) -> Row:
    return {
        "node_type": node_type,
        "usd_per_hour": price.usd_per_hour,
        "provider": price.provider,
        "region": price.region,
        "terms": price.terms,
        "date": price.date,
        "source": price.source,
    }
