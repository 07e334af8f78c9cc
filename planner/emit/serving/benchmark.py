"""``benchmark.sh``: the engine's own load generator with the workload of the plan, for ``meshplan plans record``.

Flags: ``vllm bench serve`` of vLLM 0.33, ``sglang.bench_serving`` of SGLang 0.5.23 (both read in the releases),
``aiperf profile`` (github.com/ai-dynamo/aiperf, docs of its command line). vLLM draws lengths within nominal × (1 ± r),
SGLang and this project within [q × nominal, nominal].
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from meshplan.planner.emit.artifact import Artifact, commented, stamp
from meshplan.planner.emit.serving.job import ServingJob
from meshplan.planner.emit.serving.load import Load

SCRIPT = PurePosixPath("benchmark.sh")
RESULT_FILE = "benchmark_result.json"
AIPERF_RESULT = "artifacts/profile_export_aiperf.json"
_URL = '"$url"'  # a variable of the script
_PERCENTILES = "50,90,95,99"
_EMBEDDINGS = {"--backend": "openai-embeddings", "--endpoint": "/v1/embeddings"}  # vLLM
_WARMUPS = 20  # compiles kernels and captures graphs that start-up has left out


def benchmark_script(job: ServingJob) -> Artifact | None:
    """The script; None where the plan's workload is a trace."""
    load = job.request.load
    if load is None:
        return None
    command = _COMMANDS[job.target](load, job.request.model)
    words = " \\\n  ".join(_word(flag, value) for flag, value in command.items())
    result = AIPERF_RESULT if uses_aiperf(job.target) else RESULT_FILE
    text = (
        "#!/usr/bin/env bash\n"
        + commented(
            (
                *stamp(job.request.plan, None),
                f"usage: benchmark.sh [URL]; then: meshplan plans record {job.request.plan.plan_id} --from {result}",
            )
        )
        + f"set -euo pipefail\nurl=${{1:-http://127.0.0.1:{job.request.port}}}\nexec {words}\n"
    )
    return Artifact(path=SCRIPT, content=text, executable=True)


def uses_aiperf(target: str) -> bool:
    """Whether an engine has no load generator of its own that the script could start."""
    return _COMMANDS[target] is _aiperf


def _word(flag: str, value: str) -> str:
    """A flag with its value; everything but the address is quoted."""
    if not value:
        return flag
    return f"{flag} {_URL}" if value == _URL else f"{flag} {shlex.quote(value)}"


def _rates(load: Load) -> dict[str, str]:
    if load.request_rate_per_s is not None:
        return {"--request-rate": f"{load.request_rate_per_s:g}"}
    return {"--request-rate": "inf", "--max-concurrency": str(load.concurrency)}


def _vllm(load: Load, model: str) -> Mapping[str, str]:
    share = load.length_ratio
    if load.prefix_length:
        data = {
            "--dataset-name": "prefix_repetition",
            "--prefix-repetition-prefix-len": str(load.prefix_length),
            "--prefix-repetition-suffix-len": str(max(1, load.input_length - load.prefix_length)),
            "--prefix-repetition-num-prefixes": str(load.num_prefixes),
            "--prefix-repetition-output-len": str(load.output_length),
        }
    else:
        # Uniform in [q L, L] is the mean (1 + q) L / 2 with a half-width of (1 − q) / (1 + q) of it.
        data = {
            "--dataset-name": "random",
            "--random-input-len": str(max(1, round(load.input_length * (1 + share) / 2))),
            "--random-output-len": str(max(1, round(load.output_length * (1 + share) / 2))),
            "--random-range-ratio": f"{(1 - share) / (1 + share):.4g}",
        }
    return {
        "vllm bench serve": "",
        **({"--backend": "openai"} if load.output_length else _EMBEDDINGS),
        "--base-url": _URL,
        "--model": model,
        **data,
        **_rates(load),
        "--num-prompts": str(load.num_requests),
        "--num-warmups": str(_WARMUPS),
        **({"--ignore-eos": ""} if load.output_length else {}),
        "--seed": "0",
        "--percentile-metrics": "ttft,tpot,itl,e2el" if load.output_length else "e2el",
        "--metric-percentiles": _PERCENTILES,
        "--save-result": "",
        "--result-filename": RESULT_FILE,
    }


def _sglang(load: Load, model: str) -> Mapping[str, str]:
    if load.prefix_length:
        data = {
            "--dataset-name": "generated-shared-prefix",
            "--gsp-num-groups": str(load.num_prefixes),
            "--gsp-prompts-per-group": str(-(-load.num_requests // load.num_prefixes)),
            "--gsp-system-prompt-len": str(load.prefix_length),
            "--gsp-question-len": str(max(1, load.input_length - load.prefix_length)),
            "--gsp-output-len": str(load.output_length),
        }
    else:
        data = {
            "--dataset-name": "random-ids",
            "--random-input-len": str(load.input_length),
            "--random-output-len": str(load.output_length),
            "--random-range-ratio": f"{load.length_ratio:g}",
        }
    return {
        "python3 -m sglang.bench_serving": "",
        "--backend": "sglang-oai" if load.output_length else "sglang-embedding",
        "--base-url": _URL,
        "--model": model,
        **data,
        **_rates(load),
        "--num-prompts": str(load.num_requests),
        "--warmup-requests": str(_WARMUPS),
        "--seed": "0",
        "--output-file": RESULT_FILE,
    }


def _aiperf(load: Load, model: str) -> Mapping[str, str]:
    # A uniform distribution within [q L, L] has the standard deviation (1 − q) L / √12.
    share, deviation = load.length_ratio, (1 - load.length_ratio) / 12**0.5
    flags = {
        "aiperf profile": "",
        "--url": _URL,
        "--model": model,
        "--endpoint-type": "completions",
        "--streaming": "",
        "--synthetic-input-tokens-mean": str(round((load.input_length - load.prefix_length) * (1 + share) / 2)),
        "--synthetic-input-tokens-stddev": f"{load.input_length * deviation:g}",
        "--output-tokens-mean": str(round(load.output_length * (1 + share) / 2)),
        "--output-tokens-stddev": f"{load.output_length * deviation:g}",
        "--extra-inputs": "ignore_eos:true",
        "--request-count": str(load.num_requests),
        "--warmup-request-count": str(_WARMUPS),
        "--random-seed": "0",
        "--output-artifact-dir": "artifacts",
    }
    if load.prefix_length:
        flags |= {"--prefix-prompt-length": str(load.prefix_length), "--num-prefix-prompts": str(load.num_prefixes)}
    if load.request_rate_per_s is not None:
        return {**flags, "--request-rate": f"{load.request_rate_per_s:g}"}
    return {**flags, "--concurrency": str(load.concurrency)}


_COMMANDS: Mapping[str, Callable[[Load, str], Mapping[str, str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _aiperf,
    "llama.cpp": _aiperf,
}
