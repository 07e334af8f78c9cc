"""The benchmark that comes with serving files: the plan's workload in each engine's own words."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B
from serving_cases import aggregated, layout, serving_request

from meshplan.planner.emit.serving.load import Load
from meshplan.planner.launch.registry import emit_serving

LOAD = Load(input_length=4000, output_length=1000, length_ratio=0.5, request_rate_per_s=2.0)


def words(target: str, engine: str, load: Load, model: str = "org/model") -> dict[str, str]:
    request = serving_request(LLAMA_70B, aggregated(engine, layout(8)), load=load, model_path=model)
    files = {str(file.path): file for file in emit_serving(target, request).artifacts}
    assert files["benchmark.sh"].executable
    line = files["benchmark.sh"].content.split("exec ", 1)[1].replace("\\\n", " ")
    parts = shlex.split(line)
    return {flag: value for flag, value in zip(parts, [*parts[1:], ""], strict=True) if flag.startswith("--")}


@pytest.mark.parametrize(
    ("target", "engine"),
    [
        ("vllm", "vllm"),
        ("sglang", "sglang"),
        ("trtllm", "trtllm"),
        ("lws", "sglang"),
        ("ray", "vllm"),
        ("llm-d", "vllm"),
    ],
)
def test_the_workload_is_sent(target: str, engine: str) -> None:
    said = words(target, engine, LOAD)
    if engine == "vllm":
        mean, ratio = float(said["--random-input-len"]), float(said["--random-range-ratio"])
        assert (mean * (1 - ratio), mean * (1 + ratio)) == (
            pytest.approx(2000, rel=1e-3),
            pytest.approx(4000, rel=1e-3),
        )
    elif engine == "sglang":
        assert (said["--random-input-len"], said["--random-range-ratio"]) == ("4000", "0.5")
    else:
        assert said["--synthetic-input-tokens-mean"] == "3000"
    assert float(said["--request-rate"]) == 2.0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_requests_in_flight_and_shared_prefixes(engine: str) -> None:
    load = Load(input_length=1000, output_length=100, concurrency=64, prefix_hit_rate=0.75, num_prefixes=8)
    said = words(engine, engine, load)
    assert said["--max-concurrency" if engine != "trtllm" else "--concurrency"] == "64"
    assert "750" in said.values()
    assert "8" in said.values()


def test_no_text_of_the_user_runs(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        evil = "a'; touch pwned; $(touch pwned) \"`touch pwned`"
        request = serving_request(LLAMA_70B, aggregated(engine, layout(8)), load=LOAD, model_path=evil)
        script = next(
            file.content for file in emit_serving(engine, request).artifacts if file.path.name == "benchmark.sh"
        )
        (tmp_path / "benchmark.sh").write_text(script)
        subprocess.run(
            ["bash", "benchmark.sh"], cwd=tmp_path, env={"PATH": "/bin:/usr/bin"}, capture_output=True, check=False
        )
        assert not (tmp_path / "pwned").exists()


def test_a_trace_has_no_benchmark() -> None:
    request = serving_request(LLAMA_70B, aggregated("vllm", layout(8)))
    assert all(file.path.name != "benchmark.sh" for file in emit_serving("vllm", request).artifacts)


def test_instructions_are_answered_and_prefixes_kept() -> None:
    """Without a path the checkpoint is the one that answers; prefix caching may be set whatever the plan counts on."""
    shape = replace(LLAMA_70B, source="https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json")
    request = serving_request(shape, aggregated("vllm", layout(8)), model_path="", prefix_caching=True)
    files = {str(file.path): file.content for file in emit_serving("vllm", request).artifacts}
    assert "meta-llama/Llama-3.1-70B-Instruct" in files["launch.sh"]
    assert "--enable-prefix-caching" in files["mixed_args.txt"]
