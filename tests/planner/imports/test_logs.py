"""Measured figures out of the tools' own outputs; the samples have the form of each tool's writer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B, config_for, plan_for
from serving_cases import aggregated, layout, serving_plan

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.plan import Interval
from meshplan.planner.imports.measured.logs import read_log

ONE = Interval(value=1.0, low=0.9, high=1.1)
SERVING = serving_plan(
    LLAMA_70B,
    aggregated("vllm", layout(8)),
    predicted=dict.fromkeys(
        ("ttft_mean_s", "ttft_p99_s", "tpot_p95_s", "tpot_mean_s", "e2e_mean_s", "requests_per_s"), ONE
    ),
)
CONFIG = config_for(LLAMA_70B, data_parallel=8, num_microbatches=16, micro_batch_size=1)
TRAINING = plan_for(
    LLAMA_70B,
    CONFIG,
    predicted=dict.fromkeys(("iteration_s", "peak_memory_bytes", "tokens_per_s_per_device"), ONE),
    memory={"worst": {"fixed_bytes": 0.25}},
)
VLLM = {
    "backend": "openai",
    "completed": 600,
    "request_throughput": 1.98,
    "output_throughput": 1980.5,
    "mean_ttft_ms": 410.25,
    "p99_ttft_ms": 1830.0,
    "mean_tpot_ms": 21.5,
    "p95_tpot_ms": 30.25,
    "mean_e2el_ms": 21900.0,
}
SGLANG = {
    "backend": "sglang-oai",
    "request_throughput": 2.01,
    "mean_ttft_ms": 300.0,
    "p99_ttft_ms": 900.0,
    "mean_e2e_latency_ms": 20000.0,
}
AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 250.0, "p99": 800.0},
    "inter_token_latency": {"unit": "ms", "avg": 20.0, "p95": 25.0},
    "request_latency": {"unit": "ms", "avg": 19000.0},
    "request_throughput": {"unit": "requests/sec", "avg": 1.9},
}
TERMINAL = """
============ Serving Benchmark Result ============
Successful requests:                     600
Request throughput (req/s):              1.98
Output token throughput (tok/s):         1,980.52
---------------Time to First Token----------------
Mean TTFT (ms):                          410.25
Median TTFT (ms):                        380.00
P99 TTFT (ms):                           1830.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          21.50
P95 TPOT (ms):                           30.25
==================================================
"""
MEGATRON = (
    "".join(
        f" [2026-01-01 00:00:0{step}] iteration {step:8d}/     100 | consumed samples: {step * 128} | elapsed time "
        f"per iteration (ms): {milliseconds} | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.0E-04 |\n"
        for step, milliseconds in enumerate((9000.0, 2000.0, 2100.0, 2050.0), start=1)
    )
    + "[Rank 0] (after 1 iterations) memory (MB) | allocated: 10240.0 | max allocated: 20480.0 | reserved: 30000.0\n"
)
STATISTICS = json.dumps(
    {"allocated_bytes.all.current": 10, "allocated_bytes.all.peak": 61 * 10**9, "reserved_bytes.all.peak": 66 * 10**9}
)
SUMMARY = """
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 0                 |
|---------------------------------------------------------------------------|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |  68096 KiB |  61000 MiB |    182 GiB |    181 GiB |
|       from large pool |  68096 KiB |  61000 MiB |    182 GiB |    181 GiB |
|---------------------------------------------------------------------------|
| GPU reserved memory   |  72000 MiB |  72000 MiB |  72000 MiB |      0 B   |
|===========================================================================|
"""
TITAN = "".join(
    f"[rank0]:[titan] - root - INFO - \x1b[31mstep: {step:2d}  \x1b[32mloss:  8.1  \x1b[38;2;180;60;0mgrad_norm: 1.0  "
    f"\x1b[36mmemory: 20.00GiB(25.3%)  \x1b[34mtps: {rate}  \x1b[36mtflops: 300.1  \x1b[35mmfu: 30.34%\x1b[39m\n"
    for step, rate in ((1, "1,024"), (10, "32,768"), (20, "32,768"))
)
OURS = "".join(
    f'  1%|  | {step}/3 meshplan {{"step": {step}, "step_time_s": {seconds}}}\n'
    for step, seconds in ((1, 9.0), (2, 2.0), (3, 2.2))
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (json.dumps(VLLM), {"ttft_mean_s": 0.41025, "ttft_p99_s": 1.83, "tpot_p95_s": 0.03025, "requests_per_s": 1.98}),
        (json.dumps(VLLM, indent=2), {"e2e_mean_s": 21.9, "tpot_mean_s": 0.0215}),
        (
            f"{json.dumps({**SGLANG, 'mean_ttft_ms': 1.0})}\n{json.dumps(SGLANG)}\n",
            {"ttft_mean_s": 0.3, "e2e_mean_s": 20.0},
        ),
        (
            json.dumps(AIPERF, indent=2),
            {"ttft_p99_s": 0.8, "tpot_p95_s": 0.025, "e2e_mean_s": 19.0, "requests_per_s": 1.9},
        ),
        (TERMINAL, {"ttft_mean_s": 0.41025, "ttft_p99_s": 1.83, "tpot_p95_s": 0.03025, "requests_per_s": 1.98}),
    ],
)
def test_benchmark_results_are_read_as_predicted_metrics(tmp_path: Path, text: str, wanted: dict[str, float]) -> None:
    (tmp_path / "log").write_text(text)
    found = read_log(tmp_path / "log", SERVING)
    assert found.keys() <= SERVING.predicted.keys()
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (MEGATRON, {"iteration_s": 2.05, "allocated_memory_bytes": 20480 * 2**20}),  # of tensors, not of the device
        (f"{MEGATRON} | max reserved: 30720.0", {"peak_memory_bytes": 30720 * 2**20}),
        (STATISTICS, {"allocated_memory_bytes": 61e9, "peak_memory_bytes": 66e9}),
        (str(json.loads(STATISTICS)), {"allocated_memory_bytes": 61e9, "peak_memory_bytes": 66e9}),
        (SUMMARY + SUMMARY.replace("72000", "71000"), {"peak_memory_bytes": 72000 * 2**20}),
        # 128 sequences of 4096 tokens on 8 devices: 65,536 tokens a device and step.
        (TITAN, {"iteration_s": 2.0, "peak_memory_bytes": 20 * 2**30, "tokens_per_s_per_device": 32768.0}),
        (OURS, {"iteration_s": 2.1}),
        (
            OURS.replace("}", ', "allocated_bytes.all.peak": 61000000000, "reserved_bytes.all.peak": 66000000000}'),
            {"iteration_s": 2.1, "allocated_memory_bytes": 61e9, "peak_memory_bytes": 66e9},
        ),
        # Lines that two writers mixed, or that were cut: what is no time counts as no step.
        (MEGATRON.replace("2100.0", "2100..") + MEGATRON.replace("2100.0", "0.0"), {"iteration_s": 2.05}),
        (MEGATRON.replace("2100.0", "9" * 400), {"iteration_s": 2.025}),
        (MEGATRON.replace("iteration        3", f"iteration {'3' * 5000}"), {"iteration_s": 2.05}),
        (TITAN.replace("20.00GiB", "2.0.0GiB", 1), {"iteration_s": 2.0, "peak_memory_bytes": 20 * 2**30}),
        (f'{OURS} meshplan {{"step": 1e999, "step_time_s": 1e999}}\n', {"iteration_s": 2.1}),
        (f'{OURS} meshplan {{"step": 4, "step_time_s": {"9" * 400}}}\n', {"iteration_s": 2.1}),
    ],
)
def test_a_training_log_gives_the_median_step_and_the_peak(tmp_path: Path, text: str, wanted: dict[str, float]) -> None:
    """The median of the steps, without the first, which compiles."""
    (tmp_path / "log").write_text(text)
    found = read_log(tmp_path / "log", TRAINING)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_where_the_constants_count_tensors_the_peak_is_theirs(tmp_path: Path) -> None:
    """A plan whose memory was fitted to peaks of tensors predicts those."""
    (tmp_path / "log").write_text(STATISTICS)
    counted = replace(TRAINING, provenance={"calibration": {"framework": "alpa"}})
    assert recipe_named("alpa").unstated.peak_is_allocated
    assert read_log(tmp_path / "log", counted) == {"peak_memory_bytes": 61e9}


def test_a_plan_without_constants_is_held_against_both(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(STATISTICS)
    without = replace(TRAINING, provenance={"calibration": None})
    assert read_log(tmp_path / "log", without) == {"allocated_memory_bytes": 61e9, "peak_memory_bytes": 66e9}


@pytest.mark.parametrize("text", ["", "hello", "{", '{"a": 1}', "iteration 1/ 2 |", "\x00\xff", "[1]" * 1000])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(SpecError):
        read_log(tmp_path / "log", SERVING)


@pytest.mark.parametrize("step", ["0.0", "..", "9" * 400])
def test_a_log_whose_steps_take_no_time_is_refused(tmp_path: Path, step: str) -> None:
    (tmp_path / "log").write_text(f"iteration 1/ 2 | elapsed time per iteration (ms): {step} |\n" * 3)
    with pytest.raises(SpecError, match="holds no result"):
        read_log(tmp_path / "log", TRAINING)


def test_a_log_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(MEGATRON)
    with pytest.raises(SpecError, match="this plan predicts e2e_mean_s"):
        read_log(tmp_path / "log", SERVING)
    with pytest.raises(SpecError, match="cannot read"):
        read_log(tmp_path / "none", SERVING)
