"""Runs the link probes over all ranks: rounds of disjoint pairs, then collectives; rank 0 writes the catalog.

After each round the results go to rank 0, which writes them at once. A run that lost a rank leaves the finished rounds
in the catalog; started again, it asks rank 0 which rounds are missing and does only these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.errors import ProfileError
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import ClusterProfile, Fit, Measurement, Metric, ProfileRun
from meshplan.catalogs.units import now
from meshplan.profiler.device.run import tool_source
from meshplan.profiler.environment import host_environment, host_name, version_disagreements
from meshplan.profiler.links.fits import cluster_profile, link_fits
from meshplan.profiler.links.probes import (
    FULL,
    CollectiveSample,
    LinkProtocol,
    LinkSample,
    measure_collective,
    measure_pair,
)
from meshplan.profiler.links.tournament import MAX_COMPLETE, Round, rounds, sampled_rounds, unmeasured
from meshplan.profiler.links.transport import COLLECTIVES, Transport
from meshplan.profiler.protocol import as_rate, summarize

DEFAULT_RAIL = "default"
_COLLECTIVE_GROWTH = 8
_FIRST_COLLECTIVE_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How to profile links.

    Args:
        cluster: name of the cluster profile.
        protocol: how thoroughly.
        max_complete: with more endpoints a sample of the rounds is measured.
        allow_mixed_versions: go on when ranks run different library versions.
        progress: called with each line of progress, on rank 0.
    """

    cluster: str
    protocol: LinkProtocol = FULL
    max_complete: int = MAX_COMPLETE
    allow_mixed_versions: bool = False
    progress: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """What a link run did.

    Args:
        run: the run.
        cluster: the matrix and what it says.
        measurements: every point.
        fits: alpha–beta per link, class and collective.
        notes: collectives that the library does not have, ranks that disagree on versions.
        wall_s: seconds.
    """

    run: ProfileRun
    cluster: ClusterProfile
    measurements: tuple[Measurement, ...]
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]
    wall_s: float


@dataclass(slots=True, kw_only=True)
class _Session:
    """One rail's pass, on one rank; ``store`` and ``run`` are rank 0's alone."""

    transport: Transport
    endpoints: tuple[str, ...]
    hosts: tuple[str, ...]
    rail: str
    options: LinkOptions
    store: Measurements | None
    run: ProfileRun | None
    notes: list[str]


def profile_links(
    store: Measurements | None, transports: Iterable[tuple[str, Transport]], options: LinkOptions
) -> LinkProfile | None:
    """Measure every directed pair and the collectives; called by every rank.

    Args:
        store: the catalog on rank 0, None on the others.
        transports: (rail, connected transport) one after the other: each is used up before the next is asked for.
        options: how.

    Returns:
        The profile on rank 0, None on the others.

    Raises:
        ProfileError: a rank died, or the ranks disagree on versions.
    """
    start = time.perf_counter()
    session: _Session | None = None
    missing: list[tuple[int, int]] = []
    for rail, transport in transports:
        if transport.size <= 1:
            raise ProfileError("one rank has no links; start one process per device on two or more devices")
        session = _joined(store, transport, rail, options, session)
        schedule = _schedule(transport.size, options)
        missing = unmeasured(transport.size, schedule)
        _measure_pairs(session, schedule)
        if options.protocol.collective_repeats:
            _measure_collectives(session)
        transport.barrier()
    if session is None:
        raise ProfileError("no rail to measure; name at least one with --rail")
    if session.store is None or session.run is None:
        return None
    return _finished(session, missing, start)


def _joined(
    store: Measurements | None, transport: Transport, rail: str, options: LinkOptions, earlier: _Session | None
) -> _Session:
    environment = host_environment() | {"transport": transport.name} | transport.versions()
    everybody: list[dict[str, Any]] = transport.gather(environment)
    hosts = tuple(str(found["host"]) for found in everybody)
    endpoints = _endpoint_names(hosts)
    disagreements = version_disagreements(dict(zip(endpoints, everybody, strict=True)))
    if disagreements and not options.allow_mixed_versions:
        listing = "\n".join(f"  - {line}" for line in disagreements)
        raise ProfileError(f"the ranks run different versions:\n{listing}\ninstall the same, or --allow-mixed-versions")
    run, notes = None, [f"ranks disagree on {line}" for line in disagreements]
    if earlier is not None:
        run, notes = earlier.run, earlier.notes
    elif store is not None:
        run = _started(store, everybody, endpoints, options)
    return _Session(
        transport=transport,
        endpoints=endpoints,
        hosts=hosts,
        rail=rail,
        options=options,
        store=store,
        run=run,
        notes=notes,
    )


def _started(
    store: Measurements, everybody: Sequence[dict[str, Any]], endpoints: Sequence[str], options: LinkOptions
) -> ProfileRun:
    protocol = options.protocol.document() | {"endpoints": list(endpoints)}
    found = store.resumable("links", host=host_name(), protocol=protocol, cluster=options.cluster)
    if found is not None:
        options.progress(f"resuming run {found.run_id}")
        return found
    environment = {"ranks": dict(zip(endpoints, everybody, strict=True))}
    return store.start("links", host=host_name(), environment=environment, protocol=protocol, cluster=options.cluster)


def _schedule(size: int, options: LinkOptions) -> list[Round]:
    return rounds(size) if size <= options.max_complete else sampled_rounds(size)


def _measure_pairs(session: _Session, schedule: Sequence[Round]) -> None:
    transport = session.transport
    for number in transport.broadcast_value(_rounds_to_do(session, schedule)):
        transport.barrier()
        pair = next((pair for pair in schedule[number] if transport.rank in pair), None)
        samples = measure_pair(transport, pair[0], pair[1], session.options.protocol) if pair else []
        everybody = [sample for found in transport.gather(samples) for sample in found]
        if session.store is not None and session.run is not None:
            session.store.add(session.run.run_id, [_link_measurement(session, sample) for sample in everybody])
            session.options.progress(f"rail {session.rail}: round {number + 1} of {len(schedule)} measured")


def _rounds_to_do(session: _Session, schedule: Sequence[Round]) -> list[int]:
    """On rank 0: rounds with a directed pair whose latency and bandwidth are not both in the catalog."""
    if session.store is None or session.run is None:
        return []
    have = {
        (row.link, row.probe)
        for row in session.store.of_run(session.run.run_id)
        if row.parameters.get("rail") == session.rail
    }

    def is_measured(low: int, high: int) -> bool:
        names = [_link_name(session, *ends) for ends in ((low, high), (high, low))]
        return all((name, probe) in have for name in names for probe in ("link_latency", "link_bandwidth"))

    return [number for number, pairs in enumerate(schedule) if not all(is_measured(*pair) for pair in pairs)]


def _measure_collectives(session: _Session) -> None:
    transport, protocol = session.transport, session.options.protocol
    for ranks in _groups(session.hosts):
        for name in COLLECTIVES:
            size = _FIRST_COLLECTIVE_BYTES
            while True:
                sample = measure_collective(transport, name, ranks, size, protocol)
                enough = _record_collective(session, sample)
                if transport.broadcast_value(enough):
                    break
                size *= _COLLECTIVE_GROWTH


def _record_collective(session: _Session, sample: CollectiveSample) -> bool:
    """On rank 0: store a collective; whether larger sizes are not wanted."""
    if session.store is None or session.run is None:
        return True  # rank 0's answer counts
    if not sample.times_s:
        session.notes.append(f"{sample.name} is not measured: {session.transport.name} has none")
        return True
    measurement = _collective_measurement(session, sample)
    session.store.add(session.run.run_id, [measurement])
    session.options.progress(f"{sample.name} over {len(sample.ranks)} ranks, {sample.size_bytes} bytes measured")
    protocol = session.options.protocol
    typical = summarize(sample.times_s).spread.value
    # The next size takes up to _COLLECTIVE_GROWTH times as long.
    return 2.0 * typical >= protocol.target_s or sample.size_bytes * _COLLECTIVE_GROWTH > protocol.max_bytes


def _finished(session: _Session, missing: Sequence[tuple[int, int]], start: float) -> LinkProfile:
    store, run = session.store, session.run
    if store is None or run is None:
        raise ProfileError("only rank 0 has the results")
    found = store.of_run(run.run_id)
    fits = link_fits(found)
    names = [(session.endpoints[low], session.endpoints[high]) for low, high in missing]
    both_ways = [pair for low, high in names for pair in ((low, high), (high, low))]
    cluster = cluster_profile(
        session.options.cluster, run.run_id, session.endpoints, found, unmeasured=both_ways, measured_at=now()
    )
    store.add_fits(run.run_id, fits)
    store.put_cluster(cluster)
    store.finish(run.run_id)
    return LinkProfile(
        run=store.run(run.run_id),
        cluster=cluster,
        measurements=found,
        fits=tuple(fits),
        notes=tuple(dict.fromkeys(session.notes)),
        wall_s=time.perf_counter() - start,
    )


def _link_measurement(session: _Session, sample: LinkSample) -> Measurement:
    link = _link_name(session, sample.source, sample.target)
    if sample.size_bytes is None:
        return _measurement(session, "link_latency", link, sample.source, sample.times_s, {})
    size = {"size_bytes": sample.size_bytes}
    return _measurement(session, "link_bandwidth", link, sample.source, sample.times_s, size)


def _collective_measurement(session: _Session, sample: CollectiveSample) -> Measurement:
    everybody = len(sample.ranks) == session.transport.size
    first = sample.ranks[0]
    group = f"all {len(sample.ranks)} ranks" if everybody else f"ranks of {session.hosts[first]}"
    size = {"size_bytes": sample.size_bytes, "num_ranks": len(sample.ranks)}
    return _measurement(session, sample.name, group, first, sample.times_s, size)


def _measurement(
    session: _Session, probe: str, link: str, rank: int, times_s: Sequence[float], size: dict[str, int]
) -> Measurement:
    """A rate where there is a size, else a latency."""
    timing = summarize(times_s)
    return Measurement(
        probe=probe,
        link=link,
        parameters={"rail": session.rail, **size},
        metric=Metric.BYTES_PER_S if size else Metric.LATENCY_S,
        spread=as_rate(timing, float(size["size_bytes"])) if size else timing.spread,
        source=f"{tool_source()} ({session.transport.name})",
        host=session.hosts[rank],
        measured_at=now(),
        warnings=timing.warnings,
    )


def _link_name(session: _Session, source: int, target: int) -> str:
    return f"{session.endpoints[source]} -> {session.endpoints[target]}"


def _groups(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """All ranks, and the ranks of each host where it has several."""
    everybody = tuple(range(len(hosts)))
    by_host = [tuple(rank for rank in everybody if hosts[rank] == host) for host in dict.fromkeys(hosts)]
    return [everybody, *(ranks for ranks in by_host if 1 < len(ranks) < len(everybody))]


def _endpoint_names(hosts: Sequence[str]) -> tuple[str, ...]:
    """The host's name; with its rank on the host where it has several."""
    names, seen = [], dict.fromkeys(hosts, 0)
    for host in hosts:
        names.append(host if hosts.count(host) == 1 else f"{host}/{seen[host]}")
        seen[host] += 1
    return tuple(names)
