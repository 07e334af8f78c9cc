"""Recorded requests of very different lengths: no bound speaks of requests that an SLO's percentile leaves out; what
they share is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.solution import Status
from meshplan.planner.serving.estimator.bounds.lone_requests import lone_requests
from meshplan.planner.serving.problem.requests import Arrival, Requests, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.search import search_serving

SHORT, LONG = 100, 30_000


def question(trace: Path, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": "llama-3.1-70b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"trace": trace.name},
        "slo": {"ttft_p50_s": 0.3},
        "constraints": {"target": "vllm"},
        **fields,
    }


def write(path: Path, columns: dict[str, Any]) -> Path:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("slo", [{"ttft_p50_s": 0.3}, {"e2e_p50_s": 7.0}, {"ttft_p50_s": 0.3, "tpot_mean_s": 0.06}])
def test_a_limit_on_the_median_says_nothing_of_the_long_prompts(
    slo: dict[str, float], catalog: Catalog, tmp_path: Path
) -> None:
    """Four of five prompts are short: the mean prompt alone takes longer than the limit, the median one does not."""
    rng = np.random.default_rng(1)
    prompts = np.where(rng.random(600) < 0.8, SHORT, LONG)
    arrivals = np.cumsum(rng.exponential(2.0, 600)).round(3)
    trace = write(tmp_path / "t.csv", {"arrival_s": arrivals, "input_length": prompts, "output_length": [150] * 600})
    problem = resolve_serving(read_serving_spec(question(trace, slo=slo)), catalog, tmp_path).problem
    solution, _ = search_serving(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.assignment is not None
    assert solution.assignment.judged.metrics.latencies["ttft"].p50 < 0.3


def test_prefixes_of_a_trace_are_found(catalog: Catalog, tmp_path: Path) -> None:
    num = 400
    rng = np.random.default_rng(2)
    columns: dict[str, Any] = {
        "arrival_s": np.cumsum(rng.exponential(0.25, num)).round(4),
        "input_length": [4000] * num,
        "output_length": [100] * num,
    }
    shared = {**columns, "prefix": rng.integers(0, 10, num), "cached_tokens": [3600] * num}
    first = []
    for name, what in (("plain", columns), ("shared", shared)):
        asked = question(write(tmp_path / f"{name}.csv", what), slo={"ttft_p99_s": 5.0}, fixed={"tensor_parallel": 8})
        problem = resolve_serving(read_serving_spec(asked), catalog, tmp_path).problem
        solution, _ = search_serving(problem)
        assert solution.assignment is not None
        first.append(solution.assignment.judged.metrics.latencies["ttft"].p50)
    assert first[1] < 0.5 * first[0]


@pytest.mark.parametrize("more", [{"prefix_hit_rate": 0.5}, {"num_prefixes": 3}, {"length_ratio": 0.5}])
def test_what_a_trace_brings_is_not_said_again(more: dict[str, Any], tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", {"arrival_s": [0, 1], "input_length": [9, 9], "output_length": [2, 2]})
    with pytest.raises(SpecError, match="a trace brings its lengths"):
        read_serving_spec(question(trace, workload={"trace": trace.name, **more}))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("percentile", ["mean", "p50", "p90", "p95", "p99"])
def test_a_percentile_is_never_below_its_bound(seed: int, percentile: str) -> None:
    """Against every request by itself, with prices that rise with tokens in any way."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 500))
    prompts, answers = rng.integers(1, 5_000, num), np.ceil(rng.lognormal(3.0, 2.0, num)).astype(np.int64)
    trace = Requests(
        arrival_s=np.arange(num, dtype=float),
        input_length=prompts,
        output_length=answers,
        cached_tokens=rng.integers(0, prompts, num),
    )
    assert trace.cached_tokens is not None
    workload = ServingWorkload(arrival=Arrival.TRACE, input_length=1.0, output_length=1.0, trace=trace)

    def price(tokens: float, found: float) -> float:
        return 0.01 + 1e-4 * (tokens - found) ** 1.3 + 0.5 * (tokens - found > 1_000)

    alone = lone_requests(workload).alone(price)
    first = np.array([price(p, c) for p, c in zip(prompts.tolist(), trace.cached_tokens.tolist(), strict=True)])
    taken = first + (answers - 1) * 0.02

    def of(values: np.ndarray) -> float:
        return float(values.mean() if percentile == "mean" else np.quantile(values, int(percentile[1:]) / 100))

    assert alone.after_s(Slo(metric="ttft", percentile=percentile, limit_s=1.0)) <= of(first) + 1e-9
    whole = Slo(metric="e2e", percentile=percentile, limit_s=of(taken))
    assert alone.after_s(whole, 0.02) <= of(taken) + 1e-9
    assert alone.most_between_s([whole]) >= 0.02 - 1e-9
