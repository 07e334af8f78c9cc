"""The share of a device's memory: a choice that a spec pins, an engine's flag says, and an import reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.command import import_command, read_inputs
from meshplan.planner.imports.spec import Answers
from meshplan.planner.service import emit_plan, estimate_plan, make_plan, write_files

ANSWERS = Answers(node_type="dgx-h100", input_length=1000, output_length=500, concurrency=16)
FLAGS = {
    "vllm": "--gpu-memory-utilization",
    "sglang": "--mem-fraction-static",
    "trtllm": "--kv_cache_free_gpu_memory_fraction",
}


def spec(engine: str = "vllm", **fixed: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": "llama-3.1-70b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"input_length": 1000, "output_length": 500, "concurrency": 16},
        "constraints": {"target": engine},
        "fixed": {"mode": "aggregated", "tensor_parallel": 4, "num_workers": 1, **fixed},
    }


def test_a_smaller_share_leaves_less_cache(catalog: Catalog) -> None:
    plans = {share: estimate_plan(spec(memory_fraction=share), catalog) for share in (0.7, 0.9)}
    device = catalog.node_type("dgx-h100").device
    less, more = (plan.memory["pools"][0] for plan in plans.values())
    lost = 0.2 * device.usable_memory_bytes / less["kv_bytes_per_token"]
    assert more["kv_capacity_tokens"] - less["kv_capacity_tokens"] == pytest.approx(lost, rel=1e-3)
    assert plans[0.7].config["pools"][0]["limits"]["memory_fraction"] == 0.7


def test_a_role_s_own_share_comes_before_the_common_one(catalog: Catalog) -> None:
    pinned = spec(mode="disaggregated", memory_fraction=0.8, decode={"memory_fraction": 0.7})
    pinned["fixed"].pop("num_workers")
    shares = {pool["role"]: pool["limits"]["memory_fraction"] for pool in make_plan(pinned, catalog).config["pools"]}
    assert shares == {"prefill": 0.8, "decode": 0.7}


def test_a_share_that_holds_no_request_is_named_as_what_stands_in_the_way(catalog: Catalog) -> None:
    solution = make_plan(spec(memory_fraction=0.3, pipeline_parallel=1), catalog).solution
    assert "the engine may use 23.5 GiB" in solution["binding_constraint"]
    changes = [change["change"] for change in solution["least_change"]]
    assert "without fixed.memory_fraction: 0.3" in changes


def test_a_share_is_one(catalog: Catalog) -> None:
    for wrong in (0.0, 1.2, 90):
        with pytest.raises(SpecError, match=r"fixed\.memory_fraction"):
            make_plan(spec(memory_fraction=wrong), catalog)


@pytest.mark.parametrize("engine", FLAGS)
def test_what_is_written_is_read(engine: str, catalog: Catalog, tmp_path: Path) -> None:
    made = estimate_plan(spec(engine, memory_fraction=0.8), catalog)
    write_files(emit_plan(made, engine, catalog), tmp_path / "files")
    imported = import_command([str(tmp_path / "files" / "launch.sh")], catalog, ANSWERS)
    assert imported.spec["fixed"]["memory_fraction"] == pytest.approx(0.8, abs=0.004)
    assert imported.source_flags["memory_fraction"].startswith(FLAGS[engine])
    assert not any("memory" in entry for entry in (*imported.left_out, *imported.unread))


def test_shares_of_what_the_model_leaves_are_more_of_the_whole(catalog: Catalog) -> None:
    """0.8 of weights and cache is more of the device than 0.8 with the workspace; of what is free more still."""
    starts = {
        "vllm": "vllm serve meta-llama/Llama-3.1-70B -tp 4",
        "sglang": "python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp 4",
        "trtllm": "trtllm-serve meta-llama/Llama-3.1-70B --tp_size 4",
    }
    read = {
        engine: import_command([f"{start} {FLAGS[engine]} 0.8"], catalog, ANSWERS).spec["fixed"]["memory_fraction"]
        for engine, start in starts.items()
    }
    assert read["vllm"] == 0.8
    assert 0.8 < read["sglang"] < read["trtllm"] < 1.0
    taken = 1.0 - (1.0 - read["trtllm"]) / (1.0 - 0.8)  # by weights and workspace: 35 GB of weights on 80
    assert 0.42 < taken < 0.6


def test_a_file_of_options_says_it_too(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("kv_cache_config: {free_gpu_memory_fraction: 0.7}\n")
    command = f"trtllm-serve meta-llama/Llama-3.1-70B --tp_size 4 --extra_llm_api_options {tmp_path}/options.yaml"
    imported = import_command([command], catalog, ANSWERS)
    assert 0.7 < imported.spec["fixed"]["memory_fraction"] < 1.0


def test_a_model_that_the_catalog_lacks_leaves_out_what_needs_its_weights(catalog: Catalog, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    answers = Answers(model=str(config), node_type="dgx-h100", input_length=1000, output_length=500, concurrency=16)
    command = "python3 -m sglang.launch_server --model-path org/unheard-of --tp 4 --mem-fraction-static 0.8"
    imported = import_command([command], catalog, answers)
    assert "memory_fraction" not in imported.spec["fixed"]
    assert any("--mem-fraction-static 0.8" in entry for entry in imported.left_out)


@pytest.mark.parametrize("value", ["90", "0", "most"])
def test_a_share_that_is_none_is_a_problem(value: str) -> None:
    (problem,) = read_inputs([f"vllm serve a/model --gpu-memory-utilization {value}"]).problems
    assert "is not a share above 0 and at most 1" in problem.message
