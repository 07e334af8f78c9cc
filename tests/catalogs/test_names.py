"""Names as people write them: Hugging Face ids as they are published, and GPUs as clouds list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.names import ModelName, hardware_name, model_name

IDS = {
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama-3-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "qwen/qwen3-32b": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "LLAMA-3.1-70B": "llama-3.1-70b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
}
QUANTISED = {
    "Qwen/Qwen3-32B-FP8": ("qwen3-32b", "fp8"),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ("qwen2.5-7b", "w4a16"),
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16": ("llama-3.1-70b", "w4a16"),
    "nvidia/Llama-3.3-70B-Instruct-NVFP4": ("llama-3.3-70b", "nvfp4"),
}


@pytest.fixture(scope="module")
def seed_catalog(seeded_file: Path) -> Catalog:
    return Catalog.open(str(seeded_file))


@pytest.fixture(scope="module")
def sources(seed_catalog: Catalog) -> dict[str, str]:
    return {str(row["slug"]): str(row["source"]) for row in seed_catalog.models()}


@pytest.mark.parametrize(("written", "slug"), IDS.items())
def test_a_published_id_is_the_catalogs_model(written: str, slug: str, sources: dict[str, str]) -> None:
    assert model_name(written, sources) == ModelName(slug=slug)


@pytest.mark.parametrize(("written", "expected"), QUANTISED.items())
def test_a_quantised_checkpoint_tells_its_format(
    written: str, expected: tuple[str, str], sources: dict[str, str]
) -> None:
    assert model_name(written, sources) == ModelName(slug=expected[0], scheme=expected[1])


@pytest.mark.parametrize("written", ["somebody/llama-9", "", "/", "llama", "Qwen/Qwen3-32B-GGUF-q3"])
def test_what_no_entry_means_is_not_guessed(written: str, sources: dict[str, str]) -> None:
    assert model_name(written, sources) is None


def test_every_name_of_the_catalog_means_itself(sources: dict[str, str]) -> None:
    for slug in sources:
        assert model_name(slug, sources) == ModelName(slug=slug)
        assert model_name(slug.upper(), sources) == ModelName(slug=slug)


@pytest.mark.parametrize(
    ("written", "slug"),
    [
        ("H100", "h100-sxm-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("l40s", "l40s"),
        ("A100-40GB", "a100-sxm-40gb"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", "t4"),
        ("RTX4090", "rtx-4090"),
        ("RTXA6000", "rtx-a6000"),
        ("Gaudi 3", "gaudi3"),
        ("A100 80 GB", "a100-sxm-80gb"),
        ("v5e", "tpu-v5e"),
        # as the driver says it: nvidia-smi -L, and the label nvidia.com/gpu.product of a Kubernetes node
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA-A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_as_people_say_it(written: str, slug: str, seed_catalog: Catalog) -> None:
    assert hardware_name(written, (device.slug for device in seed_catalog.devices())) == slug
    assert seed_catalog.device(written).slug == slug


def test_hyphens_are_left_out_only_where_one_entry_remains() -> None:
    assert hardware_name("ab1", ("a-b1", "c")) == "a-b1"
    assert hardware_name("ab1", ("a-b1", "ab-1")) is None
    assert hardware_name("L40", ("l40s", "l4")) is None


def test_node_types_and_models_are_looked_up_by_any_spelling(seed_catalog: Catalog) -> None:
    assert seed_catalog.node_type("DGX_H100").slug == "dgx-h100"
    assert seed_catalog.model_shape("Qwen/Qwen3-32B").slug == "qwen3-32b"
    with pytest.raises(UnknownEntryError, match="did you mean"):
        seed_catalog.model_shape("Qwen/Qwen3-31B")
