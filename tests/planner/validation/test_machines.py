"""Networks of measured runs: published texts as bandwidth per device."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validation.fields import Section
from meshplan.planner.validation.machines import MachineReader, network_bytes_per_s

GB = 1e9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x200Gb/s HDR IB", 25 * GB),  # 8 × 200 Gb/s over 8 devices
        ("HDR IB 8x200Gb/s (Selene)", 25 * GB),
        ("4 x 100Gb RoCE per node", 6.25 * GB),
        ("8x ConnectX-6 200 Gb/s", 25 * GB),
        ("400 Gbps per GPU", 50 * GB),
        ("1600 Gbps EFA", 25 * GB),
        ("Storage: 2x100Gb/s, Compute: 8x400Gb/s, other", 50 * GB),
        ("8 x ConnectX-7 RoCE a node, about 200 GB/s theoretical (as printed)", 25 * GB),
        ("ROCE2; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s", None),
        ("8x NetXtreme 400Gb", None),
        ("InfiniBand", None),
        ("", None),
    ],
)
def test_published_networks(text: str, expected: float | None) -> None:
    assert network_bytes_per_s(text, 8) == expected


@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_a_run_of_several_devices_is_not_read_as_single_nodes_without_a_network(
    num_devices: int, tmp_path: Path
) -> None:
    """The catalog also has this device rented alone; four of them that talk to each other stand in one box."""
    catalog = Catalog.open(str(tmp_path / "catalog.sqlite"))
    row = {"hardware": {"device": "a100-pcie-80gb", "num_devices": num_devices}}
    machine = MachineReader(catalog).machine(Section(row, "hardware"))
    assert machine.domain_size >= num_devices
