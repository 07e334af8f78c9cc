"""Checks that a launch script makes on a host before it starts anything: the right GPUs, and enough memory."""

from __future__ import annotations

import re

from meshplan.catalogs.constants.machines.mig_profiles import MigProfile
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.untrusted.quoting import shell_word

# Drivers report a little less than the catalog's usable memory when another version keeps more for itself.
_MEMORY_TOLERANCE = 0.97


_MIB = 2**20
# What nvidia-smi and the catalog's name have in common: "NVIDIA H100 80GB HBM3" and "NVIDIA H100 SXM5 80 GB".
_MODEL = re.compile(r"\b(RTX (PRO )?A?\d+( D\b)?|[A-Z]{1,2}\d+[A-Z]?\b)")


def gpu_checks(device: Device | None) -> str:
    """Bash that compares the host's GPUs with the planned device; a comment where that cannot be done."""
    if device is None or device.vendor != "nvidia":
        return "  # The plan names no NVIDIA device: nothing to compare."
    model = _MODEL.search(device.name)
    named = "" if model is None else _NAME_CHECK.format(model=shell_word(model[0]))
    least_mib = int(device.usable_memory_bytes * _MEMORY_TOLERANCE / _MIB)
    return _NVIDIA_CHECKS.format(named=named, least_mib=least_mib)


def mig_checks(profile: MigProfile) -> str:
    """Bash that looks for the MIG instances of a worker; devices are counted over all instances of a host."""
    return _MIG_CHECKS.format(profile=shell_word(profile.name))


def mig_uuids(profile: MigProfile) -> str:
    """Bash function that prints the UUIDs of a host's instances of a profile, as CUDA_VISIBLE_DEVICES takes them."""
    return _MIG_UUIDS.format(profile=shell_word(profile.name))


_MIG_UUIDS = r"""
# UUID of every instance of the profile on this host, one a line, device by device
mig_uuids() {{
  env -u CUDA_VISIBLE_DEVICES nvidia-smi -L | grep -F "MIG "{profile}" " | sed -E 's/.*UUID: ([^)]*)\).*/\1/'
}}
"""

_MIG_CHECKS = r"""  command -v nvidia-smi > /dev/null || fail "nvidia-smi is not on the PATH"
  local device have
  have=$(mig_uuids | wc -l)
  for device in "${{device_list[@]}}"; do
    (( device < have )) || fail "$hostname has $have MIG instances "{profile}", none with number $device: see README"
  done"""

# A whole word: A10 is neither A100 nor A10G.
_NAME_CHECK = r"""    [[ " $name " == *[!A-Za-z0-9]{model}[!A-Za-z0-9]* ]] ||
      fail "GPU $device is $name, the plan is for "{model}
"""
_NVIDIA_CHECKS = r"""  command -v nvidia-smi > /dev/null || fail "nvidia-smi is not on the PATH"
  local listing device line name memory_mib
  listing=$(env -u CUDA_VISIBLE_DEVICES nvidia-smi --query-gpu=index,name,memory.total --format=csv,noheader,nounits)
  for device in "${{device_list[@]}}"; do
    line=$(grep -E "^$device, " <<< "$listing") || fail "$hostname has no GPU $device; it has: $listing"
    IFS=, read -r _ name memory_mib <<< "${{line//, /,}}"
{named}    (( memory_mib >= {least_mib} )) || fail "GPU $device has $memory_mib MiB, the plan counts on {least_mib} MiB"
  done"""
