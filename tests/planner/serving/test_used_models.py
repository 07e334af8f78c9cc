"""The hundred text-generation models of ``used_models.txt`` by their Hugging Face ids: priced, or refused by name.

The list was put together from the model lists of vLLM 0.33, AIConfigurator 0.12.0 and LitGPT 0.5.13 on 2026-11-24;
download counts were not at hand. No search runs here: memory, one decode iteration and one training token of each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.models.scope import why_unread
from meshplan.planner.cluster.lookup import look_up_shape
from meshplan.planner.core.problems import Problems
from meshplan.planner.serving.estimator.memory import kv_bytes_per_token, weights_bytes, window_share
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.training.estimator.flops import forward_flops_per_token

LIST = Path(__file__).parents[2] / "catalogs" / "models" / "used_models.txt"
USED = LIST.read_text(encoding="utf-8").split()
REFUSED = {
    "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "google/gemma-3n-E4B-it",
    "moonshotai/Kimi-K3",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
}
BF16 = Quantization.uniform("bf16")
# Elements that a token adds to the cache of all layers, from the configurations by hand: 2·k·d·layers, for latent
# attention (rank + rotary)·layers; an indexer's key has 128 bytes and a scale of 4, counted as 66 elements of 16 bits.
CACHED_ELEMENTS = {
    "openai-community/gpt2": 2 * 12 * 64 * 12,
    "meta-llama/Llama-2-7b-chat-hf": 2 * 32 * 128 * 32,
    "meta-llama/Llama-2-70b-chat-hf": 2 * 8 * 128 * 80,
    "meta-llama/Llama-3.1-8B-Instruct": 2 * 8 * 128 * 32,
    "meta-llama/Llama-3.1-70B-Instruct": 2 * 8 * 128 * 80,
    "meta-llama/Llama-3.1-405B-Instruct": 2 * 8 * 128 * 126,
    "Qwen/Qwen2.5-7B-Instruct": 2 * 4 * 128 * 28,
    "Qwen/Qwen2.5-72B-Instruct": 2 * 8 * 128 * 80,
    "Qwen/Qwen3-8B": 2 * 8 * 128 * 36,
    "Qwen/Qwen3-32B": 2 * 8 * 128 * 64,
    "Qwen/Qwen3-30B-A3B": 2 * 4 * 128 * 48,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 2 * 2 * 256 * 12,
    "Qwen/Qwen3.5-35B-A3B": 2 * 2 * 256 * 10,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 2 * 8 * 128 * 32,
    "deepseek-ai/DeepSeek-V3": (512 + 64) * 61,
    "moonshotai/Kimi-K2-Instruct": (512 + 64) * 61,
    "deepseek-ai/DeepSeek-V3.2": (512 + 64 + 66) * 61,
    "zai-org/GLM-5.2": (512 + 64) * 78 + 66 * 21,
    "google/gemma-4-31B-it": 2 * 16 * 256 * 50 + 2 * 4 * 512 * 10,
    "XiaomiMiMo/MiMo-V2-Flash": (192 + 128) * (8 * 39 + 4 * 9),
    "openai/gpt-oss-120b": 2 * 8 * 64 * 36,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 2 * 2 * 128 * 6,
    # 2 layers with a window of single entries, 21 of one entry for 4 tokens and an indexer's key, 20 of one for 128.
    "deepseek-ai/DeepSeek-V4-Flash": 512 * 2 + (512 + 128) * 21 / 4 + 512 * 20 / 128,
}


@pytest.mark.parametrize("model", sorted(set(USED) - REFUSED))
def test_bytes_and_flops_follow_from_the_parameters(model: str, catalog: Catalog) -> None:
    shape = catalog.model_shape(model)
    assert weights_bytes(shape, BF16, Layout()) == pytest.approx(2 * shape.num_parameters, rel=0.01)
    assert kv_bytes_per_token(shape, BF16) > 0
    assert 0 < window_share(shape, 4096) <= 1
    flops = forward_flops_per_token(shape, 1024)
    multiplied = shape.num_active_parameters - shape.embedding_parameters - shape.lm_head_parameters
    predicted = 1 + shape.num_nextn_predict_layers / shape.num_hidden_layers
    assert flops.matrix == pytest.approx(2 * multiplied * predicted, rel=0.01)
    assert 0 < flops.attention < forward_flops_per_token(shape, 2**20).attention


@pytest.mark.parametrize("model", sorted(CACHED_ELEMENTS))
def test_cache_of_a_token(model: str, catalog: Catalog) -> None:
    assert kv_bytes_per_token(catalog.model_shape(model), BF16) == 2 * CACHED_ELEMENTS[model]


def test_the_list_has_a_hundred() -> None:
    assert len(USED) == len(set(USED)) == 100
    assert set(USED) > REFUSED
    assert len(REFUSED) <= 5


@pytest.mark.parametrize("model", sorted(REFUSED))
def test_refused_by_name_with_the_reason(model: str, catalog: Catalog, tmp_path: Path) -> None:
    problems = Problems()
    assert look_up_shape(model, catalog, tmp_path, problems) is None
    assert why_unread(model)
    with pytest.raises(UnknownEntryError):
        catalog.model_shape(model)
    with pytest.raises(Exception, match=f"{model} is not supported yet: it has {why_unread(model)}"):
        problems.check()
