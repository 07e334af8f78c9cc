"""How many nodes there were over time, from a CSV file, plain or compressed with gzip.

The first line names the columns, in any order: ``time_s`` (seconds, ascending within a trace) and ``nodes`` (available
from then on); if known ``trace`` (name, where one file holds several) and ``usd_per_node_hour`` (price from then on).
A column ``event`` is read past, except that its value ``end`` ends a trace; without it a trace ends with its last line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.units import SECONDS_PER_HOUR
from meshplan.catalogs.untrusted.documents import DocumentError
from meshplan.catalogs.untrusted.streams import csv_rows
from meshplan.planner.core.arrays import FloatArray, IntArray

FIELD = "run.availability"  # of the spec that names the file
NEEDED = ("time_s", "nodes")
OPTIONAL = ("trace", "event", "usd_per_node_hour")
# A year of samples of one second has 3e7 lines; a trace lists changes alone.
MOST_LINES, MOST_NODES, MOST_SECONDS = 1_000_000, 100_000, 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityTrace:
    """Nodes over time, constant between two times.

    Args:
        name: of the trace.
        times_s: [spells + 1], ascending, seconds; the last is the end.
        nodes: [spells], available from ``times_s[i]`` to ``times_s[i + 1]``.
        usd_per_node_hour: [spells]; None where no price is known.
    """

    name: str
    times_s: FloatArray
    nodes: IntArray
    usd_per_node_hour: FloatArray | None = None

    @property
    def length_s(self) -> float:
        """Seconds from the first time to the last."""
        return float(self.times_s[-1] - self.times_s[0])

    @property
    def mean_nodes(self) -> float:
        """Nodes available on average over time."""
        return float(np.diff(self.times_s) @ self.nodes) / self.length_s

    @property
    def mean_usd_per_s(self) -> float | None:
        """Dollars per second for all available nodes, on average; None without prices."""
        if self.usd_per_node_hour is None:
            return None
        paid = np.diff(self.times_s) * self.nodes * self.usd_per_node_hour / SECONDS_PER_HOUR
        return float(paid.sum()) / self.length_s

    def at_most(self, nodes: int) -> AvailabilityTrace:
        """The trace as a cluster of so many nodes sees it."""
        return replace(self, nodes=np.minimum(self.nodes, nodes))

    def changes(self) -> AvailabilityTrace:
        """The trace without prices, each spell as long as the number of nodes stays the same."""
        begins = np.append(True, np.diff(self.nodes) != 0)
        return AvailabilityTrace(
            name=self.name,
            times_s=np.append(self.times_s[:-1][begins], self.times_s[-1]),
            nodes=self.nodes[begins],
        )


def read_availability(path: Path) -> tuple[AvailabilityTrace, ...]:
    """The traces of a file, in the order of their first lines.

    Raises:
        SpecError: unreadable, a malformed line (named by its number), or a trace without a span of time.
    """
    where = f"the availability trace {path}"
    try:
        rows = csv_rows(path)
        header = [name.strip() for name in next(rows, [])]
        _check_header(header, where)
        found: dict[str, list[tuple[float, int, float]]] = {}
        for number, row in enumerate(rows, start=2):
            if number > MOST_LINES:
                raise SpecError.at("", f"more than {MOST_LINES:,} lines", of=where)
            if row:
                name, point = _point(dict(zip(header, row, strict=False)), number, where)
                found.setdefault(name, []).append(point)
    except (OSError, DocumentError, UnicodeError) as error:
        raise SpecError.at(FIELD, f"{path}: {error}") from error
    if not found:
        raise SpecError.at(FIELD, "there are no lines below the header", of=where)
    return tuple(_trace(name, points, where) for name, points in found.items())


def _check_header(header: Sequence[str], where: str) -> None:
    missing = [name for name in NEEDED if name not in header]
    unknown = [name for name in header if name not in (*NEEDED, *OPTIONAL)]
    if missing or unknown or len(set(header)) != len(header):
        wrong = f"without {', '.join(missing)}" if missing else f"unknown or twice: {', '.join(unknown or header)}"
        message = f"columns {wrong}; known are {', '.join((*NEEDED, *OPTIONAL))}"
        raise SpecError.at("line 1", message, of=where)


def _point(cells: dict[str, str], number: int, where: str) -> tuple[str, tuple[float, int, float]]:
    """(trace, (time, nodes, price)) of one line."""
    try:
        time_s, nodes = _number(cells, "time_s"), _number(cells, "nodes")
        usd = _number(cells, "usd_per_node_hour") if cells.get("usd_per_node_hour") else math.nan
        if not nodes.is_integer() and math.isfinite(nodes):
            raise ValueError(f"nodes: {cells['nodes']!r} is not a whole number such as 8")
        if not (abs(time_s) <= MOST_SECONDS and 0 <= nodes <= MOST_NODES and not usd < 0.0 and not math.isinf(usd)):
            raise ValueError("out of range")
    except (KeyError, ValueError) as error:
        raise SpecError.at(f"line {number}", f"{error}: {dict(cells)}"[:200], of=where) from error
    return cells.get("trace", "") or "trace", (time_s, int(nodes), usd)


def _number(cells: dict[str, str], name: str) -> float:
    try:
        return float(cells[name])
    except ValueError:
        raise ValueError(f"{name}: {cells[name]!r} is not a number") from None


def _trace(name: str, points: Sequence[tuple[float, int, float]], where: str) -> AvailabilityTrace:
    times = np.array([time for time, _, _ in points])
    if len(times) == 1 or (np.diff(times) < 0.0).any() or times[-1] <= times[0]:
        message = f"{name}: its times must ascend over at least two lines"
        raise SpecError.at(FIELD, message, of=where)
    keeps = np.diff(times) > 0.0
    prices = np.array([usd for _, _, usd in points[:-1]])[keeps]
    return AvailabilityTrace(
        name=name,
        times_s=np.append(times[:-1][keeps], times[-1]),
        nodes=np.array([nodes for _, nodes, _ in points[:-1]], dtype=np.int64)[keeps],
        usd_per_node_hour=None if np.isnan(prices).any() else prices,
    )
