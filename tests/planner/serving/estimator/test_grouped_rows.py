"""Rows of grouped products of experts against routing drawn token by token, and what they cost a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.constants.engine_recipes import EngineRecipe, engine_observed_as
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.planner.cluster.machine import machine_of
from meshplan.planner.serving.estimator.grouped_rows import most_rows, used_rows
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.quantization import Quantization

EXPERTS, TOP_K, BLOCK = 128, 8, 128
NODES = {"hopper": "dgx-h100", "blackwell": "dgx-b200"}


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 1500, 4096])
@pytest.mark.parametrize("unit", [64, BLOCK])
def test_the_units_in_use_are_those_of_tokens_that_choose_by_themselves(tokens: int, unit: int) -> None:
    draw = np.random.default_rng(tokens)
    chosen = draw.random((24, tokens, EXPERTS)).argpartition(TOP_K, axis=2)[:, :, :TOP_K]
    counts = np.stack([np.bincount(each.ravel(), minlength=EXPERTS) for each in chosen])
    units = np.ceil(counts / unit).sum(axis=1).mean()
    found = used_rows(
        np.array([float(tokens)]), top_k=TOP_K, num_experts=EXPERTS, local_experts=EXPERTS, unit_rows=unit
    )
    assert found[0] == pytest.approx(unit * units, rel=0.1)


@pytest.mark.parametrize("local_experts", [16, 64])
def test_at_most_every_expert_has_one_token_more_than_whole_blocks(local_experts: int) -> None:
    tokens = np.array([1.0, 8.0, 300.0, 8192.0])
    found = most_rows(tokens, top_k=TOP_K, local_experts=local_experts, block_rows=BLOCK)
    worst = tokens * TOP_K + local_experts * (BLOCK - 1)
    assert np.all(found % BLOCK == 0)
    assert np.all((found >= worst) & (found < worst + BLOCK))
    sizes: dict[str, Any] = {"top_k": TOP_K, "num_experts": EXPERTS, "local_experts": local_experts}
    assert np.all(found >= used_rows(tokens, unit_rows=BLOCK, **sizes))


def decode_s(catalog: Catalog, node: str, recipe: EngineRecipe | None, *, formats: str, running: int) -> float:
    assert recipe is not None
    worker = Worker(
        shape=catalog.model_shape("qwen3-235b-a22b"),
        machine=machine_of(Cluster(name="one", groups=(NodeGroup(node=catalog.node_type(node), count=1),))),
        engine="vllm",
        layout=Layout(tensor_parallel=4, expert_parallel=4),
        limits=EngineLimits(max_num_seqs=512, max_batched_tokens=4096),
        quantization=Quantization.uniform(formats),
        constants=ServingConstants(),
        contexts=ContextRange(prompt=1000.0, least=1000.0, most=2000.0),
        expert_kernels=recipe.expert_kernels,
        expert_block_rows=recipe.expert_block_rows,
    )
    return float(worker.step_cost().decode_s(running))


@pytest.mark.parametrize("generation", sorted(NODES))
def test_releases_that_multiply_whole_blocks_decode_slower(catalog: Catalog, generation: str) -> None:
    releases = {release: engine_observed_as("vLLM", release, "") for release in ("0.10.2", "0.11.1", "0.12.0")}
    newest = engine_observed_as("vLLM", "0.24.0", "")
    few, many = (
        {
            release: decode_s(catalog, NODES[generation], recipe, formats="fp8_block", running=running)
            for release, recipe in releases.items()
        }
        for running in (8, 64)
    )
    assert few["0.11.1"] > 1.2 * few["0.12.0"] == 1.2 * few["0.10.2"]
    assert many["0.11.1"] > many["0.12.0"]
    # Kernels of 2026 are faster than those that 0.12 and 0.14 were timed with.
    assert decode_s(catalog, NODES[generation], newest, formats="fp8_block", running=64) < many["0.12.0"]
    wide = {decode_s(catalog, NODES[generation], recipe, formats="bf16", running=8) for recipe in releases.values()}
    assert len(wide) == 1


def test_without_skipping_few_tokens_cost_what_many_do(catalog: Catalog) -> None:
    recipe = engine_observed_as("vLLM", "0.11.1", "")
    one, many = (decode_s(catalog, "dgx-b200", recipe, formats="fp8_block", running=n) for n in (1, 64))
    assert many < 1.2 * one
