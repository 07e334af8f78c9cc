"""Shapes of observed models, from the ``model`` objects of published measurements."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.observed import ASSUMED_VOCAB_SIZE, shape_from_observation

GATED: dict[str, Any] = {
    "name": "Llama-3.1-8B",
    "architecture_source": "public config",
    "gated_mlp": True,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "name": "gpt-oss-120b",
    "gated_mlp": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_type_counts": {"full_attention": 18, "sliding_attention": 18},
    "moe_intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "vocab_size": 201088,
}
DEEPSEEK_V3 = {
    "name": "DeepSeek-V3",
    "attention_type": "mla",
    "first_k_dense_replace": 3,
    "gated_mlp": True,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def mpt(num_layers: int, hidden: int, num_heads: int, num_parameters: int) -> dict[str, Any]:
    return {
        "name": "MPT",
        "gated_mlp": False,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_parameters": num_parameters,
        "tie_word_embeddings": True,
        "vocab_size": 50368,
    }


def zero_bubble(num_layers: int, hidden: int, num_heads: int) -> dict[str, Any]:
    return {
        "name": "GPT",
        "gated_mlp": False,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
    }


def test_gated_models_follow_llama() -> None:
    shape = shape_from_observation(GATED)
    assert shape.num_parameters == 8_030_261_248
    assert (shape.slug, shape.source) == ("llama-3.1-8b", "public config")


def test_deepseek_v3_has_its_published_parameters() -> None:
    shape = shape_from_observation(DEEPSEEK_V3)
    assert shape.attention is AttentionKind.MULTI_HEAD_LATENT
    assert shape.num_parameters == 671_026_404_352
    assert shape.num_moe_layers == 58


def test_layer_counts_alternate_and_experts_need_no_dense_width() -> None:
    shape = shape_from_observation(GPT_OSS)
    assert shape.sliding_windows[:4] == (128, None, 128, None)
    assert shape.num_moe_layers == 36
    # Without the biases and sinks of the family, 0.04 % below the published 116.83 billion.
    assert shape.num_parameters == pytest.approx(116.83e9, rel=0.001)


# llm-foundry training benchmarks (github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md): the printed
# parameter counts grow with the sequence length, because positions are learned.
@pytest.mark.parametrize(
    ("model", "sequence_length"),
    [
        (mpt(12, 768, 12, 124_131_840), 512),
        (mpt(12, 768, 12, 174_070_272), 65_536),
        (mpt(24, 1024, 16, 355_985_408), 2_048),
        (mpt(24, 2048, 16, 1_445_974_016), 65_536),
        (mpt(32, 4096, 32, 6_652_567_552), 512),
        (mpt(32, 4096, 32, 6_918_905_856), 65_536),
    ],
)
def test_stated_parameters_reveal_learned_positions(model: dict[str, Any], sequence_length: int) -> None:
    shape = shape_from_observation(model)
    assert shape.num_position_embeddings == sequence_length
    assert shape.num_parameters == model["num_parameters"]


@pytest.mark.parametrize("stated", [None, 1, 124_131_841, True, "124M"])
def test_other_stated_parameters_change_nothing(stated: object) -> None:
    shape = shape_from_observation({**mpt(12, 768, 12, 0), "num_parameters": stated})
    assert shape.num_position_embeddings == 0


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (zero_bubble(22, 2304, 24), 1.5),
        (zero_bubble(30, 4096, 32), 6.2),
        (zero_bubble(46, 5120, 40), 14.6),
        (zero_bubble(62, 6144, 48), 28.3),
    ],
)
def test_assumed_vocabulary_fits_the_names_of_zero_bubble(model: dict[str, Any], billions: float) -> None:
    shape = shape_from_observation(model)
    assert shape.vocab_size == ASSUMED_VOCAB_SIZE
    assert round(shape.num_parameters / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hybrid_override_pattern": "MEM*"}, "hybrid_override_pattern: has 4 entries for 32 layers"),
        ({"linear_num_value_heads": 16, "layer_types": ["conv"]}, "has 1 entries for 32 layers"),
        ({"layer_type_counts": {"linear_attention": 24, "full_attention": 8}}, "lists recurrent layers, but no key"),
        ({"layer_type_counts": {"full_attention": -1}}, "layer_type_counts: must map"),
        ({"layer_type_counts": {"full_attention": 31}}, "has 31 entries for 32 layers"),
        ({"attention_type": "ring"}, "'ring' is not supported yet"),
        ({"gated_mlp": "yes"}, "must be true or false"),
        ({"hidden_size": None}, "hidden_size: missing"),
    ],
)
def test_what_cannot_be_represented_is_named(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_observation({**GATED, **change})
    assert expected in str(caught.value)


_JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())


@given(
    junk=st.dictionaries(
        st.sampled_from([*GPT_OSS, *DEEPSEEK_V3, "num_parameters"]),
        _JUNK | st.dictionaries(st.text(max_size=3), _JUNK, max_size=3),
        max_size=4,
    ),
    base=st.sampled_from([GATED, GPT_OSS, DEEPSEEK_V3, mpt(12, 768, 12, 124_131_840)]),
)
def test_junk_gives_a_shape_or_a_model_config_error(junk: dict[str, Any], base: dict[str, Any]) -> None:
    try:
        shape = shape_from_observation({**base, **junk})
    except ModelConfigError:
        return
    assert shape.num_parameters > 0


@pytest.mark.parametrize(
    ("stated", "groups"),
    [
        ({"name": "DeepSeekV3 (w/o MTP)"}, (8, 4)),
        ({"name": "deepseek-ai/DeepSeek-R1"}, (8, 4)),
        ({"name": "DeepSeek-V3", "num_experts": 64}, (1, 1)),  # a proxy of fewer experts
        ({"name": "DeepSeek-V3", "n_group": 1, "topk_group": 1}, (1, 1)),
        ({"name": "Qwen3"}, (1, 1)),
    ],
)
def test_groups_of_experts_are_known_by_a_models_name(stated: dict[str, Any], groups: tuple[int, int]) -> None:
    moe = shape_from_observation({**GPT_OSS, "num_experts": 256, **stated}).moe
    assert moe is not None
    assert (moe.num_expert_groups, moe.num_groups_per_token) == groups


def test_gpt_oss_is_known_by_its_name() -> None:
    """Its experts have biases and their activation no fused kernel, which no key of a measurement says."""
    keys = {"num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    experts = {"head_dim": 64, "num_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2880}
    names = ("GPT OSS 120B", "openai/gpt-oss-120b", "Other 120B")
    shapes = [shape_from_observation({"name": name, **keys, **experts}) for name in names]
    assert [shape.moe is not None and shape.moe.expert_bias for shape in shapes] == [True, True, False]
