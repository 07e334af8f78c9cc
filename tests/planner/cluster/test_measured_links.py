"""A measured network moves the plan."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import ClusterProfile, MeasuredLink, Spread
from meshplan.planner.service import make_plan

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 4}]},
    "workload": {"sequence_length": 8192, "global_batch_size": 64},
}
HOSTS = ("a", "b", "c", "d")
FAST, SLOW = 350e9, 2e9  # bytes/s of a host
PIPELINE = {"tensor_parallel": 4, "pipeline_parallel": 4, "micro_batch_size": 1}


def exactly(value: float) -> Spread:
    return Spread(value=value, low=value, high=value, n=3)


def profile(name: str, slow: tuple[str, str] | None, run_id: str) -> ClusterProfile:
    links = tuple(
        MeasuredLink(
            source=a,
            target=b,
            rail="default",
            bandwidth_bytes_per_s=exactly(SLOW if (a, b) == slow else FAST),
            latency_s=exactly(8e-6),
        )
        for a, b in itertools.permutations(HOSTS, 2)
    )
    return ClusterProfile(name=name, run_id=run_id, measured_at="2026-11-21T00:00:00", endpoints=HOSTS, links=links)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    catalog = Catalog.open(str(tmp_path_factory.mktemp("profiled") / "catalog.sqlite"))
    store = Measurements(catalog.engine)
    for name, slow in (("even", None), ("degraded", ("b", "c"))):
        run = store.start("links", host="a", environment={}, protocol={}, cluster=name)
        store.put_cluster(profile(name, slow, run.run_id))
    return catalog


def planned(catalog: Catalog, name: str | None, **fixed: int) -> Any:
    cluster = SPEC["cluster"] if name is None else {**SPEC["cluster"], "profile": name}
    return make_plan({**SPEC, "cluster": cluster, "fixed": fixed}, catalog, base=Path())


def test_a_slow_link_moves_the_ranks(profiled: Catalog) -> None:
    # The degrees that a free search finds in both, pinned: it takes ten times as long.
    even, degraded = (planned(profiled, name, **PIPELINE) for name in ("even", "degraded"))
    assert even.mapping["method"] == "rank order (uniform links)"
    assert even.mapping["gain"] == 0.0
    assert even.rank_table == tuple(divmod(rank, 8) for rank in range(32))
    # One slow link of twelve: another order of the hosts does not use it at all.
    # Up to the messages of one micro-batch, which one figure for all links counts twice.
    assert degraded.predicted["iteration_s"].value == pytest.approx(even.predicted["iteration_s"].value, rel=1e-4)
    assert degraded.mapping["gain"] > 0.01
    assert degraded.mapping["identity_s"] > degraded.mapping["objective_s"]
    assert degraded.mapping["hosts"] == list(HOSTS)
    assert degraded.rank_table != even.rank_table
    assert "b → c" in degraded.provenance["sources"]["profile degraded"]
    assert "measured here" in degraded.provenance["share_of_time_by_evidence"]


def test_the_digest_of_the_catalog_covers_the_profile(profiled: Catalog) -> None:
    # Pinned degrees: only the digest matters here.
    digests = {
        planned(profiled, name, tensor_parallel=8, pipeline_parallel=1).catalog_digest
        for name in (None, "even", "degraded")
    }
    assert len(digests) == 3


def test_an_unknown_or_unfitting_profile_is_named(profiled: Catalog) -> None:
    with pytest.raises(SpecError, match=r"cluster\.profile: unknown cluster profile 'evn'; did you mean"):
        planned(profiled, "evn")
    spec = {**SPEC, "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}], "profile": "even"}}
    with pytest.raises(SpecError, match=r"has 4 hosts, the cluster 2"):
        make_plan(spec, profiled)
