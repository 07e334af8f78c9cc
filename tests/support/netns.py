"""Hosts as network namespaces with shaped links: a network to profile and to train on (root, ip, tc).

The network is hosts on a switch, and extra cables between two of them, all inside namespaces whose names start with
this process's id: nothing of the machine's own network is touched, and cleaning up is deleting them, whatever went
wrong. Rates are shaped by token buckets on both ends of each cable, so a host's rate holds for what it sends and for
what it receives.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

COMMAND_TIMEOUT_S = 20
# Jumbo frames: headers then cost 1 % of the shaped rate instead of 5 %.
MTU = 9000
PORT = 29_611


@dataclass(frozen=True)
class Shaping:
    """How tc's token buckets are set: bytes that may go at once, and how long a packet may wait."""

    burst: str = "128kb"
    latency: str = "50ms"


@dataclass(frozen=True)
class Cable:
    """A cable of its own between two hosts, with a rate in each direction, bit/s."""

    first: int
    second: int
    forward_bits_per_s: int
    backward_bits_per_s: int


@dataclass(frozen=True)
class Sites:
    """Hosts at several places: each has one line of its own to hosts of other places.

    Args:
        of_host: place of each host.
        bits_per_s: rate of each line, both ways.
        shaping: of the lines.
    """

    of_host: tuple[int, ...]
    bits_per_s: int
    shaping: Shaping = Shaping()


def skip_unless_possible(what: str) -> None:
    """Skip a test of ``what`` where namespaces cannot be made or torch is not installed."""
    reason = missing_requirement()
    if reason is None and importlib.util.find_spec("torch") is None:
        reason = f"{what} needs torch: pip install torch==2.13.0 (make test-netns does)"
    if reason:
        pytest.skip(reason)


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
        shape(name, "trial0", 10**8, Shaping())
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    return None


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)


def shape(namespace: str, device: str, bits_per_s: int, shaping: Shaping) -> None:
    rate = ["rate", f"{bits_per_s}bit", "burst", shaping.burst, "latency", shaping.latency]
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
def network(
    rates_bits_per_s: Sequence[int],
    cables: Sequence[Cable],
    shaping: Shaping | None = None,
    *,
    sites: Sites | None = None,
) -> Iterator[Network]:
    """Hosts with the given rates on one switch, the cables, and lines between sites; removed again in any case."""
    prefix, shaping = f"mp{os.getpid()}", shaping or Shaping()
    switch = f"{prefix}switch"
    hosts = tuple(f"{prefix}h{number}" for number in range(len(rates_bits_per_s)))
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "mtu", str(MTU), "up")
        for number, (host, rate) in enumerate(zip(hosts, rates_bits_per_s, strict=True)):
            _plug_into_switch(switch, host, number, rate, shaping)
        for number, cable in enumerate(cables):
            _lay(hosts, number, cable, shaping)
        if sites is not None:
            _join(switch, hosts, sites)
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


def _plug_into_switch(switch: str, host: str, number: int, rate: int, shaping: Shaping) -> None:
    port = f"port{number}"
    run("ip", "netns", "add", host)
    run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
    run("ip", "-n", host, "link", "set", "lo", "up")
    run("ip", "-n", host, "addr", "add", f"{Network.address(number)}/24", "dev", "eth0")
    run("ip", "-n", host, "link", "set", "eth0", "mtu", str(MTU), "up")
    run("ip", "-n", switch, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
    shape(host, "eth0", rate, shaping)
    shape(switch, port, rate, shaping)


def _join(switch: str, hosts: Sequence[str], sites: Sites) -> None:
    """A second bridge, which every host reaches over its line, and the ways to hosts of other sites over it."""
    run("ip", "-n", switch, "link", "add", "lines", "type", "bridge")
    run("ip", "-n", switch, "link", "set", "lines", "mtu", str(MTU), "up")
    for number, host in enumerate(hosts):
        port = f"line{number}"
        run("ip", "link", "add", "line", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
        run("ip", "-n", host, "link", "set", "line", "mtu", str(MTU), "up")
        run("ip", "-n", switch, "link", "set", port, "mtu", str(MTU), "master", "lines", "up")
        shape(host, "line", sites.bits_per_s, sites.shaping)
        shape(switch, port, sites.bits_per_s, sites.shaping)
        for other, site in enumerate(sites.of_host):
            if site != sites.of_host[number]:
                way = (f"{Network.address(other)}/32", "dev", "line", "src", Network.address(number))
                run("ip", "-n", host, "route", "add", *way)


def _lay(hosts: Sequence[str], number: int, cable: Cable, shaping: Shaping) -> None:
    device = f"cable{number}"
    ends = (
        (cable.first, cable.second, cable.forward_bits_per_s),
        (cable.second, cable.first, cable.backward_bits_per_s),
    )
    run("ip", "link", "add", device, "netns", hosts[cable.first], "type", "veth", "peer", "name", device,
        "netns", hosts[cable.second])  # fmt: skip
    for here, _, rate in ends:
        run("ip", "-n", hosts[here], "link", "set", device, "mtu", str(MTU), "up")
        shape(hosts[here], device, rate, shaping)
    for here, there, _ in ends:
        route = (f"{Network.address(there)}/32", "dev", device, "src", Network.address(here))
        run("ip", "-n", hosts[here], "route", "add", *route)
