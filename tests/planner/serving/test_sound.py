"""Requests of sound (Whisper): what a window costs, what it holds, what is refused, and what vLLM is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import emit_plan, make_plan
from meshplan.planner.serving.estimator.encoders.sound import cross_cache_bytes, encode_flops, frames
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker, scheduled
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "whisper-large-v3",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"audio": {"seconds": 20}, "output_length": 100, "concurrency": 32},
    "constraints": {"max_devices": 1},
}
WINDOW = 1500


@pytest.fixture(scope="module")
def problem(catalog: Catalog) -> ServingProblem:
    return resolve_serving(read_serving_spec(SPEC), catalog, Path()).problem


def pool_of(problem: ServingProblem, tensor_parallel: int = 1, most: int = 64) -> Pool:
    return Pool(
        role=Role.MIXED,
        node_type="dgx-h100",
        layout=Layout(tensor_parallel=tensor_parallel),
        limits=EngineLimits(max_num_seqs=most, max_batched_tokens=8192, chunked_prefill=False),
        quantization=problem.quantizations[0],
        num_workers=1,
    )


def test_a_window_costs_what_its_encoder_costs_as_a_text_encoder_and_more(problem: ServingProblem) -> None:
    shape = problem.shape
    assert (frames(shape), problem.workload.input_length) == (WINDOW, 4)  # a window is padded
    worker = pool_worker(problem.site, pool_of(problem), problem.workload)
    assert shape.encoder is not None
    alone = pool_worker(replace(problem.site, shape=shape.encoder), pool_of(problem), problem.workload)
    read = np.array([float(WINDOW)])
    layers = float((sum(alone.dense_parts_s(read).values()) + alone.prefill_attention_s(read))[0])
    assert layers < worker.encode_s < 1.3 * layers
    deeper = replace(shape, encoder=replace(shape.encoder, num_hidden_layers=64))
    twice = pool_worker(replace(problem.site, shape=deeper), pool_of(problem), problem.workload)
    assert twice.encode_s - worker.encode_s == pytest.approx(layers, rel=1e-9)
    # 32 layers of 12·h² parameters and keys and values of 32 more, at 1,500 frames; no device exceeds its peak.
    h = 1280
    flops = 2 * WINDOW * (32 * 12 * h * h + 32 * 2 * h * h) + 4 * 32 * WINDOW**2 * h
    assert encode_flops(shape, 1) == pytest.approx(flops, rel=0.002)
    assert worker.encode_s > flops / 989e12


def test_a_request_holds_what_its_encoder_read_whatever_it_writes(problem: ServingProblem) -> None:
    each = 2 * 32 * WINDOW * 1280 * 2
    assert [cross_cache_bytes(problem.shape, problem.quantizations[0], tensor_parallel=t) for t in (1, 2, 4)] == [
        each,
        each / 2,
        each / 4,
    ]
    memory = pool_memory(problem.site, pool_of(problem), problem.workload)
    context = problem.workload.input_length + problem.workload.output_length / 2
    own = 2 * 32 * 1280 * 2
    assert memory.kv_bytes_per_token == pytest.approx(own + each / context)
    held = weights_bytes(problem.shape, problem.quantizations[0], Layout())
    assert held == pytest.approx(2 * problem.shape.num_parameters, rel=0.001)


def test_a_token_pays_for_its_second_attention_alone(problem: ServingProblem) -> None:
    plain = replace(problem.site, shape=replace(problem.shape, encoder=None, norms_per_layer=2))
    crossed, without = (pool_worker(site, pool_of(problem), problem.workload) for site in (problem.site, plain))
    sequences, context = np.array([1.0, 16.0, 64.0]), np.full(3, 50.0)
    more = crossed.decode_attention_s(sequences, context) - without.decode_attention_s(sequences, context)
    longer = crossed.decode_attention_s(sequences, 2 * context) - without.decode_attention_s(sequences, 2 * context)
    assert more == pytest.approx(longer)  # what was read does not grow
    read = sequences * 2 * 32 * WINDOW * 1280 * 2 / problem.machines["dgx-h100"].device.memory_bandwidth_bytes_per_s
    assert (more > 0.9 * read).all()


def test_an_iteration_takes_as_many_windows_as_it_has_room_for(problem: ServingProblem) -> None:
    limits = scheduled(pool_of(problem, most=48), problem.recipe, problem.workload)
    assert limits.max_batched_tokens == 8192 // WINDOW * 4 + 48


def test_a_plan_and_its_files(catalog: Catalog) -> None:
    plan = make_plan(SPEC, catalog)
    assert plan.solution["status"] == "optimal"
    assert any("encoder of sound" in text for text in plan.provenance["not_validated"])
    assert plan.answer is not None
    assert plan.answer["sound"]["cache_bytes"] == 2 * 32 * WINDOW * 1280 * 2
    assert Plan.from_document(plan.to_document()).answer == plan.answer
    emitted = emit_plan(plan, "vllm", catalog)
    arguments = next(file.content for file in emitted.artifacts if file.path.name == "mixed_args.txt")
    for flag in ("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--max-model-len 448"):
        assert flag in arguments
    assert not any(file.path.name == "benchmark.sh" for file in emitted.artifacts)
    readme = next(file.content for file in emitted.artifacts if file.path.name == "README.md")
    assert "/v1/audio/transcriptions" in readme


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"workload": {**SPEC["workload"], "audio": {"seconds": 95}}}, "workload.audio.seconds", "4 windows of 30 s"),
        ({"workload": {"input_length": 4, "output_length": 9, "concurrency": 1}}, "workload.audio", "seconds: 30"),
        ({"model": "llama-3.1-8b"}, "workload.audio", "reads no sound"),
        ({"model": "t5-base", "workload": {"input_length": 4, "output_length": 9}}, "model", "no engine here has"),
        ({"constraints": {"target": "sglang"}}, "constraints.target", "vllm only"),
        ({"fixed": {"mode": "disaggregated"}}, "fixed.mode", "moves no cache"),
        ({"fixed": {"max_batched_tokens": 1024}}, "fixed.max_batched_tokens", "1,500 frames"),
        ({"workload": {**SPEC["workload"], "output_length": 600}}, "workload", "trained for 448"),
    ],
)
def test_what_is_refused_and_why(catalog: Catalog, change: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_serving(read_serving_spec(SPEC | change), catalog, Path())
    assert any(one.path == field and said in one.message for one in caught.value.problems)
