"""What PyTorch's allocator says of itself, pasted by a user: the peak of a device.

``torch.cuda.memory_stats()`` as JSON or as Python prints it, ``torch.cuda.memory_summary()`` as a table, or the line
of Megatron-LM's ``report_memory``. Of several devices the fullest counts. Source: torch 2.13, cuda/memory.py;
megatron-core 0.19.2, training/utils.py.

*Allocated* bytes are those of tensors. *Reserved* bytes are those that the allocator took from the device: tensors,
what it keeps for later, and the gaps between. The device's context and NCCL's buffers are in neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshplan.planner.core.measurable import ALLOCATED, PEAK

_STATISTIC = re.compile(r"""["'](allocated|reserved)_bytes\.all\.peak["']\s*:\s*(\d{1,18})\b""")
# | Allocated memory      |  68096 KiB |     70 MiB |    182 MiB | …: the second figure is the peak.
_SUMMARY = re.compile(
    r"^\|\s*(Allocated|GPU reserved) memory\s*\|\s*\d+\s+[KMGTP]?i?B\s*\|\s*(\d{1,9})\s+([KMGTP]?i?B)\s*\|",
    re.MULTILINE,
)
_MEGATRON = re.compile(r"max (allocated|reserved):\s*(\d{1,9}(?:\.\d+)?)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_NAMES = {"allocated": ALLOCATED, "reserved": PEAK, "Allocated": ALLOCATED, "GPU reserved": PEAK}


def torch_memory(text: str) -> Mapping[str, float]:
    """Metric → bytes at the peak of the fullest device; empty where PyTorch says nothing.

    Args:
        text: what a user has pasted, or a whole log.

    >>> torch_memory('{"allocated_bytes.all.peak": 3221225472, "reserved_bytes.all.peak": 4294967296}')
    {'allocated_memory_bytes': 3221225472.0, 'peak_memory_bytes': 4294967296.0}
    >>> torch_memory("| GPU reserved memory   |   2 GiB |   5 GiB |   9 GiB |   7 GiB |")
    {'peak_memory_bytes': 5368709120.0}
    """
    read = [(name, float(value)) for name, value in _STATISTIC.findall(text)]
    read += [(name, float(value) * _UNITS[unit]) for name, value, unit in _SUMMARY.findall(text) if unit in _UNITS]
    read += [(name, float(value) * _UNITS["MiB"]) for name, value in _MEGATRON.findall(text)]
    found: dict[str, float] = {}
    for name, value in read:
        found[_NAMES[name]] = max(value, found.get(_NAMES[name], 0.0))
    return found
