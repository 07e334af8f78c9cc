"""What must cross a slow cut, against every mapping of four nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, MOE, machine_with, problem_of

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.network import Network, Trunk
from meshplan.planner.cluster.network_model import BestLinks
from meshplan.planner.training.estimator.step import estimate_training
from meshplan.planner.training.search.joint import placed_problem
from meshplan.planner.training.search.slow_cut import CutBound, slowest_cut
from meshplan.planner.training.search.space import Space
from meshplan.planner.training.search.templates import legal_candidates, template_candidates

FIXED = {"micro_batch_size": 1, "activation_recompute": "none", "zero_stage": 1, "context_parallel": 1}


def two_sites(near: tuple[int, ...], *, trunk: bool) -> Network:
    """Four nodes at 50 GB/s a device; from the near ones to the others 0.2 GB/s, shared or each."""
    side = np.isin(np.arange(4), near)
    across = side[:, None] != side[None, :]
    rates = np.where(across & (not trunk), 0.2e9, 50e9)
    np.fill_diagonal(rates, np.inf)
    trunks = tuple(Trunk(name="line", senders=one, receivers=~one, bytes_per_s=0.2e9) for one in (side, ~side))
    return Network(
        names=("a", "b", "c", "d"),
        bytes_per_s=rates,
        latency_s=np.full((4, 4), 5e-6) * ~np.eye(4, dtype=bool),
        usable=(0, 1, 2, 3),
        trunks=trunks if trunk else (),
        source="test",
    )


FEW_LAYERS = replace(DENSE, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("shape", "near", "trunk"),
    [(FEW_LAYERS, (0, 1), True), (FEW_LAYERS, (0, 2), False), (MOE, (3,), True), (MOE, (0, 2), False)],
)
def test_no_mapping_beats_the_bound(shape: ModelShape, near: tuple[int, ...], trunk: bool) -> None:
    network = two_sites(near, trunk=trunk)
    machine = replace(machine_with(8, domain_size=2, devices_per_host=2), network=network)
    problem = problem_of(shape, num_devices=8, global_batch_size=8, machine=machine, fixed=FIXED)
    under = replace(problem, machine=replace(machine, network_model=BestLinks(network=network, domain_size=2)))
    space, bound, raised = Space.of(under), CutBound(under), 0
    for split in space.splits:
        rows = space.templates.between(1, 8 / split.pipeline_parallel)
        batch = legal_candidates(under, template_candidates(under, space.templates, rows, split), Counter())
        if not len(batch):
            continue
        model = (problem.shape, problem.workload, batch, problem.calibration)
        steps = [
            estimate_training(model[0], placed_problem(problem, order).machine, *model[1:]).step_s
            for order in itertools.permutations(range(4))
        ]
        plain = estimate_training(model[0], under.machine, *model[1:]).step_s
        least = bound.least_step_s(batch, plain, np.ones(len(batch), dtype=bool))
        assert (least <= np.min(steps, axis=0) * (1.0 + 1e-9)).all()
        raised += int(np.count_nonzero(least > 1.01 * plain))
    assert raised > 0


def test_the_slowest_cut_is_found() -> None:
    cut = slowest_cut(two_sites((0, 2), trunk=True))
    assert cut is not None
    assert cut.largest == 2
    assert cut.group_bytes_per_s(1) == 0.2e9
    assert cut.group_bytes_per_s(4) == 0.05e9
    assert cut.crosses[0].tolist() == [False, True, False, True]
