"""All-reduce times in groups of every size: measured ones come back, others continue them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.surfaces.collectives import collective_curve
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.collectives import Exchange

SIZES = np.array([1e3, 14336.0, 14336.0 * 64, 1e7, 1e9])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    catalog = Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))
    return Machine(
        device=catalog.device("gb200"),
        num_devices=72,
        devices_per_host=4,
        domain_size=72,
        scale_up_bytes_per_s=9e11,
        scale_up_latency_s=8.8e-6,
        scale_out_bytes_per_s=5e10,
        scale_out_latency_s=1e-5,
    )


@pytest.mark.parametrize(
    ("group", "device"), [(2, "gb200"), (4, "gb200"), (8, "b200-sxm-180gb")], ids=["own 2", "own 4", "links of 8"]
)
def test_measured_groups_are_the_measured_curves(machine: Machine, group: int, device: str) -> None:
    curve = collective_curve(device, "all_reduce", group, "trtllm")
    assert curve is not None
    found = Exchange(machine=machine, engine="trtllm").all_reduce_s(SIZES, group)
    assert found == pytest.approx(curve.time_s(SIZES))


def test_a_doubling_beyond_the_measured_adds_what_the_last_one_did(machine: Machine) -> None:
    exchange = Exchange(machine=machine, engine="sglang")
    four, eight, sixteen, more = (exchange.all_reduce_s(SIZES, group) for group in (4, 8, 16, 32))
    assert sixteen == pytest.approx(eight + np.maximum(eight - four, 0.0))
    assert more == pytest.approx(eight + 2.0 * np.maximum(eight - four, 0.0))


def test_small_messages_in_a_domain_are_not_priced_by_hops(machine: Machine) -> None:
    """Sixteen devices behind one switch take a few times what four take, not a ring's sixteenfold latency."""
    exchange = Exchange(machine=machine, engine="trtllm")
    assert exchange.all_reduce_s(SIZES[:1], 16)[0] < 3.0 * exchange.all_reduce_s(SIZES[:1], 4)[0]


def test_unmeasured_devices_keep_the_closed_form(machine: Machine) -> None:
    unknown = replace(machine, device=replace(machine.device, slug="unheard-of"))
    ring = 2.0 * 7.0 / 8.0 * SIZES / Exchange(machine=unknown).scale_up_bytes_per_s
    found = Exchange(machine=unknown).all_reduce_s(SIZES, 8)
    assert np.all(found > ring)
