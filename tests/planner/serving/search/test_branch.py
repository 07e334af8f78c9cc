"""The search over deployments against every deployment searched by itself, with plain bisection."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SolverError
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import Status
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.problem import MAX_UTILIZATION, ServingProblem
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search import branch, candidates, search, workers
from meshplan.planner.serving.search.branch import TIE, Branch, Simulated, simulate_candidate
from meshplan.planner.serving.search.candidates import Candidate, candidate_of, score_of
from meshplan.planner.serving.search.families import Family
from meshplan.planner.serving.search.search import families, search_serving
from meshplan.planner.serving.search.slo_judgement import RATE_TOLERANCE, HighestRate, judge
from meshplan.planner.serving.search.trials import Trial, Verdict
from meshplan.planner.serving.search.workers import price_worker, priced_workers
from meshplan.planner.serving.simulation.run import ServingRun

NUM_REQUESTS = 60
QUESTIONS: dict[str, dict[str, Any]] = {
    "70B, long prompts": {"model": "llama-3.1-70b", "slo": {"ttft_p99_s": 3.0, "tpot_p95_s": 0.05}},
    "8B, short SLOs": {"model": "llama-3.1-8b", "slo": {"ttft_p95_s": 0.3, "tpot_mean_s": 0.012}},
    "70B, dollars": {
        "model": "llama-3.1-70b",
        "slo": {"e2e_mean_s": 30.0},
        "objective": "usd_per_million_tokens",
    },
    "8B, energy": {"model": "llama-3.1-8b", "slo": {"ttft_p95_s": 0.5}, "objective": "energy"},
}


def problem_of(catalog: Catalog, **question: Any) -> ServingProblem:
    document = {
        "kind": "serving",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 2000, "output_length": 300, "num_requests": NUM_REQUESTS},
        **question,
    }
    return resolve_serving(read_serving_spec(document), catalog, Path()).problem


def kinds_of(problem: ServingProblem) -> list[Family]:
    roles = (Role.MIXED, Role.PREFILL, Role.DECODE)
    return list(families(problem, *(priced_workers(problem, role, Counter()) for role in roles)))


def deployments(problem: ServingProblem) -> list[Candidate]:
    found = [candidate_of(family, counts) for family in kinds_of(problem) for counts in family.first()]
    return [one for one in found if not problem.rules.broken(problem.shape, one.config)]


def highest_rate(problem: ServingProblem, candidate: Candidate) -> float:
    """By halving from the closed form's bound, every run to its end."""

    def keeps(rate: float) -> bool:
        return not judge(problem, candidate.config, request_rate_per_s=rate).violated

    high = MAX_UTILIZATION * candidate.request_rate_per_s
    if keeps(high):
        return high
    low = high / 2
    while not keeps(low):
        low, high = low / 2, low
        if high < 1e-3 * candidate.request_rate_per_s:
            return 0.0
    while high > low * (1.0 + RATE_TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_no_deployment_searched_by_itself_is_better(catalog: Catalog, question: dict[str, Any]) -> None:
    """Better by more than the stated gap: it covers the bracket of the search, and what sampling leaves open."""
    problem = problem_of(catalog, **question)
    solution, report = search_serving(problem)
    assert solution.objective is not None
    assert solution.gap is not None
    for candidate in deployments(problem):
        rate = highest_rate(problem, candidate)
        tokens_per_s = rate * problem.workload.mean_lengths[1]
        score = score_of(problem, candidate, request_rate_per_s=rate, tokens_per_s=tokens_per_s)
        assert score >= solution.objective * (1.0 - solution.gap) * (1.0 - 1e-9)
    assert all(one.judged.violated or one.score >= solution.objective * (1.0 - TIE) for one in report.simulated)


def test_stages_are_less_simple_than_copies_behind_a_router(catalog: Catalog) -> None:
    """An 8B model on eight GPUs: tensor parallelism, then copies, then a pipeline inside the node."""
    problem = problem_of(catalog, **QUESTIONS["8B, short SLOs"])
    rank: dict[tuple[int, int], tuple[float, ...]] = {}
    for family in kinds_of(problem):
        if len(family.kinds) != 1:
            continue
        layout = family.kinds[0].placed.layout
        counts = (8 // (layout.tensor_parallel * layout.pipeline_parallel),)
        if family.fits(counts):
            rank[layout.tensor_parallel, layout.pipeline_parallel] = family.simplicity(counts)
    assert rank[8, 1] < rank[1, 1] < rank[2, 4]
    assert rank[4, 1] < rank[1, 4]


def test_stages_of_prefill_do_not_hide_those_of_decode(catalog: Catalog) -> None:
    """DeepSeek-V3 prefilled over eight stages was decoded over eight, too: the pair was no less simple for it."""
    problem = problem_of(catalog, **QUESTIONS["70B, long prompts"], constraints={"target": "trtllm"})
    rank: dict[tuple[int, int], tuple[float, ...]] = {}
    for family in kinds_of(problem):
        layouts = [(kind.placed.layout.tensor_parallel, kind.placed.layout.pipeline_parallel) for kind in family.kinds]
        if len(layouts) > 1 and layouts[0] == (1, 4) and family.fits((1, 1)):
            rank[layouts[1]] = family.simplicity((1, 1))
    assert rank[4, 1] < rank[2, 2]


def test_copies_of_a_node_are_simpler_than_a_worker_over_two(catalog: Catalog) -> None:
    """A 70B model on two nodes: two copies, before tensor parallelism or a pipeline across the network."""
    nodes = {"nodes": [{"type": "dgx-h100", "count": 2}]}
    problem = problem_of(catalog, **QUESTIONS["70B, long prompts"], cluster=nodes)
    rank: dict[tuple[int, int], tuple[float, ...]] = {}
    for family in kinds_of(problem):
        layout = family.kinds[0].placed.layout
        counts = (16 // (layout.tensor_parallel * layout.pipeline_parallel),)
        if len(family.kinds) == 1 and family.fits(counts):
            rank[layout.tensor_parallel, layout.pipeline_parallel] = family.simplicity(counts)
    assert rank[8, 1] < rank[16, 1] < rank[8, 2]


def test_ties_are_looked_at_however_late_the_incumbent_is_found(catalog: Catalog) -> None:
    """DeepSeek-V3 on two nodes: sixty deployments violate the SLO before a pipeline over both meets it, and so do two
    copies of a node each, which need as many devices.
    """
    problem = problem_of(
        catalog,
        model="deepseek-v3",
        cluster={"nodes": [{"type": "dgx-h200", "count": 2}]},
        workload={"input_length": 2000, "output_length": 500, "request_rate_per_s": 5.0},
        slo={"ttft_p99_s": 3.0, "tpot_p95_s": 0.06},
        fixed={"mode": "aggregated"},
    )
    solution, report = search_serving(problem)
    assert solution.assignment is not None
    chosen = solution.assignment.candidate
    layout = chosen.config.pools[0].layout
    assert len(report.simulated) > branch.MAX_TIED
    assert (chosen.counts, layout.tensor_parallel, layout.pipeline_parallel) == ((2,), 8, 1)


def test_of_ties_one_tensor_parallel_group_comes_before_attention_ranks(catalog: Catalog) -> None:
    """Mixtral on two GPUs under a load that both carry: everyone starts it with two-way tensor parallelism."""
    workload = {"input_length": 2000, "output_length": 300, "num_requests": NUM_REQUESTS, "request_rate_per_s": 1}
    asked = {"slo": {"tpot_p95_s": 0.05}, "constraints": {"max_devices": 2}, "fixed": {"mode": "aggregated"}}
    problem = problem_of(catalog, model="mixtral-8x7b", workload=workload, **asked)
    ranks = [simulate_candidate(problem, one) for one in deployments(problem) if _is(one, tensor=1, data=2)]
    chosen = search_serving(problem)[0].assignment
    assert chosen is not None
    assert _is(chosen.candidate, tensor=2, data=1)
    assert any(abs(one.score - chosen.score) <= TIE * chosen.score for one in ranks), "no tie: the rule decides nothing"


def test_no_rank_decodes_more_than_deepep_can_send(catalog: Catalog) -> None:
    """Short requests of Qwen3-30B: the cache of an attention rank of SGLang would hold more than 1,024 of them."""
    workload = {"input_length": 100, "output_length": 100, "num_requests": NUM_REQUESTS}
    problem = problem_of(catalog, model="qwen3-30b-a3b", workload=workload, constraints={"target": "sglang"})
    running = {
        layout.expert_parallel == layout.devices_per_stage: kind.placed.limits.max_num_seqs
        / layout.attention_data_parallel
        for kind in priced_workers(problem, Role.MIXED, Counter())
        for layout in (kind.placed.layout,)
        if layout.attention_data_parallel == 8
    }
    assert running[True] == 1024 < running[False]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_simpler_deployments_are_tried_at_the_rate_at_which_they_tie(catalog: Catalog, num_nodes: int) -> None:
    """Without a given rate: what is simpler than the chosen one is shown to lie more than a tie from the bound."""
    nodes = {"nodes": [{"type": "dgx-h100", "count": num_nodes}]}
    asked = {"model": "llama-3.1-70b", "slo": {"ttft_p95_s": 3.0, "itl_p95_s": 0.04}, "cluster": nodes}
    workload = {"input_length": 4000, "output_length": 1000, "num_requests": NUM_REQUESTS}
    problem = problem_of(catalog, **asked, workload=workload)
    tried = Branch(problem, kinds_of(problem))
    simulated, bound = tried.run()
    tie = max(tried.incumbent, bound / (1.0 - TIE))
    chosen = min(_simplicity(one.candidate) for one in simulated if one.score <= tie)
    simpler = [
        item
        for _, item in tried.given_up
        if isinstance(item, branch.Bracket) and _simplicity(item.candidate) < chosen and item.search.violated_per_s
    ]
    for item in simpler:
        violated = item.search.violated_per_s
        tokens_per_s = violated * problem.workload.mean_lengths[1]
        score = score_of(problem, item.candidate, request_rate_per_s=violated, tokens_per_s=tokens_per_s)
        assert score >= tie * (1.0 - 1e-6), item.candidate.config.pools


def test_a_simpler_tie_is_settled_though_another_is_settled_already(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer runs had lowered the best by half a tie; what was simpler and tied with it was not held against any."""
    problem = problem_of(catalog, **QUESTIONS["8B, short SLOs"], fixed={"mode": "aggregated"})
    found = sorted(deployments(problem), key=_simplicity)
    simpler, other = (simulate_candidate(problem, one) for one in (found[0], found[-1]))
    promised = {id(simpler.candidate): 1.0 + TIE / 2, id(other.candidate): 1.0}
    simulated = [
        replace(one, score=promised[id(one.candidate)], judged=replace(one.judged, is_settled=False, violated=()))
        for one in (other, simpler)
    ]

    class Lowered:
        def __init__(self, one: Simulated) -> None:
            self.judged = lambda: replace(one.judged, is_settled=True)

        def settle(self) -> Lowered:
            return self

    monkeypatch.setattr(search, "_search_of", lambda _, one, *__: Lowered(one))
    monkeypatch.setattr(search, "score_judged", lambda _, candidate, __: promised[id(candidate)] * (1.0 + TIE / 2))
    search._settle_rates(problem, simulated, 0, Budget())
    assert simulated[0].candidate is simpler.candidate
    assert simulated[0].judged.is_settled


def _simplicity(candidate: Candidate) -> tuple[float, ...]:
    return candidate.family.simplicity(candidate.counts)


def _is(candidate: Candidate, *, tensor: int, data: int) -> bool:
    layout = candidate.config.pools[0].layout
    return (layout.tensor_parallel, layout.attention_data_parallel) == (tensor, data)


def test_a_deployment_that_meets_its_slo_at_no_rate_is_judged_where_it_violates_it(catalog: Catalog) -> None:
    problem = problem_of(catalog, model="llama-3.1-70b", slo={"ttft_p99_s": 3.0, "itl_p99_s": 0.03})
    violated = [simulate_candidate(problem, candidate) for candidate in deployments(problem)[:3]]
    assert all(one.score == math.inf or not one.judged.violated for one in violated)
    assert all(one.judged.metrics.num_served == NUM_REQUESTS for one in violated)


def test_out_of_time_the_bound_is_that_of_what_was_not_seen(catalog: Catalog) -> None:
    problem = problem_of(catalog, **QUESTIONS["70B, long prompts"])
    found = kinds_of(problem)
    simulated, bound = Branch(problem, found, budget=Budget(0.0)).run()
    assert not simulated
    assert bound == min(family.bound for family in found)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("rate", [None, 3.0])
def test_no_member_of_a_family_has_a_better_bound(
    catalog: Catalog, question: dict[str, Any], rate: float | None
) -> None:
    problem = problem_of(catalog, **question)
    workload = replace(problem.workload, request_rate_per_s=rate, arrival=Arrival.POISSON)
    for family in kinds_of(replace(problem, workload=workload)):
        for counts in family.first():
            candidate = candidate_of(family, counts)
            assert family.bound <= family.score(counts) * (1.0 + 1e-9)
            assert family.score(counts) == pytest.approx(candidate.score, rel=1e-9)


def test_pairs_do_not_crowd_a_closed_loop(catalog: Catalog) -> None:
    """Prefill and decode workers together finish no more than the requests in flight let the decode workers finish."""
    workload = {"input_length": 1000, "output_length": 200, "concurrency": 32, "num_requests": NUM_REQUESTS}
    question = {"model": "llama-3.1-8b", "workload": workload}
    free, report = search_serving(problem_of(catalog, **question))
    one = {"mode": "aggregated", "num_workers": 1, "tensor_parallel": 1}
    pinned, _ = search_serving(problem_of(catalog, **question, fixed=one))
    assert free.objective is not None
    assert pinned.objective is not None
    assert free.objective <= pinned.objective * (1.0 + TIE)
    assert report.is_complete


def test_what_was_given_up_is_looked_at_again_when_longer_runs_lower_the_best(catalog: Catalog) -> None:
    problem = problem_of(catalog, **QUESTIONS["8B, short SLOs"])
    branch = Branch(problem, kinds_of(problem))
    first, _ = branch.run()
    promised, num_first = branch.incumbent, len(first)
    assert not branch.resume(promised)
    lowered = 1.2 * promised
    rivals = [bound for bound, _ in branch.given_up if bound * (1.0 + TIE) < lowered]
    assert branch.resume(lowered) == bool(rivals)
    again, _ = branch.run()
    assert branch.incumbent <= lowered
    assert not rivals or len(again) >= num_first
    assert min((bound for bound, _ in branch.given_up), default=math.inf) * (1.0 + TIE) >= branch.incumbent
    assert len({id(one.candidate) for one in again}) == len(again)


def slow_at_first(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> ServingProblem:
    """A question of whose deployments the first four, which are all that may be simulated, are too slow under load."""
    workload = {"input_length": 2000, "output_length": 300, "num_requests": NUM_REQUESTS, "request_rate_per_s": 3}
    asked = {"workload": workload, "slo": {"ttft_p99_s": 0.35}, "objective": "num_devices"}
    problem = problem_of(catalog, model="llama-3.1-70b", fixed={"mode": "aggregated"}, **asked)
    monkeypatch.setattr(branch, "MAX_SIMULATED", 4)
    return problem


def test_a_plan_is_found_though_the_first_deployments_violate_the_slos(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs the fewest devices by its bound is simulated first, and may all be too slow under load."""
    problem = slow_at_first(catalog, monkeypatch)
    with monkeypatch.context() as without:
        without.setattr(Branch, "_rescue", lambda self: None)
        assert search_serving(problem)[0].assignment is None, "the question does not need a rescue"
    solution, report = search_serving(problem)
    assert solution.assignment is not None
    assert not solution.assignment.judged.violated
    assert report.is_complete is (solution.status is Status.OPTIMAL)


def test_what_is_expected_to_carry_the_load_is_simulated_before_the_answer_is_no_plan(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the fewest devices nor the fastest single request: what serves best with a hundred requests running."""
    problem = slow_at_first(catalog, monkeypatch)
    monkeypatch.setattr(branch, "MOST_RESCUERS", 0)
    assert search_serving(problem)[0].assignment is not None
    with monkeypatch.context() as none:
        none.setattr(candidates, "MOST_CARRIERS", 0)
        assert search_serving(problem)[0].assignment is None, "another way finds it"


def test_what_is_tried_last_is_legal_for_the_engine(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's decode workers have one stage; a plan of four was the fastest, and no file could be written for it."""
    problem = problem_of(catalog, **QUESTIONS["8B, short SLOs"])
    monkeypatch.setattr(branch, "MAX_SIMULATED", 0)
    assert search_serving(problem)[1].simulated
    monkeypatch.setattr(Branch, "_broken", lambda self, family, counts: ("the engine refuses it",))
    assert not search_serving(problem)[1].simulated


def test_a_search_whose_time_is_over_prices_no_more_workers(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rack's workers took 25 seconds to price, whatever the time limit was."""
    problem, priced = problem_of(catalog, **QUESTIONS["8B, short SLOs"]), Counter[str]()

    def count(*arguments: Any) -> Any:
        priced["worker"] += 1
        return price_worker(*arguments)

    monkeypatch.setattr(workers, "price_worker", count)
    with pytest.raises(SolverError, match="no deployment that meets every SLO found within the time limit"):
        search_serving(problem, budget=Budget(1.0, None, elapsed_s=2.0))
    assert not priced
    assert search_serving(problem)[0].assignment is not None
    assert priced["worker"] > 0


class BracketsClosedError(Exception):
    """The first deployment's highest rate is known."""


def test_deployments_that_equal_the_incumbent_take_no_turns(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy hardly falls with the rate: to equal the incumbent to nine digits moves a rate by more than that."""
    problem = problem_of(
        catalog,
        model="llama-3.1-70b",
        cluster={"nodes": [{"type": "dgx-h100", "count": 2}]},
        workload={"input_length": 2000, "output_length": 500},
        slo={"ttft_p99_s": 3.0, "tpot_p95_s": 0.05},
        objective="energy",
    )
    most_runs = 25

    def attempt(search: HighestRate, rate_per_s: float, *_: object) -> Trial:
        assert search.num_runs <= most_runs
        share = rate_per_s / (0.85 * search.most)
        interval_s = {slo: (0.0, share * slo.limit_s) for slo in problem.slos}
        verdict = Verdict.MET if share <= 1.0 else Verdict.OPEN
        return Trial(verdict=verdict, run=cast(ServingRun, search), interval_s=interval_s, num_requests=1)

    def judged(_: HighestRate) -> None:
        raise BracketsClosedError

    monkeypatch.setattr(HighestRate, "_attempt", attempt)
    monkeypatch.setattr(HighestRate, "judged", judged)
    with pytest.raises(BracketsClosedError):
        search_serving(problem)
