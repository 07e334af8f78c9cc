"""Link runs over a simulated network: the matrix is the planted one, odd links are named, lost ranks can be resumed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshplan.catalogs.errors import ProfileError
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.profiler.links.probes import LinkProtocol
from meshplan.profiler.links.run import LinkOptions, LinkProfile, profile_links

Rates = Mapping[tuple[int, int], float]
# A thread that hears nothing for so long has lost its peer.
PATIENCE_S = 2.0
PROTOCOL = LinkProtocol(warmup=1, pings=3, repeats=2, target_s=0.05, growth=8)


class SimulatedNetwork:
    """Ranks as threads with clocks of their own: a message arrives after latency + bytes/rate of *simulated* time.

    Args:
        size: number of ranks.
        rates: directed pair → bytes/s.
        latency_s: of every message.
        dies: rank that stops when it has talked to so many others.
    """

    def __init__(
        self, size: int, rates: Rates, *, latency_s: float = 1e-4, dies: Mapping[int, int] | None = None
    ) -> None:
        self.size, self.rates, self.latency_s, self.dies = size, rates, latency_s, dict(dies or {})
        self.pipes = {(a, b): queue.Queue[tuple[float, Any]]() for a in range(size) for b in range(size)}

    def run(self, work: Callable[[SimulatedTransport], Any]) -> list[Any]:
        """Every rank's result, an exception where it raised one."""
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = work(SimulatedTransport(self, rank))
            except Exception as error:  # noqa: BLE001 - handed to the test
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class SimulatedTransport:
    """One rank of a :class:`SimulatedNetwork`."""

    name = "simulated"

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size
        self.now_s = 0.0
        self.partners: set[int] = set()
        self.unsupported: frozenset[str] = frozenset()

    def clock(self) -> float:
        return self.now_s

    def versions(self) -> dict[str, Any]:
        return {"torch": "2.13.0"}

    def prepare(self, num_bytes: int) -> None:
        pass

    def send(self, target: int, num_bytes: int) -> None:
        self.partners.add(target)
        if len(self.partners) > self.network.dies.get(self.rank, self.size):
            raise ProfileError(f"rank {self.rank} dies")
        duration = self.network.latency_s + num_bytes / self.network.rates[self.rank, target]
        self._put(target, self.now_s + duration, num_bytes)

    def receive(self, source: int, num_bytes: int) -> None:
        assert self._get(source) == num_bytes

    def send_control(self, target: int, value: int) -> None:
        self._put(target, self.now_s + self.network.latency_s, value)

    def receive_control(self, source: int) -> int:
        return int(self._get(source))

    def gather(self, value: Any) -> list[Any]:
        for other in range(self.size):
            if other != self.rank:
                self._put(other, self.now_s, value)
        return [value if other == self.rank else self._get(other) for other in range(self.size)]

    def broadcast_value(self, value: Any) -> Any:
        return self.gather(value)[0]

    def barrier(self) -> None:
        self.now_s = max(self.gather(self.now_s))

    def collective(self, name: str, ranks: Sequence[int], num_bytes: int) -> bool:
        if name in self.unsupported:
            return False
        if self.rank in ranks:
            slowest = min(self.network.rates[a, b] for a in ranks for b in ranks if a != b)
            self.now_s += self.network.latency_s * len(ranks) + num_bytes / slowest
        return True

    def _put(self, target: int, arrival_s: float, value: Any) -> None:
        self.network.pipes[self.rank, target].put((arrival_s, value))

    def _get(self, source: int) -> Any:
        try:
            arrival_s, value = self.network.pipes[source, self.rank].get(timeout=PATIENCE_S)
        except queue.Empty:
            raise ProfileError(f"rank {self.rank}: rank {source} is silent") from None
        self.now_s = max(self.now_s, arrival_s)
        return value


def uniform(size: int, rate: float) -> dict[tuple[int, int], float]:
    return {(a, b): rate for a in range(size) for b in range(size) if a != b}


@pytest.fixture(autouse=True)
def _named_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPLAN_HOST", "box")


def profiled(network: SimulatedNetwork, store: Measurements, **options: Any) -> list[Any]:
    def work(transport: SimulatedTransport) -> LinkProfile | None:
        def rails() -> Iterator[tuple[str, SimulatedTransport]]:
            yield "default", transport

        chosen = LinkOptions(**{"cluster": "lab", "protocol": PROTOCOL} | options)
        return profile_links(store if transport.rank == 0 else None, rails(), chosen)

    return network.run(work)


def test_the_matrix_is_the_planted_one(store: Measurements) -> None:
    rates = uniform(6, 1e9)
    rates[1, 4] = 2e8
    rates[2, 3] = 5e8
    results = profiled(SimulatedNetwork(6, rates), store)
    assert results[1:] == [None] * 5
    profile = results[0]
    assert isinstance(profile, LinkProfile)
    matrix = store.cluster("lab").bandwidths()
    for (a, b), rate in rates.items():
        assert matrix[a][b] == pytest.approx(rate, rel=0.01)
    assert profile.run.finished_at is not None
    assert profile.cluster.findings[0].startswith("slow link box/1 -> box/4: 199.7 MB/s, 20% of the 998.3 MB/s")
    assert profile.cluster.findings[1].startswith("slow link box/2 -> box/3")
    assert any(line.startswith("asymmetric box/4 / box/1") for line in profile.cluster.findings)


def test_fits_find_latency_and_bandwidth(store: Measurements) -> None:
    (profile, *_) = profiled(SimulatedNetwork(2, uniform(2, 1e9), latency_s=2e-4), store)
    fit = next(fit for fit in profile.fits if fit.subject == "box/0 -> box/1 [default]")
    assert fit.coefficients["bandwidth_bytes_per_s"] == pytest.approx(1e9, rel=0.02)
    assert fit.coefficients["latency_s"] == pytest.approx(2e-4, rel=0.02)
    assert fit.held_out_p90 < 0.02


def test_a_lost_rank_leaves_what_was_measured_and_resumes(store: Measurements) -> None:
    rates = uniform(4, 1e9)
    results = profiled(SimulatedNetwork(4, rates, dies={2: 1}), store)
    assert isinstance(results[2], ProfileError)
    assert isinstance(results[0], ProfileError)
    (run,) = store.runs()
    kept = store.keys(run.run_id)
    assert run.finished_at is None
    assert len(kept) > 0
    assert store.cluster_names() == ()

    (profile, *_) = profiled(SimulatedNetwork(4, rates), store)
    assert profile.run.run_id == run.run_id
    assert profile.run.finished_at is not None
    assert kept < store.keys(run.run_id)
    assert len(store.cluster("lab").links) == 12


def test_a_sampled_run_names_what_it_left_out(store: Measurements) -> None:
    pairs_only = replace(PROTOCOL, collective_repeats=0, pings=1, target_s=1e-3)
    (profile, *_) = profiled(SimulatedNetwork(18, uniform(18, 1e9)), store, max_complete=8, protocol=pairs_only)
    measured = {(link.source, link.target) for link in profile.cluster.links}
    assert measured.isdisjoint(profile.cluster.unmeasured)
    assert len(measured) + len(profile.cluster.unmeasured) == 18 * 17
    assert profile.cluster.unmeasured
    assert "of 306 directed pairs were not measured" in profile.cluster.findings[-1]


def test_an_unsupported_collective_is_a_note(store: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SimulatedTransport.collective

    def without(self: SimulatedTransport, name: str, ranks: Any, num_bytes: int) -> bool:
        return name != "all_to_all" and original(self, name, ranks, num_bytes)

    monkeypatch.setattr(SimulatedTransport, "collective", without)
    (profile, *_) = profiled(SimulatedNetwork(3, uniform(3, 1e9)), store)
    assert profile.notes == ("all_to_all is not measured: simulated has none",)
    probes = {row.probe for row in profile.measurements}
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast"} < probes
    assert "all_to_all" not in probes


@pytest.mark.parametrize(("library", "old"), [("torch", "2.12.1"), ("nccl", "2.26.2"), ("meshplan", "0.0.9")])
def test_ranks_of_different_versions_are_refused(
    store: Measurements, monkeypatch: pytest.MonkeyPatch, library: str, old: str
) -> None:
    monkeypatch.setattr(SimulatedTransport, "versions", lambda self: {library: old} if self.rank else {})
    results = profiled(SimulatedNetwork(2, uniform(2, 1e9)), store)
    assert all(isinstance(result, ProfileError) for result in results)
    assert f"{library}: {old} on box/1" in str(results[0])
    assert "--allow-mixed-versions" in str(results[0])


def test_rails_are_kept_apart(store: Measurements) -> None:
    slow, fast = SimulatedNetwork(2, uniform(2, 1e8)), SimulatedNetwork(2, uniform(2, 1e9))

    def work(transport: SimulatedTransport) -> LinkProfile | None:
        def rails() -> Iterator[tuple[str, SimulatedTransport]]:
            yield "eth0", transport
            yield "eth1", SimulatedTransport(fast, transport.rank)

        chosen = LinkOptions(cluster="lab", protocol=PROTOCOL)
        return profile_links(store if transport.rank == 0 else None, rails(), chosen)

    (profile, _) = slow.run(work)
    assert profile.cluster.rails == ("eth0", "eth1")
    assert profile.cluster.bandwidths("eth0")[0][1] == pytest.approx(1e8, rel=0.02)
    assert profile.cluster.bandwidths("eth1")[0][1] == pytest.approx(1e9, rel=0.02)
    assert profile.cluster.bandwidths()[0][1] == pytest.approx(1.1e9, rel=0.02)


def test_one_rank_has_no_links(store: Measurements) -> None:
    (result,) = profiled(SimulatedNetwork(1, {}), store)
    assert "one rank has no links" in str(result)
