"""Groups of layers that keep blocks of cache of their own: how many there are, and what the host does for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.catalogs.constants.engine_recipes import engine_recipes
from meshplan.catalogs.constants.serving import ServingConstants
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.planner.cluster.machine import machine_of
from meshplan.planner.serving.estimator.host.cache_groups import num_cache_groups
from meshplan.planner.serving.estimator.iteration import ContextRange, Worker
from meshplan.planner.serving.problem.config import EngineLimits, Layout
from meshplan.planner.serving.problem.quantization import Quantization


@pytest.mark.parametrize(
    ("model", "groups"),
    [  # kinds of layers as their configurations say, put into groups by hand as vLLM 0.26 does
        ("llama-3.1-8b", 1),
        ("deepseek-v3", 1),
        ("nemotron-nano-9b-v2", 1 + 7),  # 4 of attention; 27 of Mamba-2
        ("nemotron-nano-12b-v2", 1 + 5),  # 6; 28
        ("gpt-oss-120b", 1 + 1),  # 18 with a window, 18 without
        ("gemma-3-27b", 1 + 6),  # 10 without, 52 with
        ("qwen3-next-80b-a3b", 1 + 3),  # 12 of attention; 36 of gated delta rules
    ],
)
def test_layers_are_grouped_by_what_they_keep(catalog: Catalog, model: str, groups: int) -> None:
    assert num_cache_groups(catalog.model_shape(model)) == groups


def test_kinds_of_nearly_as_many_layers_are_padded_to_one_group_each(catalog: Catalog) -> None:
    """gpt-oss-20b with a draft, the example in vLLM's source: of 12 and 13 layers a group each."""
    shape = catalog.model_shape("llama-3.1-8b")
    assert num_cache_groups(replace(shape, num_hidden_layers=25, sliding_windows=(None, 128) * 12 + (None,))) == 2
    assert num_cache_groups(replace(shape, num_hidden_layers=5, sliding_windows=(None, 128, 128, None, 128))) == 1 + 2
    assert num_cache_groups(replace(shape, num_hidden_layers=5, sliding_windows=(None, 128, 128, 128, 128))) == 5


def test_each_group_after_the_first_takes_the_host_its_time_in_every_iteration(catalog: Catalog) -> None:
    def iteration_s(each_s: float, num_prompts: int) -> float:
        worker = Worker(
            shape=catalog.model_shape("nemotron-nano-9b-v2"),
            machine=machine_of(Cluster(name="one", groups=(NodeGroup(node=catalog.node_type("dgx-h100"), count=1),))),
            engine="vllm",
            layout=Layout(tensor_parallel=1),
            limits=EngineLimits(max_num_seqs=64, max_batched_tokens=4096),
            quantization=Quantization.uniform("bf16"),
            constants=replace(ServingConstants(), launch_s_per_layer=0.0),
            contexts=ContextRange(prompt=1000.0, least=1000.0, most=2000.0),
            host_s_per_cache_group=each_s,
        )
        eight, prompts = np.array([8]), np.array([num_prompts])
        return float(worker.step_cost().steps_s(eight, eight * 1000, prompts, prompts * 100, prompts * 5e3)[0])

    assert iteration_s(2e-4, 0) - iteration_s(0.0, 0) == pytest.approx(7 * 2e-4)
    assert iteration_s(2e-4, 1) > iteration_s(0.0, 1) + 6 * 2e-4


def test_releases_that_hide_the_host_hide_it() -> None:
    vllm = [recipe for recipe in engine_recipes().values() if recipe.engine == "vllm"]
    assert any(recipe.host_s_per_cache_group for recipe in vllm)
    assert not any(recipe.host_s_per_cache_group for recipe in vllm if recipe.hides_host)
