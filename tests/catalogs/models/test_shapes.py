"""The catalog's shapes count their parameters as publishers and as Hugging Face transformers do."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import yaml

from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.config import shape_from_config
from meshplan.catalogs.models.encoder_decoder import is_encoder_decoder
from meshplan.catalogs.models.shapes import ModelShape

SEED = importlib.resources.files("meshplan.catalogs.seed") / "models.yaml"
MODELS = yaml.safe_load(SEED.read_text(encoding="utf-8"))["models"]
COUNTED = {
    slug: number
    for name in (
        "transformers_parameter_counts.json",
        "hybrid_parameter_counts.json",
        "attention_form_counts.json",
        "encoder_parameter_counts.json",
    )
    for slug, number in json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))["catalog"].items()
}

# Total parameters in billions as the publisher prints them (model card or paper), or exactly.
PUBLISHED_BILLIONS = {
    "llama-2-7b": 6.738415616,  # Hugging Face, size of the safetensors, as all twelve-digit numbers below
    "llama-2-13b": 13.01586432,
    "llama-2-70b": 68.976648192,
    "llama-3.1-8b": 8.030261248,
    "llama-3.1-70b": 70.553706496,
    "llama-3.1-405b": 405.8533888,
    "llama-3.2-1b": 1.23,  # model card
    "llama-3.2-3b": 3.21,
    "mistral-7b": 7.241732096,
    "mistral-nemo-12b": 12.247782400,
    "mistral-large-2": 123,
    "mixtral-8x7b": 46.702792704,
    "mixtral-8x22b": 141,  # mistral.ai/news/mixtral-8x22b
    "qwen2.5-0.5b": 0.494032768,
    "qwen2.5-1.5b": 1.543714304,
    "qwen2.5-7b": 7.615616512,
    "qwen2.5-72b": 72.706203648,
    "qwen3-8b": 8.2,  # Qwen3 model cards
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-coder-480b-a35b": 480,
    "qwen2-57b-a14b": 57.41,  # Qwen2 technical report, arXiv:2407.10671
    "gemma-2-9b": 9.241705984,
    "gemma-2-27b": 27.22712832,
    "gpt2": 0.124439808,
    "gpt2-xl": 1.5576112,
    "gpt-j-6b": 6.053381344,  # model card; counts the rotary buffers
    "gpt-neox-20b": 20.55456768,  # model card
    "pythia-6.9b": 6.857302016,  # model card
    "pythia-12b": 11.84607232,
    "bloom-7b1": 7.069016064,  # model card
    "bloom-176b": 176.247271424,
    "gpt3-175b": 174.6,  # Narayanan et al. 2021, arXiv:2104.04473, §5.1
    "megatron-1t": 1008.0,  # arXiv:2104.04473, Table 1
    "megatron-530b": 529.6,
    "deepseek-v2": 236,  # arXiv:2405.04434
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,  # arXiv:2412.19437
    "gpt-oss-20b": 20.91,  # gpt-oss model card, Table 1
    "gpt-oss-120b": 116.83,
    "olmoe-1b-7b": 6.92,  # arXiv:2409.02060
    "olmo-2-13b": 13.7,
    "nemotron-4-340b": 341.0,  # arXiv:2406.11704, §2.1: 9.4 of embedding, 331.6 without
    "dbrx": 132,  # model card
    "phi-3.5-moe": 41.9,
    "command-r-plus": 104,
    "starcoder-15.5b": 15.5,
    "kimi-linear-48b-a3b": 49.12,  # Hugging Face, size of the safetensors
}
PUBLISHED_TOLERANCE = 0.005

# Parameters active for a token, in billions, with half a unit of the last printed digit.
PUBLISHED_ACTIVE_BILLIONS = {
    "mixtral-8x7b": (12.9, 0.05),
    "mixtral-8x22b": (39, 0.5),
    "qwen3-235b-a22b": (22, 0.5),
    "qwen3-coder-480b-a35b": (35, 0.5),
    "qwen2-57b-a14b": (14, 0.5),
    "qwen1.5-moe-a2.7b": (2.7, 0.05),
    "dbrx": (36, 0.5),
    "deepseek-v2": (21, 0.5),
    "olmoe-1b-7b": (1.28, 0.005),
    "llama-4-scout": (17, 0.5),
    "llama-4-maverick": (17, 0.5),
    "qwen3.5-397b-a17b": (17, 0.5),  # model cards, the hybrids
    "nemotron-3-nano-30b-a3b": (3.6, 0.05),
    "granite-4.0-h-small": (9, 0.5),
    "jamba-1.5-mini": (12, 0.5),
}
# These publishers leave the input embedding out, which is looked up and not multiplied.
PUBLISHED_ACTIVE_BILLIONS_WITHOUT_EMBEDDING = {
    "gpt-oss-20b": (3.61, 0.005),
    "gpt-oss-120b": (5.13, 0.005),
    "deepseek-v3": (37, 0.5),
    "kimi-k2": (32, 0.5),
}


# Parameters that a shape does not hold or that transformers' modules do not have; see test_attention_forms.py.
BESIDE_A_SHAPE = {
    "deepseek-v4-flash": 4 * 4 * 4096 + 4 + 1,
    "deepseek-v4-pro": 4 * 4 * 7168 + 4 + 1,
    "gemma-4-26b-a4b": 30 * 128,
    "minimax-m3": -57 * 4 * 6144,
}


def shape_of(slug: str) -> ModelShape:
    entry = MODELS[slug]
    return shape_from_config(entry["config"], slug=slug, name=entry["name"], source=entry["source"])


@pytest.mark.parametrize("slug", sorted(MODELS))
def test_every_entry_is_a_cited_shape(slug: str) -> None:
    entry = MODELS[slug]
    assert set(entry) == {"name", "source", "date", "config"}
    assert all(isinstance(entry[key], str) and entry[key] for key in ("name", "source", "date"))
    shape = shape_of(slug)
    assert (shape.slug, shape.name, shape.source) == (slug, entry["name"], entry["source"])
    assert slug == slug.lower()
    assert " " not in slug


@pytest.mark.parametrize("slug", sorted(COUNTED))
def test_counts_agree_with_transformers(slug: str) -> None:
    assert shape_of(slug).num_parameters + BESIDE_A_SHAPE.get(slug, 0) == COUNTED[slug]


def test_transformers_counted_all_but_what_it_cannot_build() -> None:
    two_stacks = {slug for slug in MODELS if is_encoder_decoder(MODELS[slug]["config"])}  # test_encoder_decoder.py
    uncounted = {"dbrx", "internlm-7b", "internlm-20b", "kimi-linear-48b-a3b"}
    as_counted = {"kimi-k2-thinking": "kimi-k2", "kimi-k2.6": "kimi-k2.5"}
    assert set(MODELS) - set(COUNTED) - two_stacks == uncounted | set(as_counted)
    assert all(shape_of(one).num_parameters == COUNTED[other] for one, other in as_counted.items())


@pytest.mark.parametrize("slug", sorted(PUBLISHED_BILLIONS))
def test_totals_agree_with_publishers(slug: str) -> None:
    assert shape_of(slug).num_parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[slug], rel=PUBLISHED_TOLERANCE)


@pytest.mark.parametrize("slug", sorted(PUBLISHED_ACTIVE_BILLIONS))
def test_active_parameters_agree_with_publishers(slug: str) -> None:
    billions, half_digit = PUBLISHED_ACTIVE_BILLIONS[slug]
    assert shape_of(slug).num_active_parameters / 1e9 == pytest.approx(billions, abs=half_digit)


@pytest.mark.parametrize("slug", sorted(PUBLISHED_ACTIVE_BILLIONS_WITHOUT_EMBEDDING))
def test_active_parameters_without_embedding_agree_with_publishers(slug: str) -> None:
    shape = shape_of(slug)
    billions, half_digit = PUBLISHED_ACTIVE_BILLIONS_WITHOUT_EMBEDDING[slug]
    active = shape.num_active_parameters - shape.embedding_parameters
    assert active / 1e9 == pytest.approx(billions, abs=half_digit)


def test_parts_add_up() -> None:
    for slug in MODELS:
        shape = shape_of(slug)
        layers = [shape.layer_parameters(layer) for layer in range(shape.num_hidden_layers)]
        outside = shape.embedding_parameters + shape.lm_head_parameters + shape.num_outer_norms * shape.norm_parameters
        outside += shape.position_bias_parameters + (0 if shape.encoder is None else shape.encoder.num_parameters)
        assert sum(layers) + outside == shape.num_parameters
        assert 0 < shape.num_active_parameters <= shape.num_parameters


def test_gemma_3_split_agrees_with_its_report() -> None:
    # Gemma 3 technical report, arXiv:2503.19786, Table 1: millions of embedding and of other parameters.
    # Its totals round to the thousand-fold vocabulary of 256k plus reserved rows, hence 1 %.
    for slug, embedding, others in (("gemma-3-1b", 302, 698), ("gemma-3-4b", 675, 3209), ("gemma-3-27b", 1416, 25600)):
        shape = shape_of(slug)
        assert shape.embedding_parameters / 1e6 == pytest.approx(embedding, rel=0.01)
        assert (shape.num_parameters - shape.embedding_parameters) / 1e6 == pytest.approx(others, rel=0.01)


def test_deepseek_v3_prediction_layer_explains_the_published_file_size() -> None:
    # Hugging Face lists 684.53 billion values in the safetensors of deepseek-ai/DeepSeek-V3: the model, one
    # multi-token-prediction layer with its own copies of embedding and head, and a scale for each 128 × 128 FP8 block.
    shape = shape_of("deepseek-v3")
    copies = shape.embedding_parameters + shape.lm_head_parameters
    values = shape.num_parameters + shape.num_nextn_predict_layers * shape.nextn_layer_parameters + copies
    scales = (values - 2 * copies) / 128**2
    assert (values + scales) / 1e9 == pytest.approx(684.53, abs=0.01)
    assert shape_of("kimi-k2").nextn_layer_parameters == 0


def test_deepseek_v3_layers() -> None:
    shape = shape_of("deepseek-v3")
    assert shape.attention is AttentionKind.MULTI_HEAD_LATENT
    assert [shape.is_moe_layer(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    assert shape.num_moe_layers == 58
    assert shape.head_dim == 192


def test_llama_4_maverick_alternates_dense_and_moe_layers() -> None:
    shape = shape_of("llama-4-maverick")
    assert shape.moe is not None
    assert shape.moe.moe_layers[:4] == (False, True, False, True)
    assert shape.intermediate_size == 2 * shape.moe.expert_intermediate_size
    assert shape.sliding_windows[:4] == (8192, 8192, 8192, None)


@pytest.mark.parametrize(
    ("slug", "windows"),
    [
        ("mistral-7b", (4096, 4096)),
        ("mistral-7b-v0.3", ()),
        ("gemma-2-9b", (4096, None)),
        ("gpt-oss-20b", (128, None)),
        ("gemma-3-27b", (1024, 1024, 1024, 1024, 1024, None)),
        ("qwen2.5-7b", ()),
        ("llama-3.1-8b", ()),
    ],
)
def test_attention_windows(slug: str, windows: tuple[int | None, ...]) -> None:
    shape = shape_of(slug)
    assert shape.sliding_windows[: len(windows)] == windows
    assert bool(shape.sliding_windows) == bool(windows)
    assert shape.window(0) == (windows[0] if windows else None)


@pytest.mark.parametrize(
    ("model", "state_bytes"),
    [
        # 36 layers of 32 heads of 128 × 128 in fp32, and 3 inputs of 8,192 channels in 16 bits
        ("qwen3-next-80b-a3b", 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)),
        # 27 layers of 128 heads of 80 × 128 and 3 inputs of 12,288 channels
        ("nemotron-nano-9b-v2", 27 * (4 * 128 * 80 * 128 + 2 * 3 * 12288)),
    ],
)
def test_recurrent_state_of_a_sequence(model: str, state_bytes: int) -> None:
    shape = shape_of(model)
    assert shape.blocks is not None
    assert shape.num_recurrent_layers * shape.blocks.recurrent_state_bytes == state_bytes
