"""Rank mapping against an evaluator and a brute force written here from the statement of the problem alone."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Progress, Solution, Status
from meshplan.planner.rank_mapping.bound import lower_bound
from meshplan.planner.rank_mapping.exact import search as exact_search
from meshplan.planner.rank_mapping.exact.search import improve_exactly
from meshplan.planner.rank_mapping.objective import LinkCosts, best_ring
from meshplan.planner.rank_mapping.problem import RankMappingProblem
from meshplan.planner.rank_mapping.solve import RankMapping, answer, solve

DATA = Path(__file__).parents[2] / "data" / "rank_mapping"
INSTANCES = sorted(DATA.glob("rank-mapping-*.json"))
SHAPES = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (6, 1), (1, 6)]


def read(file: Path) -> RankMappingProblem:
    return RankMappingProblem.from_document(json.loads(file.read_text()), file.parent)


def random_problem(rng: np.random.Generator, stages: int, pipelines: int, **changes: Any) -> RankMappingProblem:
    """Islands, degraded links and latencies, in one of a few mixes."""
    nodes = stages * pipelines
    island = rng.integers(0, rng.integers(1, 4), nodes)
    bandwidth = np.where(island[:, None] == island, 25e9, rng.choice([1e9, 5e9, 20e9]))
    bandwidth = bandwidth * rng.uniform(1.0 - rng.choice([0.01, 0.3, 0.8]), 1.0, (nodes, nodes))
    latency = rng.choice([0.0, 1e-3]) * rng.random((nodes, nodes))
    fields: dict[str, Any] = {
        "num_nodes": nodes,
        "pipeline_parallel": stages,
        "data_parallel_nodes": pipelines,
        "pipeline_message_bytes": 4e7,
        "data_parallel_message_bytes": float(rng.choice([1e8, 1e9, 5e9])),
        "num_microbatches_exposed": 8.0,
        "bandwidth_bytes_per_s": bandwidth,
        "latency_s": latency,
    }
    return RankMappingProblem(**{**fields, **changes})


def time_of(problem: RankMappingProblem, assignment: Any, rings: Any) -> float:
    """T from the statement of the problem, one link after the other."""
    bandwidth, latency = problem.bandwidth_bytes_per_s, problem.latency_s
    message, pipelines = problem.pipeline_message_bytes, problem.data_parallel_nodes
    slowest_pipeline = slowest_ring = 0.0
    for row in assignment:
        pipeline = 0.0
        for a, b in itertools.pairwise(row):
            there = latency[a, b] + message / bandwidth[a, b]
            back = latency[b, a] + message / bandwidth[b, a]
            pipeline += problem.num_microbatches_exposed * (there + back)
        slowest_pipeline = max(slowest_pipeline, pipeline)
    for ring in rings if pipelines > 1 else ():
        links = [bandwidth[a, b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
        volume = 2 * (pipelines - 1) / pipelines * problem.data_parallel_message_bytes
        slowest_ring = max(slowest_ring, volume / min(links))
    return slowest_pipeline + slowest_ring


def best_time(problem: RankMappingProblem) -> float:
    """Every bijection (up to the order of pipelines) with every ring of every stage."""
    stages, pipelines = problem.pipeline_parallel, problem.data_parallel_nodes
    ring_cache: dict[frozenset[int], float] = {}

    def ring_time(nodes: tuple[int, ...]) -> float:
        key = frozenset(nodes)
        if key not in ring_cache:
            orders = ([nodes[0], *rest] for rest in itertools.permutations(nodes[1:]))
            ring_cache[key] = min(time_of(problem, [], [order]) for order in orders)
        return ring_cache[key]

    best = np.inf
    for nodes in itertools.permutations(range(problem.num_nodes)):
        assignment = [nodes[r * stages : (r + 1) * stages] for r in range(pipelines)]
        if any(left[0] > right[0] for left, right in itertools.pairwise(assignment)):
            continue
        rings = max(ring_time(tuple(row[stage] for row in assignment)) for stage in range(stages))
        if rings < best:
            best = min(best, rings + time_of(problem, assignment, []))
    return float(best)


def check_solution(problem: RankMappingProblem, solution: Solution[RankMapping]) -> RankMapping:
    """Everything that must hold for any answer; returns the mapping."""
    mapping = solution.assignment
    assert mapping is not None
    assert solution.objective is not None
    assert solution.bound is not None
    assert sorted(itertools.chain(*mapping.assignment)) == list(range(problem.num_nodes))
    for stage, ring in enumerate(mapping.rings):
        assert sorted(ring) == sorted(row[stage] for row in mapping.assignment)
    assert solution.objective == pytest.approx(time_of(problem, mapping.assignment, mapping.rings), rel=1e-12)
    assert solution.bound <= solution.objective
    assert solution.gap is not None
    assert solution.gap * solution.objective == pytest.approx(solution.objective - solution.bound, abs=1e-12)
    assert (solution.status is Status.OPTIMAL) == (solution.gap <= 1e-9)
    return mapping


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_brute_force(shape: tuple[int, int]) -> None:
    for seed in range(3):
        problem = random_problem(np.random.default_rng([*shape, seed]), *shape)
        solution = solve(problem)
        check_solution(problem, solution)
        assert solution.objective == pytest.approx(best_time(problem), rel=1e-9)
        assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_agrees_with_brute_force_on_eight_nodes(shape: tuple[int, int]) -> None:
    problem = random_problem(np.random.default_rng([*shape, 8]), *shape)
    solution = solve(problem)
    check_solution(problem, solution)
    assert solution.objective == pytest.approx(best_time(problem), rel=1e-9)
    assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("file", INSTANCES, ids=lambda file: file.stem)
def test_shipped_instances_are_solved_and_proven(file: Path) -> None:
    problem = read(file)
    solution = solve(problem)
    check_solution(problem, solution)
    assert solution.status is Status.OPTIMAL


def test_exact_search_finds_what_a_bad_incumbent_hides() -> None:
    problem = random_problem(np.random.default_rng(3), 2, 3)
    costs = LinkCosts.of(problem)
    found = improve_exactly(costs, bound_s=0.0, pipeline_bound_s=0.0, incumbent_s=1e3)
    assert found.lines is not None
    assert found.bound_s <= best_time(problem) * (1 + 1e-12)
    rings = np.stack([best_ring(costs.ring_s, stage) for stage in found.lines])
    assert costs.objective_s(found.lines, rings) == pytest.approx(best_time(problem), rel=1e-12)


@cache
def orders_of_nine() -> np.ndarray:
    """All 9! orders of three pipelines of three stages but for the order of the pipelines."""
    nodes = np.array(list(itertools.permutations(range(9))))
    return nodes[(nodes[:, 0] < nodes[:, 3]) & (nodes[:, 3] < nodes[:, 6])].reshape(-1, 3, 3)


def best_time_on_nine(problem: RankMappingProblem) -> float:
    """All orders at once; a ring of three nodes has two orders."""
    nodes = orders_of_nine()
    one_way = problem.latency_s + problem.pipeline_message_bytes / problem.bandwidth_bytes_per_s
    hop = problem.num_microbatches_exposed * (one_way + one_way.T)
    pipelines = (hop[nodes[:, :, 0], nodes[:, :, 1]] + hop[nodes[:, :, 1], nodes[:, :, 2]]).max(axis=1)
    link = 4 / 3 * problem.data_parallel_message_bytes / problem.bandwidth_bytes_per_s
    a, b, c = nodes[:, 0], nodes[:, 1], nodes[:, 2]
    one = np.maximum(np.maximum(link[a, b], link[b, c]), link[c, a])
    other = np.maximum(np.maximum(link[a, c], link[c, b]), link[b, a])
    return float((pipelines + np.minimum(one, other).max(axis=1)).min())


@pytest.mark.parametrize("range_work", [0, exact_search.RANGE_WORK])
@pytest.mark.parametrize("matching_price", [1e-9, 7, 1e12])
def test_every_way_of_the_exact_search_finds_the_optimum_of_nine_nodes(
    range_work: int, matching_price: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges whole or taken apart, by stages or by pipelines, from a good incumbent and from a bad one."""
    monkeypatch.setattr(exact_search, "RANGE_WORK", range_work)
    monkeypatch.setattr(exact_search, "WORK_PER_MATCHING", matching_price)
    for seed in range(3):
        problem = random_problem(np.random.default_rng([seed, 9]), 3, 3)
        costs, best = LinkCosts.of(problem), best_time_on_nine(problem)
        for incumbent in (best * 1.05, best * 3.0):
            found = improve_exactly(costs, bound_s=0.0, pipeline_bound_s=0.0, incumbent_s=incumbent)
            assert found.bound_s == pytest.approx(best, rel=1e-12)
            assert found.lines is not None
            rings = np.stack([best_ring(costs.ring_s, stage) for stage in found.lines])
            assert costs.objective_s(found.lines, rings) == pytest.approx(best, rel=1e-12)
        assert improve_exactly(costs, bound_s=0.0, pipeline_bound_s=0.0, incumbent_s=best).lines is None


@pytest.mark.parametrize("shape", [(4, 4), (2, 8), (8, 2), (16, 1), (1, 16), (5, 3)])
def test_up_to_sixteen_nodes_the_optimum_is_proven(shape: tuple[int, int]) -> None:
    """Independent noise on every link: nothing in the structure of the links helps."""
    rng = np.random.default_rng([*shape, 16])
    size = shape[0] * shape[1]
    noisy = 25e9 * rng.uniform(0.6, 1.4, (size, size))
    problem = random_problem(rng, *shape, bandwidth_bytes_per_s=noisy, latency_s=np.zeros((size, size)))
    solution = solve(problem)
    check_solution(problem, solution)
    assert solution.status is Status.OPTIMAL


def test_work_that_runs_out_leaves_a_bound_that_holds() -> None:
    problem = random_problem(np.random.default_rng([1, 9]), 3, 3)
    best = best_time_on_nine(problem)
    for work in (0, 100, 1000, 10_000):
        found = improve_exactly(
            LinkCosts.of(problem), bound_s=0.0, pipeline_bound_s=0.0, incumbent_s=best * 1.5, work=work
        )
        assert found.bound_s <= best * (1 + 1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 5), (4, 1)]))
def test_the_structural_bound_never_exceeds_the_optimum(seed: int, shape: tuple[int, int]) -> None:
    problem = random_problem(np.random.default_rng(seed), *shape)
    bound = lower_bound(LinkCosts.of(problem))
    assert bound.total_s <= best_time(problem) * (1 + 1e-9)
    assert bound.ring_s + bound.pipeline_s <= bound.total_s * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(2, 3), (2, 4), (3, 3), (4, 2)]))
def test_renumbering_nodes_never_changes_the_optimum(seed: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, *shape)
    order = rng.permutation(problem.num_nodes)
    renumbered = random_problem(
        rng,
        *shape,
        bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s[np.ix_(order, order)],
        latency_s=problem.latency_s[np.ix_(order, order)],
        data_parallel_message_bytes=problem.data_parallel_message_bytes,
    )
    first, second = solve(problem), solve(renumbered)
    assert first.status is second.status is Status.OPTIMAL
    assert first.objective == pytest.approx(second.objective, rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(2, 3), (2, 4), (3, 3), (4, 2)]))
def test_more_bandwidth_is_never_slower(seed: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, *shape)
    faster = random_problem(
        rng,
        *shape,
        bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s
        * rng.uniform(1.0, 2.0, problem.bandwidth_bytes_per_s.shape),
        latency_s=problem.latency_s,
        data_parallel_message_bytes=problem.data_parallel_message_bytes,
    )
    before, after = solve(problem).objective, solve(faster).objective
    assert before is not None
    assert after is not None
    assert after <= before * (1 + 1e-9)


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(3, 4), (4, 3), (2, 6), (6, 2), (4, 4)]))
def test_questions_of_up_to_sixteen_nodes_are_ordered(seed: int, shape: tuple[int, int]) -> None:
    """Renumbered nodes give the same time; slower links, larger messages and any one mapping never a shorter one."""
    rng = np.random.default_rng(seed)
    size = shape[0] * shape[1]
    links = 25e9 * rng.uniform(0.5, 1.5, (size, size))
    order = rng.permutation(size)

    def solved(**changes: Any) -> Solution[RankMapping]:
        fields = {"bandwidth_bytes_per_s": links, "data_parallel_message_bytes": 1e9, **changes}
        problem = random_problem(np.random.default_rng(0), *shape, latency_s=np.zeros((size, size)), **fields)
        solution = solve(problem)
        check_solution(problem, solution)
        assert solution.status is Status.OPTIMAL
        return solution

    best = solved().objective
    assert best is not None
    assert solved(bandwidth_bytes_per_s=links[np.ix_(order, order)]).objective == pytest.approx(best, rel=1e-9)
    for harder in (
        {"bandwidth_bytes_per_s": links * rng.uniform(0.7, 1.0, links.shape)},
        {"data_parallel_message_bytes": 1.2e9},
        {"pipeline_message_bytes": 5e7},
    ):
        slower = solved(**harder).objective
        assert slower is not None
        assert slower >= best * (1 - 1e-9)


def test_uniform_links_keep_the_default_layout() -> None:
    problem = random_problem(
        np.random.default_rng(0), 4, 8, bandwidth_bytes_per_s=np.full((32, 32), 25e9), latency_s=np.zeros((32, 32))
    )
    solution = solve(problem)
    mapping = check_solution(problem, solution)
    assert solution.status is Status.OPTIMAL
    assert mapping.assignment == tuple(tuple(range(r, 32, 8)) for r in range(8))


@pytest.mark.parametrize("shape", [(3, 6), (9, 2), (18, 1), (1, 18)])
def test_larger_jobs_are_valid_better_than_default_and_repeatable(shape: tuple[int, int]) -> None:
    problem = random_problem(np.random.default_rng([*shape, 18]), *shape)
    first, second = solve(problem, seed=5), solve(problem, seed=5)
    check_solution(problem, first)
    assert first.assignment == second.assignment
    assert first.bound == second.bound
    document = answer(problem, first)
    assert document["objective_s"] <= document["identity_s"] * (1 + 1e-12)
    assert document["objective_s"] <= document["random_mean_s"]


def test_messages_of_no_bytes_cost_nothing() -> None:
    problem = random_problem(
        np.random.default_rng(1),
        2,
        3,
        pipeline_message_bytes=0.0,
        data_parallel_message_bytes=0.0,
        latency_s=np.zeros((6, 6)),
    )
    solution = solve(problem)
    assert solution.objective == solution.bound == solution.gap == 0.0
    assert solution.status is Status.OPTIMAL


def test_extreme_links_stay_finite() -> None:
    """Seven decades between the slowest and the fastest link."""
    rng = np.random.default_rng(2)
    problem = random_problem(rng, 3, 6, bandwidth_bytes_per_s=10.0 ** rng.uniform(4, 11, (18, 18)))
    check_solution(problem, solve(problem))


def test_a_time_limit_of_nothing_still_answers() -> None:
    problem = random_problem(np.random.default_rng(4), 4, 8)
    check_solution(problem, solve(problem, budget=Budget(0.0)))


def test_an_interrupt_during_the_proof_keeps_the_mapping() -> None:
    """The budget says stop as soon as the search for a proof looks at it."""
    problem = random_problem(np.random.default_rng(12), 4, 4)
    told: list[str] = []
    budget = Budget()

    def interrupt(progress: Progress) -> None:
        told.append(progress.note)
        if progress.note == "annealing":
            budget.interrupt()

    solution = solve(problem, budget=budget, on_progress=interrupt)
    check_solution(problem, solution)
    assert "annealing" in told
    assert solution.stopped == "Ctrl-C"
    best = solve(problem)
    assert best.objective is not None
    assert solution.bound is not None
    assert solution.bound <= best.objective * (1 + 1e-9)


def test_a_proof_that_is_interrupted_leaves_a_bound_that_holds() -> None:
    problem = random_problem(np.random.default_rng([1, 9]), 3, 3)
    best = best_time_on_nine(problem)
    for looks in (0, 1, 3, 9):
        left = iter([0.0] * (looks + 1))
        stopping = Budget(1.0, clock=lambda left=left: next(left, 2.0))  # type: ignore[misc]
        found = improve_exactly(
            LinkCosts.of(problem), bound_s=0.0, pipeline_bound_s=0.0, incumbent_s=best * 1.5, budget=stopping
        )
        assert found.bound_s <= best * (1 + 1e-12)


def test_progress_tells_falling_incumbents_and_a_valid_bound() -> None:
    told: list[Progress] = []
    problem = random_problem(np.random.default_rng(6), 3, 8)
    solution = solve(problem, on_progress=told.append)
    incumbents = [progress.incumbent for progress in told if progress.incumbent is not None]
    assert incumbents == sorted(incumbents, reverse=True)
    assert solution.objective is not None
    assert all(progress.bound is not None and progress.bound <= solution.objective for progress in told)


def test_the_answer_names_what_binds() -> None:
    problem = read(DATA / "rank-mapping-islands-8n-pp2-dp4.json")
    solution = solve(problem)
    mapping = solution.assignment
    assert mapping is not None
    document = answer(problem, solution)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["assignment"] == [list(row) for row in mapping.assignment]
    path = document["critical_path"]
    assert path["pipeline_s"] + path["data_parallel_s"] == pytest.approx(document["objective_s"])
    assert path["pipeline_nodes"] == document["assignment"][path["pipeline"]]
    assert path["ring"] == document["rings"][path["stage"]]
    link = path["slowest_ring_link"]
    assert problem.bandwidth_bytes_per_s[link["sender"], link["receiver"]] == link["bandwidth_bytes_per_s"]
    ring = path["ring"]
    links = zip(ring, [*ring[1:], ring[0]], strict=True)
    assert link["bandwidth_bytes_per_s"] == min(problem.bandwidth_bytes_per_s[a, b] for a, b in links)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 6))
def test_best_ring_is_the_best_of_all_orders(seed: int, size: int) -> None:
    cost = np.random.default_rng(seed).random((8, 8))
    nodes = np.random.default_rng(seed).permutation(8)[:size]
    found = best_ring(cost, nodes)
    assert sorted(found) == sorted(nodes)

    def slowest(order: Any) -> float:
        return max(cost[a, b] for a, b in zip(order, [*order[1:], order[0]], strict=True))

    if size > 1:
        assert slowest(list(found)) == min(slowest([nodes[0], *rest]) for rest in itertools.permutations(nodes[1:]))
