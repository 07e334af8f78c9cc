"""What drawing tokens at random costs beside taking the likeliest one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.estimator.operators import Operators
from meshplan.planner.serving.estimator.pools import pool_worker
from meshplan.planner.serving.estimator.sampling import sampling_cost
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
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


def test_no_degree_of_tensor_parallelism_divides_it(catalog: Catalog) -> None:
    """Every device has all logits: what a spec's sampling adds to a decode is the same on one and on eight devices."""

    def decode_s(tensor_parallel: int, **sampling: object) -> float:
        document = {
            "kind": "serving",
            "model": "llama-3.1-8b",
            "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
            "workload": {"input_length": 500, "output_length": 100, "concurrency": 256, **sampling},
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
        return pool_worker(problem.site, pool, problem.workload).step_cost().decode_s(256)

    added = [decode_s(t, sampling={"top_p": 0.9, "penalties": True}) - decode_s(t) for t in (1, 8)]
    assert added[0] == pytest.approx(added[1])
    assert added[0] > 256 * 128256 * 125.0 / 3.35e12  # bytes of the draw and of penalties at the datasheet's rate
