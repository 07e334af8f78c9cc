"""Degrees and mapping together: no worse than a complete search, other degrees over a slow line, an honest bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from core_cases import DENSE, machine_with, problem_of

from meshplan.planner.cluster.network.network import Network, Trunk
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Progress
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.search.joint import search_plans
from meshplan.planner.training.search.mapping.placement import UNIFORM, placed_problem
from meshplan.planner.training.search.report import TIE_WIDTH


def network_of(rates: np.ndarray, *, latency: float = 5e-6, trunks: tuple[Trunk, ...] = ()) -> Network:
    rates = rates.astype(float)
    np.fill_diagonal(rates, np.inf)
    latencies = np.full(rates.shape, latency)
    np.fill_diagonal(latencies, 0.0)
    nodes = len(rates)
    names = tuple(f"n{i}" for i in range(nodes))
    return Network(
        names=names, bytes_per_s=rates, latency_s=latencies, usable=tuple(range(nodes)), trunks=trunks, source="test"
    )


def problem_on(network: Network, **fields: object) -> TrainingProblem:
    devices = 2 * network.num_nodes
    machine = replace(machine_with(devices, domain_size=2, devices_per_host=2), network=network)
    shape = replace(DENSE, num_hidden_layers=8)
    return problem_of(shape, num_devices=devices, global_batch_size=16, machine=machine, **fields)


# What lies across nodes is the question here: what a stage does inside one need not be searched.
INSIDE = {"micro_batch_size": 1, "activation_recompute": "none"}


@pytest.mark.parametrize("seed", range(3))
def test_nothing_beats_the_answer(seed: int) -> None:
    """Every candidate under every mapping of three nodes, by the degree search itself."""
    rates = np.random.default_rng(seed).choice([50e9, 10e9, 1e9, 0.2e9], (3, 3))
    problem = problem_on(network_of(rates), fixed=INSIDE)
    found = search_plans(problem)
    assert found.solution.objective is not None
    assert found.solution.bound is not None
    complete = [
        search_degrees(placed_problem(problem, order), keep=1)[0].objective
        for order in itertools.permutations(range(3))
    ]
    best = min(value for value in complete if value is not None)
    assert found.solution.bound <= best * (1.0 + 1e-9)
    assert found.solution.objective <= best / (1.0 - TIE_WIDTH)
    assert found.placement is not None
    assert found.placement.step_s == found.solution.objective


def test_a_slow_line_between_two_sites_changes_the_degrees() -> None:
    even = problem_on(network_of(np.full((4, 4), 50e9)), fixed=INSIDE)
    first = np.array([True, False, True, False])
    rates = np.where(first[:, None] == first, 50e9, 0.05e9)
    trunks = tuple(Trunk(name="line", senders=side, receivers=~side, bytes_per_s=0.05e9) for side in (first, ~first))
    sites = problem_on(network_of(rates, trunks=trunks), fixed=INSIDE)
    plain, uneven = search_plans(even), search_plans(sites)
    assert plain.placement is not None
    assert plain.placement.method == UNIFORM
    assert plain.placement.order == (0, 1, 2, 3)
    assert plain.solution.assignment is not None
    assert uneven.solution.assignment is not None
    assert uneven.solution.assignment.config != plain.solution.assignment.config
    # The degrees of the even network, even with their best mapping, are worse here.
    config = plain.solution.assignment.config
    orders = itertools.permutations(range(4))
    kept = {key: getattr(config, key) for key in ("tensor_parallel", "pipeline_parallel", "data_parallel")}
    pinned = replace(sites, fixed={**INSIDE, **kept})
    there = [search_degrees(placed_problem(pinned, order), keep=1)[0].objective for order in orders]
    assert uneven.solution.objective is not None
    assert uneven.solution.gap is not None
    assert uneven.solution.gap <= TIE_WIDTH
    assert uneven.solution.objective <= min(value for value in there if value is not None)


def test_a_time_limit_keeps_an_answer_and_its_gap() -> None:
    problem = problem_on(network_of(np.random.default_rng(5).uniform(1e9, 50e9, (12, 12))))
    found = search_plans(problem, budget=Budget(0.2))
    assert found.solution.objective is not None
    assert found.solution.bound is not None
    assert found.solution.bound <= found.solution.objective


def test_a_budget_that_ends_with_the_degrees_still_maps_one() -> None:
    rates = np.random.default_rng(0).choice([50e9, 10e9, 1e9], (4, 4))
    budget = Budget()

    def interrupt(_: Progress) -> None:
        budget.interrupt()

    fixed = {**INSIDE, "zero_stage": 1}
    found = search_plans(problem_on(network_of(rates), fixed=fixed), budget=budget, on_progress=interrupt)
    assert found.placement is not None
    assert found.solution.stopped == "Ctrl-C"
    assert found.solution.bound is not None
    assert found.solution.objective is not None
    assert found.solution.bound <= found.solution.objective


def test_an_answer_that_is_cut_short_is_no_slower_than_one_site() -> None:
    """The search ends when its first candidate is mapped; rank order alternates between the sites."""
    side = np.arange(4) % 2
    fixed = {**INSIDE, "zero_stage": 1, "tensor_parallel": 1}
    sites = problem_on(network_of(np.where(side[:, None] == side, 50e9, 0.05e9)), fixed=fixed)
    alone = search_plans(problem_on(network_of(np.full((2, 2), 50e9)), fixed=fixed)).solution
    budget = Budget()

    def interrupt(progress: Progress) -> None:
        if progress.note.startswith("mapped"):
            budget.interrupt()

    found = search_plans(sites, budget=budget, on_progress=interrupt).solution
    assert found.stopped == "Ctrl-C"
    assert found.objective is not None
    assert alone.objective is not None
    assert found.objective <= alone.objective * (1.0 + 1e-9)


def test_what_must_cross_a_slow_line_is_in_the_bound() -> None:
    """On all devices of two sites the gradients go over the line between them, whatever the mapping."""
    first = np.array([True, False, True, False])
    rates = np.where(first[:, None] == first, 50e9, 0.05e9)
    trunks = tuple(Trunk(name="line", senders=side, receivers=~side, bytes_per_s=0.05e9) for side in (first, ~first))
    network = network_of(rates, trunks=trunks)
    whole = search_plans(problem_on(network, fixed=INSIDE, limits={"min_devices": 8})).solution
    assert whole.gap is not None
    assert whole.gap <= 0.05
    assert whole.assignment is not None
    assert whole.assignment.config.world_size == 8


def test_a_limit_just_above_the_best_step_keeps_it_and_one_below_leaves_nothing() -> None:
    network = network_of(np.random.default_rng(5).uniform(1e9, 50e9, (3, 3)))
    best = search_plans(problem_on(network, fixed=INSIDE)).solution.objective
    assert best is not None
    under = problem_on(network, fixed=INSIDE, limits={"max_step_s": best * 1.01})
    assert search_plans(under).solution.objective == pytest.approx(best)
    below = problem_on(network, fixed=INSIDE, limits={"max_step_s": best * 0.5})
    assert search_plans(below).solution.assignment is None
