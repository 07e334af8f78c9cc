"""The error on runs that were not fitted to: leave one group out, fit to the others, predict the group.

Near-duplicates share a group, so that no run is predicted by its twin. This error, not the error of the fit, becomes
the interval of a prediction.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from meshplan.planner.core.constants import INTERVAL_SHARE

Key = tuple[str, str]  # framework or engine, hardware generation
Constants = TypeVar("Constants")
Row = TypeVar("Row")
KeyedRow = TypeVar("KeyedRow", bound="Keyed")
Group = TypeVar("Group", bound=Hashable)
Fitted = TypeVar("Fitted")
Judged = TypeVar("Judged")


class Keyed(Protocol):
    """A run that belongs to a set of constants."""

    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One metric of a run, predicted by constants that were fitted without the run's group.

    Args:
        id: of the run.
        group: what was left out.
        key: framework or engine, and hardware generation.
        metric: its name.
        error: predicted / measured − 1.
        strategy: what kind of run it is, for summaries.
        kind: of work, where intervals depend on that.
        evidence: what the fit had still seen of its like, where intervals depend on that.
        kernels: that it ran in, where intervals depend on that.
        is_covered: the interval holds the measurement; None where that is not judged.
    """

    id: str
    group: str
    key: Key
    metric: str
    error: float
    strategy: str = ""
    kind: str = ""
    evidence: str = ""
    kernels: str = ""
    is_covered: bool | None = None

    @property
    def source(self) -> str:
        """Who published the run."""
        return self.group.partition("|")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated(Generic[Constants]):
    """The result of a calibration.

    Args:
        calibrations: sets of constants, the general ones first.
        folds: what was left out together → every metric of every run, predicted without it; the headline first.
        memory: framework → fit of the memory constants; empty where none was measured.
    """

    calibrations: tuple[Constants, ...]
    folds: Mapping[str, tuple[HeldOut, ...]]
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """The errors of the headline."""
        return next(iter(self.folds.values()), ())

    def headed_by(self, name: str) -> Calibrated[Constants]:
        """The same with another fold as the headline."""
        return replace(self, folds={name: self.folds[name], **self.folds})


def leave_one_out(
    rows: Iterable[Row],
    together: Callable[[Row], Group],
    fitted_without: Callable[[Group], Fitted],
    judged: Callable[[Row, Fitted], Iterable[Judged]],
) -> list[Judged]:
    """Judge every row by what was fitted to the other groups.

    Args:
        rows: the runs; groups are taken in the order in which they first occur.
        together: row → what is left out with it.
        fitted_without: group → what was fitted to the rows of the other groups.
        judged: (row, fit without its group) → its errors.
    """
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault(together(row), []).append(row)
    found: list[Judged] = []
    for group, members in groups.items():
        fitted = fitted_without(group)
        found += [error for row in members for error in judged(row, fitted)]
    return found


def by_key(rows: Iterable[KeyedRow]) -> dict[Key, list[KeyedRow]]:
    """The rows of each set of constants."""
    sets: dict[Key, list[KeyedRow]] = {}
    for row in rows:
        sets.setdefault(row.key, []).append(row)
    return sets


def refined_sets(
    rows: Iterable[KeyedRow],
    shipped: Callable[[str, str], Constants],
    adapted: Callable[[list[KeyedRow], Constants], tuple[Constants, list[HeldOut]]],
    *,
    source: str,
    date: str | None,
    hold_out: str = "run",
) -> Calibrated[Constants]:
    """The catalog's sets, each adapted to the user's runs that belong to it.

    Args:
        rows: the user's runs.
        shipped: key → the catalog's set.
        adapted: (runs of a key, the catalog's set) → the adapted set, and its errors on runs held out.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
        hold_out: what was left out together where errors were taken.
    """
    made, held_out = [], []
    for key, members in sorted(by_key(rows).items()):
        start = shipped(*key)
        constants, errors = adapted(members, start)
        held_out += errors
        named: Any = constants  # both kinds' sets have these fields
        origin = f"{source}; starting from: {named.source}"
        made.append(replace(named, architecture=key[1], num_runs=len(members), source=origin, date=date or today()))
    return Calibrated(calibrations=tuple(made), folds={hold_out: tuple(held_out)})


def p90(samples: Iterable[Sequence[float]], *, fewest: int, otherwise: float) -> float:
    """90th percentile of the first sample that has at least ``fewest`` sizes of errors.

    >>> p90([[0.3], [0.1, 0.2]], fewest=2, otherwise=1.0)
    0.19
    """
    for sizes in samples:
        if len(sizes) >= fewest:
            return round(float(np.quantile(sizes, INTERVAL_SHARE)), 4)
    return otherwise


def today() -> str:
    """The day of a fit, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
