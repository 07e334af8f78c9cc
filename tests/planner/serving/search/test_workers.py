"""Workers are priced as the configuration that the plan names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.config import Role
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.layouts import placed_workers
from meshplan.planner.serving.search.search import search_serving
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.search.workers import PricedWorker, price_worker, priced_workers, smaller_chunk

# Workers run fewer requests than their cache holds, and some have smaller chunks of prefill.
QUESTION: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 1000, "output_length": 100, "length_ratio": 0.5, "num_requests": 400},
    "slo": {"ttft_p99_s": 1.0, "tpot_p95_s": 0.02},
    "objective": "max_request_rate",
    "constraints": {"target": "vllm"},
}


@pytest.mark.parametrize("more", [{}, {"power_caps_w": [450, 700]}], ids=["full clocks", "power limits"])
def test_a_deployment_is_simulated_at_the_price_of_its_own_configuration(
    more: dict[str, Any], catalog: Catalog
) -> None:
    problem = resolve_serving(read_serving_spec({**QUESTION, **more}), catalog, Path()).problem
    _, report = search_serving(problem)
    candidates = [one.candidate for one in report.simulated]
    assert len({one.config.pools[0].limits.max_batched_tokens for one in candidates}) > 1
    for one in candidates:
        rate = 0.8 * one.request_rate_per_s
        searched, alone = (
            judge(problem, one.config, request_rate_per_s=rate, costs=costs).metrics.latencies
            for costs in (one.costs, None)
        )
        for name in ("ttft", "tpot"):
            assert searched[name].p99 == pytest.approx(alone[name].p99, rel=5e-3), (
                one.config
            )  # tables end at other knots


@pytest.mark.parametrize("more", [{}, {"power_caps_w": [400, 700]}], ids=["full clocks", "power limits"])
def test_what_is_not_priced_would_not_be_kept(more: dict[str, Any], catalog: Catalog) -> None:
    """Of workers whose decodes alone are too slow no smaller chunk is priced: every one is priced here."""
    workload = {"input_length": 4000, "output_length": 1000, "request_rate_per_s": 2.0}
    question = {**QUESTION, "model": "llama-3.1-70b", "workload": workload, "slo": {"tpot_p95_s": 0.05}, **more}
    question["objective"] = "throughput_per_device"
    problem = resolve_serving(read_serving_spec(question), catalog, Path()).problem
    kept, too_slow = [], 0
    for placed in placed_workers(problem, Role.MIXED, Counter()):
        chunk, best = placed, 0.0
        while chunk is not None:
            priced = price_worker(problem, chunk)
            if priced.best_rate_per_s > best:
                best = priced.best_rate_per_s
                kept.append(priced)
            too_slow += chunk is not placed and priced.least_token_s > problem.tpot_limit_s
            chunk = smaller_chunk(problem, chunk)

    def named(kind: PricedWorker) -> tuple[Any, ...]:
        return kind.placed.layout, kind.placed.power_cap_w, kind.placed.limits, kind.best_rate_per_s

    assert too_slow  # in vain
    assert [named(kind) for kind in priced_workers(problem, Role.MIXED, Counter())] == [named(kind) for kind in kept]


def test_chunks_are_halved_down_to_512_tokens(catalog: Catalog) -> None:
    """In steps of four the one between 512 and 2048 was missed that kept an SLO on gaps and one on first tokens."""
    question = {**QUESTION, "workload": {"input_length": 4000, "output_length": 100, "request_rate_per_s": 1.0}}
    problem = resolve_serving(read_serving_spec(question), catalog, Path()).problem
    placed, chunks = next(iter(placed_workers(problem, Role.MIXED, Counter()))), []
    while placed is not None:
        chunks.append(placed.limits.max_batched_tokens)
        placed = smaller_chunk(problem, placed)
    assert chunks == [8192, 4096, 2048, 1024, 512]


@pytest.mark.parametrize(("engine", "on_decode"), [("vllm", True), ("sglang", False)])
def test_decode_workers_keep_prefixes_where_their_engine_does(engine: str, on_decode: bool, catalog: Catalog) -> None:
    """SGLang's do not: every disaggregated deployment under shared prefixes was refused for it."""
    workload = {"input_length": 2000, "output_length": 100, "request_rate_per_s": 1.0, "prefix_hit_rate": 0.5}
    question = {**QUESTION, "workload": workload, "objective": "num_devices", "constraints": {"target": engine}}
    problem = resolve_serving(read_serving_spec(question), catalog, Path()).problem
    found = {role: next(iter(placed_workers(problem, role, Counter()))).limits.prefix_caching for role in Role}
    assert found == {Role.MIXED: True, Role.PREFILL: True, Role.DECODE: on_decode}
