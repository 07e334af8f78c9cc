"""Device runs on the NumPy backend: every probe measures, a killed run resumes, a failing probe spares the others."""

from __future__ import annotations

import errno
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.connection import connect, parse_url
from meshplan.catalogs.errors import CatalogError, ProfileError
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import Metric
from meshplan.profiler.device.backends import Backend
from meshplan.profiler.device.numpy_backend import NumpyBackend
from meshplan.profiler.device.opening import open_backend
from meshplan.profiler.device.probes import PROBES, Effort, cases
from meshplan.profiler.device.run import DeviceOptions, profile_device
from meshplan.profiler.protocol import Protocol

# Every case once: these tests are about what is written, not about the figures.
ONCE = Protocol(warmup=0, min_repeats=1, max_repeats=1)


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshplan.profiler.device.run.QUICK", ONCE)


def quick(**options: Any) -> DeviceOptions:
    return DeviceOptions(is_quick=True, **options)


def test_every_probe_measures_and_says_how(store: Measurements) -> None:
    profile = profile_device(store, NumpyBackend(), quick(cluster="mine"))
    assert profile.failures == ()
    assert profile.run.finished_at is not None
    assert profile.run.protocol["data"].startswith("uniform random")
    assert profile.run.environment["numpy"]
    # The processor has no memory apart from the host's.
    expected = set(PROBES) - {"host_transfer", "fp8_gemm", "disk"} | {"disk_write", "disk_read"}
    assert {row.probe for row in profile.measurements} == expected
    for row in profile.measurements:
        assert row.spread.low <= row.spread.value <= row.spread.high
        assert "numpy" in row.source
        document = row.document()
        assert document[row.metric.value]["value"] == row.spread.value
        assert document["n"] == 1
    assert next(row for row in profile.measurements if row.probe == "kernel_launch").metric is Metric.LATENCY_S


def test_a_killed_run_resumes(store: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NumpyBackend()
    monkeypatch.setattr(backend, "attention", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        profile_device(store, backend, quick(probes=["gemm", "attention_decode", "memory_copy"]))
    (run,) = store.runs()
    assert run.finished_at is None
    kept = store.of_run(run.run_id)
    assert {row.probe for row in kept} == {"gemm"}

    profile = profile_device(store, NumpyBackend(), quick(probes=["gemm", "attention_decode", "memory_copy"]))
    assert profile.run.run_id == run.run_id
    assert profile.num_resumed == len(kept)
    assert profile.measurements[: len(kept)] == kept
    assert profile.run.finished_at is not None

    again = profile_device(store, NumpyBackend(), quick(probes=["kernel_launch"]))
    assert again.run.run_id != run.run_id


def test_a_full_disk_spares_the_other_probes(store: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("meshplan.profiler.device.probes.os.fsync", full)
    profile = profile_device(store, NumpyBackend(), quick(probes=["disk", "kernel_launch"]))
    assert [row.probe for row in profile.measurements] == ["kernel_launch"]
    assert len(profile.failures) == 2
    assert profile.failures[0].startswith("disk_write")
    assert "No space left on device; give a folder with room and write permission with --scratch" in profile.failures[0]
    assert profile.run.finished_at is None


def test_nothing_measured_is_an_error(store: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NumpyBackend()
    monkeypatch.setattr(backend, "launch", _no_memory)
    with pytest.raises(ProfileError, match=r"kernel_launch.*not enough memory"):
        profile_device(store, backend, quick(probes=["kernel_launch"]))


def test_an_unknown_probe_is_refused(store: Measurements) -> None:
    with pytest.raises(ProfileError, match="unknown probe 'gem'; one of gemm"):
        profile_device(store, NumpyBackend(), quick(probes=["gem"]))


def test_a_read_only_catalog_is_refused(store: Measurements) -> None:
    path = store.engine.url.database
    read_only = Measurements(connect(parse_url(f"sqlite:///file:{path}?mode=ro&uri=true")))
    with pytest.raises(CatalogError, match="read-only"):
        profile_device(read_only, NumpyBackend(), quick(probes=["kernel_launch"]))


def test_torch_is_asked_for_by_name() -> None:
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(ProfileError, match="needs torch, which is not installed"):
            open_backend("torch-cpu")
        assert open_backend("auto").name == "numpy"
    with pytest.raises(ProfileError, match="unknown backend 'cuda'"):
        open_backend("cuda")


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("is_accelerator", [True, False])
def test_every_case_is_a_point_of_its_own(tmp_path: Path, is_quick: bool, is_accelerator: bool) -> None:
    effort = Effort(is_quick=is_quick, is_accelerator=is_accelerator, scratch=tmp_path)
    found = list(cases(NumpyBackend(), effort))
    keys = [(case.probe, case.dtype, tuple(case.parameters.items())) for case in found]
    assert len(keys) == len(set(keys))
    assert all(case.work > 0 for case in found)


def test_attention_is_attention() -> None:
    # One query against one key gives that key's value, whatever the score.
    backend: Backend = NumpyBackend()
    result = backend.attention(1, 4, 2, 1, 1, 8)()
    assert getattr(result, "shape", None) == (1, 2, 2, 1, 8)


@pytest.mark.torch
def test_torch_runs_the_same_probes(store: Measurements) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: make test-netns")
    profile = profile_device(store, open_backend("torch-cpu"), quick())
    assert profile.failures == ()
    assert {row.probe for row in profile.measurements} >= set(PROBES) - {"host_transfer", "fp8_gemm", "disk"}
    assert profile.run.environment["torch"]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _no_memory() -> None:
    raise MemoryError
