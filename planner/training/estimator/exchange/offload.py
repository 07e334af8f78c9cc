"""Cost of offload: states in host memory or on NVMe, checkpointed activations in host memory.

*Optimizer* (arXiv:2101.06840). After the last micro-batch the gradients of the owned parameters go to the host, the
host updates its master copies and moments, and the new weights come back, in sequence (Megatron-LM's default; overlap
is faster). On NVMe reading and writing of states overlaps with the update (arXiv:2104.07857, §5.2.2):

    T = owned·(g/B_link + w/B_link) + max(owned·r·a/B_host, owned·r·2·o/B_nvme)

A share f of the states may move (DeepSpeed's Twin-Flow, Megatron-LM's HybridDeviceOptimizer). Both step one part after
the other here, so that time rises with f and the least f that fits is the best::

    T(f) = f·T + (1 − f)·T_device

*Parameters* (ZeRO-Infinity, arXiv:2104.07857, §5.1 and §6.1). Every rank fetches its own shard before each
gather, all links of a host at the same time: forward, backward, and once more with recompute. From NVMe the ranks of a
host share its devices, and reads overlap with the transfer of earlier shards over the link:

    T = passes·shard·max(w/B_link, r·w/B_nvme)

*Activations*. The inputs of recomputed layers move to the host in the forward and back in the backward pass, one after
the other with compute, or behind it as below where the framework has streams for them
(:attr:`~meshplan.catalogs.constants.training.FrameworkRecipe.overlaps_activation_offload`):

    T = 2·bytes/B_link

*Layers without recompute*. What the first n of L layers keep, S bytes together, leaves behind the layers after them and
comes back before their own backward passes, one layer's copy after the other. Layers of t_f forward and t_b backward
hide all of it but (Transformer Engine, pytorch/cpu_offload.py of 2025: L − n layers stay on the device, at least the
two of :data:`ACTIVATION_BUFFERS` here)::

    T = max(0, S/B − (L − 2)·t_f) + max(0, S/B − (L − 2)·t_b),    B = min(B_link, B_nvme/r) on drives, else B_link

owned: parameters whose states the rank keeps; shard: its part of the sharded parameters; g, w, o: bytes of a
gradient as reduced, of a weight and of the optimizer states; a: bytes that Adam moves per parameter; r: ranks of one
host; B_link, B_host, B_nvme: bytes/s of a device's link to its host, of the host's memory under an optimizer step and
of its NVMe devices together. Fetching parameters overlaps with compute as ZeRO-3's gathers do. Not validated against a
run with offload, but for torchtune's inputs of recomputed layers, whose copies are hidden in its published pair of
runs; that no framework copies activations to drives makes their figure a bound (SSDTrain, arXiv:2408.10013, did).
"""

from __future__ import annotations

import numpy as np

from meshplan.catalogs.hardware import Device
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.arrays import BoolArray, FloatArray, IntArray

# PCI Express of a hardware generation, x16, one direction, bytes/s (catalogs/seed/links.yaml; 3.0 by its data rate).
# Devices with a faster link to their host (NVLink-C2C) are priced as if they had PCI Express.
PCIE_3, PCIE_4, PCIE_5 = 15.5e9, 31e9, 63e9
HOST_LINK_BYTES_PER_S = {"volta": PCIE_3, "turing": PCIE_3, "ampere": PCIE_4, "ada": PCIE_4, "cdna2": PCIE_4}
DEFAULT_HOST_LINK_BYTES_PER_S = PCIE_5
# Attained share of the link for large pinned copies. Assumed: that of collectives (``scale_up_efficiency``).
HOST_LINK_EFFICIENCY = 0.75
# Memory traffic of one host under Adam, all its ranks together, bytes/s. Assumed: above 39 GB/s, which is what 3.1
# billion parameters per 2.4 s step need with forward and backward passes included (DeepSpeed pull request 7474, one
# host of 128 cores), and below the 200 GB/s and more that two sockets stream.
HOST_ADAM_BYTES_PER_S = 100e9
# All NVMe devices of a host together, read or written, bytes/s, if not given in the spec. Assumed: 1.6 GB/s for each
# of a DGX-2's 16 GPUs (arXiv:2104.07857, figure 2b).
DEFAULT_NVME_BYTES_PER_S = 1.6e9 * 16
# Copies on the host besides the states: the gradient (fp32) and the new weight (16 bits), both pinned.
HOST_COPY_BYTES_PER_PARAMETER = 6.0
# Pinned buffers of one rank through which shards pass between NVMe and device: DeepSpeed's five of 1e8 parameters and
# the 1e9 parameters that it keeps in host memory (runtime/zero/offload_config.py, defaults), 16 bits each.
NVME_BUFFER_BYTES = 2.0 * (5 * 1e8 + 1e9)
# What stays on the device of what moves, layer inputs or whole layers: the one in use and the one in transfer.
ACTIVATION_BUFFERS = 2.0
# Share of a host's memory that jobs may use. Assumed: the system, data loader and page cache take the rest.
USABLE_HOST_SHARE = 0.8


def host_link_bytes_per_s(device: Device) -> float:
    """Attained rate of copies between a device and its host, bytes/s."""
    return HOST_LINK_EFFICIENCY * HOST_LINK_BYTES_PER_S.get(device.architecture, DEFAULT_HOST_LINK_BYTES_PER_S)


def nvme_bytes_per_s(machine: Machine) -> float:
    """Rate of all NVMe devices of one host together, bytes/s."""
    return machine.nvme_bytes_per_s or DEFAULT_NVME_BYTES_PER_S


def host_optimizer_s(
    owned: FloatArray,
    machine: Machine,
    ranks_on_host: IntArray,
    *,
    on_nvme: BoolArray,
    gradient_bytes: float,
    weight_bytes: float,
    adam_bytes: float,
    state_bytes: float,
) -> FloatArray:
    """Time of an optimizer step on the host with its copies, [n]; the first equation of the module docstring."""
    copied = owned * (gradient_bytes + weight_bytes) / host_link_bytes_per_s(machine.device)
    updated = owned * ranks_on_host * adam_bytes / HOST_ADAM_BYTES_PER_S
    stored = owned * ranks_on_host * 2.0 * state_bytes / nvme_bytes_per_s(machine)
    return copied + np.where(on_nvme, np.maximum(updated, stored), updated)


def fetch_s(
    shard_bytes: FloatArray, machine: Machine, ranks_on_host: IntArray, *, on_nvme: BoolArray, passes: FloatArray
) -> FloatArray:
    """Time to fetch a rank's shard of the parameters in all passes of one micro-batch, [n]."""
    over_link = shard_bytes / host_link_bytes_per_s(machine.device)
    from_nvme = shard_bytes * ranks_on_host / nvme_bytes_per_s(machine)
    return passes * np.where(on_nvme, np.maximum(over_link, from_nvme), over_link)


def activation_offload_s(input_bytes: FloatArray, device: Device) -> FloatArray:
    """Time to move a micro-batch's kept layer inputs to the host and back, [n]."""
    return 2.0 * input_bytes / host_link_bytes_per_s(device)


def layers_offload_s(
    kept_bytes: FloatArray,
    layers_s: FloatArray,
    num_layers: int | IntArray,
    forward_share: FloatArray,
    *,
    bytes_per_s: FloatArray,
) -> FloatArray:
    """Exposed time of activations that leave without recompute and come back, of one micro-batch, [n].

    Args:
        kept_bytes: S, what the offloaded layers keep, [n].
        layers_s: forward and backward passes of all layers, s, [n].
        num_layers: L, of all candidates or [n].
        forward_share: of ``layers_s``, [n].
        bytes_per_s: B of :func:`away_bytes_per_s`, [n].
    """
    copied = kept_bytes / bytes_per_s
    hiding = layers_s * np.maximum(0.0, 1.0 - ACTIVATION_BUFFERS / np.maximum(num_layers, 1))
    forward, backward = hiding * forward_share, hiding * (1.0 - forward_share)
    return np.maximum(copied - forward, 0.0) + np.maximum(copied - backward, 0.0)


def away_bytes_per_s(machine: Machine, ranks_on_host: IntArray, *, on_nvme: BoolArray) -> FloatArray:
    """Rate at which one rank's tensors leave its device, bytes/s, [n]: of its link, or of its part of the drives."""
    link = host_link_bytes_per_s(machine.device)
    return np.where(on_nvme, np.minimum(link, nvme_bytes_per_s(machine) / ranks_on_host), link)
