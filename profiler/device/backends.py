"""One interface over NumPy and torch, so that the same probe runs on a laptop's processor and on a GPU.

A backend makes random arrays and returns *operations*: functions without arguments that do one piece of work on
arrays made beforehand. What is timed, how often and how the rate is counted is the probe's business.

Torch is in :mod:`meshplan.profiler.device.torch_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Operation = Callable[[], object]
FP8_NEEDS = (
    "measure it with --backend torch-gpu on an NVIDIA GPU of compute capability 8.9 or later, or an MI300 or later"
)
# Step size of the optimizer that is timed; the time does not depend on it.
LEARNING_RATE = 1e-3


class Backend(Protocol):
    """What a probe may ask for. Sizes are in elements; every array is random, never zeros."""

    name: str
    device: str
    is_accelerator: bool
    dtypes: tuple[str, ...]

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies in 8-bit floating point."""

    def environment(self) -> dict[str, Any]:
        """Versions and clocks."""

    def element_bytes(self, dtype: str) -> int:
        """Bytes of one element."""

    def synchronize(self) -> None:
        """Wait for what was started."""

    def matmul(self, left: Sequence[int], right: Sequence[int], dtype: str) -> Operation:
        """Product of two random arrays; leading dimensions are batches."""

    def grouped_matmul(self, rows: Sequence[int], n: int, k: int, dtype: str) -> Operation:
        """One product per group, each with its own weights: the experts of a layer."""

    def fp8_matmul(self, m: int, n: int, k: int) -> Operation:
        """m×k by k×n with both in 8-bit floating point, one scale each, out in bf16.

        Raises:
            ProfileError: this backend or device has none.
        """

    def throttled(self, since: float) -> str | None:
        """Why the device lowered its clocks since a monotonic time; None where it did not, or does not say."""

    def attention(self, batch: int, heads: int, kv_heads: int, queries: int, context: int, dim: int) -> Operation:
        """Softmax attention of ``queries`` against ``context`` keys; causal where they are as many."""

    def copy(self, num_elements: int, dtype: str) -> Operation:
        """Copy one array into another."""

    def add(self, num_elements: int, dtype: str) -> Operation:
        """Elementwise sum of two arrays into a third."""

    def adam_step(self, num_elements: int) -> Operation:
        """One Adam step in fp32."""

    def launch(self) -> Operation:
        """The smallest operation there is."""

    def host_transfer(self, num_bytes: int, *, to_device: bool) -> Operation:
        """Move bytes between the host's memory and the device's."""
