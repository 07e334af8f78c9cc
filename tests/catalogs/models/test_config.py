"""Reading a config.json: family defaults against transformers, bad input, and no exception but ModelConfigError."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_configs import SMALL_LLAMA
from hypothesis import given
from hypothesis import strategies as st

from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models import config as model_config
from meshplan.catalogs.models.config import read_config, shape_from_config
from meshplan.catalogs.models.families.registry import FAMILIES
from meshplan.catalogs.models.fields import FIELDS
from meshplan.catalogs.models.shapes import ModelShape

COUNTED = json.loads((Path(__file__).parent / "transformers_parameter_counts.json").read_text(encoding="utf-8"))
HYBRIDS = json.loads((Path(__file__).parent / "hybrid_parameter_counts.json").read_text(encoding="utf-8"))["families"]
ENCODERS = json.loads((Path(__file__).parent / "encoder_parameter_counts.json").read_text(encoding="utf-8"))["families"]
FORMS = json.loads((Path(__file__).parent / "attention_form_counts.json").read_text(encoding="utf-8"))["families"]
# Learned values beside the matrices, which a shape does not hold: two xIELU slopes a layer (Apertus), and the routing
# correction of ERNIE's three MoE layers with four experts, a parameter there and a buffer elsewhere.
NOT_IN_A_SHAPE = {"apertus": 8 * 2, "ernie4_5_moe": 3 * 4}


def read(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(config, slug="test")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelConfigError) as caught:
        read(config)
    return str(caught.value)


# --- families ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sorted(COUNTED["families"]))
def test_family_defaults_agree_with_transformers(case: str) -> None:
    expected = COUNTED["families"][case]
    shape = read(expected["config"])
    assert shape.num_parameters + NOT_IN_A_SHAPE.get(case, 0) == expected["num_parameters"]
    if "windowed_layers" in expected:
        assert [layer for layer in range(8) if shape.window(layer) is not None] == expected["windowed_layers"]


@pytest.mark.parametrize("case", sorted(HYBRIDS))
def test_hybrids_agree_with_transformers(case: str) -> None:
    assert read(HYBRIDS[case]["config"]).num_parameters == HYBRIDS[case]["num_parameters"]


def test_families_that_transformers_does_not_check() -> None:
    cases = [*COUNTED["families"].values(), *HYBRIDS.values(), *FORMS.values(), *ENCODERS.values()]
    checked = {str(case["config"]["model_type"]).removesuffix("_text") for case in cases}
    same_rules = {family for family in FAMILIES if any(FAMILIES[family] is FAMILIES[other] for other in checked)}
    # Not in transformers (remote code), or built from the same text model as a checked family.
    assert set(FAMILIES) - checked - same_rules == {"chatglm", "dbrx", "internlm", "internlm2", "phi3", "qwen"}


def test_unknown_family_is_read_by_llamas_rules() -> None:
    known, unknown = read(SMALL_LLAMA), read({**SMALL_LLAMA, "model_type": "llama-of-tomorrow"})
    assert unknown.family == "llama-of-tomorrow"
    assert unknown.num_parameters == known.num_parameters
    assert read({key: value for key, value in SMALL_LLAMA.items() if key != "model_type"}).family == ""


def test_unknown_family_with_a_plain_activation_has_two_matrices() -> None:
    assert not read({**SMALL_LLAMA, "model_type": "new", "hidden_act": "gelu"}).gated_mlp
    assert read({**SMALL_LLAMA, "model_type": "new", "hidden_act": "silu"}).gated_mlp


def test_unknown_keys_are_ignored() -> None:
    assert read({**SMALL_LLAMA, "a_key_of_tomorrow": {"deep": [1]}, "rope_scaling": None}) == read(SMALL_LLAMA)


def test_null_counts_as_absent() -> None:
    assert read({**SMALL_LLAMA, "head_dim": None, "tie_word_embeddings": None}) == read(SMALL_LLAMA)


def test_qwen_first_generation_halves_its_width() -> None:
    assert read({**SMALL_LLAMA, "model_type": "qwen", "intermediate_size": 1024}).intermediate_size == 512


def test_chatglm_spelling() -> None:
    # THUDM/glm-4-9b-chat, config.json; the transformers conversion counts 9,399,951,360 parameters.
    shape = read(
        {
            "model_type": "chatglm",
            "num_layers": 40,
            "hidden_size": 4096,
            "ffn_hidden_size": 13696,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            "add_qkv_bias": True,
            "padded_vocab_size": 151552,
            "seq_length": 131072,
            "tie_word_embeddings": False,
        }
    )
    assert shape.num_parameters == 9_399_951_360
    assert shape.max_sequence_length == 131072


def test_mpt_learned_positions_only_without_alibi() -> None:
    config = {"model_type": "mpt", "n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": 100, "max_seq_len": 32}
    assert read(config).num_position_embeddings == 0
    assert read({**config, "attn_config": {"alibi": False}}).num_position_embeddings == 32
    assert read({**config, "attn_config": {"alibi": False, "rope": True}}).num_position_embeddings == 0
    assert read({**config, "no_bias": False}).mlp_bias


def test_listed_moe_layers_win() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    numbered = read({**SMALL_LLAMA, **experts, "moe_layers": [1, 3]})
    flagged = read({**SMALL_LLAMA, **experts, "moe_layer_freq": [0, 1, 0, 1]})
    typed = read({**SMALL_LLAMA, **experts, "mlp_layer_types": ["dense", "sparse"] * 2, "first_k_dense_replace": 4})
    for shape in (numbered, flagged, typed):
        assert shape.moe is not None
        assert shape.moe.moe_layers == (False, True, False, True)


def test_groups_that_a_token_may_visit() -> None:
    routed = {**SMALL_LLAMA, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}

    def groups(**keys: Any) -> tuple[int, int] | None:
        moe = read({**routed, **keys}).moe
        return moe and (moe.num_expert_groups, moe.num_groups_per_token)

    assert (
        groups(n_group=8, topk_group=3, topk_method="group_limited_greedy") == groups(n_group=8, topk_group=3) == (8, 3)
    )
    for free in (
        {},
        {"n_group": 4, "topk_group": 4},
        {"n_group": 4},
        {"n_group": 8, "topk_group": 3, "topk_method": "greedy"},
    ):
        assert groups(**free) == (1, 1)


def test_one_expert_is_a_dense_model() -> None:
    assert read({**SMALL_LLAMA, "num_experts": 1, "num_experts_per_tok": 1}).moe is None


# --- multimodal models --------------------------------------------------------------------------------------------


def test_text_section_of_a_multimodal_model() -> None:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27}
    shape = read({"model_type": "llava", "text_config": SMALL_LLAMA, "vision_config": vision})
    assert shape == read(SMALL_LLAMA)


def test_sparse_gemma_3_section_takes_family_defaults() -> None:
    # google/gemma-3-4b-it, config.json: the section leaves out heads, vocabulary and head size.
    section = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = read({"model_type": "gemma3", "text_config": section})
    assert shape.num_parameters == COUNTED["catalog"]["gemma-3-4b"]
    assert shape.tie_word_embeddings


def test_sizes_beside_an_empty_text_section_are_used() -> None:
    assert read({**SMALL_LLAMA, "text_config": {}}) == read(SMALL_LLAMA)


def test_tying_may_be_stated_outside_the_section() -> None:
    assert read({"text_config": SMALL_LLAMA, "tie_word_embeddings": True}).tie_word_embeddings


# --- layers that are not attention and an MLP ----------------------------------------------------------------------


def test_qwen3_next_has_attention_in_every_fourth_layer() -> None:
    shape = read(HYBRIDS["qwen3_next"]["config"])
    assert [layer for layer in range(8) if shape.has_attention(layer)] == [3, 7]
    assert (shape.num_recurrent_layers, shape.num_dense_layers, shape.num_moe_layers) == (6, 0, 8)
    assert shape.has_output_gate


def test_nemotron_h_has_one_block_a_layer() -> None:
    shape = read(HYBRIDS["nemotron_h-latent"]["config"])  # MEM*EMM-
    assert (shape.num_attention_layers, shape.num_recurrent_layers) == (1, 4)
    assert [layer for layer in range(8) if shape.has_mlp(layer)] == [1, 4, 7]
    assert (shape.num_moe_layers, shape.num_dense_layers, shape.expert_hidden_size) == (2, 1, 64)


def test_falcon_h1_mixes_both_ways_in_each_layer() -> None:
    shape = read(HYBRIDS["falcon_h1"]["config"])
    assert (shape.num_attention_layers, shape.num_recurrent_layers) == (8, 8)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "deberta-v2", "hidden_size": 768},
            "'deberta-v2' is a text encoder of a family",
        ),
        ({"model_type": "bart", "d_model": 512, "num_layers": 6, "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "vit", "hidden_size": 768, "image_size": 224}, "vision"),
        ({"model_type": "resnet", "depths": [3, 4, 6, 3]}, "'resnet' is a vision"),
        ({"model_type": "clip", "text_config": {**SMALL_LLAMA, "model_type": "clip_text_model"}}, "'clip' is a vision"),
        ({"model_type": "new", "hidden_size": 768, "image_size": 224}, "no vocabulary"),
        ({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.2"}, "diffusers component"),
        ({**SMALL_LLAMA, "model_type": "mllama_text_model"}, "'mllama_text_model' is not supported yet"),
        ({**SMALL_LLAMA, "compress_ratios": [0, 4, 128, 4]}, "are read for deepseek_v4 only"),
        ({**SMALL_LLAMA, "model_type": "kimi_k3", "attn_res_block_size": 12}, "outputs of earlier layers"),
        ({**SMALL_LLAMA, "model_type": "nemotron-nas", "block_configs": [{}]}, "unlike widths"),
        ({"model_type": "mamba", "hidden_size": 768, "state_size": 16}, "state-space"),
        ({**SMALL_LLAMA, "hybrid_override_pattern": "M*E-"}, "lists recurrent layers, but no key states their sizes"),
        ({**SMALL_LLAMA, "hybrid_override_pattern": "M*EX"}, "must be made of M (mamba)"),
        (
            {**SMALL_LLAMA, "model_type": "nemotron_h", "mamba_num_heads": 8, "mamba_head_dim": 64},
            "mamba_num_heads: sizes of recurrent layers, but nothing says which layers these are (layer_types, ",
        ),
        (
            {**SMALL_LLAMA, "layer_types": ["linear_attention", "full_attention"] * 2},
            "lists recurrent layers, but no key",
        ),
        ({**SMALL_LLAMA, "layer_types": ["linear_attention", "full_attention"]}, "has 2 entries for 4 layers"),
        ({**SMALL_LLAMA, "layer_types": ["quadratic"] * 4}, "layers of kind 'quadratic' are not supported yet"),
        ({**SMALL_LLAMA, "attn_type_list": [0, 2]}, "must be a list of 0 (linear) and 1"),
        ({**SMALL_LLAMA, "index_topk": 2048}, "index_n_heads: missing"),
        ({**SMALL_LLAMA, "architectures": ["NewForMaskedLM"]}, "masked language model"),
        ({}, "keys seen: none"),
        ({"learning_rate": 0.1}, "keys seen: learning_rate"),
        ({"text_config": {"unrelated": 1}}, "states none of"),
        ({**SMALL_LLAMA, "model_type": 7}, "model_type: must be text, is 7"),
    ],
)
def test_what_is_not_a_decoder_is_named(config: dict[str, Any], expected: str) -> None:
    assert expected in refusal(config)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_missing_keys_are_named(key: str) -> None:
    message = refusal({name: value for name, value in SMALL_LLAMA.items() if name != key})
    assert f"  - {key}: missing" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads"])
@pytest.mark.parametrize("value", [0, -1, 10**12, 2.5, "32", True, [32], {}, float("nan"), float("inf")])
def test_bad_sizes_are_named(key: str, value: object) -> None:
    assert f"  - {key}: must" in refusal({**SMALL_LLAMA, key: value})


def test_an_endless_number_is_named() -> None:
    assert "hidden_size: must lie between 1 and 262144 (hidden size), is an integer of" in refusal(
        {**SMALL_LLAMA, "hidden_size": 10**5000}
    )


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "256 is not divisible by 7 attention heads"),
        ({"num_key_value_heads": 3}, "3 does not divide 8 attention heads"),
        ({"tie_word_embeddings": "yes"}, "must be true or false, is 'yes'"),
        ({"num_experts": 4}, "num_experts_per_tok: missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 is more than the 4 experts there are"),
        ({**EXPERTS, "n_group": 2, "topk_group": 3}, "3 is more than the 2 groups of experts"),
        ({**EXPERTS, "n_group": 3, "topk_group": 2}, "4 experts are not divisible into 3 equal groups"),
        ({**EXPERTS, "n_group": 4, "topk_group": 1}, "1 groups of 1 experts are fewer than the 2 a token visits"),
        ({"kv_lora_rank": 64}, "qk_nope_head_dim: missing"),
        ({"layer_types": ["full_attention"]}, "has 1 entries for 4 layers"),
        ({"layer_types": "full_attention"}, "must be a list of texts"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window: missing"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_layers": [4]}, "layer numbers from 0 to 3"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": [1]}, "must hold 4 entries 0 or 1"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": "all"}, "must be a list of layer numbers"),
        ({"model_type": "gpt2", "n_inner": None}, "positions are learned"),
        ({"model_type": "gemma3", "sliding_window_pattern": "LXG"}, "sliding_window_pattern: must be a whole number"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], expected: str) -> None:
    assert expected in refusal({**SMALL_LLAMA, **change})


def test_all_problems_come_in_one_message() -> None:
    message = refusal(
        {"model_type": "llama", "num_hidden_layers": "32", "hidden_size": -1, "mlp_bias": 3, "head_dim": 0}
    )
    for path in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "mlp_bias", "head_dim"):
        assert f"  - {path}: " in message


def test_one_key_that_gives_two_sizes_is_reported_once() -> None:
    message = refusal(
        {**SMALL_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0], "intermediate_size": 0}
    )
    assert message.count("intermediate_size") == 1


# --- files ----------------------------------------------------------------------------------------------------------


def test_reads_a_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My Llama_v2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA), encoding="utf-8")
    shape = read_config(folder)
    assert dataclasses.replace(shape, source="") == dataclasses.replace(read_config(folder / "config.json"), source="")
    assert (shape.slug, shape.name) == ("my-llama-v2", "My Llama_v2")
    other = folder / "tiny.json"
    other.write_text(json.dumps(SMALL_LLAMA), encoding="utf-8")
    assert read_config(other).slug == "tiny"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\xfa", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"[1, 2]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
        (b'"text"', "must hold a JSON object"),
        (b'{"hidden_size": NaN}', "hidden_size: must be a whole number"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelConfigError, match=expected):
        read_config(file)


def test_missing_file_and_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="no model configuration at"):
        read_config(tmp_path / "absent.json")
    with pytest.raises(ModelConfigError, match="no model configuration at"):
        read_config(tmp_path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "config.json/config.json"])
def test_impossible_paths_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelConfigError, match=r"no model configuration at|cannot read"):
        read_config(tmp_path / path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelConfigError, match="no model configuration at"):
        read_config(tmp_path)


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "MAX_CONFIG_BYTES", 100)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL_LLAMA | {"padding": "x" * 100}), encoding="utf-8")
    with pytest.raises(ModelConfigError, match="larger than 100 bytes"):
        read_config(file)


# --- junk -----------------------------------------------------------------------------------------------------------

_KEYS = sorted(
    {key for field in FIELDS.values() for key in field.keys}
    | {
        "model_type",
        "layer_types",
        "moe_layers",
        "mlp_layer_types",
        "mlp_only_layers",
        "attn_config",
        "ffn_config",
        "text_config",
    }
    | {"sliding_window_pattern", "tie_word_embeddings", "attention_bias", "no_bias", "multi_query", "alibi"}
    | {"use_sliding_window", "max_window_layers", "attn_type_list", "hidden_act", "expansion_ratio", "architectures"}
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=0, max_value=64)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["LLG", "full_attention", "sliding_attention", *sorted(FAMILIES)])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=8,
)


@given(config=st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=5), _VALUES, max_size=12), whole=st.booleans())
def test_junk_gives_a_shape_or_a_model_config_error(config: dict[str, Any], whole: bool) -> None:
    try:
        shape = read({**SMALL_LLAMA, **config} if whole else config)
    except ModelConfigError:
        return
    assert 0 < shape.num_active_parameters <= shape.num_parameters
    assert len(shape.sliding_windows) in (0, shape.num_hidden_layers)


@given(family=st.sampled_from(sorted(FAMILIES)), junk=st.dictionaries(st.sampled_from(_KEYS), _SCALARS, max_size=4))
def test_junk_in_every_family(family: str, junk: dict[str, Any]) -> None:
    try:
        shape = read({**SMALL_LLAMA, "max_position_embeddings": 64, **junk, "model_type": family})
    except ModelConfigError:
        return
    assert shape.num_parameters > 0
