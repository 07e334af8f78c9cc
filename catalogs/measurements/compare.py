"""What differs between two catalogs: the numbers that count in each, and the newest cluster profiles.

Only ruling facts are compared, because those are what a plan rests on; superseded ones may differ freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.facts import ruling_facts
from meshplan.catalogs.measurements.rows import Measurements

# Field → (value in SI units, where it is from).
Numbers = Mapping[str, tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number that two catalogs disagree on.

    Args:
        kind: ``device``, ``link``, ``node_type`` or ``cluster``.
        subject: slug, or name of the cluster.
        field: which number.
        first: its value in the first catalog, SI; None where absent.
        second: in the second one.
        first_source: where the first one is from.
        second_source: where the second one is from.
    """

    kind: str
    subject: str
    field: str
    first: float | None
    second: float | None
    first_source: str
    second_source: str

    @property
    def change(self) -> float | None:
        """second/first − 1; None where one is absent or the first is zero."""
        if not self.first or self.second is None:
            return None
        return self.second / self.first - 1.0

    def row(self) -> dict[str, Any]:
        """The difference as plain JSON."""
        return {
            "kind": self.kind,
            "subject": self.subject,
            "field": self.field,
            "first": self.first,
            "second": self.second,
            "change": self.change,
            "first_source": self.first_source,
            "second_source": self.second_source,
        }


def differences(first: Catalog, second: Catalog) -> list[Difference]:
    """Every ruling number and every directed link of a cluster that differs, in the order of kinds and names."""
    return [*_fact_differences(first, second), *_cluster_differences(first, second)]


def _fact_differences(first: Catalog, second: Catalog) -> Iterator[Difference]:
    for kind in ("device", "link", "node_type"):
        for subject in sorted({*_slugs(first, kind), *_slugs(second, kind)}):
            yield from _differing(kind, subject, _ruling(first, kind, subject), _ruling(second, kind, subject))


def _cluster_differences(first: Catalog, second: Catalog) -> Iterator[Difference]:
    ours, theirs = Measurements(first.engine), Measurements(second.engine)
    for name in sorted({*ours.cluster_names(), *theirs.cluster_names()}):
        yield from _differing("cluster", name, _links(ours, name), _links(theirs, name))


def _differing(kind: str, subject: str, ours: Numbers, theirs: Numbers) -> Iterator[Difference]:
    for field in sorted({*ours, *theirs}):
        first, first_source = ours.get(field, (None, ""))
        second, second_source = theirs.get(field, (None, ""))
        if first != second:
            yield Difference(
                kind=kind,
                subject=subject,
                field=field,
                first=first,
                second=second,
                first_source=first_source,
                second_source=second_source,
            )


def _slugs(catalog: Catalog, kind: str) -> list[str]:
    match kind:
        case "device":
            return [device.slug for device in catalog.devices()]
        case "link":
            return [link.slug for link in catalog.links()]
        case _:
            return [node.slug for node in catalog.node_types()]


def _ruling(catalog: Catalog, kind: str, subject: str) -> Numbers:
    return {
        field: (fact.value, f"{fact.evidence.level.value}: {fact.evidence.source}")
        for field, fact in ruling_facts(catalog.facts(kind, subject)).items()
    }


def _links(store: Measurements, name: str) -> Numbers:
    if name not in store.cluster_names():
        return {}
    profile = store.cluster(name)
    source = f"profile run {profile.run_id}, {profile.measured_at}"
    return {
        f"{link.source} -> {link.target} [{link.rail}] bandwidth_bytes_per_s": (
            link.bandwidth_bytes_per_s.value,
            source,
        )
        for link in profile.links
    }
