"""NVIDIA's Multi-Instance GPU: into what a device may be cut. The profiles ship as ``seed/mig.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from meshplan.catalogs.constants.entries import seed_content
from meshplan.catalogs.constants.machines.device_shares import DeviceShare

MIG_FILE = "mig.yaml"
# Memory, L2 cache and memory bandwidth of a device are dealt out in eighths.
MEMORY_SLICES = 8
_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile(DeviceShare):
    """One kind of instance, named as ``nvidia-smi mig -cgi`` takes it, such as ``3g.40gb``.

    All instances of a device that is cut are of one kind here.
    """


@cache
def mig_profiles() -> Mapping[str, Mapping[str, MigProfile]]:
    """Device → profile by name; a device that is not there cannot be cut, or no source says into what."""
    return {
        device: {name: _profile(name, row, entry["device_sms"]) for name, row in entry["profiles"].items()}
        for device, entry in seed_content(MIG_FILE)["devices"].items()
    }


def _profile(name: str, row: Mapping[str, float], device_sms: int) -> MigProfile:
    return MigProfile(
        name=name,
        instances=int(row["instances"]),
        compute_share=row["sms"] / device_sms,
        memory_share=row["memory_slices"] / MEMORY_SLICES,
        memory_bytes=row["memory_gib"] * _GIB,
    )
