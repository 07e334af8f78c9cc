"""Files start the checkpoint that the question names, and read a quantised one as it is."""

from __future__ import annotations

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.launch.checkpoint import Checkpoint, checkpoint_of
from meshplan.planner.service import emit_plan, make_plan


def question(model: str, **fixed: object) -> dict[str, object]:
    return {
        "kind": "serving",
        "model": model,
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 128, "output_length": 16, "concurrency": 2, "num_requests": 16},
        "constraints": {"rent": "device"},  # of a whole node two devices would prefill and decode apart
        "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1, "num_workers": 1, **fixed},
    }


FLEET = {
    "kind": "gpu-allocation",
    "model": "Qwen/Qwen3-8B-FP8",
    "market": {"rent": "node", "offers": [{"type": "dgx-h100", "max_nodes": 2}]},
    "workload": {"buckets": [{"input_tokens": [1, 512], "output_tokens": [1, 64], "request_rate_per_s": 2}]},
    "slo": {"ttft_p99_s": 3, "tpot_p95_s": 0.1},
    "replay": {"enabled": False},  # what is started matters here
}


def text_of(artifacts: tuple[Artifact, ...], name: str) -> str:
    return next(one.content for one in artifacts if one.path.name == name)


@pytest.mark.parametrize(
    ("model", "started", "flags"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-AWQ", ""),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B-FP8", ""),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", ""),
        ("qwen3-8b-fp8", "Qwen/Qwen3-8B", "--quantization"),  # a name of nobody's checkpoint: the engine makes it
        ("qwen3-8b", "Qwen/Qwen3-8B", ""),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", ""),  # the catalog's: the one that answers
    ],
)
def test_the_checkpoint_is_the_one_that_was_asked_for(catalog: Catalog, model: str, started: str, flags: str) -> None:
    emitted = emit_plan(make_plan(question(model), catalog), "vllm", catalog)
    assert f"vllm serve {started} " in text_of(emitted.artifacts, "launch.sh")
    assert ("--quantization" in text_of(emitted.artifacts, "mixed_args.txt")) == bool(flags)


def test_a_named_folder_is_a_copy_of_what_was_asked_for(catalog: Catalog) -> None:
    plan = make_plan(question("Qwen/Qwen2.5-7B-Instruct-AWQ"), catalog)
    emitted = emit_plan(plan, "vllm", catalog, model_path="/models/awq")
    assert "vllm serve /models/awq " in text_of(emitted.artifacts, "launch.sh")
    assert "--quantization" not in text_of(emitted.artifacts, "mixed_args.txt")


def test_a_plan_in_four_bits_starts_what_the_user_names(catalog: Catalog) -> None:
    """Of a model that is published in 16 bits; without a name there is nothing to start, and the refusal says so."""
    plan = make_plan(question("qwen2.5-7b", quantization="w4a16"), catalog)
    with pytest.raises(CannotExpressError, match="--model-path"):
        emit_plan(plan, "vllm", catalog)
    emitted = emit_plan(plan, "vllm", catalog, model_path="Qwen/Qwen2.5-7B-Instruct-AWQ")
    assert "vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ " in text_of(emitted.artifacts, "launch.sh")


def test_the_pools_of_a_fleet_start_it_too(catalog: Catalog) -> None:
    plan = make_plan(FLEET, catalog)
    scripts = [one.content for one in emit_plan(plan, "vllm", catalog).artifacts if one.path.name == "launch.sh"]
    assert scripts
    assert all("vllm serve Qwen/Qwen3-8B-FP8 " in text for text in scripts)


def test_a_plan_in_other_formats_does_not_start_the_quantised_checkpoint(catalog: Catalog) -> None:
    shape = catalog.model_shape("qwen3-8b")
    pools = [{"quantization": {"mlp": "bf16"}}]
    assert checkpoint_of("Qwen/Qwen3-8B-FP8", shape, pools, "") == Checkpoint()
    assert checkpoint_of("Qwen/Qwen3-8B-FP8", shape, [{"quantization": {"mlp": "fp8_block"}}], "").is_quantized


@pytest.mark.parametrize("path", ["models/qwen/config.json", "./qwen", "/qwen/FP8", "a/b/c", "", "-x/y"])
def test_a_path_is_no_checkpoint_of_the_hub(catalog: Catalog, path: str) -> None:
    assert checkpoint_of(path, catalog.model_shape("qwen3-8b"), [], "").path == ""
