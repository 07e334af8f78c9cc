"""Experts in 8-bit blocks that TensorRT-LLM's generated kernels multiply: what their constant prices, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.planner.cluster.machine import machine_of
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker, scale
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.quantization import Quantization

ONE = ServingConstants()
TWICE = replace(ONE, generated_experts_factor=2.0)
MANY, FEW = 4096, 64


def worker_of(catalog: Catalog, **fields: Any) -> Worker:
    """DeepSeek-V3 in its published format on eight B200."""
    node = catalog.node_type("dgx-b200")
    defaults: dict[str, Any] = {
        "shape": catalog.model_shape("deepseek-v3"),
        "machine": machine_of(Cluster(name="one", groups=(NodeGroup(node=node, count=1),))),
        "engine": "sglang",
        "layout": Layout(tensor_parallel=8, expert_tensor_parallel=8),
        "limits": EngineLimits(max_num_seqs=64, max_batched_tokens=4096),
        "quantization": Quantization.uniform("fp8_block"),
        "generated_experts": True,
        "constants": ONE,
        "contexts": ContextRange(prompt=1000.0, least=1000.0, most=2000.0),
    }
    return Worker(**{**defaults, **fields})


def added_s(worker: Worker, tokens: int) -> float:
    """What the factor of two adds to the experts of so many tokens, over all layers."""
    one, twice = (worker.step_cost(constants).experts_s[tokens] for constants in (ONE, TWICE))
    return twice - one


def test_many_tokens_take_the_experts_alone_so_much_longer(catalog: Catalog) -> None:
    worker = worker_of(catalog)
    routed = worker.shape.num_moe_layers * worker.routed_s(np.array([float(MANY)]))[0]
    expected = float(scale(ONE, np.array([float(MANY)]))[0]) * routed
    assert added_s(worker, MANY) == pytest.approx(expected, rel=1e-6)
    assert added_s(worker, FEW) == pytest.approx(0.0, abs=1e-12)
    dense = [worker.step_cost(constants).dense_s[MANY] for constants in (ONE, TWICE)]
    assert dense[0] == dense[1]


def test_gathered_ranks_add_up_and_what_they_exchange_is_not_multiplied(catalog: Catalog) -> None:
    ranks = Layout(tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)
    worker = worker_of(catalog, layout=ranks, gathers_tokens=True)
    routed = worker.shape.num_moe_layers * worker.routed_s(np.array([float(MANY)]))[0]
    assert worker.expert_exchange_s(np.array([float(MANY)]))[0] > 0.0
    factor = float(scale(ONE, np.array([MANY / 8.0]))[0])
    assert added_s(worker, MANY) == pytest.approx(factor * routed, rel=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"generated_experts": False},
        {"quantization": Quantization.uniform("nvfp4")},
        {"layout": Layout(tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)},
    ],
    ids=("other kernels", "another format", "tokens sent to their experts"),
)
def test_others_are_priced_as_they_were_timed(catalog: Catalog, changed: dict[str, Any]) -> None:
    assert added_s(worker_of(catalog, **changed), MANY) == 0.0


def test_a_model_without_experts_has_none(catalog: Catalog) -> None:
    dense = worker_of(catalog, shape=catalog.model_shape("llama-3.1-70b"), layout=Layout(tensor_parallel=8))
    assert not dense.has_generated_experts
