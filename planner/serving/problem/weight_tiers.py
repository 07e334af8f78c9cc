"""Weights of a serving worker that lie on none of its own devices: the choice that a plan makes, and what may make it.

*In host memory.* Where the weights lie and who computes with them is decided in :mod:`meshplan.planner.serving.tiers`.

*On FFN devices* (attention–FFN disaggregation, AFD). A worker's own devices hold attention weights and KV cache, its
FFN devices the MLPs or experts (Step-3, arXiv:2507.19427; MegaScale-Infer, arXiv:2504.02263; Lamina, arXiv:2405.01814).
How such a worker is placed and priced is decided in :mod:`meshplan.planner.serving.attention_ffn`.

The search and the estimator know them as a :class:`Tiering` and a :class:`Separation` of the question only, so that a
question without one loads none of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

# Log factor by which the time per token of weights in host memory lies within in nine of ten cases, beyond what devices
# err by: of 28 published figures of sources that nothing is fitted to the third widest is 1.37 times off
# (``tests/benchmarks/beyond_memory.py``, 2026-11-25).
TIER_ERROR_P90 = math.log(1.4)
_GIB = 2.0**30


# KTransformers' kernels for experts on the host (:mod:`meshplan.planner.serving.tiers.kernels`).
KERNEL_NAMES = ("AMXINT4", "AMXINT8", "BF16", "FP8", "FP8_PERCHANNEL", "LLAMAFILE")


class Way(Enum):
    """Who computes with the weights in host memory."""

    EXPERTS_ON_HOST = "experts_on_host"  # the host's processor, routed experts only (KTransformers, arXiv:2504.09345)
    LAYERS_ON_HOST = "layers_on_host"  # the host's processor in turn with the devices, whole layers (llama.cpp)
    STREAMED = "streamed"  # the devices, which read them over PCI Express in every iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTiers:
    """Weights of one worker beyond device memory.

    Args:
        way: see :class:`Way`.
        host_bytes: weights in host memory, bytes.
        device_experts: routed experts of each MoE layer in device memory (with ``experts_on_host``).
        host_layers: layers with their weights in host memory (with ``layers_on_host``): of a mixture of experts the
            routed experts of so many MoE layers, of a dense model whole layers with their KV cache.
        by_popularity: the most popular experts are those in device memory; False: any of them.
        streamed_bytes_per_device: weights of each device that lie in host memory (with ``streamed``), bytes.
        kernel: KTransformers' name of the host's kernel; empty where nothing is computed there.
        threads: of the host's kernel: physical cores; 0 where unknown.
        numa_nodes: pools of threads, one for each; 0 where unknown.
        drive_bytes: part of the host's weights that its memory has no room for (with ``layers_on_host``): its drives
            are read for it in every iteration.
        drive_doubt: log factor by which times may be shorter or longer, because nobody knows what the page cache keeps.
        device_prefill_tokens: from so many tokens of an iteration on, the host's experts are copied to the devices
            layer by layer and computed there; 0: never.
    """

    way: Way
    host_bytes: float
    device_experts: int = 0
    host_layers: int = 0
    by_popularity: bool = False
    streamed_bytes_per_device: float = 0.0
    kernel: str = ""
    threads: int = 0
    numa_nodes: int = 0
    device_prefill_tokens: int = 0
    drive_bytes: float = 0.0
    drive_doubt: float = 0.0

    @property
    def label(self) -> str:
        """In few words, for tables: routed experts of a layer on devices, or what each device reads from the host.

        >>> WeightTiers(way=Way.EXPERTS_ON_HOST, host_bytes=1e11, device_experts=6).label
        '6 experts/layer'
        """
        if self.way is Way.EXPERTS_ON_HOST:
            return f"{self.device_experts} experts/layer"
        if self.way is Way.LAYERS_ON_HOST:
            drives = f", {self.drive_bytes / _GIB:.0f} GiB on its drives" if self.drive_bytes else ""
            return f"{self.host_layers} layers on the host{drives}"
        return f"{self.streamed_bytes_per_device / _GIB:.1f} GiB streamed"


class Tiering(Protocol):
    """What a question with host memory can do with it.

    Types above this module are named in the docstrings only, so that imports run one way.
    """

    @property
    def is_asked(self) -> bool:
        """The user pinned what lies on the host: workers without it are no answer."""

    def placements(self, problem: Any, role: Any, rejected: Counter[str]) -> Iterable[Any]:
        """Workers (``PlacedWorker``) of a role whose weights lie on devices and host."""

    def worker(self, worker: Any, pool: Any) -> Any:
        """The ``Worker`` of a ``Pool`` with :class:`WeightTiers`, priced with them; the same one without."""

    def memory(self, memory: Any, shape: Any, pool: Any) -> Any:
        """``WorkerMemory`` of its fullest device, from that of the same worker with all weights on its devices."""

    def document(self) -> dict[str, Any]:
        """The host as plain JSON, for the plan's provenance and digest."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is assumed of the host and was not measured, in words."""


# --- on FFN devices ---------------------------------------------------------------------------------------------------

# Log factor by which times of such a worker lie within in nine of ten cases, beyond what devices err by. An assumption:
# one published rate is met within 2 to 13 % (``tests/benchmarks/attention_ffn.py``), and one figure shows no spread.
SEPARATION_ERROR_P90 = math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnDevices:
    """The devices of one worker that compute its MLPs or experts.

    Args:
        node_type: catalog name of their nodes.
        num_devices: of one worker, beside those of its layout.
        micro_batches: parts of a batch that alternate between the two sides.
    """

    node_type: str
    num_devices: int
    micro_batches: int

    @property
    def label(self) -> str:
        """In few words, for tables.

        >>> FfnDevices(node_type="dgx-h100", num_devices=8, micro_batches=3).label
        'FFN on 8 of dgx-h100 by 3 micro-batches'
        """
        batches = "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"
        return f"FFN on {self.num_devices} of {self.node_type} by {batches}"


class Separation(Protocol):
    """What a question that allows FFN devices can do with them.

    Types above this module are named in the docstrings only, so that imports run one way.
    """

    @property
    def is_asked(self) -> bool:
        """Decode workers without FFN devices are no answer."""

    def placements(self, problem: Any, rejected: Counter[str]) -> Iterable[Any]:
        """Decode workers (``PlacedWorker``) with FFN devices."""

    def worker(self, worker: Any, pool: Any) -> Any:
        """The ``Worker`` of a ``Pool`` with :class:`FfnDevices`, priced with them; the same one without."""

    def memory(self, memory: Any, shape: Any, pool: Any) -> Any:
        """``WorkerMemory`` of its fullest attention device, from that of the same worker with all weights on it."""

    def ffn_memory(self, problem: Any, pool: Any) -> Any:
        """``WorkerMemory`` of an FFN device, without a cache."""

    def parts(self, worker: Any, num_running: float) -> list[Any]:
        """Parts (``Part``) of a decode iteration of a worker that :meth:`worker` made."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was not held against a run, in words."""
