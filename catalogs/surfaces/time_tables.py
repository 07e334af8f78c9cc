"""One kernel's times on a grid: a formula, a correction, and the guarantee that more work never costs less.

log(measured/formula) lies on a grid of the formula's coordinates (:mod:`meshplan.catalogs.surfaces.grid`). The log
times at the knots are then made to rise along the axes where more is more work; between knots they are interpolated,
beyond the grid they grow as the formula does::

    time(x) = exp(interpolated log time at x̂) · formula(x)/formula(x̂),    x̂ = x drawn back into the grid
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.surfaces.files import Row
from meshplan.catalogs.surfaces.grid import FloatArray, Knots, grid_from_row, grid_row, grid_value, monotone

STEP = 0.02  # resolution of a stored correction, in log(time)
_FIRST_CONTEXT = 64.0  # tokens: a chunk is priced at octaves of context from here
Points = tuple[FloatArray, ...]
Key = TypeVar("Key", bound=Hashable)
Formula = Callable[[FloatArray, Points], FloatArray]  # parameters, coordinates → seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """Times of one kernel.

    Args:
        formula: positive parameters and coordinates → seconds.
        parameters: the formula's.
        knots: grid positions, one array per axis.
        corrections: log(measured/formula) as fitted, on the grid.
        touched: knots that a measurement touched, on the grid.
        rising: axes along which more is more work.
        kernel: framework, its version and the kernel in the source.
        num_samples: measurements that it was fitted to.
        median_error: |predicted/measured − 1| of measurements that a fit had not seen, each fifth in turn.
        p90_error: 90th percentile of the same.
    """

    formula: Formula
    parameters: tuple[float, ...]
    knots: Knots
    corrections: FloatArray
    touched: NDArray[np.bool_]
    rising: tuple[int, ...]
    kernel: str
    num_samples: int
    median_error: float
    p90_error: float
    log_times: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        """Log seconds at the knots, made to rise."""
        at_knots = self.formula(np.asarray(self.parameters), tuple(np.meshgrid(*self.knots, indexing="ij")))
        log_times = monotone(np.log(at_knots) + self.corrections, self.touched, self.rising)
        object.__setattr__(self, "log_times", log_times)

    def time_s(self, points: Points) -> FloatArray:
        """Seconds at ``points``, one flat array per axis."""
        inside = tuple(np.clip(values, edge[0], edge[-1]) for values, edge in zip(points, self.knots, strict=True))
        parameters = np.asarray(self.parameters)
        growth = self.formula(parameters, points) / self.formula(parameters, inside)
        return np.asarray(np.exp(grid_value(self.knots, self.log_times, inside)) * growth)


def table_row(table: TimeTable) -> dict[str, Any]:
    """The stored form."""
    return {
        "kernel": table.kernel,
        "num_samples": table.num_samples,
        "median_error": round(table.median_error, 4),
        "p90_error": round(table.p90_error, 4),
        "parameters": [float(f"{parameter:.6g}") for parameter in table.parameters],
        "knots": [[int(position) for position in positions] for positions in table.knots],
        **grid_row(table.corrections, table.touched, step=STEP),
    }


def table_from_row(row: Row, *, formula: Formula, rising: tuple[int, ...]) -> TimeTable:
    """The inverse of :func:`table_row`."""
    knots = tuple(np.array(positions, dtype=float) for positions in row["knots"])
    corrections, touched = grid_from_row(row, tuple(len(positions) for positions in knots))
    return TimeTable(
        formula=formula,
        parameters=tuple(row["parameters"]),
        knots=knots,
        corrections=corrections,
        touched=touched,
        rising=rising,
        **{name: row[name] for name in ("kernel", "num_samples", "median_error", "p90_error")},
    )


class TablesByKey(Mapping[Key, TimeTable]):
    """Tables of one surface, each made when it is first asked for: a question asks for one or two of them.

    Args:
        rows: key → stored row.
        make: row → table.
    """

    def __init__(self, rows: Mapping[Key, Row], make: Callable[[Row], TimeTable]) -> None:
        self._rows, self._make = rows, make
        self._made: dict[Key, TimeTable] = {}

    def __getitem__(self, key: Key) -> TimeTable:
        if key not in self._made:
            self._made[key] = self._make(self._rows[key])
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def rising_with_context(priced: Callable[[FloatArray], FloatArray], before: FloatArray, new: FloatArray) -> FloatArray:
    """Times of chunks after earlier context, never less than with a shorter one.

    A chunk is priced as a prefill of as many queries and positions, which trades sequences for length and may save time
    in a table that was measured in whole sequences. Therefore octaves of context are priced, made to rise, and
    interpolated in the logarithm of the length.

    Args:
        priced: context of each request → seconds, [n].
        before: context of each request, [n].
        new: tokens of each request that are computed, [n].
    """
    start, end = np.zeros(len(before)), np.full(len(before), _FIRST_CONTEXT)
    below = priced(start)
    times = below.copy()
    while (start < before).any():
        above = np.maximum(below, priced(end))
        here, first, last = (position + new for position in (before, start, end))
        share = np.log(here / first) / np.log(last / first)
        times = np.where((before > start) & (before <= end), below * (above / below) ** share, times)
        below, start, end = above, end, 2.0 * end
    return times


def smooth_maximum(first: FloatArray, second: FloatArray) -> FloatArray:
    """(a⁴ + b⁴)^¼ of positive arrays: where compute and memory overlap all but fully."""
    larger = np.maximum(first, second)
    return np.asarray(larger * ((first / larger) ** 4 + (second / larger) ** 4) ** 0.25)
