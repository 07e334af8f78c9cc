"""The load of an imported server is that of the benchmark beside it, as vLLM and SGLang draw it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.command import import_command
from meshplan.planner.imports.spec import Answers

VLLM = "vllm serve Qwen/Qwen3-32B -tp 4 &\nvllm bench serve --model Qwen/Qwen3-32B"
SGLANG = "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 4 &\npython3 -m sglang.bench_serving"


def workload(script: str, catalog: Catalog, tmp_path: Path, **answers: Any) -> dict[str, Any]:
    path = tmp_path / "bench.sh"
    path.write_text(script)
    made = import_command([str(path)], catalog, Answers(node_type="dgx-h100", **answers))
    return dict(made.spec["workload"])


def spread(least: int, most: int) -> dict[str, Any]:
    return {"min": least, "max": most, "counts": [1]}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            f"{VLLM} --random-input-len 2000 --random-output-len 300 --request-rate 4 --num-prompts 500",
            {"input_length": 2000, "output_length": 300, "request_rate_per_s": 4.0, "num_requests": 500},
        ),
        (
            f"{VLLM} --random-input-len 2000 --random-range-ratio 0.2 --max-concurrency 64",
            {
                "input_lengths": spread(1600, 2400),
                "output_lengths": spread(102, 154),
                "concurrency": 64,
                "num_requests": 1000,
            },
        ),
        (
            f"{VLLM} --dataset-name prefix_repetition --prefix-repetition-num-prefixes 20 --request-rate 2 "
            "--burstiness 0.25",
            {
                "input_length": 512,
                "output_length": 128,
                "prefix_tokens": 256,
                "num_prefixes": 20,
                "request_rate_per_s": 2.0,
                "arrival": "gamma",
                "burstiness": 2.0,
                "num_requests": 1000,
            },
        ),
        (
            f"{SGLANG} --dataset-name random --random-input-len 4000 --random-output-len 100 --random-range-ratio 0.5",
            {
                "input_lengths": spread(2000, 4000),
                "output_lengths": spread(50, 100),
                "arrival": "all_at_once",
                "num_requests": 1000,
            },
        ),
        (
            f"{SGLANG} --dataset-name generated-shared-prefix --gsp-num-groups 32 --request-rate 8",
            {
                "input_length": 2176,
                "output_length": 256,
                "prefix_tokens": 2048,
                "num_prefixes": 32,
                "request_rate_per_s": 8.0,
                "num_requests": 1000,
            },
        ),
    ],
)
def test_a_benchmark_states_the_load(script: str, expected: dict[str, Any], catalog: Catalog, tmp_path: Path) -> None:
    assert workload(script, catalog, tmp_path) == expected


def test_answers_take_the_place_of_what_a_benchmark_states(catalog: Catalog, tmp_path: Path) -> None:
    script = f"{VLLM} --random-range-ratio 0.2 --request-rate 4"
    found = workload(script, catalog, tmp_path, input_length=500, concurrency=8)
    assert found == {"input_length": 500, "output_lengths": spread(102, 154), "concurrency": 8}


def test_what_a_benchmark_draws_from_a_dataset_has_to_be_said(catalog: Catalog, tmp_path: Path) -> None:
    script = f"{SGLANG} --dataset-name sharegpt --request-rate 4"
    with pytest.raises(SpecError, match="input_length: no command line states it") as refused:
        workload(script, catalog, tmp_path)
    assert "concurrency" not in str(refused.value)
    path = tmp_path / "bench.sh"
    made = import_command([str(path)], catalog, Answers(node_type="dgx-h100", input_length=300, output_length=200))
    assert made.left_out == ("the lengths of sharegpt, which sglang.bench_serving, line 2 draws from",)
    assert made.spec["workload"]["request_rate_per_s"] == 4.0
    assert made.source_flags["workload.request_rate_per_s"] == "sglang.bench_serving, line 2"


def test_numbers_that_are_none_state_no_load(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="concurrency: no command line states it"):
        workload(f"{VLLM} --request-rate fast", catalog, tmp_path)
