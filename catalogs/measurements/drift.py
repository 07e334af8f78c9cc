"""Whether two profiles of the same thing still agree: which links and devices moved, and by how much.

A point has drifted when the spreads of the two runs have no value in common and the values differ by more than
:data:`MIN_CHANGE`; the second condition keeps very steady probes from reporting changes that no plan would notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from meshplan.catalogs.measurements.types import MeasuredLink, Measurement, Spread

# Below 5 % a plan does not change (the estimator's own error is about that).
MIN_CHANGE = 0.05
# Links and nodes drift over weeks (maintenance, cables, firmware); older profiles deserve a warning.
STALE_AFTER_DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One point that two runs disagree on.

    Args:
        point: probe, subject and parameters.
        subject: the link or device.
        before: value of the earlier run.
        after: value of the later run.
    """

    point: str
    subject: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """after/before − 1."""
        return self.after / self.before - 1.0

    def __str__(self) -> str:
        return f"{self.point}: {self.before:.4g} → {self.after:.4g} ({self.change:+.0%})"


def drifts(before: Iterable[Measurement], after: Iterable[Measurement]) -> tuple[Drift, ...]:
    """Points of both runs whose values moved by more than their spread, the largest change first."""
    earlier = {(measurement.key, measurement.metric): measurement for measurement in before}
    return _worst_first(
        _drift(row.key, row.device or row.link or "", earlier[row.key, row.metric].spread, row.spread)
        for row in after
        if (row.key, row.metric) in earlier
    )


def link_drifts(before: Iterable[MeasuredLink], after: Iterable[MeasuredLink]) -> tuple[Drift, ...]:
    """Links of both profiles whose bandwidth or latency moved by more than its spread, the largest change first.

    The rate of a link is that of its largest message, whose size is chosen by its speed: no point of :func:`drifts`
    need be common to a fast and a slow day.
    """
    earlier = {(link.source, link.target, link.rail): link for link in before}
    return _worst_first(
        _drift(
            f"{link.source} -> {link.target} [{link.rail}] {field}",
            f"{link.source} -> {link.target}",
            getattr(earlier[link.source, link.target, link.rail], field),
            getattr(link, field),
        )
        for link in after
        if (link.source, link.target, link.rail) in earlier
        for field in ("bandwidth_bytes_per_s", "latency_s")
    )


def _drift(point: str, subject: str, before: Spread, after: Spread) -> Drift | None:
    found = Drift(point=point, subject=subject, before=before.value, after=after.value)
    return None if before.overlaps(after) or abs(found.change) <= MIN_CHANGE else found


def _worst_first(found: Iterable[Drift | None]) -> tuple[Drift, ...]:
    return tuple(sorted((drift for drift in found if drift), key=lambda drift: -abs(drift.change)))


def age_days(measured_at: str, *, at: datetime | None = None) -> float:
    """Days from a measurement to a moment; None for this one."""
    moment = datetime.fromisoformat(measured_at)
    return ((at or datetime.now(UTC)) - moment).total_seconds() / 86_400


def staleness_warning(name: str, measured_at: str, *, at: datetime | None = None) -> str | None:
    """A sentence where a profile is older than :data:`STALE_AFTER_DAYS`, or dated in the future."""
    age = age_days(measured_at, at=at)
    if age < -1:
        return f"the profile of {name} is dated {-age:.0f} days in the future: a clock was wrong; measure it again"
    if age <= STALE_AFTER_DAYS:
        return None
    return f"the profile of {name} is {age:.0f} days old; links drift: meshplan profile links --name {name}"
