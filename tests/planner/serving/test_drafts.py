"""Speculative decoding chosen by load: measured yields, when drafts hurt, and what is asked wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.constants.speculation import speculation_profiles
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.solution import Status
from meshplan.planner.serving.drafts import hurts_from, speculation_by_load
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role, ServingConfig, Speculation
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.problem.speculation import acceptance_of, speculation_options
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.branch import TIE
from meshplan.planner.serving.search.search import search_serving
from meshplan.planner.serving.search.slo_judgement import judge

CHOOSE: dict[str, Any] = {"choose": ["ngram", "eagle3"], "draft_model": "some/eagle3"}
ONE_CHUNK = {"mode": "aggregated", "max_batched_tokens": 2048}
PROFILE = {"ngram": {3: 1.2}, "eagle3": {3: 2.25}}


def problem_of(catalog: Catalog, speculation: dict[str, Any], concurrency: int = 8, **keys: Any) -> ServingProblem:
    document = {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 500, "output_length": 100, "concurrency": concurrency, "num_requests": 512},
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


def test_acceptance_is_one_where_every_draft_counts_and_none_where_no_draft_does() -> None:
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


def test_answers_of_one_token_have_nothing_to_draft(catalog: Catalog) -> None:
    load = {"input_length": 17, "output_length": 1, "concurrency": 4, "num_requests": 64}
    problem = problem_of(catalog, CHOOSE, workload=load)
    rows = speculation_by_load(problem.site, pool_of(problem, 8), problem.workload, problem.speculation_options)
    assert [(row.best, row.speed_up) for row in rows] == [(None, 1.0)] * 4


def test_the_table_by_load_is_what_is_simulated(catalog: Catalog) -> None:
    """Closed loops of one worker, where the chosen depth is a matter of a few percent."""
    problem = problem_of(catalog, CHOOSE)
    pool, options = pool_of(problem, 64), problem.speculation_options
    rows = {row.num_running: row for row in speculation_by_load(problem.site, pool, problem.workload, options)}
    for running in (1, 64):
        asked = problem_of(catalog, CHOOSE, concurrency=running)
        tokens = {
            drafts: judge(asked, simulated_config(asked, drafts), num_requests=512).output_tokens_per_s
            for drafts in (None, *asked.speculation_options[::3], rows[running].best)
        }
        assert tokens[rows[running].best] >= 0.98 * max(tokens.values())


def simulated_config(problem: ServingProblem, drafts: Speculation | None) -> ServingConfig:
    slots = problem.workload.concurrency or 1
    return ServingConfig(engine="vllm", pools=(pool_of(problem, slots),), speculation=drafts)


def test_every_option_is_searched(catalog: Catalog) -> None:
    """The plan is the best of a search for each option by itself, and is proven."""
    problem = problem_of(catalog, CHOOSE | {"profile": PROFILE}, concurrency=64, fixed=ONE_CHUNK)
    solution, report = search_serving(problem)
    alone = {stated.speculation: search_serving(stated)[0] for stated in problem.with_each_draft}
    least = min(found.objective for found in alone.values() if found.objective is not None)
    assert solution.objective == pytest.approx(least, rel=TIE)
    assert solution.status is Status.OPTIMAL
    chosen = solution.assignment
    assert chosen is not None
    assert alone[chosen.candidate.config.speculation].objective == pytest.approx(least, rel=TIE)
    assert all(worker.worker.speculation == chosen.candidate.config.speculation for worker in report.mixed)


def test_no_drafts_where_none_is_accepted(catalog: Catalog) -> None:
    useless = {"choose": ["ngram"], "profile": {"ngram": {1: 1.0, 5: 1.0}}}
    solution, _ = search_serving(problem_of(catalog, useless, fixed=ONE_CHUNK))
    assert solution.assignment is not None
    assert solution.assignment.candidate.config.speculation is None


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
