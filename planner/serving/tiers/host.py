"""The host of a worker: how fast it reads weights, multiplies with them, and hands them to its devices.

- Reading: share × peak of a socket's channels × sockets^power, all fitted (``tests/benchmarks/beyond_memory.py``).
- Multiplying: rates that published expert kernels attained (``catalogs/seed/hosts.yaml``).
- Devices read host memory over PCI Express, all together no faster than the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.constants.machines.host_processors import HostProcessor
from meshplan.catalogs.hardware import Device

# Attained share of one socket's peak memory bandwidth while experts are read for single tokens, and the power of the
# number of sockets with which it grows (two read 1.62 times as fast as one): least squares over twelve decode rates of
# DeepSeek-V3 on one and two Xeon Gold 6454S (KTransformers, doc/en/DeepseekR1_V3_tutorial.md). Sources held out,
# llama.cpp among them, err by 15.5 % in the median (``tests/benchmarks/beyond_memory.py``, 2026-11-25).
READ_SHARE = 0.42
SOCKET_POWER = 0.70
# Time for which a layer with any expert on the host waits for it (copies to and fro, hand-over to threads): solved for
# from twelve cells of KTransformers' table (kt-kernel/experts-sched-Tutorial.md: Qwen3-Next-80B in fp8, four RTX 4090,
# GPU shares of 0, 20, … 100 %), with two sockets of Xeon Gold 6454S and one request, which the source does not print.
ROUND_TRIP_S = 57e-6
# PCI Express of a hardware generation, x16, one direction, bytes/s (catalogs/seed/links.yaml; 3.0 by its data rate),
# and the share that large pinned copies attain: assumed, as in training's offload.
PCIE_3, PCIE_4, PCIE_5 = 15.5e9, 31e9, 63e9
_LINKS = {"volta": PCIE_3, "turing": PCIE_3, "ampere": PCIE_4, "ada": PCIE_4, "cdna2": PCIE_4}
LINK_SHARE = 0.75
# Share of a host's memory that weights may take. Assumed: the system and page cache take the rest, as in training.
USABLE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host as a worker uses it.

    Args:
        memory_bytes: of all sockets together.
        processor: what a socket has.
        sockets: that hold and compute weights, each its share.
        bandwidth_bytes_per_s: peak of all channels.
        is_assumed: only the memory was stated.
        read_share: attained share of a socket's peak.
        round_trip_s: for which a layer waits that has any expert there.
        drives_bytes_per_s: attained by all its drives together; None where none is named.
    """

    memory_bytes: float
    processor: HostProcessor
    sockets: int
    bandwidth_bytes_per_s: float
    is_assumed: bool = False
    read_share: float = READ_SHARE
    round_trip_s: float = ROUND_TRIP_S
    drives_bytes_per_s: float | None = None

    @property
    def usable_bytes(self) -> float:
        """Memory that weights may take."""
        return USABLE_SHARE * self.memory_bytes

    @property
    def read_bytes_per_s(self) -> float:
        """Attained rate at which its processors read weights, all sockets together."""
        return self.read_share * self.bandwidth_bytes_per_s * self.sockets ** (SOCKET_POWER - 1.0)

    def flops_per_s(self, product_bytes: int) -> float:
        """Attained rate of products with weights that are multiplied in 2 bytes or in 1."""
        return self.sockets * self.processor.matrix_flops_per_s[product_bytes]

    def link_bytes_per_s(self, device: Device, num_devices: int) -> float:
        """Attained rate at which each of ``num_devices`` devices reads host memory at the same time."""
        return min(link_bytes_per_s(device), self.bandwidth_bytes_per_s / num_devices)


def link_bytes_per_s(device: Device) -> float:
    """Attained rate of a device's link to its host, bytes/s."""
    return LINK_SHARE * _LINKS.get(device.architecture, PCIE_5)
