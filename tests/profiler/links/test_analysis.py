"""What a matrix says: a bad link is named, a slow host is not blamed on its links, sound clusters are left alone."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.measurements.types import MeasuredLink, Spread
from meshplan.profiler.links.analysis import findings, host_speeds, link_classes


def links_of(rates: dict[tuple[str, str], float], rail: str = "default") -> list[MeasuredLink]:
    return [
        MeasuredLink(
            source=source,
            target=target,
            rail=rail,
            bandwidth_bytes_per_s=Spread(value=rate, low=rate, high=rate, n=3),
            latency_s=Spread(value=1e-5, low=1e-5, high=1e-5, n=3),
        )
        for (source, target), rate in rates.items()
    ]


def cluster(*speeds: float) -> dict[tuple[str, str], float]:
    return {(f"h{a}", f"h{b}"): min(speeds[a], speeds[b]) for a, b in permutations(range(len(speeds)), 2)}


@given(st.lists(st.floats(min_value=0.95, max_value=1.05), min_size=30, max_size=30))
def test_a_sound_cluster_is_left_alone(noise: list[float]) -> None:
    rates = {pair: 1e9 * factor for (pair, factor) in zip(cluster(*[1.0] * 6), noise, strict=True)}
    assert findings(links_of(rates)) == []


def test_a_slow_host_is_named_once_and_not_its_links() -> None:
    found = findings(links_of(cluster(4e8, 4e8, 4e8, 1e8)))
    assert len(found) == 1
    assert found[0].startswith("slow host h3: 100.0 MB/s")


def test_a_bad_link_is_named_and_not_its_hosts() -> None:
    rates = cluster(*[4e8] * 5)
    rates["h1", "h2"] = rates["h2", "h1"] = 1e8
    assert [line.split(":")[0] for line in findings(links_of(rates))] == [
        "slow link h1 -> h2",
        "slow link h2 -> h1",
    ]


def test_an_asymmetry_says_which_way() -> None:
    rates = cluster(*[4e8] * 5)
    rates["h1", "h2"] = 1e8
    assert "asymmetric h2 / h1: 400.0 MB/s there, 100.0 MB/s back" in findings(links_of(rates))


def test_rails_are_judged_apart() -> None:
    fast, slow = links_of(cluster(*[4e8] * 4), "ib0"), links_of(cluster(*[1e8] * 4), "eth0")
    assert findings([*fast, *slow]) == []


def test_classes_follow_gaps() -> None:
    classes = link_classes(links_of(cluster(4e8, 4e8, 2e8, 1e8)))
    assert [group.bandwidth_bytes_per_s for group in classes] == [4e8, 2e8, 1e8]
    assert [len(group.links) for group in classes] == [2, 4, 6]


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_say_about_nothing(count: int) -> None:
    assert findings(links_of(cluster(*[1.0] * count))) == []
    assert host_speeds({}) == {}
