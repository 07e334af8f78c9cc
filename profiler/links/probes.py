"""How one pair of endpoints, and one group, is measured over a :class:`~meshplan.profiler.links.transport.Transport`.

*Latency*: 8-byte ping-pongs; half a round trip, which cannot separate the two directions without synchronised
clocks, so both directions get the same value.

*Bandwidth*, each direction on its own: the source sends one message and waits for a control number that says it has
arrived; the time of one message is that time less half a round trip. Sizes grow until a message takes
:attr:`LinkProtocol.target_s`, long enough for token buckets, socket buffers and slow starts not to count. The rate at
the largest size is the link's bandwidth; the smaller ones are kept for the fit.

*Collectives*: the time of the slowest rank, from a barrier on. Rates are algorithm bandwidths (full buffer over
time); bus bandwidth follows by the usual factor (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshplan.profiler.links.transport import Transport
from meshplan.profiler.protocol import summarize

PING_BYTES = 8
STOP = 0
ARRIVED = 1
# The last step overshoots the target a little rather than missing it.
_OVERSHOOT = 1.2
_MIN_GROWTH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProtocol:
    """How thoroughly to measure a link.

    Args:
        warmup: ping-pongs that do not count.
        pings: ping-pongs that do.
        repeats: messages of each size.
        first_bytes: smallest message.
        growth: factor to the next size.
        max_bytes: largest message.
        target_s: stop when a message takes so long.
        collective_repeats: repeats of each collective and size; 0 leaves collectives out.
    """

    warmup: int = 3
    pings: int = 20
    repeats: int = 3
    first_bytes: int = 4096
    growth: int = 4
    max_bytes: int = 2**26
    target_s: float = 0.25
    collective_repeats: int = 3

    def document(self) -> dict[str, Any]:
        """What is stored with the measurements."""
        return asdict(self) | {
            "latency": "half the median round trip of 8 bytes",
            "bandwidth": "message over its time, less half a round trip; the largest message counts",
            "order": "round-robin tournament of disjoint pairs",
        }


QUICK = LinkProtocol(pings=8, repeats=2, target_s=0.05, growth=8, collective_repeats=0)
FULL = LinkProtocol()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One measured point of a directed link, between ranks.

    Args:
        source: rank that sends.
        target: rank that receives.
        size_bytes: message; None for the latency.
        times_s: repeated times of one message, in order.
    """

    source: int
    target: int
    size_bytes: int | None
    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One measured collective.

    Args:
        name: such as ``all_reduce``.
        ranks: the group.
        size_bytes: full buffer.
        times_s: repeated times of the slowest rank; empty where the library has no such collective.
    """

    name: str
    ranks: tuple[int, ...]
    size_bytes: int
    times_s: tuple[float, ...]


def measure_pair(transport: Transport, low: int, high: int, protocol: LinkProtocol) -> list[LinkSample]:
    """Measure both directions of a pair; called by both ranks, each returns what it has timed."""
    first = transport.rank == low
    round_trips = _ping(transport, high, protocol) if first else _pong(transport, low, protocol)
    # The other end needs the latency too; nanoseconds fit a control number.
    if first:
        latency_s = float(np.median(round_trips)) / 2.0
        transport.send_control(high, max(1, round(latency_s * 1e9)))
        halves = tuple(time / 2.0 for time in round_trips)
        samples = [
            LinkSample(source=source, target=target, size_bytes=None, times_s=halves)
            for source, target in ((low, high), (high, low))
        ]
    else:
        latency_s, samples = transport.receive_control(low) / 1e9, []
    for source, target in ((low, high), (high, low)):
        if transport.rank == source:
            samples += _send_curve(transport, target, latency_s, protocol)
        else:
            _receive_curve(transport, source, protocol)
    return samples


def measure_collective(
    transport: Transport, name: str, ranks: Sequence[int], size_bytes: int, protocol: LinkProtocol
) -> CollectiveSample:
    """Time one collective at one size; called by every rank of the world."""
    times: list[float] = []
    supported = True
    transport.prepare(size_bytes)
    for repeat in range(protocol.collective_repeats + 1):
        transport.barrier()
        begin = transport.clock()
        supported = transport.collective(name, ranks, size_bytes)
        mine = transport.clock() - begin if transport.rank in ranks else 0.0
        everybody = transport.gather(mine if supported else None)
        if any(time is None for time in everybody):
            return CollectiveSample(name=name, ranks=tuple(ranks), size_bytes=size_bytes, times_s=())
        if repeat:  # the first one connects and allocates
            times.append(max(everybody))
    return CollectiveSample(name=name, ranks=tuple(ranks), size_bytes=size_bytes, times_s=tuple(times))


def _ping(transport: Transport, other: int, protocol: LinkProtocol) -> tuple[float, ...]:
    times = []
    for _ in range(protocol.warmup + protocol.pings):
        begin = transport.clock()
        transport.send(other, PING_BYTES)
        transport.receive(other, PING_BYTES)
        times.append(transport.clock() - begin)
    return tuple(times[protocol.warmup :])


def _pong(transport: Transport, other: int, protocol: LinkProtocol) -> tuple[float, ...]:
    for _ in range(protocol.warmup + protocol.pings):
        transport.receive(other, PING_BYTES)
        transport.send(other, PING_BYTES)
    return ()


def _send_curve(transport: Transport, target: int, latency_s: float, protocol: LinkProtocol) -> list[LinkSample]:
    samples = []
    size = protocol.first_bytes
    while True:
        transport.send_control(target, size)
        transport.prepare(size)
        transport.receive_control(target)
        times = []
        for _ in range(protocol.repeats):
            begin = transport.clock()
            transport.send(target, size)
            transport.receive_control(target)
            elapsed = transport.clock() - begin
            # On a link faster than its own latency's jitter the rest could be nothing: half is what is certain.
            times.append(max(elapsed - latency_s, elapsed / 2.0))
        samples.append(
            LinkSample(source=transport.rank, target=target, size_bytes=size, times_s=tuple(times)),
        )
        typical = summarize(times).spread.value
        if typical >= protocol.target_s or size >= protocol.max_bytes:
            break
        growth = min(float(protocol.growth), max(_MIN_GROWTH, _OVERSHOOT * protocol.target_s / typical))
        size = min(protocol.max_bytes, int(size * growth))
    transport.send_control(target, STOP)
    return samples


def _receive_curve(transport: Transport, source: int, protocol: LinkProtocol) -> None:
    while (size := transport.receive_control(source)) != STOP:
        transport.prepare(size)
        transport.send_control(source, ARRIVED)
        for _ in range(protocol.repeats):
            transport.receive(source, size)
            transport.send_control(source, ARRIVED)
