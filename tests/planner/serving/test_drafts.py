"""Speculative decoding chosen by load: measured yields, when drafts hurt, and what is asked wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.constants.speculation import speculation_profiles
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.solution import Status
from meshplan.planner.serving.drafts import hurts_from, search_with_speculation, speculation_by_load
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role, Speculation
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.speculation import acceptance_of, speculation_options
from meshplan.planner.serving.resolve import resolve_serving

CHOOSE: dict[str, Any] = {"choose": ["ngram", "eagle3"], "draft_model": "some/eagle3"}


def problem_of(catalog: Catalog, speculation: dict[str, Any], concurrency: int = 8, **keys: Any) -> ServingProblem:
    document = {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 500, "output_length": 100, "concurrency": concurrency},
        "constraints": {"target": "vllm", "max_devices": 1},
        "speculation": speculation,
    }
    return resolve_serving(read_serving_spec(document | keys), catalog, Path()).problem


def pool_of(problem: ServingProblem, slots: int) -> Pool:
    limits = EngineLimits(max_num_seqs=slots, max_batched_tokens=2048)
    return Pool(
        role=Role.MIXED,
        node_type="dgx-h100",
        layout=Layout(),
        limits=limits,
        quantization=problem.quantizations[0],
        num_workers=1,
    )


@pytest.mark.parametrize("dataset", sorted(speculation_profiles()))
def test_options_yield_what_was_measured(dataset: str, catalog: Catalog) -> None:
    profile = speculation_profiles()[dataset]
    shape = catalog.model_shape("llama-3.1-8b")
    options = speculation_options(shape, profile, ("ngram", "eagle3"), None)
    assert len(options) == sum(map(len, profile.values()))
    for option in options:
        assert option.tokens_per_step == pytest.approx(profile[option.method][option.num_draft_tokens], rel=1e-9)
        assert 0 < option.draft_cost < 0.2
    for yields in profile.values():  # deeper drafts yield more, and ever less for each
        gains = [yields[drafted] for drafted in sorted(yields)]
        assert gains == sorted(gains)


def test_all_accepted() -> None:
    assert acceptance_of(4.0, 3) == pytest.approx(1.0)
    assert acceptance_of(1.0, 3) == pytest.approx(0.0, abs=1e-12)


def test_drafts_help_few_requests_and_hurt_many(catalog: Catalog) -> None:
    problem = problem_of(catalog, CHOOSE)
    weak = (Speculation(num_draft_tokens=7, acceptance=0.2, draft_cost=0.05, method="eagle3"),)
    rows = speculation_by_load(problem.site, pool_of(problem, 512), problem.workload, weak)
    assert [row.num_running for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert hurts_from(rows) is not None
    assert rows[-1].best is None
    assert rows[-1].speed_up < 1.0
    alone = speculation_by_load(problem.site, pool_of(problem, 1), problem.workload, problem.speculation_options)
    assert alone[0].speed_up > 1.3


def test_the_best_by_load_is_the_least_time_a_token(catalog: Catalog) -> None:
    problem = problem_of(catalog, CHOOSE)
    pool = pool_of(problem, 64)
    rows = speculation_by_load(problem.site, pool, problem.workload, problem.speculation_options)
    for row in rows:
        times = {None: pool_worker(problem.site, pool, problem.workload).step_cost()}
        times |= {
            option: pool_worker(problem.site, pool, problem.workload, option).step_cost()
            for option in problem.speculation_options[::5]
        }
        context = row.num_running * 550.5
        least = min(cost.step_s(row.num_running, context, 0, 0, 0.0) / cost.tokens_per_step for cost in times.values())
        best = pool_worker(problem.site, pool, problem.workload, row.best).step_cost()
        assert best.step_s(row.num_running, context, 0, 0, 0.0) / best.tokens_per_step <= least * (1 + 1e-9)


def test_a_choice_is_never_worse_than_none(catalog: Catalog) -> None:
    plain, solution, _, document = search_with_speculation(
        problem_of(catalog, CHOOSE), seed=0, budget=None, on_progress=None
    )
    _, without, _, nothing = search_with_speculation(
        problem_of(catalog, {"num_draft_tokens": 1, "acceptance": 0.0}), seed=0, budget=None, on_progress=None
    )
    assert nothing is None
    assert document is not None
    assert plain.speculation is not None
    assert solution.objective is not None
    assert without.objective is not None
    assert solution.objective < without.objective
    assert solution.bound is not None
    assert solution.bound <= solution.objective
    assert solution.status is Status.FEASIBLE  # the options that were not searched may be better


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"num_draft_tokens": 3}, "acceptance missing"),
        ({"choose": ["eagle3"], "acceptance": 0.5}, "acceptance cannot be stated beside choose"),
        ({"choose": ["mtp"]}, "the profile says nothing of mtp"),
        ({"choose": ["eagle3"], "profile": "poems"}, "no profile 'poems' is shipped"),
        ({"choose": ["eagle3"], "profile": {"eagle3": {2: 3.5}}}, "profile.eagle3.2"),
        ({"choose": ["draft_model"], "profile": {"draft_model": {2: 2.0}}}, "draft_cost is missing"),
        ({"choose": ["mtp"], "profile": {"mtp": {1: 1.8}}}, "mtp: .* has no prediction layers"),
    ],
)
def test_what_is_asked_wrongly(speculation: dict[str, Any], message: str, catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=message):
        problem_of(catalog, speculation)
