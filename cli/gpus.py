"""``--gpus``: ``16xH100`` or ``2xdgx-h100,8xA100`` → the nodes of a spec's cluster."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.hardware import NodeType

_GROUP = re.compile(
    r"\s*(?P<count>\d{1,7})\s*[xX×*]\s*(?P<name>[\w. -]+?)\s*|"
    r"\s*(?P<name2>[\w. -]+?)\s*[xX×*]\s*(?P<count2>\d{1,7})\s*"
)
_RUN_TOGETHER = re.compile(r"\s*(?P<count>\d{1,7})\s*(?P<name>[A-Za-z][\w.-]*)\s*")
# Racks that share a job evenly: at most so many times those that would hold it.
MOST_RACKS = 2
# Makers' own node types come before those of one cloud, and boards with the fastest links before PCIe cards.
_PREFERRED = ("dgx-", "hgx-", "gb200-", "gb300-", "hls-")


def cluster_of(text: str, catalog: Catalog) -> tuple[dict[str, Any], int | None]:
    """The cluster that ``16xH100`` or ``2xdgx-h100,8xA100`` means, and the most devices where a node is not full.

    GPUs stand in the maker's own nodes (H100 → dgx-h100), as many as are needed. Of several types each node that is not
    full says how many of its devices may be used, and there is no limit on all together.

    Raises:
        SpecError: a group cannot be read, or names nothing in the catalog.
    """
    used: dict[str, int] = {}
    types: dict[str, NodeType] = {}
    for part in text.split(","):
        match = _GROUP.fullmatch(part)
        if match is None:
            run_together = _RUN_TOGETHER.fullmatch(part)
            meant = "" if run_together is None else f"; did you mean {run_together['count']}x{run_together['name']}?"
            raise _problem(f"{part.strip()!r} is not read; write 16xH100, or 2xdgx-h100 for whole nodes{meant}")
        count, name = int(match["count"] or match["count2"]), str(match["name"] or match["name2"])
        node, devices = _node_of(name, count, catalog)
        types[node.slug] = node
        used[node.slug] = used.get(node.slug, 0) + devices
    if len(types) > 1:
        return {"nodes": [_part_nodes(node, used[slug]) for slug, node in types.items()]}, None
    [(slug, node)] = types.items()
    if (racks := _even_racks(node, used[slug])) is not None:
        return {"nodes": [racks]}, None
    nodes = -(-used[slug] // node.num_devices)
    is_full = used[slug] == nodes * node.num_devices
    return {"nodes": [{"type": slug, "count": nodes}]}, None if is_full else used[slug]


def _even_racks(node: NodeType, devices: int) -> dict[str, Any] | None:
    """As many devices of each of several racks, as their schedulers deal jobs out: 64 of the 72 of four racks for 256.

    Groups of a power of two then stay within their NVLink domains, which those of racks filled one by one straddle.
    None for whole racks, for nodes of one host, and for numbers that no few racks share evenly.
    """
    least = -(-devices // node.num_devices)
    if node.num_hosts == 1 or least == 1 or devices == least * node.num_devices:
        return None
    for count in range(least, MOST_RACKS * least + 1):
        if devices % count == 0 and devices // count % node.devices_per_host == 0:
            return {"type": node.slug, "count": count, "devices": devices // count}
    return None


def _part_nodes(node: NodeType, devices: int) -> dict[str, Any]:
    """An entry of ``cluster.nodes`` beside other types: a limit on all devices together would let one type stand in for
    another, so nodes that are not full say how many of their devices there are.
    """
    nodes = -(-devices // node.num_devices)
    if devices == nodes * node.num_devices:
        return {"type": node.slug, "count": nodes}
    if devices % nodes:
        raise _problem(
            f"{devices} GPUs beside others are spread evenly over {nodes} nodes of {node.num_devices} ({node.slug}): "
            f"write {devices // nodes * nodes} or {(devices // nodes + 1) * nodes}"
        )
    return {"type": node.slug, "count": nodes, "devices": devices // nodes}


def _node_of(name: str, count: int, catalog: Catalog) -> tuple[NodeType, int]:
    """The node type in which ``count`` GPUs or nodes of that name stand, and the number of GPUs."""
    from meshplan.catalogs.errors import UnknownEntryError, closest_names, did_you_mean

    if count < 1:
        raise _problem(f"{count} of {name}: at least 1")
    try:
        node = catalog.node_type(name)
    except UnknownEntryError:
        pass
    else:
        return node, count * node.num_devices
    try:
        device = catalog.device(name)
    except UnknownEntryError:
        from meshplan.catalogs.constants.machines.small_machines import small_machines

        if name.lower() in small_machines():
            raise _problem(f"{name} is a machine at home: ask in a file with kind: edge") from None
        known = [one.slug for one in catalog.devices()] + [one.slug for one in catalog.node_types()]
        hint = did_you_mean(closest_names(name, known))
        raise _problem(f"no GPU and no node type is called {name!r}{hint}") from None
    nodes = [node for node in catalog.node_types() if node.device.slug == device.slug]
    if not nodes:
        raise _problem(f"no node type of the catalog holds {device.slug}: describe it in a spec (cluster.devices)")
    return min(nodes, key=lambda node: _preference(node, count)), count


def _preference(node: NodeType, count: int) -> tuple[bool, bool, bool, str]:
    """Small is better: nodes with a network where several are needed, the makers' own, then those of no cloud."""
    joined = node.scale_out_link is not None or count <= node.num_devices
    clouds = ("aws-", "azure-", "gcp-", "lambda-", "coreweave-", "oci-")
    return not joined, not node.slug.startswith(_PREFERRED), node.slug.startswith(clouds), node.slug


def _problem(message: str) -> SpecError:
    return SpecError.at("--gpus", message, of="the question")
