"""Attention–FFN disaggregation (AFD): the choice that a plan makes, and what may make it.

A worker's own devices hold attention weights and KV cache, its *FFN devices* the MLPs or experts (Step-3,
arXiv:2507.19427; MegaScale-Infer, arXiv:2504.02263; Lamina, arXiv:2405.01814). How such a worker is placed and priced
is decided in :mod:`meshplan.planner.serving.attention_ffn`. The search and the estimator know it as a
:class:`Separation` of the question only, so that a question without one loads none of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

# Log factor by which times of such a worker lie within in nine of ten cases, beyond what devices err by. An assumption:
# one published rate is met within 2 to 12 % (``tests/benchmarks/attention_ffn.py``), and one figure shows no spread.
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
