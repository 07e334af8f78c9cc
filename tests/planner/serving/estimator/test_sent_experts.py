"""Experts whose kernels see the tokens alone that were sent to their device, beside a published deployment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from serving_workers import worker_of

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.planner.cluster.machine import machine_of
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Role
from meshplan.planner.serving.problem.quantization import Quantization

# SGLang's DeepSeek-V3 on 96 H100 (lmsys.org/blog/2025-05-05-large-scale-ep): prompts of 2,000 tokens, decoded by nine
# nodes at 22,300 tokens/s each with 256 requests a device; balancing the experts' loads (EPLB) had gained 2.54.
TOKENS_PER_S_OF_A_NODE, GAINED_BY_BALANCE, RUNNING = 22_300.0, 2.54, 256
NUM_NODES = 8  # of 64 devices: 72 do not divide 256 experts


@pytest.fixture(scope="module")
def sending(catalog: Catalog) -> Worker:
    machine = machine_of(Cluster(name="wide", groups=(NodeGroup(node=catalog.node_type("dgx-h100"), count=NUM_NODES),)))
    devices = 8 * NUM_NODES
    return worker_of(
        catalog.model_shape("deepseek-v3"),
        machine,
        engine="sglang",
        role=Role.DECODE,
        layout=Layout(attention_data_parallel=devices, expert_parallel=devices),
        limits=EngineLimits(max_num_seqs=RUNNING * devices, max_batched_tokens=8192),
        quantization=Quantization.uniform("fp8_block", kv_cache="bf16"),
        contexts=ContextRange(prompt=2000.0, least=2000.0, most=2100.0),
        sends_to_whole_experts=True,
    )


def test_wide_expert_parallelism_decodes_about_as_published(sending: Worker) -> None:
    """Launch files balance nothing, so that as much less is expected as balance had gained, at most."""
    cost, running = sending.step_cost(), sending.limits.max_num_seqs
    iteration_s = cost.decode_s(running) + cost.decode_context_s[running] * running * 2050.0
    assert TOKENS_PER_S_OF_A_NODE / GAINED_BY_BALANCE < running / iteration_s / NUM_NODES < TOKENS_PER_S_OF_A_NODE


def test_what_a_device_is_sent_costs_no_less_than_its_weights_and_products(sending: Worker) -> None:
    tokens, bandwidth = np.array([64.0, 1024.0, 16_384.0]), sending.machine.device.memory_bandwidth_bytes_per_s
    own, gathered = sending.routed_s(tokens), replace(sending, gathers_tokens=True).routed_s(tokens)
    moe, group = sending.shape.moe, sending.layout.expert_parallel
    assert moe is not None
    each = 3.0 * sending.shape.hidden_size * moe.expert_intermediate_size
    hit = moe.num_experts * (1.0 - (1.0 - moe.num_experts_per_token / moe.num_experts) ** tokens)
    assert np.all(own >= hit / group * each / bandwidth)
    assert np.all(own <= gathered)
    assert np.all(np.diff(own) > 0.0)


def test_only_whole_experts_of_attention_ranks_are_sent_tokens(sending: Worker) -> None:
    split = replace(sending, layout=Layout(attention_data_parallel=64, expert_parallel=32, expert_tensor_parallel=2))
    one_group = replace(sending, layout=Layout(tensor_parallel=64, expert_parallel=64))
    assert [one.sends_tokens for one in (sending, split, one_group)] == [True, False, False]
    assert not replace(sending, gathers_tokens=True).sends_tokens
    assert [engine_recipes()[name].sends_to_whole_experts for name in ("sglang", "sglang-0.5", "vllm")] == [
        True,
        False,
        False,
    ]
