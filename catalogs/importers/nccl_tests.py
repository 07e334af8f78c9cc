"""Logs of nccl-tests and rccl-tests, which print the same table.

Sizes are in bytes, times in µs, bandwidths in GB/s (10⁹); the log must say so in its second heading line, and size
over time must agree with the printed algorithm bandwidth, so that a log of another version whose columns moved is
rejected instead of misread.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (meaning of algbw and busbw).
"""

from __future__ import annotations

import re
from pathlib import Path

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.importers.csv_tables import MAX_PROBLEMS, refusal
from meshplan.catalogs.measurements.types import Measurement, Metric, Spread

_HEADING = re.compile(r"^#\s+size\s+count\s+type\b.*\btime\s+algbw\s+busbw", re.MULTILINE)
_UNITS = re.compile(r"^#\s+\(B\)\s+\(elements\).*\(us\)\s+\(GB/s\)\s+\(GB/s\)", re.MULTILINE)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.+?)\s*$", re.MULTILINE)
_TEST = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)_perf\b")
_NAMES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
# Times are printed with four digits, bandwidths with two decimals.
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE_GB_PER_S = 0.01, 0.006
_MIN_CELLS = 8


def is_nccl_tests(text: str) -> bool:
    """Whether a text is a log of nccl-tests or rccl-tests."""
    return _HEADING.search(text) is not None


def read_nccl_tests(text: str, *, name: str, measured_at: str, device: str | None = None) -> list[Measurement]:
    """The out-of-place rows of a log, as algorithm bandwidths.

    Args:
        text: the log.
        name: the file's, for messages and the source.
        measured_at: ISO 8601.
        device: what it was measured on; None takes the name that the log gives its first rank.

    Raises:
        CatalogError: no units, no test name, or rows that contradict themselves.
    """
    problems: list[Problem] = []
    test = _TEST.search(text)
    ranks = _RANK.findall(text)
    if _UNITS.search(text) is None:
        problems.append(
            Problem(path="header", message="no line with the units (B) (us) (GB/s); numbers without a unit")
        )
    if test is None:
        problems.append(
            Problem(path="", message="no test name such as all_reduce_perf; keep the command line in the log")
        )
    if not ranks:
        problems.append(Problem(path="", message="no lines '# Rank 0 … on HOST device …'; keep the whole log"))
    rows = [
        (line, cells)
        for line, content in enumerate(text.splitlines(), start=1)
        if (cells := content.split()) and cells[0].isdigit()
    ]
    if not rows:
        problems.append(Problem(path="", message="no measured rows"))
    for line, cells in rows:
        message = _row_problem(cells, _bus_factor(test.group(1) if test else "", len(ranks)))
        if message and len(problems) < MAX_PROBLEMS:
            problems.append(Problem(path=f"line {line}", message=message))
    if problems or test is None:
        raise refusal(Path(name), problems)
    collective = _NAMES.get(test.group(1), test.group(1))
    hosts = list(dict.fromkeys(host for _, host, _ in ranks))
    return [
        _measurement(cells, collective, len(ranks), hosts, device or ranks[0][2], name, measured_at)
        for _, cells in rows
        if int(cells[0]) > 0
    ]


def _bus_factor(test: str, num_ranks: int) -> float | None:
    """Bus over algorithm bandwidth; None where the number of ranks is unknown."""
    if not num_ranks:
        return None
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2.0 * share, "broadcast": 1.0, "sendrecv": 1.0}.get(test, share)


def _row_problem(cells: list[str], bus_factor: float | None) -> str | None:
    if len(cells) < _MIN_CELLS:
        return f"{len(cells)} values, at least {_MIN_CELLS} expected"
    try:
        size, time_us, algorithm_gb_per_s, bus_gb_per_s = (float(cells[index]) for index in (0, 5, 6, 7))
    except ValueError:
        return f"not numbers: size {cells[0]}, time {cells[5]}, algbw {cells[6]}, busbw {cells[7]}"
    if time_us <= 0.0:
        return f"time {time_us} us is not positive"
    implied = size / time_us / 1e3
    if not _agree(implied, algorithm_gb_per_s):
        return (
            f"size/time is {implied:.2f} GB/s but algbw says {algorithm_gb_per_s:.2f}: other units or swapped columns"
        )
    # Time and algorithm bandwidth swapped would still multiply to the size.
    if bus_factor is not None and not _agree(bus_factor * algorithm_gb_per_s, bus_gb_per_s):
        return f"busbw {bus_gb_per_s:.2f} is not {bus_factor:.3f} × algbw {algorithm_gb_per_s:.2f}: swapped columns"
    return None


def _agree(expected: float, printed: float) -> bool:
    return abs(expected - printed) <= max(_ABSOLUTE_TOLERANCE_GB_PER_S, _RELATIVE_TOLERANCE * expected)


def _measurement(
    cells: list[str], collective: str, num_ranks: int, hosts: list[str], device: str, name: str, measured_at: str
) -> Measurement:
    size = int(cells[0])
    rate = size / (float(cells[5]) * 1e-6)
    group = f"{num_ranks} ranks of {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    return Measurement(
        probe=collective,
        link=f"{device}: {group}",
        dtype=cells[2],
        parameters={"size_bytes": size, "num_ranks": num_ranks, "num_hosts": len(hosts), "rail": "default"},
        metric=Metric.BYTES_PER_S,
        # One printed mean; the log does not say how it spread.
        spread=Spread.single(rate),
        source=f"nccl-tests log {name}",
        host=hosts[0],
        measured_at=measured_at,
    )
