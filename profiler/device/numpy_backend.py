"""The NumPy backend of the device probes: the host's processor, with the BLAS that NumPy was built with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshplan.catalogs.errors import ProfileError
from meshplan.profiler.device.backends import FP8_NEEDS, LEARNING_RATE, Operation
from meshplan.profiler.environment import cpu_name, host_environment

# Moments of the optimizer that is timed; the time does not depend on them.
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8


class NumpyBackend:
    """The processor through NumPy: always there."""

    name = "numpy"
    is_accelerator = False
    has_fp8 = False
    dtypes: tuple[str, ...] = ("fp32", "fp64")

    def __init__(self, *, seed: int = 0) -> None:
        self.device = cpu_name()
        self._random = np.random.default_rng(seed)

    def environment(self) -> dict[str, Any]:
        """Versions and clocks."""
        blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
        return host_environment() | {"backend": self.name, "blas": f"{blas.get('name')} {blas.get('version')}"}

    def element_bytes(self, dtype: str) -> int:
        """Bytes of one element."""
        return {"fp32": 4, "fp64": 8}[dtype]

    def synchronize(self) -> None:
        """NumPy has finished when it returns."""

    def matmul(self, left: Sequence[int], right: Sequence[int], dtype: str) -> Operation:
        """Product of two random arrays."""
        a, b = self._array(left, dtype), self._array(right, dtype)
        out = a @ b
        return lambda: np.matmul(a, b, out=out)

    def grouped_matmul(self, rows: Sequence[int], n: int, k: int, dtype: str) -> Operation:
        """One product per group."""
        pairs = [(self._array((count, k), dtype), self._array((k, n), dtype)) for count in rows]
        return lambda: [a @ b for a, b in pairs]

    def fp8_matmul(self, m: int, n: int, k: int) -> Operation:
        """NumPy has no 8-bit floating point."""
        raise ProfileError(f"{self.name} has no fp8 product; {FP8_NEEDS}")

    def throttled(self, since: float) -> str | None:
        """Processors say nothing; the trend of the repeats does (:mod:`meshplan.profiler.protocol`)."""

    def attention(self, batch: int, heads: int, kv_heads: int, queries: int, context: int, dim: int) -> Operation:
        """Softmax attention, unfused: NumPy has no flash kernel."""
        q = self._array((batch, kv_heads, heads // kv_heads, queries, dim), "fp32")
        k, v = (self._array((batch, kv_heads, 1, context, dim), "fp32") for _ in range(2))
        hidden = np.triu(np.full((queries, context), -np.inf, dtype=np.float32), 1) if queries == context else 0.0

        def run() -> object:
            scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(dim)) + hidden
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return weights / weights.sum(axis=-1, keepdims=True) @ v

        return run

    def copy(self, num_elements: int, dtype: str) -> Operation:
        """Copy one array into another."""
        source, target = self._array((num_elements,), dtype), self._array((num_elements,), dtype)
        return lambda: np.copyto(target, source)

    def add(self, num_elements: int, dtype: str) -> Operation:
        """Elementwise sum of two arrays into a third."""
        a, b, c = (self._array((num_elements,), dtype) for _ in range(3))
        return lambda: np.add(a, b, out=c)

    def adam_step(self, num_elements: int) -> Operation:
        """One Adam step in fp32, each elementwise operation a pass over memory."""
        weight, gradient, first, second = (self._array((num_elements,), "fp32") for _ in range(4))
        np.abs(second, out=second)
        scratch = np.empty_like(weight)

        def run() -> None:
            np.multiply(first, _BETA_1, out=first)
            np.multiply(gradient, 1 - _BETA_1, out=scratch)
            np.add(first, scratch, out=first)
            np.multiply(second, _BETA_2, out=second)
            np.multiply(gradient, gradient, out=scratch)
            np.multiply(scratch, 1 - _BETA_2, out=scratch)
            np.add(second, scratch, out=second)
            np.sqrt(second, out=scratch)
            np.add(scratch, _EPSILON, out=scratch)
            np.divide(first, scratch, out=scratch)
            np.multiply(scratch, LEARNING_RATE, out=scratch)
            np.subtract(weight, scratch, out=weight)

        return run

    def launch(self) -> Operation:
        """Adding two numbers: what one call costs."""
        a, b = self._array((1,), "fp32"), self._array((1,), "fp32")
        return lambda: np.add(a, b, out=b)

    def host_transfer(self, num_bytes: int, *, to_device: bool) -> Operation:
        """There is no device besides the host."""
        raise ProfileError(
            f"{self.name} has no device memory separate from the host's; measure it with --backend torch-gpu"
        )

    def _array(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        kind = {"fp32": np.float32, "fp64": np.float64}[dtype]
        return self._random.uniform(-1.0, 1.0, size=tuple(shape)).astype(kind, copy=False)
