"""The output of mpiGraph: the directed bandwidth matrix of a cluster, in MiB/s.

The ``Send`` table has a heading ``Send  host:rank …`` and one row ``host:rank to  value …`` per sender. Every host
sends and receives at once while mpiGraph measures, so its rates include what that costs.

Source: https://github.com/LLNL/mpiGraph/blob/244d1a9f2b4b949365c568a2941adb980253e3ff/mpiGraph.c (format; MB is 2²⁰).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.importers.csv_tables import MAX_PROBLEMS, refusal
from meshplan.catalogs.measurements.types import ClusterProfile, MeasuredLink, Measurement, Metric, Spread

MIB = 2**20
_START, _END, _TABLE, _ROW = "START mpiGraph", "END mpiGraph", "Send", " to"
# mpiGraph prints no latency; it is unknown, and a microsecond is below what any network does.
UNKNOWN_LATENCY_S = 1e-6


def is_mpigraph(text: str) -> bool:
    """Whether a text is the output of mpiGraph."""
    return _START in text


def read_mpigraph(text: str, *, name: str, measured_at: str) -> list[Measurement]:
    """The send bandwidth of every ordered pair.

    Args:
        text: the output.
        name: the file's, for messages and the source.
        measured_at: ISO 8601.

    Raises:
        CatalogError: cut off, or rows that do not fit the heading.
    """
    lines = [line.rstrip("\t ") for line in text.splitlines()]
    problems: list[Problem] = []
    if _END not in text:
        problems.append(Problem(path="", message=f"no {_END!r} at the end: the run was cut off"))
    header = next((index for index, line in enumerate(lines) if line.startswith(f"{_TABLE}\t")), None)
    if header is None:
        problems.append(Problem(path="", message=f"no table {_TABLE!r}"))
        raise refusal(Path(name), problems)
    names = lines[header].split("\t")[1:]
    size = next((int(line.split("\t")[1]) for line in lines if line.startswith("MsgSize\t")), 0)
    measurements: list[Measurement] = []
    for offset, source in enumerate(names, start=1):
        number = header + offset + 1
        cells = lines[header + offset].split("\t") if header + offset < len(lines) else []
        message = _row_problem(cells, source, len(names))
        if message:
            problems.append(Problem(path=f"line {number}", message=message))
            continue
        for target, cell in zip(names, cells[1:], strict=True):
            if source != target:
                measurements.append(_measurement(source, target, float(cell) * MIB, size, name, measured_at))
    if problems:
        raise refusal(Path(name), problems[:MAX_PROBLEMS])
    return measurements


def cluster_of(rows: Sequence[Measurement], *, name: str, run_id: str) -> ClusterProfile:
    """The matrix of an imported output as a cluster profile."""
    links = []
    for row in rows:
        source, _, target = (row.link or "").partition(" -> ")
        links.append(
            MeasuredLink(
                source=source,
                target=target,
                rail="default",
                bandwidth_bytes_per_s=row.spread,
                latency_s=Spread.single(UNKNOWN_LATENCY_S),
            )
        )
    return ClusterProfile(
        name=name,
        run_id=run_id,
        measured_at=rows[0].measured_at,
        endpoints=tuple(dict.fromkeys(link.source for link in links)),
        links=tuple(links),
        findings=("latencies are unknown (mpiGraph prints none) and stand as 1 us",),
    )


def _row_problem(cells: Sequence[str], source: str, count: int) -> str | None:
    if not cells or cells[0] != f"{source}{_ROW}":
        return f"expected the row of {source!r}, found {cells[0] if cells else 'the end'!r}"
    if len(cells) != count + 1:
        return f"{len(cells) - 1} values under {count} headings"
    for cell, index in zip(cells[1:], range(count), strict=True):
        try:
            value = float(cell)
        except ValueError:
            return f"{cell!r} is not a number"
        if value < 0.0 or (value == 0.0 and not _is_own(source, index)):
            return f"{cell} MB/s to rank {index}: not measured"
    return None


def _is_own(source: str, index: int) -> bool:
    return source.rpartition(":")[2] == str(index)


def _measurement(source: str, target: str, rate: float, size: int, name: str, measured_at: str) -> Measurement:
    return Measurement(
        probe="link_bandwidth",
        link=f"{source} -> {target}",
        parameters={"size_bytes": size, "rail": "default"},
        metric=Metric.BYTES_PER_S,
        spread=Spread.single(rate),
        source=f"mpiGraph output {name}",
        host=source.rpartition(":")[0],
        measured_at=measured_at,
    )
