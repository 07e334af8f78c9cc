"""Models whose layers have attention of several forms: parameters as transformers counts them, caches by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.layers.naming import describe_blocks
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.plan import shape_document, shape_from_document
from meshplan.planner.serving.estimator.memory import (
    attention_parameters,
    kv_bytes_per_token,
    state_bytes_per_request,
    window_share,
)
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.training.estimator.flops import forward_flops_per_token

COUNTED = json.loads((Path(__file__).parent / "attention_form_counts.json").read_text(encoding="utf-8"))["families"]
# Vectors and small matrices that a shape does not hold: DeepSeek-V4 gathers its n residual streams of width h before
# the LM head (n²·h + n + 1), Gemma 4 scales each routed expert. MiniMax-M3's indexers have no weights of heads (h·4 in
# each of six layers), which are counted here.
NOT_IN_A_SHAPE = {
    "deepseek_v4": 4 * 4 * 128 + 4 + 1,
    "deepseek_v4-listed": 2 * 2 * 128 + 2 + 1,
    "gemma4_text-experts": 8 * 6,
    "minimax_m3_vl_text": -6 * 128 * 4,
}
BF16 = Quantization.uniform("bf16")


def shape_of(case: str, **changes: Any) -> ModelShape:
    return shape_from_config(COUNTED[case]["config"] | changes, slug=case)


@pytest.mark.parametrize("case", sorted(COUNTED))
def test_parameters_agree_with_transformers(case: str) -> None:
    shape = shape_of(case)
    assert shape.num_parameters + NOT_IN_A_SHAPE.get(case, 0) == COUNTED[case]["num_parameters"]


@pytest.mark.parametrize("case", sorted(COUNTED))
def test_plans_carry_them(case: str) -> None:
    shape = shape_of(case)
    assert shape_from_document(json.loads(json.dumps(shape_document(shape)))) == shape
    assert describe_blocks(shape)


def test_layers_are_those_that_the_configuration_lists() -> None:
    names = [form.name for layer in range(6) if (form := shape_of("deepseek_v4").attention_form(layer))]
    sparse, heavy = "compressed sparse", "heavily compressed"
    assert names == ["sliding", heavy, sparse, heavy, sparse, sparse]
    assert [shape_of("mimo_v2_flash").window(layer) for layer in (0, 1, 7)] == [None, 16, None]


def test_cache_of_compressed_attention() -> None:
    # d = 32 in every layer: one with a window, two of one entry for 128 tokens, three of one for 4 tokens with an
    # indexer's key of 16; each of the five keeps a window of 16 single tokens.
    shape = shape_of("deepseek_v4")
    assert kv_bytes_per_token(shape, BF16) == pytest.approx(2 * (32 + 2 * 32 / 128 + 3 * (32 + 16) / 4))
    assert kv_bytes_per_token(shape, BF16, tensor_parallel=8) == kv_bytes_per_token(shape, BF16)
    assert state_bytes_per_request(shape) == 2 * 5 * 16 * 32
    # At 160 tokens the layer with a window holds a tenth of its 32 elements a token.
    assert window_share(shape, 160) == pytest.approx((3.2 + 0.5 + 36) / (32 + 0.5 + 36))


def test_cache_of_two_head_sizes() -> None:
    # Six layers of 4 heads of 16 with a window, two of 2 heads of 32: keys and values are cached apart.
    shape = shape_of("gemma4_text")
    assert kv_bytes_per_token(shape, BF16) == 2 * (6 * 2 * 4 * 16 + 2 * 2 * 2 * 32)
    assert kv_bytes_per_token(shape, BF16, tensor_parallel=4) == 2 * (6 * 2 * 16 + 2 * 2 * 32)
    assert kv_bytes_per_token(shape_of("mimo_v2_flash"), BF16) == 2 * (24 + 16) * (2 * 2 + 6 * 4)


def test_shared_indexers_cache_nothing() -> None:
    shape = shape_of("glm_moe_dsa")
    assert shape.num_indexed_layers == 3
    own = kv_bytes_per_token(shape_of("glm_moe_dsa", indexer_types=None), BF16)
    assert own - kv_bytes_per_token(shape, BF16) == 5 * (16 + 4)


@pytest.mark.parametrize("case", sorted(COUNTED))
def test_more_devices_hold_no_more(case: str) -> None:
    shape = shape_of(case)
    held = [attention_parameters(shape, devices) for devices in (1, 2, 4, 8)]
    assert held == sorted(held, reverse=True)
    # Norms, sinks and biases are vectors: at most 3 % of these small models' attention.
    whole = sum(shape.layer_attention_parameters(layer) for layer in range(shape.num_hidden_layers))
    assert 0.97 * whole <= held[0] * shape.num_attention_layers <= whole


def test_compression_spares_multiplications() -> None:
    sparse, all_entries = shape_of("deepseek_v4"), shape_of("deepseek_v4", index_topk=2**20)
    assert forward_flops_per_token(sparse, 4096).attention < forward_flops_per_token(all_entries, 4096).attention
    assert forward_flops_per_token(sparse, 8192).attention > forward_flops_per_token(sparse, 4096).attention


@pytest.mark.parametrize(
    ("case", "key"),
    [("deepseek_v4", "compress_ratios"), ("gemma4_text", "global_head_dim")],
)
def test_unknown_families_are_not_read_as_llama(case: str, key: str) -> None:
    with pytest.raises(ModelConfigError, match=f"{key}: .*model_type is 'a-model-of-tomorrow'"):
        shape_of(case, model_type="a-model-of-tomorrow")


def test_layers_of_their_own_inputs_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="hidden_size_per_layer_input: not supported yet"):
        shape_of("gemma4_text", hidden_size_per_layer_input=256)
