"""The link profiler on a real network: eight hosts in namespaces with shaped rates, Gloo between them.

Three speed classes, one degraded link and one asymmetric link; the catalog's matrix must be the shaped one, and the
odd links must be named. Run with ``make test-netns``: needs root, ip, tc and torch.

The network is hosts on a switch, and extra cables between two of them, all inside namespaces whose names start with
this process's id: nothing of the machine's own network is touched, and cleaning up is deleting them, whatever went
wrong. Rates are shaped by token buckets on both ends of each cable, so a host's rate holds for what it sends and for
what it receives.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshplan.catalogs.database import open_database
from meshplan.catalogs.measurements import Measurements

COMMAND_TIMEOUT_S = 20
# Jumbo frames: headers then cost 1 % of the shaped rate instead of 5 %.
MTU = 9000
BURST = "128kb"
PORT = 29_611


@dataclass(frozen=True)
class Cable:
    """A cable of its own between two hosts, with a rate in each direction, bit/s."""

    first: int
    second: int
    forward_bits_per_s: int
    backward_bits_per_s: int


def missing_requirement() -> str | None:
    """Why namespaces cannot be made here, None where they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool!r} (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"mp{os.getpid()}probe"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "trial0", "type", "veth", "peer", "name", "trial1")
        shape(name, "trial0", 10**8)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    return None


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)


def shape(namespace: str, device: str, bits_per_s: int) -> None:
    rate = ["rate", f"{bits_per_s}bit", "burst", BURST, "latency", "50ms"]
    run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)


@dataclass(frozen=True)
class Network:
    """The hosts: their namespaces and addresses."""

    namespaces: tuple[str, ...]

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{10 + host}"

    def start(self, host: int, arguments: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
        """Start one rank of meshplan on a host, as torchrun would."""
        environment = {
            **os.environ,
            "RANK": str(host),
            "WORLD_SIZE": str(len(self.namespaces)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "MESHPLAN_HOST": f"host-{host}",
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", self.namespaces[host], sys.executable, "-m", "meshplan.cli.main", *arguments]
        with log.open("wb") as file:
            return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


@contextmanager
def network(rates_bits_per_s: Sequence[int], cables: Sequence[Cable]) -> Iterator[Network]:
    """Hosts with the given rates on one switch, and the cables; removed again in any case."""
    prefix = f"mp{os.getpid()}"
    switch = f"{prefix}switch"
    hosts = tuple(f"{prefix}h{number}" for number in range(len(rates_bits_per_s)))
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "mtu", str(MTU), "up")
        for number, (host, rate) in enumerate(zip(hosts, rates_bits_per_s, strict=True)):
            _plug_into_switch(switch, host, number, rate)
        for number, cable in enumerate(cables):
            _lay(hosts, number, cable)
        yield Network(namespaces=hosts)
    finally:
        for namespace in (*hosts, switch):
            subprocess.run(
                ["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=COMMAND_TIMEOUT_S
            )


def shaped_rates(rates_bits_per_s: Sequence[int], cables: Sequence[Cable]) -> Mapping[tuple[int, int], float]:
    """What each directed link may carry, bytes/s."""
    numbers = range(len(rates_bits_per_s))
    rates = {(a, b): min(rates_bits_per_s[a], rates_bits_per_s[b]) / 8.0 for a in numbers for b in numbers if a != b}
    for cable in cables:
        rates[cable.first, cable.second] = cable.forward_bits_per_s / 8.0
        rates[cable.second, cable.first] = cable.backward_bits_per_s / 8.0
    return rates


def _plug_into_switch(switch: str, host: str, number: int, rate: int) -> None:
    port = f"port{number}"
    run("ip", "netns", "add", host)
    run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
    run("ip", "-n", host, "link", "set", "lo", "up")
    run("ip", "-n", host, "addr", "add", f"{Network.address(number)}/24", "dev", "eth0")
    run("ip", "-n", host, "link", "set", "eth0", "mtu", str(MTU), "up")
    run("ip", "-n", switch, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
    shape(host, "eth0", rate)
    shape(switch, port, rate)


def _lay(hosts: Sequence[str], number: int, cable: Cable) -> None:
    device = f"cable{number}"
    ends = (
        (cable.first, cable.second, cable.forward_bits_per_s),
        (cable.second, cable.first, cable.backward_bits_per_s),
    )
    run("ip", "link", "add", device, "netns", hosts[cable.first], "type", "veth", "peer", "name", device,
        "netns", hosts[cable.second])  # fmt: skip
    for here, _, rate in ends:
        run("ip", "-n", hosts[here], "link", "set", device, "mtu", str(MTU), "up")
        shape(hosts[here], device, rate)
    for here, there, _ in ends:
        route = (f"{Network.address(there)}/32", "dev", device, "src", Network.address(here))
        run("ip", "-n", hosts[here], "route", "add", *route)


pytestmark = pytest.mark.netns

FAST, MEDIUM, SLOW = 200_000_000, 100_000_000, 50_000_000
HOSTS = (FAST, FAST, FAST, FAST, MEDIUM, MEDIUM, SLOW, SLOW)
DEGRADED = Cable(first=1, second=3, forward_bits_per_s=40_000_000, backward_bits_per_s=40_000_000)
ASYMMETRIC = Cable(first=0, second=2, forward_bits_per_s=FAST, backward_bits_per_s=80_000_000)
CABLES = (DEGRADED, ASYMMETRIC)
DEADLINE_S = 240


@pytest.fixture(autouse=True)
def _requirements() -> None:
    reason = missing_requirement()
    if reason is None and importlib.util.find_spec("torch") is None:
        reason = "the link probes need torch: pip install torch==2.13.0 (make test-netns does)"
    if reason:
        pytest.skip(reason)


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
