"""A machine whose devices are shared by several workers: instances of NVIDIA's Multi-Instance GPU, replicas under MPS.

An instance of MIG is a device of its own: it has its share of the multiprocessors, of the memory and of the memory's
bandwidth to itself, and no link to another instance (docs.nvidia.com/datacenter/tesla/mig-user-guide: no peer-to-peer
between instances). No kernel was timed on one: its times are those of rooflines at these shares, in which the launch of
a kernel is as long as on the whole device. A replica under MPS runs the kernels of the whole device, more slowly
(:mod:`meshplan.planner.serving.estimator.instances`); what is said of its device here bounds it. Nodes and devices are
rented whole. Of the board's power each part draws its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshplan.catalogs.constants.machines.device_shares import DeviceShare
from meshplan.catalogs.hardware import Device
from meshplan.planner.cluster.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CutMachine(Machine):
    """A machine whose devices are parts of larger ones.

    Args:
        profile: of every part.
        whole_device: what was cut.
    """

    profile: DeviceShare
    whole_device: Device

    @property
    def instances_per_device(self) -> int:
        """Parts into which every device is cut."""
        return self.profile.instances


def cut(machine: Machine, profile: DeviceShare | None) -> Machine:
    """The machine with every device cut into equal parts; itself without one, or if it is cut already."""
    if profile is None or isinstance(machine, CutMachine):
        return machine
    times, usd, device = profile.instances, machine.usd_per_hour_per_device, machine.device
    same = {name: getattr(machine, name) for name in Machine.__dataclass_fields__}
    changed = {
        "device": instance_of(device, profile),
        "num_devices": machine.num_devices * times,
        "domain_size": machine.domain_size * times,
        "devices_per_host": machine.devices_per_host * times,
        "usd_per_hour_per_device": None if usd is None else usd / times,
        "scale_out_bytes_per_s": machine.scale_out_bytes_per_s / times,
        "mesh": None,
    }
    return CutMachine(**(same | changed), profile=profile, whole_device=device)


def instance_of(device: Device, profile: DeviceShare) -> Device:
    """One part as a device; nothing that was measured of the whole holds for it.

    Memory that the driver keeps of the whole device is not taken from an instance's a second time: what
    ``nvidia-smi mig -lgip`` lists is what is left.
    """
    return replace(
        device,
        slug=f"{device.slug}.{profile.name}",
        name=f"{device.name}, {profile.name}",
        memory_bytes=int(profile.memory_bytes),
        usable_memory_bytes=int(min(profile.memory_bytes, device.usable_memory_bytes / profile.instances)),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * profile.memory_share,
        peak_flops_per_s={name: rate * profile.compute_share for name, rate in device.peak_flops_per_s.items()},
        tdp_w=None if device.tdp_w is None else device.tdp_w / profile.instances,
        gemm_curves={},
        operator_scales={},
    )
