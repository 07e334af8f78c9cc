"""What is measured on one device: the cases of each probe, their sizes, and how the rate is counted.

A :class:`Case` is one point: a probe, its parameters, the work of one call, and how to prepare that call. Adding a
probe is one function that yields cases and one line in :data:`PROBES`.

Work of one call:

- ``gemm`` m×k by k×n: 2·m·n·k FLOPs, also the fp8 points that the probe ``fp8_gemm`` adds; ``batched_gemm``,
  ``grouped_gemm``: summed over the batch or the groups;
- ``attention_prefill``: 4·batch·heads·tokens²·dim FLOPs, halved because it is causal;
- ``attention_decode``: bytes of keys and values that one new token reads, 2·batch·kv_heads·context·dim·element;
- ``memory_copy``: one read and one write; ``elementwise``: two reads and one write;
- ``optimizer_step``: Adam reads weight, gradient and both moments and writes all but the gradient: 28 bytes per
  parameter in fp32. An unfused implementation moves more; its rate is lower, which is the point;
- ``kernel_launch``: seconds of the smallest operation;
- ``host_to_device``, ``device_to_host``, ``disk_write``, ``disk_read``: bytes moved.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from meshplan.catalogs.errors import ProfileError
from meshplan.catalogs.measurements.types import Metric
from meshplan.profiler.device.backends import FP8_NEEDS, Backend, Operation

ADAM_BYTES_PER_PARAMETER = 28.0
MIB = 2**20
# Products of a training step, long enough on the fastest GPUs to be more than launch: tokens by the widths of small and
# large models, and inner lengths down to a shard of the heads.
TRAINING_PRODUCTS = (
    (4096, 6144, 4096),
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 2048, 2048),
    (16384, 4096, 512),
    (4096, 1024, 8192),
    (2048, 8192, 8192),
    (512, 16384, 8192),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point to measure.

    Args:
        probe: name of the probe.
        parameters: shape or ``size_bytes``.
        metric: what the result is.
        work: FLOPs or bytes of one call; 1 for a latency.
        prepare: makes the arrays and returns the call; may raise MemoryError or OSError.
        dtype: type of the data.
    """

    probe: str
    parameters: Mapping[str, int]
    metric: Metric
    work: float
    prepare: Callable[[], Operation]
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many and how large cases to measure.

    Args:
        is_quick: a few cases of each probe.
        is_accelerator: sizes for a GPU instead of a CPU.
        scratch: folder for the disk probe.
    """

    is_quick: bool
    is_accelerator: bool
    scratch: Path

    def choose(self, cpu: Sequence[int], accelerator: Sequence[int]) -> Sequence[int]:
        """Sizes for this kind of device; a quick run takes the middle one."""
        sizes = accelerator if self.is_accelerator else cpu
        return (sizes[len(sizes) // 2],) if self.is_quick else sizes


Probe = Callable[[Backend, Effort], Iterator[Case]]


def gemm(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Square, thin (decode), and just-over-a-tile products, so that tile quantization shows."""
    squares = _squares(effort)
    # Squares are enough to see the rate of the other precisions.
    others = () if effort.is_quick else backend.dtypes[1:]
    for dtype in (backend.dtypes[0], *others):
        for m, n, k in squares if dtype in others else _products(effort):
            prepare = partial(backend.matmul, (m, k), (k, n), dtype)
            yield _flops_case("gemm", 2.0 * m * n * k, prepare, dtype, m=m, n=n, k=k)


def fp8_gemm(backend: Backend, effort: Effort) -> Iterator[Case]:
    """The same products in 8-bit floating point: ``gemm`` points of dtype fp8, where the device has them."""
    for m, n, k in _products(effort):
        yield _flops_case("gemm", 2.0 * m * n * k, partial(backend.fp8_matmul, m, n, k), "fp8", m=m, n=n, k=k)


def batched_gemm(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Many equal products in one call."""
    dtype, batch = backend.dtypes[0], 16
    for size in effort.choose((64, 128, 256), (128, 512, 1024)):
        prepare = partial(backend.matmul, (batch, size, size), (batch, size, size), dtype)
        yield _flops_case("batched_gemm", 2.0 * batch * size**3, prepare, dtype, batch=batch, m=size, n=size, k=size)


def grouped_gemm(backend: Backend, effort: Effort) -> Iterator[Case]:
    """The experts of a MoE layer: as many rows in total, shared unevenly (a geometric series) over the groups."""
    dtype, groups = backend.dtypes[0], 8
    width = 2048 if effort.is_accelerator else 256
    for total in effort.choose((256, 1024), (1024, 8192)):
        shares = np.maximum(1, np.round(total * 0.5 ** np.arange(1, groups + 1))).astype(int).tolist()
        rows = sum(shares)
        prepare = partial(backend.grouped_matmul, shares, width, width, dtype)
        work = 2.0 * rows * width * width
        yield _flops_case("grouped_gemm", work, prepare, dtype, groups=groups, rows=rows, n=width, k=width)


def attention_prefill(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Causal attention over a whole prompt, four query heads to one key/value head."""
    heads, kv_heads, dim = (32, 8, 128) if effort.is_accelerator else (8, 2, 64)
    for tokens in effort.choose((128, 256, 512), (1024, 4096, 16384)):
        shape = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "tokens": tokens, "head_dim": dim}
        prepare = partial(backend.attention, 1, heads, kv_heads, tokens, tokens, dim)
        yield _flops_case("attention_prefill", 4.0 * heads * tokens**2 * dim / 2.0, prepare, backend.dtypes[0], **shape)


def attention_decode(backend: Backend, effort: Effort) -> Iterator[Case]:
    """One new token of each sequence against its whole context."""
    heads, kv_heads, dim = (32, 8, 128) if effort.is_accelerator else (8, 2, 64)
    batch, dtype = (32 if effort.is_accelerator else 4), backend.dtypes[0]
    for context in effort.choose((512, 2048, 8192), (1024, 4096, 16384)):
        shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "context": context, "head_dim": dim}
        prepare = partial(backend.attention, batch, heads, kv_heads, 1, context, dim)
        work = 2.0 * batch * kv_heads * context * dim * backend.element_bytes(dtype)
        yield _bytes_case("attention_decode", work, prepare, dtype, **shape)


def memory_copy(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Copying an array, from what fits the cache to what does not."""
    for size in effort.choose((MIB, 64 * MIB, 128 * MIB), (16 * MIB, 256 * MIB, 1024 * MIB)):
        yield _bytes_case("memory_copy", 2.0 * size, partial(backend.copy, size // 4, "fp32"), "fp32", size_bytes=size)


def elementwise(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Adding two arrays into a third."""
    for size in effort.choose((MIB, 32 * MIB, 64 * MIB), (16 * MIB, 256 * MIB, 1024 * MIB)):
        yield _bytes_case("elementwise", 3.0 * size, partial(backend.add, size // 4, "fp32"), "fp32", size_bytes=size)


def optimizer_step(backend: Backend, effort: Effort) -> Iterator[Case]:
    """One Adam step; the size is that of the weights."""
    for size in effort.choose((4 * MIB, 16 * MIB, 32 * MIB), (64 * MIB, 512 * MIB, 1024 * MIB)):
        work = ADAM_BYTES_PER_PARAMETER / 4.0 * size
        yield _bytes_case("optimizer_step", work, partial(backend.adam_step, size // 4), "fp32", size_bytes=size)


def kernel_launch(backend: Backend, effort: Effort) -> Iterator[Case]:
    """The smallest operation."""
    yield Case(probe="kernel_launch", parameters={}, metric=Metric.LATENCY_S, work=1.0, prepare=backend.launch)


def host_transfer(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Between host and device memory, both ways."""
    for size in effort.choose((MIB,), (MIB, 64 * MIB, 512 * MIB)):
        for probe, to_device in (("host_to_device", True), ("device_to_host", False)):
            prepare = partial(backend.host_transfer, size, to_device=to_device)
            yield _bytes_case(probe, float(size), prepare, size_bytes=size)


def disk(backend: Backend, effort: Effort) -> Iterator[Case]:
    """Writing a checkpoint and reading it back, past the page cache."""
    size = (8 if effort.is_quick else 64) * MIB
    for probe, prepare in (("disk_write", _disk_write), ("disk_read", _disk_read)):
        yield _bytes_case(probe, float(size), partial(prepare, effort.scratch, size), size_bytes=size)


PROBES: Mapping[str, Probe] = {
    "gemm": gemm,
    "fp8_gemm": fp8_gemm,
    "batched_gemm": batched_gemm,
    "grouped_gemm": grouped_gemm,
    "attention_prefill": attention_prefill,
    "attention_decode": attention_decode,
    "memory_copy": memory_copy,
    "elementwise": elementwise,
    "optimizer_step": optimizer_step,
    "kernel_launch": kernel_launch,
    "host_transfer": host_transfer,
    "disk": disk,
}


def cases(backend: Backend, effort: Effort, probes: Sequence[str] | None = None) -> Iterator[Case]:
    """Every case of the chosen probes (None: all that this backend has).

    Raises:
        ProfileError: no such probe, or one that this backend has nothing for.
    """
    lacking = {"fp8_gemm": not backend.has_fp8, "host_transfer": not backend.is_accelerator}
    for name in probes or ():
        if name not in PROBES:
            raise ProfileError(f"unknown probe {name!r}; one of {', '.join(PROBES)}")
        if lacking.get(name):
            need = FP8_NEEDS if name == "fp8_gemm" else "measure it with --backend torch-gpu on a machine with a GPU"
            raise ProfileError(f"{name}: {backend.name} on {backend.device} has none; {need}")
    for name in probes or [name for name in PROBES if not lacking.get(name)]:
        yield from PROBES[name](backend, effort)


def _squares(effort: Effort) -> list[tuple[int, int, int]]:
    cpu, accelerator = (128, 256, 384, 512, 768, 1024), (512, 1024, 2048, 4096, 8192)
    return [(size, size, size) for size in effort.choose(cpu, accelerator)]


def _products(effort: Effort) -> list[tuple[int, int, int]]:
    width = 4096 if effort.is_accelerator else 512
    thin = [(rows, width, width) for rows in effort.choose((1, 16, 64), (1, 16, 64, 128))]
    edges = () if effort.is_quick else (128, 129, 192, 256, 257, 320, 384)
    shapes = [*_squares(effort), *thin, *((rows, width, width) for rows in edges)]
    shapes += [(256, 256, inner) for inner in effort.choose((64, 1024, 4096), (64, 512, 4096, 16384))]
    if effort.is_accelerator and not effort.is_quick:
        shapes += TRAINING_PRODUCTS
    return list(dict.fromkeys(shapes))


def _flops_case(
    probe: str, flops: float, prepare: Callable[[], Operation], dtype: str | None, **parameters: int
) -> Case:
    return Case(probe=probe, parameters=parameters, metric=Metric.FLOPS_PER_S, work=flops, prepare=prepare, dtype=dtype)


def _bytes_case(
    probe: str, num_bytes: float, prepare: Callable[[], Operation], dtype: str | None = None, **parameters: int
) -> Case:
    return Case(
        probe=probe, parameters=parameters, metric=Metric.BYTES_PER_S, work=num_bytes, prepare=prepare, dtype=dtype
    )


def _disk_write(folder: Path, size: int) -> Operation:
    content = os.urandom(size)

    def write() -> None:
        # Removed on closing, also when the disk is full or the process is killed.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    return write


def _disk_read(folder: Path, size: int) -> Operation:
    # A plain descriptor: the file has no name any more, and goes when the operation does.
    descriptor, name = tempfile.mkstemp(dir=folder)
    os.unlink(name)
    try:
        os.write(descriptor, os.urandom(size))
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        raise

    def read() -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        while os.read(descriptor, MIB):
            pass

    weakref.finalize(read, os.close, descriptor)
    return read
