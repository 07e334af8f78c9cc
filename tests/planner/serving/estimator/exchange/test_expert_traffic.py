"""Loads and ways of tokens between devices against counting them one by one, and what they may do to prices."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.catalogs.surfaces.experts import expert_surface
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.serving.estimator.exchange.expert_traffic import expert_traffic
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.estimator.memory import worker_memory
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.expert_routing import Dispatch, ExpertRouting, zipf_load
from meshplan.planner.serving.problem.quantization import Quantization

LAYERS, EXPERTS, TOP_K, DEVICES, PER_NODE = 2, 6, 2, 4, 2
SPREAD = Layout(attention_data_parallel=DEVICES, expert_parallel=DEVICES)
NODES = np.arange(DEVICES) // PER_NODE
# Eight slots: experts 0 and 3 have two copies in the first layer, 5 and 2 in the second.
PLACEMENT = np.array([[0, 1, 2, 3, 0, 4, 3, 5], [5, 0, 1, 2, 3, 5, 4, 2]])
TOKENS = np.array([64.0, 512.0, 4096.0, 32768.0])
EIGHT = Layout(attention_data_parallel=16, expert_parallel=16)
MODEL, SIZE, CHOSEN = "qwen3-235b-a22b", 128, 8


@pytest.fixture(scope="module")
def machine(catalog: Catalog) -> Machine:
    return machine_of(Cluster(name="two", groups=(NodeGroup(node=catalog.node_type("dgx-h100"), count=2),)))


def worker(catalog: Catalog, machine: Machine, experts: ExpertRouting | None, layout: Layout = EIGHT) -> Worker:
    return Worker(
        shape=catalog.model_shape(MODEL),
        machine=machine,
        engine="sglang",
        layout=layout,
        limits=EngineLimits(max_num_seqs=64, max_batched_tokens=4096),
        quantization=Quantization.uniform("bf16"),
        constants=ServingConstants(),
        contexts=ContextRange(prompt=1000.0, least=1000.0, most=2000.0),
        experts=experts,
    )


def routing(load: np.ndarray, **fields: object) -> ExpertRouting:
    return ExpertRouting(load=load / load.sum(axis=1, keepdims=True), source="a test", **fields)


def recorded(seed: int) -> ExpertRouting:
    """Sixty tokens of two layers, with their loads and transitions of the first experts."""
    draw = np.random.default_rng(seed)
    weight = draw.dirichlet(np.ones(EXPERTS), LAYERS)
    tokens = np.array(
        [[draw.choice(EXPERTS, TOP_K, replace=False, p=0.9 * row + 0.1 / EXPERTS) for _ in range(60)] for row in weight]
    )
    load = np.array([np.bincount(layer.ravel(), minlength=EXPERTS) for layer in tokens], dtype=float)
    ways = np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
    np.add.at(ways[0], (tokens[0, :, 0], tokens[1, :, 0]), 1.0)
    return routing(load, placement=PLACEMENT, token_experts=tokens, transitions=ways)


def homes(layer: int, expert: int) -> list[int]:
    """Devices that hold a copy."""
    return [slot // 2 for slot in range(8) if PLACEMENT[layer, slot] == expert]


@pytest.mark.parametrize("seed", range(4))
def test_ways_of_tokens_that_return_are_those_counted_one_by_one(seed: int) -> None:
    """Every token once on every attention rank, every copy of its experts as likely as the others."""
    found, given_ = expert_traffic(recorded(seed), SPREAD, top_k=TOP_K, domain_size=PER_NODE), recorded(seed)
    assert found is not None
    assert given_.token_experts is not None
    levels: dict[str, float] = {}
    near, far = np.zeros((LAYERS, DEVICES)), np.zeros((LAYERS, DEVICES // PER_NODE))
    for layer, tokens in enumerate(given_.token_experts):
        here: Counter[str] = Counter()
        for home, token in itertools.product(range(DEVICES), tokens.tolist()):
            choices = list(itertools.product(*(homes(layer, expert) for expert in token)))
            for places in choices:
                part = 1.0 / len(choices) / len(tokens)
                for device in set(places):
                    same = device == home
                    level = "same_device" if same else "same_node" if NODES[device] == NODES[home] else "other_node"
                    here[level] += part
                    near[layer, device] += part * (level == "same_node")
                for node in {int(NODES[device]) for device in places} - {int(NODES[home])}:
                    far[layer, node] += part / PER_NODE
        for level, count in here.items():
            levels[level] = levels.get(level, 0.0) + count / here.total() / LAYERS
    assert found.hops.same_device == pytest.approx(levels["same_device"])
    assert found.hops.same_node == pytest.approx(levels["same_node"])
    assert found.hops.other_node == pytest.approx(levels["other_node"])
    by_chance = 1.0 - (1.0 - 1.0 / DEVICES) ** TOP_K
    assert found.near == pytest.approx(near.max(axis=1) / ((PER_NODE - 1) * by_chance))
    on_a_node = 1.0 - 0.5**TOP_K
    assert found.far == pytest.approx(far.max(axis=1) / ((DEVICES - PER_NODE) / PER_NODE * on_a_node))
    pieces = np.zeros((LAYERS, DEVICES))
    for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
        for device in homes(layer, expert):
            pieces[layer, device] += given_.load[layer, expert] / len(homes(layer, expert))
    assert found.load_factor == pytest.approx(DEVICES * pieces.max(axis=1))


@pytest.mark.parametrize("seed", range(4))
def test_ways_of_tokens_that_stay_are_those_counted_one_by_one(seed: int) -> None:
    given_ = replace(recorded(seed), dispatch=Dispatch.STAYS)
    found = expert_traffic(given_, SPREAD, top_k=TOP_K, domain_size=PER_NODE)
    assert found is not None
    assert found.staying is not None
    assert given_.token_experts is not None
    ways = np.zeros((DEVICES, DEVICES))
    for before, after in zip(given_.token_experts[0, :, 0], given_.token_experts[1, :, 0], strict=True):
        pairs = list(itertools.product(homes(0, before), homes(1, after)))
        for source, target in pairs:
            ways[source, target] += 1.0 / len(pairs) / 60
    assert found.hops.same_device == pytest.approx(np.trace(ways))
    crossing = sum(ways[a, b] for a, b in itertools.product(range(DEVICES), repeat=2) if NODES[a] != NODES[b])
    assert found.hops.other_node == pytest.approx(crossing)
    into = [sum(ways[a, b] for a in range(DEVICES) if a != b and NODES[a] == NODES[b]) for b in range(DEVICES)]
    out = [sum(ways[a, b] for b in range(DEVICES) if a != b and NODES[a] == NODES[b]) for a in range(DEVICES)]
    assert found.staying.first_near == pytest.approx([max(into + out)])
    directions = [ways[:2, 2:].sum(), ways[2:, :2].sum()]
    assert found.staying.first_far == pytest.approx([max(directions) / PER_NODE])


def test_even_loads_exchange_what_is_priced_without_any(catalog: Catalog, machine: Machine) -> None:
    """Kernels then take the tables of balanced routing, which are at most those of the skew assumed otherwise."""
    even, unknown = (worker(catalog, machine, said) for said in (routing(np.ones((3, SIZE))), None))
    assert even.expert_exchange_s(TOKENS) == pytest.approx(unknown.expert_exchange_s(TOKENS), rel=1e-12)
    assert (even.routed_s(TOKENS)[-2:] < unknown.routed_s(TOKENS)[-2:]).all()


def test_even_loads_cost_a_device_without_tables_what_it_costs_without_loads(
    catalog: Catalog, machine: Machine
) -> None:
    plain = replace(machine, device=catalog.device("mi300x"))
    assert expert_surface("mi300x", "bfloat16") is None
    even, unknown = (worker(catalog, plain, said) for said in (routing(np.ones((3, SIZE))), None))
    assert even.routed_s(TOKENS) == pytest.approx(unknown.routed_s(TOKENS), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), share=st.floats(0.0, 1.0))
def test_less_skew_is_never_slower(catalog: Catalog, machine: Machine, seed: int, share: float) -> None:
    load = zipf_load(4, SIZE, 1.2)
    load = np.random.default_rng(seed).permuted(load, axis=1)
    milder = share * load + (1.0 - share) / SIZE
    for price in ("routed_s", "expert_exchange_s"):
        skewed, less = (getattr(worker(catalog, machine, routing(of)), price)(TOKENS) for of in (load, milder))
        assert (less <= skewed * (1.0 + 1e-9)).all()


def test_routing_means_nothing_where_every_device_has_all_experts(catalog: Catalog, machine: Machine) -> None:
    whole = Layout(tensor_parallel=8, expert_tensor_parallel=8)
    skewed, unknown = (worker(catalog, machine, said, whole) for said in (routing(zipf_load(4, SIZE, 2.0)), None))
    assert skewed.traffic is None
    assert skewed.routed_s(TOKENS).tolist() == unknown.routed_s(TOKENS).tolist()


def test_copies_take_their_memory_from_the_cache(catalog: Catalog, machine: Machine) -> None:
    shape, limits = catalog.model_shape(MODEL), EngineLimits()
    copies = np.tile(np.r_[np.arange(SIZE), np.arange(16)], (4, 1))
    formats = Quantization.uniform("bf16")
    one, more = (
        worker_memory(
            shape,
            machine.device,
            EIGHT,
            limits,
            formats,
            context=1000.0,
            experts=routing(np.ones((4, SIZE)), placement=placement),
        )
        for placement in (None, copies)
    )
    each = 2.0 * shape.expert_parameters * shape.num_moe_layers  # one more slot on each of 16 devices
    assert more.weights_bytes - one.weights_bytes == pytest.approx(each)
    lost = 16 * each / one.kv_bytes_per_token
    assert one.kv_capacity_tokens - more.kv_capacity_tokens == pytest.approx(lost, abs=2)


def test_tokens_that_stay_hold_every_cache_on_every_device(catalog: Catalog, machine: Machine) -> None:
    shape, formats = catalog.model_shape(MODEL), Quantization.uniform("bf16")
    returns = routing(np.ones((2, SIZE)), transitions=np.ones((1, SIZE, SIZE)))
    held = [
        worker_memory(shape, machine.device, EIGHT, EngineLimits(), formats, context=1e3, experts=said)
        for said in (returns, replace(returns, dispatch=Dispatch.STAYS))
    ]
    assert held[0].kv_capacity_tokens == pytest.approx(16 * held[1].kv_capacity_tokens, abs=16)


def test_fewer_hops_cost_tokens_that_stay_less(catalog: Catalog, machine: Machine) -> None:
    """A hidden block of eight experts on each device, which tokens never leave, against experts in order."""
    block = np.random.default_rng(0).permutation(SIZE).reshape(16, 8)
    ways = np.zeros((1, SIZE, SIZE))
    for one in block:
        ways[0][np.ix_(one, one)] = 1.0
    in_order = routing(np.ones((2, SIZE)), transitions=ways, dispatch=Dispatch.STAYS)
    together = replace(in_order, placement=np.tile(block.ravel(), (2, 1)))
    prices = [worker(catalog, machine, said).expert_exchange_s(TOKENS) for said in (in_order, together)]
    assert (prices[1] < prices[0]).all()
    traffic = worker(catalog, machine, together).traffic
    assert traffic is not None
    assert traffic.hops.same_device == pytest.approx(1.0)
    returning = [
        worker(catalog, machine, replace(said, dispatch=Dispatch.RETURNS)).expert_exchange_s(TOKENS)
        for said in (in_order, together)
    ]
    assert returning[1] == pytest.approx(returning[0])  # which expert follows which is no matter there
