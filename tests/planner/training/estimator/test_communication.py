"""Collectives: ring formulas by hand, hierarchical groups, limits, monotony."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_cases import machine_with
from hypothesis import assume, given
from hypothesis import strategies as st
from training_constants import with_time

from meshplan.catalogs.constants.training import Calibration, TimeConstants
from meshplan.planner.training.estimator.exchange.collectives import CommunicationModel
from meshplan.planner.training.estimator.exchange.token_copies import TokenCopies

EXACT = Calibration(
    framework="any", architecture="any", time=TimeConstants(scale_up_efficiency=1.0, network_efficiency=1.0)
)
UP, NETWORK = 450e9, 50e9
SIZES, STRIDES, BYTES = st.integers(1, 4096), st.integers(1, 512), st.floats(1e3, 1e12)


def links(**fields: Any) -> CommunicationModel:
    latencies = {"scale_up_latency_s": 0.0, "scale_out_latency_s": 0.0}
    return CommunicationModel(machine=machine_with(4096, **{**latencies, **fields}), calibration=EXACT)


def visiting(experts: float) -> TokenCopies:
    return TokenCopies(experts_per_token=experts)


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values)


def test_a_ring_inside_one_domain() -> None:
    assert links().gather_s(np.array([8e9]), ints(8), ints(1)) == pytest.approx(7 / 8 * 8e9 / UP)
    assert links().all_reduce_s(np.array([8e9]), ints(8), ints(1)) == pytest.approx(2 * 7 / 8 * 8e9 / UP)


def test_a_ring_waits_for_every_hop() -> None:
    """NCCL's own model of a ring (src/graph/tuning.cc): 3.4 µs from device to device of a host, 14 µs between hosts."""
    sizes = ints(1, 8, 16, 16, 512)
    found = links().ring_latency_s(sizes, ints(1, 1, 1, 8, 1))
    hops = ((0, 0), (7, 0), (14, 1), (0, 15), (448, 63))
    assert found == pytest.approx([inside * 3.4e-6 + between * 14e-6 for inside, between in hops])


def test_a_group_of_one_is_free() -> None:
    model = links(scale_up_latency_s=1.0, scale_out_latency_s=1.0)
    for seconds in (
        model.gather_s(np.array([1e12]), ints(1), ints(64)),
        model.all_reduce_s(np.array([1e12]), ints(1), ints(1)),
        model.all_to_all_s(np.array([1e12]), ints(1), ints(1)),
    ):
        assert seconds == 0.0


def test_members_of_a_domain_drive_their_nics_together() -> None:
    """16 ranks at stride 1 are two hosts of 8: the ring crosses with 8 NICs; at stride 8 each host has one member."""
    together = links().gather_s(np.array([16e9]), ints(16), ints(1))
    assert together == pytest.approx(15 / 16 * 16e9 / (8 * NETWORK))
    alone = links().gather_s(np.array([16e9]), ints(16), ints(8))
    assert alone == pytest.approx(15 / 16 * 16e9 / NETWORK)
    pairs = links().gather_s(np.array([16e9]), ints(16), ints(4))
    assert pairs == pytest.approx(15 / 16 * 16e9 / (2 * NETWORK))


def test_the_scale_up_link_caps_the_nics() -> None:
    fat = links(scale_out_bytes_per_s=400e9)
    assert fat.gather_s(np.array([16e9]), ints(16), ints(1)) == pytest.approx(15 / 16 * 16e9 / UP)


def test_latency_is_a_tree_of_hops() -> None:
    model = links(scale_up_latency_s=1e-6, scale_out_latency_s=1e-5)
    assert model.gather_s(np.full(3, 1e-9), ints(8, 5, 2), ints(1, 1, 4)) == pytest.approx([3e-6, 3e-5, 1e-6])
    assert model.gather_s(np.full(1, 1e-9), ints(16), ints(1)) == pytest.approx([4e-5])


def test_all_to_all_inside_a_domain_and_across() -> None:
    near = links().all_to_all_s(np.array([8e9]), ints(8), ints(1))
    assert near == pytest.approx(7 / 8 * 8e9 / UP)
    far = links().all_to_all_s(np.array([8e9]), ints(64), ints(1))
    assert far == pytest.approx(56 / 64 * 8e9 / NETWORK)


def test_deduplication_sends_one_copy_a_domain() -> None:
    """With a token's k copies on D domains, D·(1 − (1 − 1/D)^k) of the k cross; k → ∞ leaves one copy a domain."""
    plain = links().all_to_all_s(np.array([8e9]), ints(64), ints(1))
    few = links().all_to_all_s(np.array([8e9]), ints(64), ints(1), copies=visiting(8.0))
    assert few / plain == pytest.approx(8 * (1 - (7 / 8) ** 8) / 8)
    one = links().all_to_all_s(np.array([8e9]), ints(64), ints(1), copies=visiting(1.0))
    assert one == pytest.approx(plain)
    many = links(scale_up_bytes_per_s=1e30).all_to_all_s(np.array([8e9]), ints(64), ints(1), copies=visiting(1e6))
    assert many / plain == pytest.approx(8 / 1e6)


def test_a_boundary_is_inside_a_node_or_crosses_it() -> None:
    """Two stages of 4 share a node of 8; of two stages of 8 each device sends over its NIC."""
    model = links(scale_up_latency_s=1e-6, scale_out_latency_s=1e-5)
    seconds = model.pipeline_s(np.full(2, 1e9), 2, ints(4, 8), np.zeros(2), wraps=False)
    assert seconds == pytest.approx([2 * (1e9 / UP + 1e-6), 2 * (1e9 / NETWORK + 1e-5)])


def test_a_pipeline_of_stages_smaller_than_a_node_feels_the_network() -> None:
    """16 stages of one device on two nodes: the boundary between the nodes decides the steady state."""
    sent, waits = np.array([1e9]), np.array([7.0])
    fast, slow = (
        links(scale_out_bytes_per_s=rate).pipeline_s(sent, 16, ints(1), waits, wraps=False) for rate in (50e9, 50e6)
    )
    far, near = 2 * 1e9 / 50e6, 2 * 1e9 / UP
    assert slow == pytest.approx(14 * near + far + 7 * (near + far) / 2)
    assert slow > 100 * fast


def test_a_ring_that_straddles_nodes_has_one_nic() -> None:
    """Data parallelism over 3 ranks, 8 devices a node: the third group has two members on one node, one on the next."""
    seconds = links().gather_s(np.array([3e9]), ints(3), ints(1))
    assert seconds == pytest.approx(2 / 3 * 3e9 / NETWORK)


def test_a_member_sends_to_the_next_over_the_slowest_link_of_its_ring() -> None:
    assert links().ring_step_s(np.array([1e9, 1e9]), ints(4, 16), ints(1, 1)) == pytest.approx(
        [1e9 / UP, 1e9 / NETWORK]
    )


def test_without_a_network_what_crosses_nodes_takes_for_ever() -> None:
    model = links(scale_out_bytes_per_s=0.0)
    assert np.isinf(model.all_reduce_s(np.array([1e9]), ints(16), ints(1)))
    assert np.isfinite(model.all_reduce_s(np.array([1e9]), ints(8), ints(1)))


@given(
    size=SIZES, stride=STRIDES, total=BYTES, up=st.floats(1.0, 10.0), out=st.floats(1.0, 10.0), copies=st.floats(1, 16)
)
def test_more_bandwidth_is_never_slower(
    size: int, stride: int, total: float, up: float, out: float, copies: float
) -> None:
    slow = links(scale_up_latency_s=2e-6, scale_out_latency_s=5e-6)
    machine = replace(slow.machine, scale_up_bytes_per_s=up * UP, scale_out_bytes_per_s=out * NETWORK)
    fast = replace(slow, machine=machine)
    payload = np.array([total])
    for model_s in ("gather_s", "all_reduce_s", "all_to_all_s"):
        assert getattr(fast, model_s)(payload, ints(size), ints(stride)) <= getattr(slow, model_s)(
            payload, ints(size), ints(stride)
        )
    assert fast.all_to_all_s(payload, ints(size), ints(stride), copies=visiting(copies)) <= slow.all_to_all_s(
        payload, ints(size), ints(stride), copies=visiting(copies)
    )
    for wraps in (False, True):
        lasting = (payload, size + 1, ints(stride), np.array([16.0]))
        assert fast.pipeline_s(*lasting, wraps=wraps) <= slow.pipeline_s(*lasting, wraps=wraps)


@given(size=SIZES, stride=STRIDES, total=BYTES, factor=st.floats(1.0, 100.0))
def test_more_bytes_are_never_faster(size: int, stride: int, total: float, factor: float) -> None:
    model = links(scale_up_latency_s=2e-6, scale_out_latency_s=5e-6)
    for name in ("gather_s", "all_reduce_s", "all_to_all_s"):
        few, many = (getattr(model, name)(np.array([b]), ints(size), ints(stride)) for b in (total, factor * total))
        assert 0.0 <= few <= many < np.inf


@given(size=SIZES, stride=STRIDES, total=BYTES)
def test_no_collective_beats_the_fastest_link(size: int, stride: int, total: float) -> None:
    assume(size > 1)
    model = links()
    least = (size - 1) / size * total / UP
    assert model.gather_s(np.array([total]), ints(size), ints(stride)) >= least * (1 - 1e-12)
    assert model.all_reduce_s(np.array([total]), ints(size), ints(stride)) >= 2 * least * (1 - 1e-12)


@given(size=SIZES, stride=STRIDES, copies=st.floats(1.0, 64.0))
def test_deduplication_never_sends_more(size: int, stride: int, copies: float) -> None:
    payload = np.array([1e9])
    plain = links().all_to_all_s(payload, ints(size), ints(stride))
    assert links().all_to_all_s(payload, ints(size), ints(stride), copies=visiting(copies)) <= plain * (1 + 1e-12)


def test_a_candidate_can_be_priced_under_many_constants() -> None:
    """A fit takes its derivatives so."""
    efficiency = np.array([0.5, 0.7, 1.0])
    many = replace(links(), calibration=with_time(EXACT, network_efficiency=efficiency, scale_up_efficiency=efficiency))
    each = [
        replace(links(), calibration=with_time(EXACT, network_efficiency=e, scale_up_efficiency=e))
        for e in efficiency.tolist()
    ]
    waits = np.array([8.0])
    together = many.pipeline_s(np.array([1e9]), 4, ints(4), waits, wraps=False)
    assert together == pytest.approx(
        [one.pipeline_s(np.array([1e9]), 4, ints(4), waits, wraps=False)[0] for one in each]
    )
    assert many.ring_step_s(np.array([1e9]), ints(16), ints(1)) == pytest.approx(
        [one.ring_step_s(np.array([1e9]), ints(16), ints(1))[0] for one in each]
    )
    assert many.all_to_all_s(np.array([1e9]), ints(16), ints(1)) == pytest.approx(
        [one.all_to_all_s(np.array([1e9]), ints(16), ints(1))[0] for one in each]
    )


@pytest.mark.parametrize(
    ("size", "stride", "hops_inside", "hops_across"), [(8, 1, 7, 0), (64, 1, 56, 7), (64, 2, 48, 15), (64, 8, 0, 63)]
)
def test_broadcasts_move_the_bytes_of_a_gather_and_wait_for_each_hop(
    size: int, stride: int, hops_inside: int, hops_across: int
) -> None:
    """A chain through all members for each member: one hop for each further domain, the others inside."""
    inside_s, across_s, total = 1e-6, 1e-5, np.array([8e9])
    model = links(scale_up_latency_s=inside_s, scale_out_latency_s=across_s)
    ring = model.ring(ints(size), ints(stride))
    waited = ring.broadcasts_s(total) - ring.gather_s(total)
    assert waited == pytest.approx(size * (hops_inside * inside_s + hops_across * across_s))
    assert model.ring(ints(1), ints(1)).broadcasts_s(total) == 0.0


def test_a_fused_dispatcher_sends_a_token_once_to_each_device_of_a_node() -> None:
    plain = links().all_to_all_s(np.array([8e9]), ints(8), ints(1))
    fused = links().all_to_all_s(np.array([8e9]), ints(8), ints(1), copies=visiting(8.0))
    # Eight uniform draws visit 8·(1 − (7/8)⁸) = 5.25 of eight devices.
    assert fused == pytest.approx(plain * 5.25 / 8.0, rel=0.01)
