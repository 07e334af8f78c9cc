"""The processor or a GPU through torch.

CUDA and ROCm are the same class as the CPU (ROCm calls itself ``cuda`` there): only the device, the dtypes, fp8
products and ``synchronize`` differ, so the CPU run exercises the code that a GPU runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from meshplan.catalogs.errors import ProfileError
from meshplan.profiler.device.backends import FP8_NEEDS, LEARNING_RATE, Operation
from meshplan.profiler.device.gpu_watch import GpuWatch
from meshplan.profiler.environment import cpu_name, gpu_environment, host_environment

# NVIDIA's fp8 tensor cores begin with Ada (8.9); AMD's with MI300, whose fp8 is another format than everyone else's.
_FP8_CAPABILITY = (8, 9)
_FNUZ_ARCHITECTURE, _FP8_ARCHITECTURES = "gfx94", ("gfx95", "gfx12")


class TorchBackend:
    """The processor or one GPU through torch.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        seed: for the random data.

    Raises:
        ProfileError: no torch, or no such device.
    """

    def __init__(self, device: str = "cpu", *, seed: int = 0) -> None:
        if importlib.util.find_spec("torch") is None:
            raise ProfileError("this backend needs torch, which is not installed; use --backend numpy or install torch")
        import torch  # optional, and slow to import

        if device != "cpu" and not torch.cuda.is_available():
            raise ProfileError(
                f"torch {torch.__version__} sees no GPU; use --backend torch-cpu, or install a GPU build"
            )
        self._torch = torch
        self._target = torch.device(device)
        self.is_accelerator = self._target.type != "cpu"
        if self.is_accelerator and self._target.index is None:
            # The clocks of one GPU are asked for by its number.
            self._target = torch.device("cuda", torch.cuda.current_device())
        self._dtype = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
        torch.manual_seed(seed)
        self.name = "torch-gpu" if self.is_accelerator else "torch-cpu"
        self.device = str(torch.cuda.get_device_name(self._target)) if self.is_accelerator else cpu_name()
        self.dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32") if self.is_accelerator else ("fp32", "bf16")
        self._watch = (
            GpuWatch(str(torch.cuda.get_device_properties(self._target).uuid)) if self.is_accelerator else None
        )

    def environment(self) -> dict[str, Any]:
        """Versions and clocks."""
        torch = self._torch
        found: dict[str, Any] = {"backend": self.name, "torch": torch.__version__, "threads": torch.get_num_threads()}
        if self.is_accelerator:
            found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": gpu_environment()}
            found["capability"] = list(torch.cuda.get_device_capability(self._target))
        return host_environment() | found

    def element_bytes(self, dtype: str) -> int:
        """Bytes of one element."""
        return int(self._dtype[dtype].itemsize)

    def synchronize(self) -> None:
        """Wait for the GPU; the CPU has finished when it returns."""
        if self.is_accelerator:
            self._torch.cuda.synchronize(self._target)

    def matmul(self, left: Sequence[int], right: Sequence[int], dtype: str) -> Operation:
        """Product of two random arrays."""
        a, b = self._array(left, dtype), self._array(right, dtype)
        out = self._torch.matmul(a, b)
        return lambda: self._torch.matmul(a, b, out=out)

    def grouped_matmul(self, rows: Sequence[int], n: int, k: int, dtype: str) -> Operation:
        """One product per group."""
        pairs = [(self._array((count, k), dtype), self._array((k, n), dtype)) for count in rows]
        return lambda: [a @ b for a, b in pairs]

    def fp8_matmul(self, m: int, n: int, k: int) -> Operation:
        """m×k by k×n, as engines run it: e4m3, one scale per operand, fast accumulation, out in bf16."""
        dtype = self._fp8_dtype()
        if dtype is None:
            raise ProfileError(f"{self.device} through {self.name} has no fp8 product; {FP8_NEEDS}")
        # The right operand lies column by column, which is the only way that cuBLASLt takes it; n and k are multiples
        # of 16.
        a, b = self._array((m, k), "fp32").to(dtype), self._array((n, k), "fp32").to(dtype).t()
        scale = self._torch.ones((), device=self._target, dtype=self._torch.float32)
        out_dtype = self._torch.bfloat16
        return lambda: self._torch._scaled_mm(a, b, scale, scale, out_dtype=out_dtype, use_fast_accum=True)

    def throttled(self, since: float) -> str | None:
        """What nvidia-smi reported meanwhile."""
        return self._watch.throttled(since) if self._watch else None

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU multiplies in 8-bit floating point; torch's CPU path is no measure of anything."""
        return self._fp8_dtype() is not None

    def _fp8_dtype(self) -> Any:
        torch = self._torch
        if not self.is_accelerator:
            return None
        if torch.version.hip:
            architecture = str(torch.cuda.get_device_properties(self._target).gcnArchName)
            if architecture.startswith(_FNUZ_ARCHITECTURE):
                return torch.float8_e4m3fnuz
            return torch.float8_e4m3fn if architecture.startswith(_FP8_ARCHITECTURES) else None
        return torch.float8_e4m3fn if torch.cuda.get_device_capability(self._target) >= _FP8_CAPABILITY else None

    def attention(self, batch: int, heads: int, kv_heads: int, queries: int, context: int, dim: int) -> Operation:
        """Softmax attention by whatever kernel torch chooses."""
        dtype = self.dtypes[0]
        q = self._array((batch, heads, queries, dim), dtype)
        k, v = (self._array((batch, kv_heads, context, dim), dtype) for _ in range(2))
        attend = self._torch.nn.functional.scaled_dot_product_attention
        causal, grouped = queries == context, heads != kv_heads
        return lambda: attend(q, k, v, is_causal=causal, enable_gqa=grouped)

    def copy(self, num_elements: int, dtype: str) -> Operation:
        """Copy one array into another."""
        source, target = self._array((num_elements,), dtype), self._array((num_elements,), dtype)
        return lambda: target.copy_(source)

    def add(self, num_elements: int, dtype: str) -> Operation:
        """Elementwise sum of two arrays into a third."""
        a, b, c = (self._array((num_elements,), dtype) for _ in range(3))
        return lambda: self._torch.add(a, b, out=c)

    def adam_step(self, num_elements: int) -> Operation:
        """One fused Adam step in fp32."""
        weight = self._torch.nn.Parameter(self._array((num_elements,), "fp32"))
        weight.grad = self._array((num_elements,), "fp32")
        optimizer = self._torch.optim.Adam([weight], lr=LEARNING_RATE, fused=True)
        return optimizer.step

    def launch(self) -> Operation:
        """Adding two numbers: what one kernel launch costs."""
        a, b = self._array((1,), "fp32"), self._array((1,), "fp32")
        return lambda: b.add_(a)

    def host_transfer(self, num_bytes: int, *, to_device: bool) -> Operation:
        """Copy between pinned host memory and the device."""
        if not self.is_accelerator:
            raise ProfileError(
                f"{self.name} has no device memory separate from the host's; measure it with --backend torch-gpu"
            )
        torch = self._torch
        host = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8).pin_memory()
        there = host.to(self._target)
        if to_device:
            return lambda: there.copy_(host, non_blocking=True)
        return lambda: host.copy_(there, non_blocking=True)

    def _array(self, shape: Sequence[int], dtype: str) -> Any:
        values = self._torch.rand(tuple(shape), device=self._target, dtype=self._torch.float32) * 2.0 - 1.0
        return values.to(self._dtype[dtype])
