"""The lines that only a GPU runs, without one: torch's checks on fake CUDA tensors, a scripted nvidia-smi, refusals.

``FakeTensorMode`` is torch's: it computes the device, dtype, layout and size of every result and refuses what the CUDA
operator would, but runs no kernel. Nothing here says that a figure is right; that takes a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshplan.catalogs.errors import ProfileError
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.profiler.device.gpu_watch import GpuWatch
from meshplan.profiler.device.numpy_backend import NumpyBackend
from meshplan.profiler.device.probes import Effort, cases
from meshplan.profiler.device.run import DeviceOptions, profile_device
from meshplan.profiler.device.torch_backend import TorchBackend
from meshplan.profiler.links.launch import RankEnvironment
from meshplan.profiler.links.transport import _own_gpu, rendezvous_store

H200 = SimpleNamespace(uuid="1f2e", gcnArchName="")


def accelerator(folder: Path) -> Effort:
    return Effort(is_quick=False, is_accelerator=True, scratch=folder)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch that believes in one H200; arrays are fake."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: make test-netns")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        yield torch


@pytest.mark.torch
def test_every_product_and_attention_is_one_that_cuda_takes(cuda: Any, tmp_path: Path) -> None:
    backend = TorchBackend("cuda")
    assert (backend.name, backend.device) == ("torch-gpu", "NVIDIA H200")
    # Fake tensors know no pinned memory and no copy on a device that torch was not built for.
    without = {"host_to_device", "device_to_host", "memory_copy", "disk_write", "disk_read"}
    found = [case for case in cases(backend, accelerator(tmp_path)) if case.probe not in without]
    assert {case.dtype for case in found if case.probe == "gemm"} == {"bf16", "fp16", "fp32", "fp8"}
    for case in found:
        result = case.prepare()()
        for part in result if isinstance(result, list) else [result]:
            assert part is None or str(part.device) == "cuda:0", case


@pytest.mark.torch
def test_an_fp8_product_is_the_one_of_the_engines(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    original = cuda._scaled_mm
    monkeypatch.setattr(
        cuda, "_scaled_mm", lambda *given, **named: calls.append((given, named)) or original(*given, **named)
    )
    backend = TorchBackend("cuda")
    result = backend.fp8_matmul(129, 256, 64)()
    ((left, right, *scales), named), *_ = calls
    assert tuple(result.shape) == (129, 256)
    assert result.dtype == named["out_dtype"] == cuda.bfloat16
    assert left.dtype == right.dtype == cuda.float8_e4m3fn
    assert right.stride() == (1, 64)  # column by column
    assert all(scale.dtype == cuda.float32 and scale.device == left.device for scale in scales)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        backend.fp8_matmul(128, 256, 60)()


@pytest.mark.torch
def test_the_fp8_product_is_a_product() -> None:
    """The same call on the processor, whose torch has the operator too: its values, which fake tensors have not."""
    torch = pytest.importorskip("torch")
    backend = TorchBackend("cpu")
    backend._fp8_dtype = lambda: torch.float8_e4m3fn
    multiply = backend.fp8_matmul(32, 48, 64)
    left, right, scale = (cell.cell_contents for cell in _cells(multiply, ("a", "b", "scale")))
    expected = (left.float() @ right.float()) * float(scale) ** 2
    torch.testing.assert_close(multiply().float(), expected, rtol=0.01, atol=0.05)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("capability", "architecture", "dtype"),
    [
        ((8, 0), "", None),
        ((8, 9), "", "float8_e4m3fn"),
        ((10, 0), "", "float8_e4m3fn"),
        ((9, 4), "gfx942:sramecc+", "float8_e4m3fnuz"),
        ((9, 5), "gfx950", "float8_e4m3fn"),
        ((9, 0), "gfx90a", None),
    ],
)
def test_which_gpus_have_fp8(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str, dtype: str | None
) -> None:
    monkeypatch.setattr(cuda.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(
        cuda.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="", gcnArchName=architecture)
    )
    monkeypatch.setattr(cuda.version, "hip", "6.4" if architecture else None)
    backend = TorchBackend("cuda")
    assert backend.has_fp8 == (dtype is not None)
    assert backend._fp8_dtype() == (getattr(cuda, dtype) if dtype else None)
    if dtype is None:
        with pytest.raises(ProfileError, match=r"NVIDIA H200 through torch-gpu has no fp8 product; .*8\.9 or later"):
            backend.fp8_matmul(16, 16, 16)


@pytest.mark.torch
def test_waiting_is_for_the_gpu_that_is_measured(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(cuda.cuda, "synchronize", lambda device: waited.append(str(device)))
    TorchBackend("cuda:1").synchronize()
    TorchBackend("cuda").synchronize()
    assert waited == ["cuda:1", "cuda:0"]


@pytest.mark.parametrize("probe", ["fp8_gemm", "host_transfer"])
def test_what_a_processor_has_not_is_refused_by_name(store: Measurements, probe: str) -> None:
    with pytest.raises(ProfileError, match=rf"{probe}: numpy on .* has none; measure it with --backend torch-gpu"):
        profile_device(store, NumpyBackend(), DeviceOptions(is_quick=True, probes=[probe]))


# --- nvidia-smi -----------------------------------------------------------------------------------------------------


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, *, field: str, masks: str) -> None:
    """An nvidia-smi that knows one name of the field and then says ``masks``, one every 10 ms."""
    path = folder / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--query-gpu={field}*--id=GPU-1f2e*) ;; *) echo "Field is not a valid field" ; exit 2 ;; esac\n'
        'case "$*" in *--loop-ms=*) ;; *) echo 0x0000000000000001 ; exit 0 ;; esac\n'
        f"for mask in {masks}; do echo $mask; sleep 0.01; done\nexec sleep 60\n",
        encoding="utf-8",
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("field", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_the_reason_for_lower_clocks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    tool(tmp_path, monkeypatch, field=field, masks="0x1 0x4 0x44 nonsense 0x0")
    begin = time.perf_counter()
    watch = GpuWatch("1f2e")
    while len(watch._samples) < 4 and time.perf_counter() < begin + 10.0:
        time.sleep(0.01)
    expected = "throttling: software power cap in 2 of 4 samples; hardware thermal slowdown in 1 of 4 samples"
    assert watch.throttled(begin) == expected
    assert watch.throttled(time.perf_counter()) is None


@pytest.mark.parametrize("masks", ["0x1", "0x102", "0x0 0x10"])
def test_idling_is_not_throttling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masks: str) -> None:
    tool(tmp_path, monkeypatch, field="clocks_event_reasons.active", masks=masks)
    watch = GpuWatch("GPU-1f2e")
    time.sleep(0.2)
    assert watch.throttled(0.0) is None


def test_a_driver_that_does_not_say_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, field="something_else", masks="0x4")
    assert GpuWatch("1f2e").throttled(0.0) is None
    monkeypatch.setenv("PATH", "")
    assert GpuWatch("1f2e").throttled(0.0) is None


def test_a_throttled_measurement_carries_the_reason(store: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NumpyBackend()
    monkeypatch.setattr(backend, "throttled", lambda _: "throttling: software power cap in 3 of 4 samples")
    profile = profile_device(store, backend, DeviceOptions(is_quick=True, probes=["kernel_launch"]))
    assert profile.measurements[0].warnings[-1] == "throttling: software power cap in 3 of 4 samples"


# --- links ----------------------------------------------------------------------------------------------------------


def place(local_rank: int) -> RankEnvironment:
    return RankEnvironment(
        rank=local_rank, world_size=8, local_rank=local_rank, master_address="a", master_port=1, launcher="torchrun"
    )


def library(*, count: int, nccl: bool = True) -> Any:
    return SimpleNamespace(
        __version__="2.13.0",
        cuda=SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count),
        distributed=SimpleNamespace(is_nccl_available=lambda: nccl),
        device=lambda kind, index: f"{kind}:{index}",
    )


def test_a_rank_takes_its_own_gpu_or_the_only_one_it_is_shown() -> None:
    assert _own_gpu(library(count=8), place(3)) == "cuda:3"
    # srun --gpus-per-task=1: every task sees one GPU and calls it 0.
    assert _own_gpu(library(count=1), place(3)) == "cuda:0"


@pytest.mark.parametrize(
    ("count", "nccl", "message"), [(0, True, "sees no GPU"), (8, False, "no NCCL"), (2, True, "shows 2")]
)
def test_links_of_gpus_without_gpus_are_refused(count: int, nccl: bool, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        _own_gpu(library(count=count, nccl=nccl), place(3))


def test_links_without_torch_name_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshplan.profiler.links.transport.importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ProfileError, match=r"rank 3: links are measured .* torch is not installed; install it on every"
    ):
        rendezvous_store(place(3))


@pytest.mark.torch
def test_links_of_gpus_are_refused_before_anybody_waits() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: make test-netns")
    with pytest.raises(ProfileError, match="sees no GPU"):
        rendezvous_store(place(3), use_gpu=True, timeout_s=600.0)


def _cells(function: Any, names: tuple[str, ...]) -> list[Any]:
    return [function.__closure__[function.__code__.co_freevars.index(name)] for name in names]
