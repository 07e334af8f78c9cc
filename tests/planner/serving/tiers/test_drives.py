"""Drives of a host: prefixes on them, and weights that exceed its memory (llama.cpp's memory map)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.constants.machines.drives import drives
from meshplan.catalogs.constants.machines.host_processors import host_processors
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.cluster.lookup import DRIVE_SHARE
from meshplan.planner.service import make_plan
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.weight_tiers import Way, WeightTiers
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.cache_shapes import NVME_BYTES_PER_S, largest_tier
from meshplan.planner.serving.tiers.host import Host
from meshplan.planner.serving.tiers.layers import page_cache_s_per_byte

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-70b",
    "cluster": {
        "devices": {"type": "rtx-4090", "per_node": 1, "nodes": 1},
        "links": {"intra_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
        "host_memory": "16 GB",
        "host_processor": "core-i9-14900kf",
    },
    "workload": {"input_length": 64, "output_length": 16, "concurrency": 1, "num_requests": 2},
    "quantization": ["q4_k_m"],
    "constraints": {"target": "llama.cpp"},
}
DRIVE = {"drive": "samsung-990-pro"}
GB = 1e9


def spec(**cluster: Any) -> dict[str, Any]:
    changed = copy.deepcopy(SPEC)
    changed["cluster"] |= cluster
    return changed


def host(drives_bytes_per_s: float | None) -> Host:
    return Host(
        memory_bytes=16 * GB,
        processor=host_processors()["core-i9-14900kf"],
        sockets=1,
        bandwidth_bytes_per_s=64 * GB,
        drives_bytes_per_s=drives_bytes_per_s,
    )


def tiers(drive_bytes: float) -> WeightTiers:
    return WeightTiers(way=Way.LAYERS_ON_HOST, host_bytes=20 * GB, host_layers=40, drive_bytes=drive_bytes)


def test_a_byte_takes_no_less_with_more_on_drives_or_slower_ones_and_memory_bounds_it_from_below() -> None:
    memory = 27 * GB
    assert page_cache_s_per_byte(host(None), tiers(0.0), memory) == (1 / memory, 1 / memory)
    for slower, faster in ((3 * GB, 6 * GB), (6 * GB, 12 * GB)):
        for less, more in ((1 * GB, 5 * GB), (5 * GB, 20 * GB)):
            times = {
                (rate, part): page_cache_s_per_byte(host(rate), tiers(part), memory)
                for rate in (slower, faster)
                for part in (less, more)
            }
            for best, worst in times.values():
                assert 1 / memory <= best <= worst
            assert times[faster, less][0] <= times[slower, less][0] <= times[slower, more][0]
            assert times[faster, more][1] <= times[slower, more][1]
    best, worst = page_cache_s_per_byte(host(6 * GB), tiers(20 * GB), memory)
    assert best == pytest.approx(worst) == pytest.approx(1 / (6 * GB))  # nothing in memory: nothing in doubt


def test_weights_beyond_host_memory_need_drives_and_their_time_lies_between_best_and_worst(catalog: Catalog) -> None:
    refused, made = make_plan(spec(), catalog), make_plan(spec(**DRIVE), catalog)
    assert not refused.config
    assert "no cluster.drive is named" in str(refused.solution["binding_constraint"])
    told = made.config["pools"][0]["weight_tiers"]
    assert 0.0 < told["drive_bytes"] < told["host_bytes"]
    per_token = made.predicted["tpot_mean_s"]
    rate = DRIVE_SHARE * drives()["samsung-990-pro"].read_bytes_per_s
    assert per_token.low <= told["drive_bytes"] / rate
    assert per_token.high >= told["host_bytes"] / rate
    assert any("weights on drives" in doubt for doubt in made.provenance["not_validated"])


def test_drives_change_nothing_where_memory_has_room(catalog: Catalog) -> None:
    plain, with_drive = (make_plan(spec(host_memory="64 GB", **more), catalog) for more in ({}, DRIVE))
    assert plain.config == with_drive.config
    assert plain.predicted == with_drive.predicted


def test_prefixes_on_nvme_are_fetched_at_the_rate_of_the_named_drives(catalog: Catalog) -> None:
    rates = []
    for more in ({}, DRIVE, {**DRIVE, "drives_per_host": 4}):
        problem = resolve_serving(read_serving_spec(spec(**more)), catalog, Path()).problem
        tier = largest_tier(next(iter(problem.machines.values())), "nvme")
        assert tier is not None
        rates.append(tier.bytes_per_s_per_device)
    assert rates[0] == NVME_BYTES_PER_S
    assert rates[2] == pytest.approx(4 * rates[1]) == pytest.approx(4 * DRIVE_SHARE * 7.45e9)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [({"drive": "samsung-990"}, "did you mean 'samsung-990-pro'"), ({"drives_per_host": 2}, "name them with drive")],
)
def test_drives_that_nobody_knows_or_names_are_refused(catalog: Catalog, cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve_serving(read_serving_spec(spec(**cluster)), catalog, Path())
