"""The difference of two catalogs: none with itself, and exactly what was changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.facts import Fact
from meshplan.catalogs.hardware import Evidence, EvidenceLevel
from meshplan.catalogs.measurements.compare import differences
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import ClusterProfile, MeasuredLink, Spread


@pytest.fixture
def twin(database_file: Path, tmp_path: Path) -> Catalog:
    return Catalog.open(str(shutil.copy(database_file, tmp_path / "twin.sqlite")))


def with_cluster(catalog: Catalog, rate: float) -> None:
    store = Measurements(catalog.engine)
    run = store.start("links", host="a", environment={}, protocol={}, cluster="lab")
    spread = Spread(value=rate, low=rate, high=rate, n=3)
    link = MeasuredLink(source="a", target="b", rail="eth0", bandwidth_bytes_per_s=spread, latency_s=spread)
    store.put_cluster(
        ClusterProfile(name="lab", run_id=run.run_id, measured_at="2026", endpoints=("a", "b"), links=(link,))
    )


def test_a_catalog_is_like_itself(catalog: Catalog, twin: Catalog) -> None:
    assert differences(catalog, twin) == []


def test_a_measured_number_shows_with_both_sources(catalog: Catalog, twin: Catalog) -> None:
    evidence = Evidence(level=EvidenceLevel.MEASURED, source="stream", date="2026-11-21", num_samples=5)
    fact = Fact(field="memory_bandwidth_bytes_per_s", value=3e12, evidence=evidence)
    twin.add_facts("device", "h100-sxm-80gb", [fact])
    (found,) = differences(catalog, twin)
    assert (found.subject, found.field, found.second) == ("h100-sxm-80gb", "memory_bandwidth_bytes_per_s", 3e12)
    assert found.change == pytest.approx(3e12 / catalog.device("h100-sxm-80gb").memory_bandwidth_bytes_per_s - 1)
    assert found.first_source.startswith("datasheet")
    assert found.second_source == "measured here: stream"


def test_clusters_are_compared_link_by_link(catalog: Catalog, twin: Catalog) -> None:
    with_cluster(catalog, 1e9)
    with_cluster(twin, 5e8)
    (found,) = differences(catalog, twin)
    assert (found.kind, found.field) == ("cluster", "a -> b [eth0] bandwidth_bytes_per_s")
    assert found.change == pytest.approx(-0.5)


def test_what_only_one_has_is_named(catalog: Catalog, twin: Catalog) -> None:
    with_cluster(catalog, 1e9)
    (found,) = differences(catalog, twin)
    assert (found.first, found.second, found.change) == (1e9, None, None)
