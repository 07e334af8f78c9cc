"""Parts of a device that workers have to themselves or share: instances of MIG, replicas under MPS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

# Clients that one device takes at once: 48 on Volta and later up to CUDA 13.0, 60 after (docs.nvidia.com/deploy/mps).
MOST_REPLICAS = 48
# Numbers of replicas that are tried where nobody says which: one, two and four were measured (arXiv:2503.08311).
USUAL_REPLICAS = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What one worker has of a device on which several equal ones run.

    Args:
        name: of the kind of part.
        instances: parts of one device.
        compute_share: of the device's multiprocessors.
        memory_share: of the device's memory bandwidth.
        memory_bytes: memory of one part, bytes.
    """

    name: str
    instances: int
    compute_share: float
    memory_share: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsShare(DeviceShare):
    """One of n replicas that run on a device at the same time under CUDA's Multi-Process Service.

    Nothing but memory is kept apart, and that by what each server is told to take. Each has an equal part of the
    threads (``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``), and while all work, an equal part of the memory's bandwidth.
    """

    @classmethod
    def of(cls, memory_bytes: float, replicas: int) -> Self:
        """The part of each of so many replicas on a device with so much memory, as servers count it."""
        part = 1.0 / replicas
        return cls(
            name=f"1 of {replicas} under MPS",
            instances=replicas,
            compute_share=part,
            memory_share=part,
            memory_bytes=memory_bytes / replicas,
        )

    @property
    def thread_percentage(self) -> int:
        """``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` of each replica, rounded up: what is cut off would be nobody's."""
        return -(-100 // self.instances)
