"""Images in front of a language model: what they add to prompts, time and memory, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving

IMAGE = {"width": 1280, "height": 720}


def problem_of(catalog: Catalog, images: dict[str, Any] | None, **changes: Any) -> ServingProblem:
    workload: dict[str, Any] = {"input_length": 500, "output_length": 100, "concurrency": 8}
    if images is not None:
        workload["images"] = images
    document = {
        "kind": "serving",
        "model": "qwen2.5-vl-7b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": workload,
    }
    return resolve_serving(read_serving_spec(document | changes), catalog, Path()).problem


def pool_of(problem: ServingProblem, tensor_parallel: int = 1, stages: int = 1) -> Pool:
    return Pool(
        role=Role.MIXED,
        node_type="dgx-h100",
        layout=Layout(tensor_parallel=tensor_parallel, pipeline_parallel=stages),
        limits=EngineLimits(max_num_seqs=8, max_batched_tokens=2048),
        quantization=problem.quantizations[0],
        num_workers=1,
    )


def pairs(new: int, done: int) -> float:
    return new * (done + (new + 1) / 2)


def test_a_prompt_costs_its_images_once_however_it_is_cut(catalog: Catalog) -> None:
    seeing = problem_of(catalog, {**IMAGE, "per_request": 2})
    length = int(seeing.workload.input_length)
    assert length == 500 + 2 * 1196
    blind = problem_of(catalog, None, workload={"input_length": length, "output_length": 100, "concurrency": 8})
    worker = pool_worker(seeing.site, pool_of(seeing), seeing.workload)
    cost, without = (
        pool_worker(problem.site, pool_of(problem), problem.workload).step_cost() for problem in (seeing, blind)
    )
    factor = seeing.site.constants["dgx-h100"].prefill_factor
    for chunks in ([length], [2048, length - 2048], [512] * 5 + [length - 2560]):
        done, added = 0, 0.0
        for new in chunks:
            found = [one.prefill_pair_s * pairs(new, done) for one in (cost, without)]
            added += found[0] - found[1]
            done += new
        assert added == pytest.approx(factor * worker.encode_s, rel=1e-9)
    assert cost.decode_s(8) == without.decode_s(8)


def test_time_and_memory_of_the_encoder(catalog: Catalog) -> None:
    one, two, none = (problem_of(catalog, images) for images in ({**IMAGE}, {**IMAGE, "per_request": 2}, None))
    times = [pool_worker(each.site, pool_of(each), each.workload).encode_s for each in (one, two, none)]
    assert times[2] == 0.0
    assert times[0] < times[1] <= 2.0 * times[0] * (1 + 1e-9)
    tower = one.shape.vision
    assert tower is not None
    # No device multiplies faster than its peak.
    flops = 2.0 * tower.num_layers * (4 * 1280**2 + 3 * 1280 * 3420) * 1196 * 4
    assert times[0] > flops / 989e12
    for degree in (1, 2, 4):
        held, bare = (
            pool_memory(each.site, pool_of(each, degree), each.workload).weights_bytes for each in (one, none)
        )
        assert held - bare == pytest.approx(2.0 * tower.parameters / degree)


def test_where_images_are_refused(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"workload.images: no vision encoder of Llama 3.1 8B is known"):
        problem_of(catalog, IMAGE, model="llama-3.1-8b")
    with pytest.raises(SpecError, match="width"):
        problem_of(catalog, {"height": 10})
    with pytest.raises(SpecError, match="a trace states whole prompts"):
        problem_of(catalog, None, workload={"trace": str(tmp_path / "t.csv"), "images": IMAGE})
