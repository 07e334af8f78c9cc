"""From link measurements to the cluster profile: the directed matrix, alpha–beta fits, and what is odd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshplan.catalogs.measurements.types import ClusterProfile, Fit, MeasuredLink, Measurement
from meshplan.profiler.fitting.lines import fit_alpha_beta
from meshplan.profiler.links.analysis import findings, link_classes
from meshplan.profiler.links.probes import PING_BYTES

Curve = list[tuple[float, float]]


def measured_links(measurements: Iterable[Measurement]) -> list[MeasuredLink]:
    """Latency and the rate of the largest message of every directed link and rail that has both."""
    latency: dict[tuple[str, str], Measurement] = {}
    largest: dict[tuple[str, str], Measurement] = {}
    for row in measurements:
        key = (row.link or "", str(row.parameters.get("rail")))
        if row.probe == "link_latency":
            latency[key] = row
        elif row.probe == "link_bandwidth":
            best = largest.get(key)
            if best is None or row.parameters["size_bytes"] > best.parameters["size_bytes"]:
                largest[key] = row
    links = []
    for (name, rail), row in largest.items():
        source, _, target = name.partition(" -> ")
        if (name, rail) in latency:
            links.append(
                MeasuredLink(
                    source=source,
                    target=target,
                    rail=rail,
                    bandwidth_bytes_per_s=row.spread,
                    latency_s=latency[name, rail].spread,
                )
            )
    return links


def cluster_profile(
    name: str,
    run_id: str,
    endpoints: Sequence[str],
    measurements: Iterable[Measurement],
    *,
    unmeasured: Iterable[tuple[str, str]],
    measured_at: str,
) -> ClusterProfile:
    """The matrix of a run with its findings."""
    links = measured_links(measurements)
    missing = tuple(unmeasured)
    notes = findings(links)
    if missing:
        notes.append(
            f"{len(missing)} of {len(endpoints) * (len(endpoints) - 1)} directed pairs were not measured (sample); "
            f"first: {missing[0][0]} -> {missing[0][1]}"
        )
    return ClusterProfile(
        name=name,
        run_id=run_id,
        measured_at=measured_at,
        endpoints=tuple(endpoints),
        links=tuple(links),
        unmeasured=missing,
        findings=tuple(notes),
    )


def link_fits(measurements: Iterable[Measurement]) -> list[Fit]:
    """Alpha–beta lines: one per directed link, one per class of links, one per collective and group."""
    rows = list(measurements)
    return [*_pair_fits(rows), *_class_fits(rows), *_collective_fits(rows)]


def _pair_fits(rows: list[Measurement]) -> Iterator[Fit]:
    for (link, rail), curve in _curves(rows, probe="link_bandwidth").items():
        yield from _line(f"{link} [{rail}]", curve, "link_bandwidth probe, one directed link")


def _class_fits(rows: list[Measurement]) -> Iterator[Fit]:
    curves = _curves(rows, probe="link_bandwidth")
    links = measured_links(rows)
    for rail in dict.fromkeys(link.rail for link in links):
        for group in link_classes([link for link in links if link.rail == rail]):
            curve = [point for source, target in group.links for point in curves[f"{source} -> {target}", rail]]
            yield from _line(f"{group.name} [{rail}]", curve, f"link_bandwidth probe, {len(group.links)} links")


def _collective_fits(rows: list[Measurement]) -> Iterator[Fit]:
    pair_probes = ("link_latency", "link_bandwidth")
    for probe in dict.fromkeys(row.probe for row in rows if row.probe not in pair_probes):
        for (group, rail), curve in _curves(rows, probe=probe).items():
            yield from _line(f"{probe}: {group} [{rail}]", curve, f"{probe} probe, full buffer over time")


def _curves(rows: list[Measurement], *, probe: str) -> dict[tuple[str, str], Curve]:
    """(link, rail) → (size in bytes, seconds) points; the ping-pong is the smallest message of a link."""
    curves: dict[tuple[str, str], Curve] = {}
    for row in rows:
        if probe == "link_bandwidth" and row.probe == "link_latency":
            key = (row.link or "", str(row.parameters["rail"]))
            curves.setdefault(key, []).append((float(PING_BYTES), row.spread.value))
        if row.probe == probe:
            size = float(row.parameters["size_bytes"])
            key = (row.link or "", str(row.parameters["rail"]))
            curves.setdefault(key, []).append((size, size / row.spread.value))
    return curves


def _line(subject: str, curve: Curve, source: str) -> Iterator[Fit]:
    sizes, times = zip(*curve, strict=True)
    fit = fit_alpha_beta(subject, sizes, times, source=source)
    if fit is not None:
        yield fit
