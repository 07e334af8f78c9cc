"""Reading observation files, and the hardware of a measured run as a machine; shared by the runs of every kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError, why
from meshplan.catalogs.hardware import NodeType
from meshplan.catalogs.models.observed import shape_from_observation
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.catalogs.untrusted.documents import DocumentError, parse
from meshplan.catalogs.untrusted.streams import long_lines
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.mesh import mesh_of
from meshplan.planner.core.reading.documents import read_document
from meshplan.planner.core.reading.doors import RUN, refuse_other
from meshplan.planner.validation.fields import Section, UnsupportedError

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog


_DOCUMENTS = (".json", ".yaml", ".yml")
# What messages call them: they are no spec.
ROWS = "the measured rows"


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file, blank lines skipped.

    Raises:
        SpecError: unreadable, or a line that is not a JSON object; or the file is a spec, say, and no rows.
    """
    if path.is_dir():
        message = f"is a folder; give its files of measured runs, such as {path / '*.jsonl'}"
        raise SpecError.at(str(path), message, of=ROWS)
    if path.suffix in _DOCUMENTS and path.is_file():
        try:
            document = read_document(path)
        except SpecError:
            pass  # one object a line: no document
        else:
            refuse_other(document, RUN, name=str(path), means="measured runs")
    return rows_of(long_lines(path), name=str(path))


def rows_of(lines: Iterable[str], *, name: str) -> Iterator[Mapping[str, Any]]:
    """The rows of lines of JSON, blank ones skipped.

    Args:
        lines: one object each.
        name: how messages call them.

    Raises:
        SpecError: they cannot be read, or a line is not a JSON object.
    """
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = parse(line, is_json=True, name="the line")
            if not isinstance(row, dict):
                raise SpecError.at(f"{name}:{number}", "not a JSON object", of=ROWS)
            yield row
    except (OSError, DocumentError) as error:
        place = f"{name}:{number}" if number else name
        raise SpecError.at(place, f"cannot be read: {why(error)}", of=ROWS) from error


# Keys of ``hardware`` that rows have; not all say something to an estimate.
HARDWARE = frozenset(
    {"device", "num_devices", "devices_per_node", "intra_node", "inter_node", "slices", "slice", "system", "cpu"}
    | {"pools", "device_counts"}
)


# Keys of ``model`` that say nothing about its sizes: a row with these alone names a model of the catalog.
NAMED_ONLY = frozenset({"name", "lora", "architecture_source"})


class MachineReader:
    """Reads the hardware and the model of a measured run, looking them up in a catalog.

    Args:
        catalog: where devices, node types and models come from.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._device = cache(catalog.device)  # thousands of rows name a few devices
        self._nodes: dict[str, list[NodeType]] = {}
        for node in catalog.node_types():
            self._nodes.setdefault(node.device.slug, []).append(node)

    def shape(self, model: Section) -> ModelShape:
        """The model that a row describes by its sizes, or names where the catalog knows it.

        Raises:
            ModelConfigError: it is neither.
        """
        named = model.values.get("name")
        if model.values.keys() - NAMED_ONLY or not isinstance(named, str):
            return shape_from_observation(model.values)
        known = self._catalog.model_name(named)
        return shape_from_observation(model.values) if known is None else self._catalog.model_shape(known.slug)

    def machine(self, hardware: Section) -> Machine:
        """The machine that a row describes: links of the catalog's node type, network bandwidth as the row states it.

        Raises:
            CatalogError: the device is not in the catalog.
            UnsupportedError: no node type of the catalog has the device, so its links are unknown.
        """
        hardware.refuse_misnamed(HARDWARE)
        device = self._device(hardware.text("device"))
        nodes = self._nodes.get(device.slug, [])
        if not nodes:
            raise UnsupportedError(f"the catalog has no node type with {device.slug}, so its links are unknown")
        num_devices = hardware.whole("num_devices")
        per_host = hardware.whole("devices_per_node", _first_that_holds(nodes, num_devices).devices_per_host)
        node = _typical_node([node for node in nodes if node.devices_per_host == per_host] or nodes)
        network = network_bytes_per_s(str(hardware.values.get("inter_node") or ""), per_host)
        slices = hardware.whole("slices", 0, least=0, most=num_devices)
        domain = max(node.num_devices, per_host) if node.num_hosts > 1 else per_host
        link = node.scale_out_link
        used = num_devices // slices if slices else _used_of_domain(num_devices, domain, per_host)
        return Machine(
            device=device,
            num_devices=num_devices,
            devices_per_host=per_host,
            domain_size=used,
            scale_up_bytes_per_s=node.scale_up_link.bandwidth_bytes_per_s,
            scale_up_latency_s=node.scale_up_link.latency_s,
            scale_up_technology=node.scale_up_link.technology,
            scale_out_bytes_per_s=network or node.scale_out_bytes_per_s_per_device,
            scale_out_latency_s=0.0 if link is None else link.latency_s,
            mesh=mesh_of(node.pair_links, used),
        )


def _used_of_domain(num_devices: int, domain: int, per_host: int) -> int:
    """Devices that a run uses of each scale-up domain: as many of every one, in whole hosts.

    Schedulers place jobs on racks in equal segments, so that groups of 2, 4, … 64 ranks stay inside one (Slurm's
    topology/block with ``--segment``, https://slurm.schedmd.com/topology.html#block): 256 GPUs of NVL72 are 4 × 64.

    >>> _used_of_domain(256, 72, 4), _used_of_domain(64, 72, 4), _used_of_domain(24, 8, 8)
    (64, 72, 8)
    """
    if num_devices <= domain or domain <= per_host:
        return domain
    fewest = -(-num_devices // domain)
    equal = (count for count in range(fewest, num_devices // per_host + 1) if num_devices % (count * per_host) == 0)
    return num_devices // next(equal, fewest)


def _first_that_holds(nodes: list[NodeType], num_devices: int) -> NodeType:
    """The first node type that holds a run of so many devices, else the largest.

    The catalog also has nodes rented with a single device: they hold no run of several, which no network would join.
    """
    largest = max(node.devices_per_host for node in nodes)
    return next(node for node in nodes if node.devices_per_host >= min(num_devices, largest))


def _typical_node(nodes: list[NodeType]) -> NodeType:
    """The node type of a row that names the device alone: that with the (upper) median network bandwidth."""
    networked = [node for node in nodes if node.scale_out_bytes_per_s_per_device] or nodes
    return sorted(networked, key=lambda node: node.scale_out_bytes_per_s_per_device)[len(networked) // 2]


# Published networks are in bits, but for sums over a node's cards.
BITS_PER_BYTE = 8.0
_NODE_IN_BYTES = re.compile(r"\ba node\b[^;]*?(\d+)\s*GB/s")
_PER_NODE = re.compile(r"(\d+)\s*x[^,]*?(\d+)\s*Gb", re.IGNORECASE)
_PER_DEVICE = re.compile(r"(\d+)\s*Gb(?:ps|/s)?\s*per\s*GPU", re.IGNORECASE)
_TOTAL = re.compile(r"^\s*(\d+)\s*Gbps", re.IGNORECASE)


def network_bytes_per_s(text: str, per_host: int) -> float | None:
    """Network bandwidth per device, from a text such as ``8x200Gb/s HDR IB``; None where it finds no number.

    >>> network_bytes_per_s("8x200Gb/s HDR IB", 8)
    25000000000.0
    """
    section = re.search(r"Compute:([^,]*)", text)
    text = section.group(1) if section else text
    if node := _NODE_IN_BYTES.search(text):
        return float(node[1]) * 1e9 / per_host
    if device := _PER_DEVICE.search(text):
        return float(device[1]) * 1e9 / BITS_PER_BYTE
    if (node := _PER_NODE.search(text)) and "NetXtreme" not in text:  # such rows state the card's limit, not the link
        return float(node[1]) * float(node[2]) * 1e9 / BITS_PER_BYTE / per_host
    if total := _TOTAL.search(text):
        return float(total[1]) * 1e9 / BITS_PER_BYTE / per_host
    return None
