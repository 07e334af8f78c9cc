"""What drawing tokens at random costs beside taking the likeliest one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.breakdown import iteration_parts
from meshplan.planner.serving.estimator.host.front_end import NO_FRONT_END
from meshplan.planner.serving.estimator.iteration import Worker
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.estimator.sampling import sampling_cost
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.requests import Sampling
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving

NUCLEUS = Sampling(top_p=0.95)


@pytest.mark.parametrize(
    ("sequences", "vocabulary", "published_ms"),
    [
        (64, 131072, 1.005),
        (512, 131072, 6.15),
        (512, 131072, 8.787),
        (1024, 131072, 16.312),
        (512, 32768, 2.252),
        (56, 32768, 0.393),
    ],
)
def test_sorting_takes_about_what_pull_requests_print(
    catalog: Catalog, sequences: int, vocabulary: int, published_ms: float
) -> None:
    """Top-p alone, without the draw: vllm-project/vllm 33538 and 40376, column PyTorch."""
    operators = Operators(device=catalog.device("h100-sxm-80gb"), engine="vllm")
    counts = np.array([float(sequences)])
    sorts, passes = (sampling_cost(engine_recipes()["vllm-2025"], Sampling(top_p=top_p)) for top_p in (0.9, 1.0))
    assert sorts is not None
    assert passes is not None
    added = sorts.seconds(operators, counts, vocabulary) - passes.seconds(operators, counts, vocabulary)
    assert 1e3 * added[0] == pytest.approx(published_ms, rel=0.4)


@pytest.mark.parametrize(
    ("sequences", "vocabulary", "published_ms"),
    [(64, 131072, 1.005), (128, 131072, 2.318), (512, 131072, 6.15), (128, 32768, 0.626), (512, 32768, 1.694)],
)
def test_sorting_on_a_b200_takes_what_was_timed_there(
    catalog: Catalog, sequences: int, vocabulary: int, published_ms: float
) -> None:
    """vllm-project/vllm 40376, column PyTorch, rows topp_whole; its text names the device."""
    recipe, counts = engine_recipes()["vllm-2025"], np.array([float(sequences)])
    operators = Operators(device=catalog.device("b200-sxm-180gb"), engine="vllm")
    sorts, passes = (sampling_cost(recipe, Sampling(top_p=top_p)) for top_p in (0.9, 1.0))
    assert sorts is not None
    assert passes is not None
    added = sorts.seconds(operators, counts, vocabulary) - passes.seconds(operators, counts, vocabulary)
    assert 1e3 * added[0] == pytest.approx(published_ms, rel=0.15)


@pytest.mark.parametrize(
    ("sequences", "vocabulary", "measured_ms"),
    [(256, 151936, 4.998), (512, 151936, 9.742), (1024, 128256, 16.378), (1024, 201088, 25.476)],
)
def test_sorting_on_an_h100_takes_what_was_timed_there(
    catalog: Catalog, sequences: int, vocabulary: int, measured_ms: float
) -> None:
    """Sort, softmax, cumulative sum, masks and scatter of PyTorch 2.11 on an H100 80GB HBM3, 2026-11-27: medians of 15.

    Smaller batches took longer than the rate says: 3.16 ms for 128 sequences of 151,936 logits, 0.89 ms for 32.
    """
    operators, counts = Operators(device=catalog.device("h100-sxm-80gb"), engine="vllm"), np.array([float(sequences)])
    sorts, passes = (sampling_cost(engine_recipes()["vllm-0.11"], Sampling(top_p=top_p)) for top_p in (0.9, 1.0))
    assert sorts is not None
    assert passes is not None
    added = sorts.seconds(operators, counts, vocabulary) - passes.seconds(operators, counts, vocabulary)
    assert 1e3 * added[0] == pytest.approx(measured_ms, rel=0.1)


def test_greedy_is_free_and_only_old_releases_sort() -> None:
    recipes = engine_recipes()
    assert sampling_cost(recipes["vllm-2025"], None) is None
    costs = {name: sampling_cost(recipe, NUCLEUS) for name, recipe in recipes.items()}
    sorts = {name for name, cost in costs.items() if cost is not None and cost.sorted_logits_per_s}
    assert None not in costs.values()
    assert sorts == {"vllm-v0", "vllm-0.10", "vllm-0.11", "vllm-2025", "vllm-0.14"}
    penalised = sampling_cost(recipes["vllm-2025"], Sampling(penalties=True))
    assert penalised is not None
    assert penalised.sorted_logits_per_s is None


def worker(catalog: Catalog, tensor_parallel: int, output_length: int, **workload: object) -> Worker:
    """Llama-3.1-8B with 256 requests on H100, greedy unless the workload says otherwise."""
    problem, pool = asked(catalog, tensor_parallel, output_length, **workload)
    return pool_worker(problem.site, pool, problem.workload)


def asked(
    catalog: Catalog, tensor_parallel: int, output_length: int, **workload: object
) -> tuple[ServingProblem, Pool]:
    """The question of :func:`worker`, and its pool."""
    document = {
        "kind": "serving",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 500, "output_length": output_length, "concurrency": 256, **workload},
    }
    problem = resolve_serving(read_serving_spec(document), catalog, Path()).problem
    pool = Pool(
        role=Role.MIXED,
        node_type="dgx-h100",
        layout=Layout(tensor_parallel=tensor_parallel),
        limits=EngineLimits(max_num_seqs=256, max_batched_tokens=2048),
        quantization=problem.quantizations[0],
        num_workers=1,
    )
    return problem, pool


def test_no_degree_of_tensor_parallelism_divides_it(catalog: Catalog) -> None:
    """Every device has all logits: what a spec's sampling adds to a decode is the same on one and on eight devices."""
    sampling = {"top_p": 0.9, "penalties": True}
    drawn, greedy = (
        [
            replace(worker(catalog, t, 100, **said), hides_host=False, front_end=NO_FRONT_END).step_cost().decode_s(256)
            for t in (1, 8)
        ]
        for said in ({"sampling": sampling}, {})
    )
    added = [with_it - without for with_it, without in zip(drawn, greedy, strict=True)]
    assert added[0] == pytest.approx(added[1])
    assert added[0] > 256 * 128256 * 125.0 / 3.35e12  # bytes of the draw and of penalties at the datasheet's rate


@pytest.mark.parametrize("output_length", [200, 20_000])
def test_a_step_waits_for_the_longer_of_its_layers_and_the_copy_of_answers(
    catalog: Catalog, output_length: int
) -> None:
    """25 ns for each token generated so far (vllm-project/vllm, pull request 47540), hidden where answers are short."""
    found = replace(
        worker(catalog, 8, output_length, sampling={"penalties": True}), hides_host=False, front_end=NO_FRONT_END
    )
    assert found.sampling is not None
    hidden = replace(found, sampling=replace(found.sampling, host_s_per_token=0.0)).step_cost()
    waits, n, grown = found.step_cost(), 256, 256 * output_length
    sampled = hidden.outputs_s[n] + found.constants.host_step_s
    layers = hidden.step_s(n, n * 500 + grown, 0, 0, 0.0) - sampled
    copy = 2.5e-8 * grown
    assert (copy > layers) == (output_length == 20_000)
    assert waits.step_s(n, n * 500 + grown, 0, 0, 0.0) - sampled == pytest.approx(max(layers, copy))
    assert waits.decode_s(n) == hidden.decode_s(n)  # no answer yet, nothing to copy


def test_the_parts_of_an_iteration_hold_what_it_waits_for_the_copy(catalog: Catalog) -> None:
    problem, pool = asked(catalog, 8, 20_000, sampling={"penalties": True})
    parts = {part.name: part.seconds for part in iteration_parts(problem, pool, num_running=256)}
    step_s = pool_worker(problem.site, pool, problem.workload).step_cost().step_s(256, 256 * 10_500, 0, 0, 0.0)
    assert parts["copy of answers for penalties"] > 0.1 * step_s
    assert sum(parts.values()) == pytest.approx(step_s, rel=0.02)


def test_only_engines_that_copy_answers_on_the_host_wait_for_it() -> None:
    recipes, penalised = engine_recipes(), Sampling(penalties=True)
    costs = {name: sampling_cost(recipe, penalised) for name, recipe in recipes.items()}
    waits = {name for name, cost in costs.items() if cost is not None and cost.host_s_per_token}
    assert waits == {"vllm-0.10", "vllm-0.11", "vllm-2025", "vllm-0.14", "vllm-0.15", "vllm"}
    plain = sampling_cost(recipes["vllm"], NUCLEUS)
    assert plain is not None
    assert plain.host_s_per_token == 0.0
