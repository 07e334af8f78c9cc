"""Measurements in the database: written as they are made, resumed, compared, and carried to another catalog."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.connection import connect, parse_url
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.errors import CatalogError, UnknownEntryError
from meshplan.catalogs.measurements.drift import drifts, link_drifts, staleness_warning
from meshplan.catalogs.measurements.exchange import export_cluster, import_cluster
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import (
    ClusterProfile,
    Fit,
    MeasuredLink,
    Measurement,
    Metric,
    ProfileRun,
    Spread,
)

DAY = "2026-11-21T10:00:00+00:00"


def spread(value: float, width: float = 0.01) -> Spread:
    return Spread(value=value, low=value * (1 - width), high=value * (1 + width), n=5)


def measurement(value: float = 1e9, *, link: str = "a -> b", size: int = 1024, width: float = 0.01) -> Measurement:
    return Measurement(
        probe="link_bandwidth",
        link=link,
        parameters={"size_bytes": size, "rail": "default"},
        metric=Metric.BYTES_PER_S,
        spread=spread(value, width),
        source="test",
        host="a",
        measured_at=DAY,
        warnings=("odd",),
    )


def cluster(run_id: str, name: str = "lab") -> ClusterProfile:
    link = MeasuredLink(
        source="a", target="b", rail="default", bandwidth_bytes_per_s=spread(1e9), latency_s=spread(1e-5)
    )
    return ClusterProfile(name=name, run_id=run_id, measured_at=DAY, endpoints=("a", "b"), links=(link,))


FIT = Fit(
    subject="a -> b",
    model="alpha_beta",
    coefficients={"latency_s": 1e-5},
    residual_median=0.01,
    residual_p90=0.02,
    held_out_median=0.02,
    held_out_p90=0.03,
    num_points=4,
    source="test",
)


@pytest.fixture
def store(empty_engine: Engine) -> Measurements:
    return Measurements(empty_engine)


def started(store: Measurements, **options: str) -> str:
    return store.start("links", host="a", environment={}, protocol={"n": 1}, **options).run_id


def test_what_goes_in_comes_out(store: Measurements) -> None:
    run_id = started(store, cluster="lab")
    assert store.add(run_id, [measurement()]) == 1
    store.add_fits(run_id, [FIT])
    store.put_cluster(cluster(run_id))
    assert store.of_run(run_id) == (measurement(),)
    assert store.fits(run_id) == (FIT,)
    assert store.cluster("lab") == cluster(run_id)
    assert store.cluster("lab").bandwidths() == [[None, 1e9], [None, None]]


def test_a_point_is_measured_once_in_a_run(store: Measurements) -> None:
    run_id = started(store)
    assert store.add(run_id, [measurement(1e9), measurement(2e9, size=2048)]) == 2
    assert store.add(run_id, [measurement(3e9)]) == 0
    assert store.of_run(run_id)[0].spread.value == 1e9
    assert store.add(started(store), [measurement(3e9)]) == 1


def test_only_an_unfinished_run_of_the_same_kind_resumes(store: Measurements) -> None:
    run_id = started(store, cluster="lab")
    find = {"host": "a", "protocol": {"n": 1}, "cluster": "lab"}
    found = store.resumable("links", **find)
    assert found is not None
    assert found.run_id == run_id
    assert store.resumable("links", **find | {"host": "b"}) is None
    assert store.resumable("links", **find | {"protocol": {"n": 2}}) is None
    assert store.resumable("device", **find) is None
    store.finish(run_id)
    assert store.resumable("links", **find) is None


def test_the_newest_profile_counts(store: Measurements) -> None:
    first, second = started(store), started(store)
    store.put_cluster(cluster(second))
    store.put_cluster(cluster(first))
    assert [profile.run_id for profile in store.cluster_history("lab")] == [second, first]
    assert store.forget(second)
    assert store.cluster("lab").run_id == first
    with pytest.raises(UnknownEntryError, match="did you mean 'lab'"):
        store.cluster("labs")


@pytest.mark.parametrize(
    "values", [(1.0, 2.0, 3.0, 1), (1.0, 0.0, 3.0, 1), (1.0, 1.0, 1.0, 0), (1.0, 1.0, float("inf"), 1)]
)
def test_an_impossible_spread_is_refused(values: tuple[float, float, float, int]) -> None:
    value, low, high, n = values
    with pytest.raises(ValueError, match="low ≤ value ≤ high"):
        Spread(value=value, low=low, high=high, n=n)


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "catalog.sqlite")
    store = Measurements(open_database(path))
    run_id = started(store)

    def write(number: int) -> None:
        mine = Measurements(connect(parse_url(path)))
        for size in range(10):
            mine.add(run_id, [measurement(size=1000 * number + size)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.of_run(run_id)) == 40


@given(st.floats(min_value=1e6, max_value=1e12), st.floats(min_value=1.0, max_value=1.5))
def test_drift_needs_more_than_the_spread(value: float, factor: float) -> None:
    found = drifts([measurement(value, width=0.05)], [measurement(value * factor, width=0.05)])
    assert bool(found) == (factor * 0.95 > 1.05)
    if found:
        assert found[0].change == pytest.approx(factor - 1.0)


def test_drifts_are_named_worst_first() -> None:
    before = [measurement(1e9, link="a -> b"), measurement(1e9, link="b -> a"), measurement(1e9, link="c -> a")]
    after = [measurement(8e8, link="a -> b"), measurement(3e8, link="b -> a"), measurement(1.001e9, link="c -> a")]
    assert [drift.subject for drift in drifts(before, after)] == ["b -> a", "a -> b"]
    assert "-70%" in str(drifts(before, after)[0])


def test_a_link_drifts_though_its_largest_message_is_another() -> None:
    def link(rate: float, *, rail: str = "eth0") -> MeasuredLink:
        return MeasuredLink(
            source="a",
            target="b",
            rail=rail,
            bandwidth_bytes_per_s=Spread(value=rate, low=0.95 * rate, high=1.05 * rate, n=3),
            latency_s=Spread(value=1e-5, low=0.9e-5, high=1.1e-5, n=20),
        )

    after = [link(4e8), link(5e8, rail="eth1"), link(1.0, rail="new")]
    (drift,) = link_drifts([link(1e9), link(5e8, rail="eth1")], after)
    assert str(drift) == "a -> b [eth0] bandwidth_bytes_per_s: 1e+09 → 4e+08 (-60%)"
    assert drift.subject == "a -> b"


def test_a_device_is_compared_with_its_last_finished_run(store: Measurements) -> None:
    def run(host: str = "box", backend: str = "numpy", *, is_finished: bool = True) -> ProfileRun:
        begun = store.start("device", host=host, environment={}, protocol={"backend": backend}, cluster=None)
        if is_finished:
            store.finish(begun.run_id)
        return store.run(begun.run_id)

    first = run()
    assert store.before(first) is None
    second = run()
    run("elsewhere")
    run(backend="torch-cpu")
    run(is_finished=False)
    found = store.before(run())
    assert found is not None
    assert found.run_id == second.run_id


def test_old_profiles_are_stale() -> None:
    now = datetime(2027, 1, 20, tzinfo=UTC)
    assert "60 days old" in (staleness_warning("lab", DAY, at=now) or "")
    assert staleness_warning("lab", DAY, at=datetime(2026, 11, 22, tzinfo=UTC)) is None
    assert "in the future" in (staleness_warning("lab", DAY, at=datetime(2026, 11, 1, tzinfo=UTC)) or "")


def test_a_profile_travels_as_one_file(store: Measurements, tmp_path: Path) -> None:
    run_id = started(store, cluster="lab")
    store.add(run_id, [measurement(), measurement(size=2048)])
    store.add_fits(run_id, [FIT])
    store.put_cluster(cluster(run_id))
    store.finish(run_id)
    document = json.loads(json.dumps(export_cluster(store, "lab")))

    other = Measurements(open_database(str(tmp_path / "other.sqlite")))
    assert import_cluster(other, document)["measurements"] == 2
    assert import_cluster(other, document)["measurements"] == 0
    assert json.loads(json.dumps(export_cluster(other, "lab"))) == document
    import_cluster(other, document, name="twin")
    assert other.cluster("twin") == replace(store.cluster("lab"), name="twin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "meshplan-catalog/1"}, "format must be 'meshplan-profile/1'"),
        ({"run": {"run_id": "x"}}, "malformed, nothing was imported"),
        ({"measurements": [{"probe": "x"}]}, "malformed, nothing was imported"),
        ({"fits": None}, "malformed, nothing was imported"),
    ],
)
def test_a_malformed_profile_is_refused(store: Measurements, change: dict[str, object], message: str) -> None:
    run_id = started(store)
    store.put_cluster(cluster(run_id))
    document = export_cluster(store, "lab") | change
    store.forget(run_id)
    with pytest.raises(CatalogError, match=message):
        import_cluster(store, document)
    assert store.runs() == ()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("profile", "endpoints"), ["a"], "b is no endpoint of the profile"),
        (("profile", "endpoints"), ["a", 7], "must be texts, not 7"),
        (("profile", "endpoints"), ["a", "b", "a"], "a is listed twice"),
        (("profile", "links", 0, "source"), ["a"], r"must be texts, not \['a'\]"),
        (("profile", "links", 0, "rail"), {}, "must be texts, not {}"),
        (("profile", "findings"), [1], "must be texts, not 1"),
        (("profile", "unmeasured"), [["a", "c"]], "c is no endpoint of the profile"),
        (("measured_at",), True, "measured_at"),
        (("measured_at",), "yesterday", "measured_at"),
        (("measured_at",), "2026-11-21", "measured_at"),
        (("measurements", 0, "parameters"), None, "parameters"),
        (("measurements", 0, "parameters"), [1], "parameters"),
        (("measurements", 0, "parameters"), {"size_bytes": {}}, "parameters"),
        (("fits", 0, "coefficients"), {"latency_s": "x"}, "coefficients"),
        (("fits", 0, "coefficients"), [1], "coefficients"),
    ],
)
def test_a_profile_that_could_not_be_shown_is_refused(
    store: Measurements, tmp_path: Path, path: tuple[str | int, ...], value: object, message: str
) -> None:
    """It was stored, and every look at it ended as a bug."""
    run_id = started(store, cluster="lab")
    store.add(run_id, [measurement()])
    store.add_fits(run_id, [FIT])
    store.put_cluster(cluster(run_id))
    document = json.loads(json.dumps(export_cluster(store, "lab")))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    other = Measurements(open_database(str(tmp_path / "other.sqlite")))
    with pytest.raises(CatalogError, match=f"nothing was imported: .*{message}"):
        import_cluster(other, document)
    assert other.runs() == ()


def test_a_profile_that_lacks_a_part_is_refused(store: Measurements) -> None:
    with pytest.raises(CatalogError, match="lacks cluster, measured_at"):
        import_cluster(store, {"format": "meshplan-profile/1"})
