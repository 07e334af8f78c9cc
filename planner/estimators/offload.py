"""What it costs to keep the optimizer's states in host memory and to run its step there (arXiv:2101.06840).

After the last micro-batch the gradients of the owned parameters go to the host, the host updates its master copies and
moments, and the new 16-bit weights come back, one after the other (Megatron-LM's default; what overlaps is faster):

    T = owned·(g/B_link + w/B_link + r·a/B_host)

owned: parameters whose states the rank keeps; g, w: bytes of a gradient as reduced and of a weight; a: bytes that Adam
moves a parameter; r: ranks of one host, which share its memory; B_link, B_host: bytes/s of a device's link to its host
and of the host's memory under an optimizer step. No run with offload was measured here.
"""

from __future__ import annotations

from meshplan.catalogs.hardware import Device
from meshplan.planner.estimators.candidates import FloatArray, IntArray

# PCI Express of a hardware generation, x16, one direction, bytes/s (catalogs/seed/links.yaml; 3.0 by its data rate).
# Devices with a faster way to their host (NVLink-C2C) are priced as if they had PCI Express.
PCIE_3, PCIE_4, PCIE_5 = 15.5e9, 31e9, 63e9
HOST_LINK_BYTES_PER_S = {"volta": PCIE_3, "turing": PCIE_3, "ampere": PCIE_4, "ada": PCIE_4, "cdna2": PCIE_4}
DEFAULT_HOST_LINK_BYTES_PER_S = PCIE_5
# Of the link, for large pinned copies. Assumed: as collectives reach of their links (``scale_up_efficiency``).
HOST_LINK_EFFICIENCY = 0.75
# Memory traffic of one host under Adam, all its ranks together, bytes/s. Assumed: above 39 GB/s, which is what 3.1
# billion parameters a 2.4 s step need with forward and backward passes included (DeepSpeed pull request 7474, one host
# of 128 cores), and below the 200 GB/s and more that two sockets stream.
HOST_ADAM_BYTES_PER_S = 100e9
# Copies on the host besides the states: the gradient (fp32) and the new weight (16 bits), both pinned.
HOST_COPY_BYTES_PER_PARAMETER = 6.0
# Of a host's memory, what jobs may fill. Assumed: the rest is the system's, the data loader's and the page cache's.
USABLE_HOST_SHARE = 0.8


def host_link_bytes_per_s(device: Device) -> float:
    """Bytes/s that a device's copies to or from its host reach."""
    return HOST_LINK_EFFICIENCY * HOST_LINK_BYTES_PER_S.get(device.architecture, DEFAULT_HOST_LINK_BYTES_PER_S)


def host_optimizer_s(
    owned: FloatArray,
    device: Device,
    ranks_on_host: IntArray,
    *,
    gradient_bytes: float,
    weight_bytes: float,
    adam_bytes: float,
) -> FloatArray:
    """Seconds of an optimizer step on the host, copies included, [n]; the equation of the module docstring."""
    copied = owned * (gradient_bytes + weight_bytes) / host_link_bytes_per_s(device)
    return copied + owned * ranks_on_host * adam_bytes / HOST_ADAM_BYTES_PER_S
