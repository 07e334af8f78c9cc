"""Logs of nccl-tests and mpiGraph: sound ones become measurements, doubtful ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.importers.logs import import_file
from meshplan.catalogs.measurements.rows import Measurements

# The layout of nccl-tests 2.13 (BSD-3-Clause); the figures are made up.
NCCL_LOG = """\
./build/all_reduce_perf -b 8 -e 128M -f 2 -g 2
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor)
#
# Using devices
#  Rank  0 Group  0 Pid  11 on    node-a device  0 [0x07] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  11 on    node-a device  1 [0x08] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    10.00    0.00    0.00      0    10.10    0.00    0.00      0
     1048576        262144     float     sum      -1    20.00   52.43   52.43      0    20.10   52.17   52.17      0
   134217728      33554432     float     sum      -1    500.0  268.44  268.44      0    501.0  267.90  267.90      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 100.0
"""

MPIGRAPH = "\n".join(
    [
        "START mpiGraph v1.5",
        "MsgSize\t1048576",
        "Times\t10",
        "Window\t50",
        "Procs\t3",
        "",
        "Send max\t300.0",
        "",
        "Send\tn0:0\tn1:1\tn2:2\t",
        "n0:0 to\t0.000\t300.000\t290.000\t",
        "n1:1 to\t100.000\t0.000\t295.000\t",
        "n2:2 to\t301.000\t299.000\t0.000\t",
        "END mpiGraph",
        "",
    ]
)


@pytest.fixture
def store(empty_engine: Engine) -> Measurements:
    return Measurements(empty_engine)


def imported(store: Measurements, tmp_path: Path, text: str, **options: str | None) -> dict[str, object]:
    path = tmp_path / "log.txt"
    path.write_text(text, encoding="utf-8")
    return import_file(store, path, **{"cluster": None, "device": None} | options)


def test_an_nccl_log_becomes_measurements(store: Measurements, tmp_path: Path) -> None:
    done = imported(store, tmp_path, NCCL_LOG)
    rows = store.of_run(str(done["run_id"]))
    assert [row.parameters["size_bytes"] for row in rows] == [8, 1048576, 134217728]
    assert rows[2].probe == "all_reduce"
    assert rows[2].spread.value == pytest.approx(268.435e9, rel=1e-4)
    assert rows[2].link == "NVIDIA H100 80GB HBM3: 2 ranks of 1 host"
    assert rows[2].dtype == "float"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("(us)  (GB/s)  (GB/s)", "(ms)  (GB/s)  (GB/s)"), "no line with the units"),
        (
            ("   500.0  268.44  268.44 ", "  268.44   500.0  268.44 "),
            "line 13: busbw 268.44 is not 1.000 × algbw 500.00: swapped",
        ),
        (("all_reduce_perf", "my_perf"), "no test name"),
        (("#  Rank", "#  Place"), "no lines '# Rank 0"),
        (("     1048576        262144     float     sum", "     1048576"), "line 12: time 0.0 us is not positive"),
    ],
)
def test_a_doubtful_nccl_log_is_refused(
    store: Measurements, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in NCCL_LOG
    with pytest.raises(CatalogError, match=message):
        imported(store, tmp_path, NCCL_LOG.replace(*change))
    assert store.runs() == ()


def test_mpigraph_becomes_a_cluster(store: Measurements, tmp_path: Path) -> None:
    imported(store, tmp_path, MPIGRAPH, cluster="lab")
    profile = store.cluster("lab")
    assert profile.endpoints == ("n0:0", "n1:1", "n2:2")
    matrix = profile.bandwidths()
    assert matrix[0][1] == 300 * 2**20
    assert matrix[1][0] == 100 * 2**20
    assert matrix[0][0] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("END mpiGraph", ""), "the run was cut off"),
        (("n1:1 to\t100.000\t0.000\t295.000\t", "n1:1 to\t100.000\t295.000\t"), "line 11: 2 values under 3 headings"),
        (("n1:1 to", "n2:2 to"), "expected the row of 'n1:1'"),
        (("300.000", "fast"), "'fast' is not a number"),
        (("290.000", "0.000"), "to rank 2: not measured"),
    ],
)
def test_a_doubtful_mpigraph_is_refused(
    store: Measurements, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(CatalogError, match=message):
        imported(store, tmp_path, MPIGRAPH.replace(*change))
    assert store.runs() == ()


@pytest.mark.parametrize("text", ["", "hello", "{"])
def test_an_unknown_format_is_refused(store: Measurements, tmp_path: Path, text: str) -> None:
    with pytest.raises(CatalogError):
        imported(store, tmp_path, text)
