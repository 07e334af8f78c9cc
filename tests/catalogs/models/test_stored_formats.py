"""Formats of checkpoints by their quantization_config: published ones by tool, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_configs import SMALL_LLAMA

from meshplan.catalogs.errors import Problem
from meshplan.catalogs.models.config import read_config, read_formats, shape_from_config
from meshplan.catalogs.models.stored_formats import StoredFormats, stored_formats

MIXED = {
    **SMALL_LLAMA,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FOUR_FLOAT = {"num_bits": 4, "type": "float", "group_size": 16}
EXPERTS_NVFP4 = {f"backbone.layers.{layer}.mixer.experts.{e}.up_proj": "NVFP4" for layer in (1, 2, 3) for e in range(8)}


def read(config: dict[str, Any], section: dict[str, Any]) -> tuple[StoredFormats | None, list[Problem]]:
    problems: list[Problem] = []
    whole = {**config, "quantization_config": section}
    return stored_formats(whole, shape_from_config(config, slug="test"), problems), problems


@pytest.mark.parametrize(
    ("section", "attention", "mlp", "experts"),
    [
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate"]}, "w4a16", "w4a16", "w4a16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "w8a16", "w8a16", "w8a16"),
        # GPTQModel: attention stays wide, shared experts have eight bits.
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "dynamic": {"-:.*self_attn.*": {}, "+:.*(shared_expert|layers\\.0\\.mlp\\.).*": {"bits": 8}},
            },
            "bf16",
            "w8a16",
            "w4a16",
        ),
        (FP8_BLOCK, "fp8_block", "fp8_block", "fp8_block"),
        ({**FP8_BLOCK, "expert_dtype": "fp4"}, "fp8_block", "fp8_block", "mxfp4"),  # DeepSeek-V4
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", "fp8", "fp8"),
        # openai/gpt-oss-120b.
        (
            {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            },
            "bf16",
            "mxfp4",
            "mxfp4",
        ),
        # moonshotai/Kimi-K2.5: compressed-tensors, experts alone.
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int"},
                        "input_activations": None,
                    }
                },
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
            },
            "bf16",
            "bf16",
            "w4a16",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "int"},
                        "input_activations": {"num_bits": 8, "type": "int"},
                    }
                },
            },
            "int8",
            "int8",
            "int8",
        ),
        # modelopt by wildcards, as of nvidia/GLM-5.2-NVFP4; the dense layer has more parameters than shared experts.
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.0*", *(f"model.layers.{n}.self_attn*" for n in (1, 2, 3))],
            },
            "bf16",
            "bf16",
            "nvfp4",
        ),
        # modelopt by layers, named as in Nemotron 3.
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {name: {"quant_algo": algorithm} for name, algorithm in EXPERTS_NVFP4.items()}
                | {
                    f"backbone.layers.{layer}.mixer.{m}_proj": {"quant_algo": "FP8"}
                    for layer in range(4)
                    for m in "qkvo"
                },
            },
            "fp8",
            "bf16",
            "bf16",
        ),
        # Groups over a checkpoint in fp8, as of nvidia/DeepSeek-V4-Flash-NVFP4.
        (
            {
                "quant_method": "fp8",
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": FOUR_FLOAT, "input_activations": FOUR_FLOAT}
                },
                "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*", "layers.0.mlp"],
            },
            "fp8_block",
            "fp8_block",
            "nvfp4",
        ),
    ],
)
def test_a_section_becomes_formats_of_attention_mlp_and_experts(
    section: dict[str, Any], attention: str, mlp: str, experts: str
) -> None:
    stored, problems = read(MIXED, section)
    assert not problems
    assert stored is not None
    assert (stored.attention, stored.mlp, stored.experts) == (attention, mlp, experts)


def test_experts_by_their_down_projections() -> None:
    listed = {name.replace("up_proj", "w2"): {"quant_algo": "MXFP8"} for name in EXPERTS_NVFP4}
    stored, problems = read(MIXED, {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed})
    assert (problems, stored is not None and stored.experts) == ([], "mxfp8")


def test_what_differs_is_a_share_of_the_parameters() -> None:
    # Queries and outputs have 256·256 parameters each, keys and values a quarter of it.
    stored, _ = read(
        SMALL_LLAMA, {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.q_proj", "*.k_proj"]}
    )
    assert stored is not None
    assert stored.exceptions == {"attention": 0.5}
    assert "50.0% of attention" in stored.description
    first, _ = read(SMALL_LLAMA, {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["model.layers.0"]})
    assert first is not None
    assert (first.mlp, first.exceptions) == ("w4a16", {"attention": 0.25, "mlp": 0.25})


def test_every_problem_has_its_path() -> None:
    bits = {"targets": ["Linear"], "weights": {"num_bits": 3, "type": "int"}}
    section = {"quant_method": "compressed-tensors", "ignore": ["re:(", "re:(a+)+b", 7], "config_groups": {"g": bits}}
    _, problems = read(SMALL_LLAMA, section)
    assert [problem.path for problem in problems] == [
        "quantization_config.ignore",
        "quantization_config.config_groups.g.weights",
    ]
    _, problems = read(SMALL_LLAMA, {**section, "ignore": ["re:(", "re:(a+)+b"], "config_groups": {"g": "none"}})
    assert [problem.path for problem in problems] == [
        "quantization_config.ignore[0]",
        "quantization_config.ignore[1]",
        "quantization_config.config_groups.g.weights",
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "awq", "bits": 3}, "bits: 3 bits are not known"),
        ({"quant_method": "quip"}, "quant_method: 'quip' is not supported yet"),
        ({"quant_algo": "FP2"}, "quant_algo: 'FP2' is not known"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"layers.0.mlp": None}}, "'None' is not known"),
        ({"quant_method": "gptq", "dynamic": {"-:(x*)*y": {}}}, "too complicated"),
    ],
)
def test_unknown_formats_are_named(section: dict[str, Any], message: str) -> None:
    stored, problems = read(SMALL_LLAMA, section)
    assert stored is None
    assert message in "\n".join(str(problem) for problem in problems)


def test_a_file_beside_the_configuration_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA), encoding="utf-8")
    shape, problems = read_config(tmp_path), []
    assert read_formats(tmp_path, shape, problems) is None
    quantization = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    document = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(document), encoding="utf-8")
    stored = read_formats(tmp_path, shape, problems)
    assert problems == []
    assert stored == StoredFormats(method="modelopt", attention="fp8", mlp="fp8", experts="fp8")
