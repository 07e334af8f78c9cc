"""What named checkpoints hold: the formats that decide what fits and which layouts an engine takes."""

from __future__ import annotations

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.quantization import SCHEMES, Quantization, named_formats


def formats(catalog: Catalog, written: str) -> Quantization:
    name = catalog.model_name(written)
    assert name is not None, f"{written} is not in the catalog"
    return named_formats(written, name.scheme, catalog.model_shape(name.slug), "bf16")


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("deepseek-ai/DeepSeek-V4-Pro", "fp8_block, experts mxfp4"),
        ("deepseek-ai/DeepSeek-V3.1", "fp8_block"),
        ("moonshotai/Kimi-K2-Instruct", "fp8_block"),
        ("moonshotai/Kimi-K2-Thinking", "bf16, experts w4a16"),
        ("moonshotai/Kimi-K2.5", "bf16, experts w4a16"),
        ("moonshotai/Kimi-K2.6", "bf16, experts w4a16"),
        ("openai/gpt-oss-120b", "bf16, experts mxfp4"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "fp8_block"),
        ("Qwen/Qwen3-32B", "bf16"),
        ("zai-org/GLM-5-FP8", "fp8_block"),
        ("zai-org/GLM-4.6-FP8", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-BLOCK", "fp8_block"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "fp8, attention bf16"),
        ("nvidia/DeepSeek-R1-NVFP4", "nvfp4, attention bf16"),
    ],
)
def test_named_checkpoints_hold_what_their_publishers_store(catalog: Catalog, written: str, label: str) -> None:
    assert formats(catalog, written).label == label


@pytest.mark.parametrize(
    ("written", "published_gb"),
    [
        # Sizes of the repositories on the hub: model cards and deployment guides.
        ("deepseek-ai/DeepSeek-V4-Pro", 865.0),
        ("deepseek-ai/DeepSeek-V4-Flash", 160.0),
        ("moonshotai/Kimi-K2.5", 595.0),
    ],
)
def test_weights_weigh_what_the_hub_says(catalog: Catalog, written: str, published_gb: float) -> None:
    name = catalog.model_name(written)
    assert name is not None
    held, shape = formats(catalog, written), catalog.model_shape(name.slug)
    assert shape.moe is not None
    layers = sum(map(shape.is_moe_layer, range(shape.num_hidden_layers)))
    experts = layers * shape.moe.num_experts * shape.expert_parameters
    rest = shape.num_parameters - experts
    found = experts * SCHEMES[held.experts].weight_bytes + rest * SCHEMES[held.attention].weight_bytes
    assert found / 1e9 == pytest.approx(published_gb, rel=0.08)  # Kimi's scales are of 32, not 128, values


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_refuses_experts_cut_through_their_blocks_of_scales(catalog: Catalog, engine: str) -> None:
    """``The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128``."""
    held, shape = formats(catalog, "Qwen/Qwen3-235B-A22B-FP8"), catalog.model_shape("qwen3-235b-a22b")
    rules = ENGINES[engine].layout_rules(held)
    layouts = [Layout(tensor_parallel=8, expert_tensor_parallel=8), Layout(tensor_parallel=8, expert_parallel=8)]
    assert [all(rule.holds(shape, layout) for rule in rules) for layout in layouts] == [False, True]
