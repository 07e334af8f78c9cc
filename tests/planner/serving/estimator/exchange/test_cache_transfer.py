"""What moving a KV cache takes: by hand, and Mooncake never sooner than NIXL."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.exchange.cache_transfer import CacheTransfer
from meshplan.planner.serving.problem.config import KvConnector


@pytest.fixture(scope="module")
def machine(catalog: Catalog) -> Machine:
    return Machine(
        device=catalog.device("h100-sxm-80gb"),
        num_devices=16,
        devices_per_host=8,
        domain_size=8,
        scale_up_bytes_per_s=4.5e11,
        scale_up_latency_s=5e-6,
        scale_out_bytes_per_s=5e10,
        scale_out_latency_s=1e-5,
    )


def test_mooncake_by_hand(machine: Machine) -> None:
    """37 GB/s of a NIC of 50; 160 µs, the link's 10, and 80 layers' keys and values of 0.69 µs each."""
    moved = CacheTransfer(connector=KvConnector.MOONCAKE, machine=machine)
    assert moved.bytes_per_s == pytest.approx(37e9)
    assert moved.start_s(LLAMA_70B) == pytest.approx(170e-6 + 160 * 3.1e-3 / 4493)


def test_a_latent_is_one_piece_a_layer(machine: Machine) -> None:
    moved = CacheTransfer(connector=KvConnector.MOONCAKE, machine=machine)
    pieces = moved.start_s(DEEPSEEK_V3) - CacheTransfer(connector=KvConnector.NIXL, machine=machine).start_s(
        DEEPSEEK_V3
    )
    assert pieces == pytest.approx(61 * 3.1e-3 / 4493)


@pytest.mark.parametrize("rate", [1e9, 5e10])
def test_mooncake_is_never_sooner(machine: Machine, rate: float) -> None:
    slower = replace(machine, scale_out_bytes_per_s=rate)
    nixl, mooncake = (CacheTransfer(connector=one, machine=slower) for one in KvConnector)
    assert nixl.bytes_per_s >= mooncake.bytes_per_s
    assert nixl.start_s(LLAMA_70B) < mooncake.start_s(LLAMA_70B)
