"""What data parallelism adds at least on uneven links, against the price of every candidate and sharding group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, machine_with, problem_of

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.crossing import CrossingLinks, Way, slow_cut
from meshplan.planner.cluster.network.network import Network, Trunk
from meshplan.planner.cluster.network.network_model import BestLinks, NetworkModel, OneOrder
from meshplan.planner.training.estimator.candidates import joined
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.space import Space
from meshplan.planner.training.search.templates import divisors, template_candidates
from meshplan.planner.training.search.variants import smaller_groups

# Ways to cross that need three kinds of groups over several nodes each.
NEEDS_MANY_NODES = {Way.SHARDS_AND_COPIES_AND_PIPELINES.name}
PINS = {"micro_batch_size": 1, "virtual_pipeline_stages": 1}


def machine_of(name: str) -> Machine:
    """Eight devices at two sites that one line joins, under one kind of network model."""
    domain = 1 if name in NEEDS_MANY_NODES else 2
    nodes = 8 // domain
    site = np.arange(nodes) * 2 // nodes
    same = site[:, None] == site
    rates, latency = np.where(same, 25e9, 2e9), np.where(same, 5e-6, 1e-2)
    np.fill_diagonal(rates, np.inf)
    np.fill_diagonal(latency, 0.0)
    network = Network(
        names=tuple(f"n{i}" for i in range(nodes)),
        bytes_per_s=rates,
        latency_s=latency,
        usable=tuple(range(nodes)),
        trunks=tuple(Trunk(name=str(i), senders=site == i, receivers=site != i, bytes_per_s=5e8) for i in (0, 1)),
    )
    cut, best = slow_cut(network, domain), BestLinks(network=network, domain_size=domain)
    assert cut is not None
    in_turn = tuple(np.argsort(np.arange(nodes) % (nodes // 2), kind="stable").tolist())
    models: dict[str, NetworkModel] = {
        "best links": best,
        "by site": OneOrder(network=network, order=network.usable, domain_size=domain),
        "in turn": OneOrder(network=network, order=in_turn, domain_size=domain),
        **{way.name: CrossingLinks(cut=cut, way=way, best=best) for way in Way},
    }
    return machine_with(8, domain_size=domain, devices_per_host=domain, network=network, network_model=models[name])


def question(name: str, shape: ModelShape = DENSE, *, is_fsdp: bool = False, **pins: int) -> TrainingProblem:
    plain = Calibration(framework="any", architecture="any")
    return problem_of(
        shape,
        num_devices=8,
        global_batch_size=8,
        sequence_length=4096,
        machine=machine_of(name),
        calibration=replace(plain, recipe=replace(plain.recipe, is_fsdp=is_fsdp, overlaps_data_parallel=True)),
        fixed={**PINS, **pins},
    )


def held(problem: TrainingProblem) -> tuple[int, float]:
    """Candidates that were held against their bound, and the least price over the bound."""
    model, space = problem.machine.network_model, Space.of(problem)
    assert model is not None
    seen, tightest = 0, np.inf
    for split in space.splits:
        window = space.templates.between(1, problem.limits.max_devices / split.pipeline_parallel)
        rows = np.arange(window.start, window.stop)
        batch = template_candidates(problem, space.templates, rows, split)
        if not len(batch):
            continue
        cells = np.repeat(rows, space.templates.num_variants[rows])
        own = batch if "data_parallel_shard" in problem.fixed else joined([batch, smaller_groups(batch)])
        if len(own) > len(batch):
            sizes = [len(divisors(data)) - 1 for data in batch.data_parallel.tolist()]
            cells = np.concatenate([cells, np.repeat(cells, sizes)])
        rows = np.flatnonzero(model.is_possible(own.degrees) & ((own.zero_stage > 0) | (own.data_parallel_shard == 1)))
        own, cells = own.take(rows), cells[rows]
        if not len(own):
            continue
        steps = estimate_training(problem.shape, problem.machine, problem.workload, own, problem.calibration).step_s
        least = space.bounds.least_s(split, cells)
        assert (least <= steps).all()
        seen += len(own)
        tightest = min(tightest, float(np.min(steps / least)))
    return seen, tightest


KINDS = ["best links", "by site", "in turn", *(way.name for way in Way)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("shape", "is_fsdp"), [(DENSE, False), (MOE, True)], ids=["dense", "experts, sharded by PyTorch"]
)
def test_no_way_to_shard_beats_the_bound_of_its_template(name: str, shape: ModelShape, is_fsdp: bool) -> None:
    seen, tightest = held(question(name, shape, is_fsdp=is_fsdp))
    assert seen > 10
    # Collectives of the layers that cross the line are left out of the bound.
    assert name == Way.TENSOR.name or tightest < 1.5, "the bound is far from every candidate"


@pytest.mark.parametrize("pin", [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 3}, {"data_parallel_shard": 2}])
def test_pins_of_the_states_tighten_the_bound(pin: dict[str, int]) -> None:
    free, problem = question("in turn"), question("in turn", **pin)
    assert held(problem)[0] > 10
    space = Space.of(free)
    pinned, split = space.pinned(problem, pin), space.splits[0]
    rows = np.flatnonzero(pinned.templates.stage_devices <= problem.limits.max_devices)
    own, others = pinned.bounds.least_s(split, rows), space.bounds.least_s(split, rows)
    assert (own >= others * (1.0 - 1e-12)).all()
    assert (own > others * (1.0 + 1e-3)).any()
