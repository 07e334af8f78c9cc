"""``meshplan profile`` from the command line: the JSON of the design, resuming, showing, carrying."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import ClusterProfile, MeasuredLink, Spread
from meshplan.profiler.protocol import Protocol

Command = Callable[..., Any]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshplan.profiler.device.run.QUICK", Protocol(warmup=0, min_repeats=1, max_repeats=1))
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lab(seeded: Path, tmp_path: Path) -> Path:
    """A catalog with two profiles of a cluster, the second one slower."""
    database = Path(shutil.copy(seeded, tmp_path / "lab.sqlite"))
    store = Measurements(open_database(str(database)))
    for rate in (1e9, 4e8):
        run = store.start("links", host="a", environment={}, protocol={}, cluster="lab")
        spread = Spread(value=rate, low=rate, high=rate, n=3)
        link = MeasuredLink(source="a", target="b", rail="eth0", bandwidth_bytes_per_s=spread, latency_s=spread)
        profile = ClusterProfile(
            name="lab",
            run_id=run.run_id,
            measured_at="2026-11-21T00:00:00+00:00",
            endpoints=("a", "b"),
            links=(link,),
            findings=("slow link a -> b",),
        )
        store.put_cluster(profile)
        store.finish(run.run_id)
    return database


def test_the_json_is_the_designs(meshplan: Command) -> None:
    done = meshplan(
        "profile", "device", "--quick", "--backend", "numpy", "--probe", "gemm", "--probe", "kernel_launch",
        "--format", "json",
    )  # fmt: skip
    assert done.code == 0
    for row in done.json["measurements"]:
        assert set(row) >= {"probe", "device", "n", "source"}
        (metric,) = set(row) & {"flops_per_s", "bytes_per_s", "latency_s"}
        assert set(row[metric]) == {"value", "low", "high"}
    assert done.json["failures"] == []


def test_all_without_a_launcher_measures_the_device_and_says_so(
    meshplan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshplan.profiler.device import probes as device_probes

    monkeypatch.setattr(device_probes, "PROBES", {"kernel_launch": device_probes.kernel_launch})
    done = meshplan("profile", "all", "--quick", "--backend", "numpy", "--format", "json")
    assert done.code == 0
    assert [row["probe"] for row in done.json["measurements"]] == ["kernel_launch"]
    assert "no launcher: only the device is measured" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("links",), "no launcher's variables are set"),
        (("device", "--backend", "abacus"), "unknown backend 'abacus'"),
        (("device", "--backend", "numpy", "--probe", "gem"), "unknown probe 'gem'"),
        (("export", "nowhere", "--out", "x.json"), "unknown cluster profile 'nowhere'"),
        (("import", "missing.json"), "cannot read missing.json"),
        (("show", "nowhere"), "unknown cluster profile 'nowhere'"),
    ],
)
def test_what_cannot_be_done_is_explained(meshplan: Command, arguments: tuple[str, ...], message: str) -> None:
    done = meshplan("profile", *arguments)
    assert done.code == 4
    assert message in done.err
    assert done.out == ""


def test_a_cluster_is_shown_with_its_findings(meshplan: Command, lab: Path) -> None:
    shown = meshplan("profile", "show", "lab", "--db", str(lab), "--format", "json").json
    assert shown["bandwidth_bytes_per_s"] == [[None, 4e8], [None, None]]
    assert shown["findings"] == ["slow link a -> b"]
    assert shown["drift"][0] == "a -> b [eth0] bandwidth_bytes_per_s: 1e+09 → 4e+08 (-60%)"
    runs = meshplan("profile", "show", "--db", str(lab), "--format", "json").json
    assert [run["cluster"] for run in runs] == ["lab", "lab"]
    assert "400.0 MB/s" in meshplan("profile", "show", "lab", "--db", str(lab)).out


def test_a_profile_travels_by_file(meshplan: Command, lab: Path, tmp_path: Path) -> None:
    file, picture, other = tmp_path / "lab.json", tmp_path / "lab.html", str(tmp_path / "other.sqlite")
    assert meshplan("profile", "export", "lab", "--out", str(file), "--db", str(lab)).code == 0
    assert meshplan("profile", "import", str(file), "--db", other).code == 0
    assert meshplan("profile", "picture", "lab", "--out", str(picture), "--db", other).code == 0
    assert picture.read_text(encoding="utf-8").startswith("<!doctype html>")
    wrong = meshplan("profile", "picture", "lab", "--out", str(tmp_path / "lab.png"), "--db", other)
    assert (wrong.code, (tmp_path / "lab.png").exists()) == (2, False)
    assert "end it in .html" in wrong.err
    assert meshplan("catalog", "diff", str(lab), other, "--format", "json").json == []


def test_what_a_device_run_measures_scales_the_device_of_the_catalog(
    meshplan: Command, seeded: Path, tmp_path: Path
) -> None:
    database = Path(shutil.copy(seeded, tmp_path / "own.sqlite"))
    done = meshplan(
        "profile", "device", "--quick", "--backend", "numpy", "--probe", "memory_copy", "--as", "l40s", "--db", database
    )  # fmt: skip
    assert done.code == 0
    scales = Catalog(open_database(str(database))).device("l40s").operator_scales
    # A CPU is slower than an L40S, but for a machine so slow that the scale is refused.
    assert ("operator_time_scale.memory" in done.err and scales["memory"] > 1.0) or "left out, memory" in done.err


def test_who_has_no_gpu_is_told_what_is_measured(meshplan: Command) -> None:
    """Figures of the host's processor passed for those of a GPU that torch could not see."""
    few = ("--quick", "--probe", "kernel_launch", "--format", "json")
    assert "no GPU is seen from here" in meshplan("profile", "device", *few).err
    assert "no GPU is seen" not in meshplan("profile", "device", "--backend", "numpy", *few).err
