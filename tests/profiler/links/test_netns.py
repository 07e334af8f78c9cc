"""The link profiler on a real network: eight hosts in namespaces with shaped rates, Gloo between them.

Three speed classes, one degraded link and one asymmetric link; the catalog's matrix must be the shaped one, and the
odd links must be named. Run with ``make test-netns``: needs root, ip, tc and torch.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from netns import Cable, Network, network, shaped_rates, skip_unless_possible

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.measurements.rows import Measurements

pytestmark = pytest.mark.netns

FAST, MEDIUM, SLOW = 200_000_000, 100_000_000, 50_000_000
HOSTS = (FAST, FAST, FAST, FAST, MEDIUM, MEDIUM, SLOW, SLOW)
DEGRADED = Cable(first=1, second=3, forward_bits_per_s=40_000_000, backward_bits_per_s=40_000_000)
ASYMMETRIC = Cable(first=0, second=2, forward_bits_per_s=FAST, backward_bits_per_s=80_000_000)
CABLES = (DEGRADED, ASYMMETRIC)
DEADLINE_S = 240


@pytest.fixture(autouse=True)
def _requirements() -> None:
    skip_unless_possible("the link profiler")


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes of processes that end before the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in processes]


@contextmanager
def profiling(net: Network, database: Path, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One rank on every host; what still runs afterwards, for whatever reason, is killed."""
    arguments = ["profile", "links", "--name", "lab", "--rail", "eth0", "--db", str(database), "--format", "json"]
    arguments += ["--timeout", "30"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(len(net.namespaces)):
            processes.append(net.start(host, arguments, log=folder / f"rank{host}.log"))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def test_the_matrix_is_the_shaped_one(tmp_path: Path) -> None:
    database = tmp_path / "catalog.sqlite"
    with network(HOSTS, CABLES) as net, profiling(net, database, tmp_path) as processes:
        codes = ended(processes)
    assert codes == [0] * len(HOSTS), (tmp_path / "rank0.log").read_text()[-2000:]

    cluster = Measurements(open_database(str(database))).cluster("lab")
    matrix = cluster.bandwidths()
    expected = shaped_rates(HOSTS, CABLES)
    assert len(cluster.links) == len(HOSTS) * (len(HOSTS) - 1)
    wrong = {
        pair: (matrix[pair[0]][pair[1]], rate)
        for pair, rate in expected.items()
        if abs(matrix[pair[0]][pair[1]] / rate - 1.0) > 0.10
    }
    assert not wrong

    text = "\n".join(cluster.findings)
    assert "slow link host-1 -> host-3" in text
    assert "slow link host-3 -> host-1" in text
    assert "asymmetric host-0 / host-2" in text
    assert "slow host host-6" in text
    # Only those: a sound link is never accused.
    assert text.count("slow link") == 3  # both directions of the degraded link, the bad one of the asymmetric
    assert text.count("asymmetric") == 1


def test_a_dying_rank_leaves_a_valid_catalog_that_resumes(tmp_path: Path) -> None:
    database = tmp_path / "catalog.sqlite"
    hosts = (FAST, FAST, MEDIUM, MEDIUM)
    with network(hosts, ()) as net:
        with profiling(net, database, tmp_path) as processes:
            deadline = time.monotonic() + DEADLINE_S
            while "round 1 of" not in (tmp_path / "rank0.log").read_text() and time.monotonic() < deadline:
                assert all(process.poll() is None for process in processes), (tmp_path / "rank0.log").read_text()
                time.sleep(0.1)
            processes[2].send_signal(signal.SIGKILL)
            codes = ended(processes)
        assert codes[0] == 4
        assert "start the same command again" in (tmp_path / "rank0.log").read_text()

        store = Measurements(open_database(str(database)))
        (run,) = store.runs(kind="links")
        kept = store.keys(run.run_id)
        assert run.finished_at is None
        assert kept

        with profiling(net, database, tmp_path) as processes:
            assert ended(processes) == [0] * len(hosts)
    (again,) = store.runs(kind="links")
    assert again.run_id == run.run_id
    assert again.finished_at is not None
    assert kept < store.keys(run.run_id)
    assert len(store.cluster("lab").links) == 12
