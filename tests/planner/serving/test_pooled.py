"""Embedding and reranking: what a request costs, what no device holds, what is refused, and what engines are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.emit.training.megatron.model import inexpressible_shape
from meshplan.planner.launch import serving as launch
from meshplan.planner.service import make_plan
from meshplan.planner.serving.estimator.pools import pool_memory, pool_worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Pool, Role
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving

TEXT = {"input_length": 512, "concurrency": 8}


def document(model: str, task: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": model,
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"task": task, **TEXT},
        "constraints": {"max_devices": 1},
        **changes,
    }


def problem_of(catalog: Catalog, model: str, task: str, **changes: Any) -> ServingProblem:
    return resolve_serving(read_serving_spec(document(model, task, **changes)), catalog, Path()).problem


def pool_of(problem: ServingProblem, tensor_parallel: int = 1) -> Pool:
    return Pool(
        role=Role.MIXED,
        node_type="dgx-h100",
        layout=Layout(tensor_parallel=tensor_parallel),
        limits=EngineLimits(max_num_seqs=64, max_batched_tokens=8192, chunked_prefill=False),
        quantization=problem.quantizations[0],
        num_workers=1,
    )


def test_a_text_costs_all_pairs_of_its_tokens(catalog: Catalog) -> None:
    """n² pairs at the rate of the n·(n + 1)/2 that a decoder's tokens attend to."""
    problem = problem_of(catalog, "bge-m3", "embed")
    causal = replace(problem.site, shape=replace(problem.shape, bidirectional=False))
    length = np.array([64.0, 512.0, 8192.0])
    both, before = (
        pool_worker(site, pool_of(problem), problem.workload).prefill_attention_s(length)
        for site in (problem.site, causal)
    )
    np.testing.assert_allclose(both / before, 2.0 * length / (length + 1.0))


def test_an_encoder_holds_weights_and_no_cache(catalog: Catalog) -> None:
    problem = problem_of(catalog, "bge-m3", "embed")
    layers = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    ends = (250_002 + 8194 + 1) * 1024 + 1024 * 1025
    for degree in (1, 2):
        memory = pool_memory(problem.site, pool_of(problem, degree), problem.workload)
        assert memory.kv_bytes_per_token == 0.0
        assert memory.weights_bytes == pytest.approx(2.0 * (layers + ends) / degree, rel=2e-3)  # biases, norms


def test_a_decoder_that_embeds_has_no_lm_head(catalog: Catalog) -> None:
    embeds = problem_of(catalog, "qwen3-embedding-8b", "embed")
    answers = problem_of(catalog, "qwen3-embedding-8b", "generate", workload={**TEXT, "output_length": 1})
    bare, headed = (pool_memory(one.site, pool_of(one), one.workload) for one in (embeds, answers))
    assert headed.weights_bytes - bare.weights_bytes == pytest.approx(2.0 * 151_665 * 4096)
    assert bare.kv_bytes_per_token == headed.kv_bytes_per_token > 0.0
    cost = pool_worker(embeds.site, pool_of(embeds), embeds.workload)
    assert cost.head_s(np.array([1.0, 64.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("model", "task", "changes", "messages"),
    [
        ("bge-m3", "generate", {"workload": {**TEXT, "output_length": 9}}, ["generates no tokens", "embed or rerank"]),
        ("bge-m3", "rerank", {}, ["has no classifier"]),
        ("bge-m3", "embed", {"workload": {"task": "embed", **TEXT, "output_length": 9}}, ["leave output_length out"]),
        ("bge-m3", "embed", {"workload": {"task": "embed", "concurrency": 8}}, ["needs input_length"]),
        ("bge-m3", "embed", {"workload": {"task": "embed", **TEXT, "sampling": {}}}, ["leave sampling out"]),
        ("multilingual-e5-large", "embed", {"workload": {"task": "embed", "input_length": 600}}, ["trained for 512"]),
        ("bge-m3", "embed", {"constraints": {"target": "trtllm"}}, ["planned for vllm or sglang only"]),
        (
            "bge-m3",
            "embed",
            {
                "slo": {"tpot_p99_s": 0.1, "ttft_p99_s": 1.0},
                "speculation": {"num_draft_tokens": 2, "acceptance": 0.5},
                "fixed": {"mode": "disaggregated"},
                "workload": {"task": "embed", **TEXT, "prefix_hit_rate": 0.5},
            },
            ["no tokens to wait for", "drafts speed up", "nothing to decode", "no prefix is the same"],
        ),
        ("bge-m3", "embed", {"fixed": {"max_batched_tokens": 256}}, ["takes whole texts, which have 512 tokens"]),
        ("qwen3-embedding-4b", "rerank", {"constraints": {"target": "sglang"}}, ["by generating one token"]),
    ],
)
def test_what_is_refused_all_at_once(
    catalog: Catalog, model: str, task: str, changes: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        problem_of(catalog, model, task, **changes)
    assert [message for message in messages if message not in str(caught.value)] == []


def test_encoders_are_not_trained(catalog: Catalog) -> None:
    question = {
        "kind": "training",
        "model": "bge-m3",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"sequence_length": 512, "global_batch_size": 64},
    }
    with pytest.raises(SpecError, match=r"BGE M3 is no language model .tokens attend to those after them"):
        make_plan(question, catalog)
    # Nor is one taken for a decoder of its sizes where a command line names none.
    assert inexpressible_shape(catalog.model_shape("bge-m3")) is not None


@pytest.mark.parametrize(
    ("model", "task", "target", "written"),
    [
        ("bge-m3", "embed", "vllm", {"--runner pooling", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"}),
        ("qwen3-embedding-0.6b", "embed", "vllm", {"--runner pooling", "--convert embed", "--enable-chunked-prefill"}),
        (
            "bge-reranker-v2-m3",
            "rerank",
            "sglang",
            {"--is-embedding", "--chunked-prefill-size -1", "--disable-radix-cache", "--attention-backend triton"},
        ),
    ],
)
def test_plan_and_flags(catalog: Catalog, model: str, task: str, target: str, written: set[str]) -> None:
    workload = {"task": task, "input_length": 256, "request_rate_per_s": 20, "num_requests": 300}
    changes = {"workload": workload, "constraints": {"target": target, "max_devices": 1}, "slo": {"e2e_p99_s": 1.0}}
    plan = make_plan(document(model, task, **changes), catalog)
    assert plan.config["pools"][0]["role"] == "mixed"
    assert {name for name in plan.predicted if name.startswith(("ttft", "tpot"))} == set()
    emitted = launch.files(plan, target, catalog, EmitOptions())
    (arguments,) = [file.content for file in emitted.artifacts if file.path.name == "mixed_args.txt"]
    assert written <= set(arguments.splitlines())
    benchmark = [file.content for file in emitted.artifacts if file.path.name == "benchmark.sh"]
    assert [("embedding" in text, "ignore-eos" in text) for text in benchmark] == (
        [] if task == "rerank" else [(True, False)]
    )
