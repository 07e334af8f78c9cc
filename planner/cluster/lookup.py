"""Catalog entries that a spec names: model, node types, prices. An unknown name is reported with its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.machines.drives import drives
from meshplan.catalogs.errors import CatalogError, Problem, UnknownEntryError, closest_names, did_you_mean
from meshplan.catalogs.hardware import Device, Link, NodeType, Price
from meshplan.catalogs.models.config import read_config
from meshplan.catalogs.models.hub import HUB, cached_config, is_hub_id
from meshplan.catalogs.models.scope import why_unread
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.links_spec import LinkSpec, LinksSpec
from meshplan.planner.cluster.spec import ClusterSpec, PriceSpec
from meshplan.planner.core.problems import Problems

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


ANY = "any"


IN_PLACE = "as described in the spec"
# Share of a drive's sequential peak that is attained. Assumed, as of every other rate of a tier that was not measured.
DRIVE_SHARE = 0.8
# Catalog entry that stands for the link inside a node of one device, as in its own such nodes: nothing crosses it.
LINK_OF_ONE_DEVICE = "pcie4"


def look_up_language_model(model: str, catalog: Catalog, base: Path, problems: Problems) -> ModelShape | None:
    """The shape of a model that predicts each token from those before; None after adding a problem (encoders)."""
    shape = look_up_shape(model, catalog, base, problems)
    if shape is None or not (shape.bidirectional or shape.pooling):
        return shape
    what = "tokens attend to those after them" if shape.bidirectional else "it ends in a classifier"
    problems.say(
        "model",
        f"{shape.name} is no language model ({what}): embedding and reranking are planned (kind: "
        "serving with workload.task), its training is not",
    )
    return None


def look_up_shape(model: str, catalog: Catalog, base: Path, problems: Problems) -> ModelShape | None:
    """The shape of a catalog model or of a ``config.json``; None after adding a problem."""
    try:
        path = config_path(model, catalog, base)
        if path is None:
            return catalog.model_shape(model)
        if is_path(model, base):
            return read_config(path)
        return replace(read_config(path, name=model.rpartition("/")[2]), source=f"{HUB}/{model}")
    except UnknownEntryError as error:
        if part := why_unread(model):
            problems.say("model", f"{model} is not supported yet: it has {part}")
            return None
        if (pictures := _diffusion_name(model)) is not None:
            problems.say("model", f"{pictures} makes images or videos: ask with kind: diffusion")
            return None
        problems.say(
            "model",
            f"{error} (see: meshplan catalog list models; or give the path of its config.json: "
            f"hf download {model if '/' in model else 'ORGANISATION/MODEL'} config.json"
            f"{', or plan with --download' if is_hub_id(model) else ''})",
        )
    except CatalogError as error:
        problems.say("model", str(error))
    return None


def _diffusion_name(model: str) -> str | None:
    """The diffusion model that a name means; None where it means none."""
    from meshplan.catalogs.models.diffusion import diffusion_model  # start-up: for unknown names alone

    try:
        return diffusion_model(model).name
    except UnknownEntryError:
        return None


def config_path(model: str, catalog: Catalog, base: Path) -> Path | None:
    """Where the ``config.json`` of a model lies that a spec names by a path, or by an id that the catalog does not know
    but a cache of this machine holds; None for the catalog's models, and where there is none.
    """
    if is_path(model, base):
        return base / model
    return None if catalog.model_name(model) is not None else cached_config(model)


def is_path(model: str, base: Path) -> bool:
    """Whether ``model`` names a file or folder; ``Qwen/Qwen3-32B`` is an id unless such a folder exists."""
    return model.endswith(".json") or model.startswith((".", "/")) or (base / model).exists()


def unknown_names(document: Mapping[str, Any], catalog: Catalog) -> list[Problem]:
    """Names that the catalog does not have, in a document that may be malformed elsewhere.

    Args:
        document: the spec as plain data, of any shape.
        catalog: where the names are looked up.
    """
    cluster = document.get("cluster")
    cluster = cluster if isinstance(cluster, Mapping) else {}
    nodes = cluster.get("nodes")
    places: list[tuple[str, Any, Callable[[str], object]]] = [
        (f"cluster.nodes[{index}].type", node.get("type"), catalog.node_type)
        for index, node in enumerate(nodes if isinstance(nodes, list) else [])
        if isinstance(node, Mapping)
    ]
    devices = cluster.get("devices")
    if isinstance(devices, Mapping):
        places.append(("cluster.devices.type", devices.get("type"), catalog.device))
    model = document.get("model")
    if document.get("kind") == "diffusion":
        from meshplan.catalogs.models.diffusion import diffusion_model  # start-up: as above

        places.append(("model", model, diffusion_model))
    elif isinstance(model, str) and "/" not in model and not model.endswith(".json"):
        places.append(("model", model, catalog.model))
    problems = Problems()
    for path, name, look_up in places:
        if isinstance(name, str) and name:
            try:
                look_up(name)
            except UnknownEntryError as error:
                problems.say(path, str(error))
    return problems


def node_in_place(spec: ClusterSpec, catalog: Catalog, problems: Problems) -> NodeType | None:
    """The node type that a spec describes by ``devices`` and ``links``; None without them or with an unknown device."""
    if spec.devices is None:
        return None
    try:
        device = catalog.device(spec.devices.type)
    except UnknownEntryError as error:
        problems.say("cluster.devices.type", f"{error} (see: meshplan catalog list devices)")
        return None
    per_node = spec.devices.per_node
    links = spec.links or LinksSpec()
    return NodeType(
        slug=f"{per_node}x-{device.slug}",
        name=f"{per_node} × {device.name}, {IN_PLACE}",
        device=device,
        num_hosts=1,
        devices_per_host=per_node,
        nics_per_host=per_node,
        host_memory_bytes=None,
        scale_up_link=catalog.link(LINK_OF_ONE_DEVICE)
        if links.intra_node is None
        else _stated("intra-node", links.intra_node, _technology(device, catalog)),
        scale_out_link=None if links.inter_node is None else _stated("inter-node", links.inter_node, IN_PLACE),
    )


def node_of(index: int, spec: ClusterSpec, catalog: Catalog, problems: Problems) -> NodeType | None:
    """The node type of ``cluster.nodes[index]`` with the links that the spec states, and no more devices than it lets
    be used; None after adding a problem.
    """
    asked, where = (spec.nodes or [])[index], f"cluster.nodes[{index}]"
    try:
        node = catalog.node_type(asked.type)
    except UnknownEntryError as error:
        problems.say(f"{where}.type", f"{error} (see: meshplan catalog list nodes)")
        return None
    if asked.devices is not None and asked.devices < node.num_devices:
        if node.pair_links:
            what = "a part of it is not planned, because its devices are joined in pairs: leave it out"
            problems.say(f"{where}.devices", f"{node.slug}: {what}")
            return None
        if node.num_hosts > 1 and asked.devices % node.devices_per_host:
            hosts = f"of a rack whole hosts of {node.devices_per_host} may be used, not {asked.devices} devices"
            problems.say(f"{where}.devices", f"{node.slug}: {hosts}")
            return None
        node = part_of_node(node, asked.devices)
    elif asked.devices is not None and asked.devices > node.num_devices:
        problems.say(f"{where}.devices", f"{asked.devices} of the {node.num_devices} that {node.slug} has")
        return None
    return with_stated_links(node, spec)


def part_of_node(node: NodeType, devices: int) -> NodeType:
    """A node of which ``devices`` may be used: each keeps its share of the NICs, and the price is the whole node's.

    Of a rack whole hosts are used, which clouds rent one by one: they cost their share.
    """
    if node.num_hosts > 1:
        share = devices / node.num_devices
        prices = tuple(replace(price, usd_per_hour=price.usd_per_hour * share) for price in node.prices)
        return replace(node, num_hosts=devices // node.devices_per_host, prices=prices)
    nics = max(node.nics_per_host * devices // node.devices_per_host, 1)
    return replace(node, devices_per_host=devices, nics_per_host=nics)


def usable_part(cluster: Mapping[str, Any], node: NodeType) -> NodeType:
    """A node type with the devices of each that a plan's spec lets be used."""
    own = [one.get("devices") for one in cluster.get("nodes") or () if one["type"] == node.slug]
    return node if not own or own[0] is None else part_of_node(node, int(own[0]))


def with_stated_links(node: NodeType, spec: ClusterSpec) -> NodeType:
    """The node type with the links that the spec states in place of the catalog's."""
    links = spec.links
    if links is None:
        return node
    if links.intra_node is not None:
        inside = _stated("intra-node", links.intra_node, node.scale_up_link.technology)
        node = replace(node, scale_up_link=inside, pair_links=())  # stated for each device, whatever its peer
    if links.inter_node is not None:  # stated for each device
        outside = _stated("inter-node", links.inter_node, IN_PLACE)
        node = replace(node, scale_out_link=outside, nics_per_host=node.devices_per_host)
    return node


def _stated(slug: str, link: LinkSpec, technology: str) -> Link:
    return Link(
        slug=slug,
        name=IN_PLACE,
        technology=technology,
        bandwidth_bytes_per_s=link.bandwidth,
        latency_s=link.latency,
    )


def _technology(device: Device, catalog: Catalog) -> str:
    """How devices of a type are connected in the node types of the catalog."""
    known = [node.scale_up_link.technology for node in catalog.node_types() if node.device.slug == device.slug]
    return known[0] if known else IN_PLACE


def drives_bytes_per_s(cluster: ClusterSpec, problems: Problems) -> float | None:
    """What the NVMe drives of one host attain together while large blocks are read; None where none is named."""
    if cluster.drive is None:
        return None
    if cluster.drive not in drives():
        hint = did_you_mean(closest_names(cluster.drive, drives()))
        problems.say("cluster.drive", f"unknown drive {cluster.drive!r}{hint}; known: {', '.join(drives())}")
        return None
    return DRIVE_SHARE * (cluster.drives_per_host or 1) * drives()[cluster.drive].read_bytes_per_s


def node_price(node: NodeType, cluster: ClusterSpec, wanted: PriceSpec) -> Price | None:
    """What a node of a spec costs: as the spec says, else by the catalog; None where no price is known."""
    own = cluster.usd_per_hour_per_node
    if own is not None:
        return Price(usd_per_hour=own, provider="yours", region=ANY, terms="as given", date="", source="the spec")
    return choose_price(node.prices, wanted)


def choose_price(prices: tuple[Price, ...], wanted: PriceSpec) -> Price | None:
    """The newest matching price: on-demand before other terms, then the cheapest."""
    fitting = [
        price
        for price in prices
        if wanted.provider in (None, price.provider)
        and wanted.region in (None, price.region, ANY)
        and wanted.terms in (None, price.terms)
    ]
    if not fitting:
        return None
    preferred = [price for price in fitting if price.terms == "on-demand"] or fitting
    newest = max(price.date for price in preferred)
    return min((price for price in preferred if price.date == newest), key=lambda price: price.usd_per_hour)
