"""CPU seconds of serving questions that take long: python tests/benchmarks/slow_questions.py [part of a name]

Each is asked by the command line, imports included, and answered without being stored. Code compiled by Numba should be
there before (any long simulation leaves it): compiling takes half a minute once.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXIT_INFEASIBLE = 3


def question(model: str, workload: dict[str, Any], nodes: dict[str, int], **more: Any) -> dict[str, Any]:
    return {
        "kind": "serving",
        "model": model,
        "cluster": {"nodes": [{"type": name, "count": count} for name, count in nodes.items()]},
        "workload": workload,
        "slo": {"ttft_p99_s": 3.0, "tpot_p95_s": 0.05},
        **more,
    }


SHORT, LONG = {"input_length": 2000, "output_length": 500}, {"input_length": 4000, "output_length": 1000}
PREFIXES = {"input_length": 4000, "output_length": 300, "prefix_hit_rate": 0.9, "num_prefixes": 200}
QUESTIONS = {
    "highest rate, 70B, 16 H100": question("llama-3.1-70b", SHORT, {"dgx-h100": 2}, objective="max_request_rate"),
    "highest rate, prefill and decode apart, 70B, 16 H100": question(
        "llama-3.1-70b",
        {"input_length": 4000, "output_length": 500},
        {"dgx-h100": 2},
        objective="max_request_rate",
        fixed={"mode": "disaggregated"},
        slo={"ttft_p99_s": 2.0, "tpot_p95_s": 0.04},
    ),
    "highest rate, Qwen3-Next-80B, 16 H100": question(
        "qwen3-next-80b-a3b",
        {"input_length": 4000, "output_length": 500},
        {"dgx-h100": 2},
        objective="max_request_rate",
    ),
    "highest rate, 200 prefixes, 70B, 16 H100": question(
        "llama-3.1-70b", PREFIXES, {"dgx-h100": 2}, objective="max_request_rate"
    ),
    "least energy, free load, 70B, 16 H100": question("llama-3.1-70b", SHORT, {"dgx-h100": 2}, objective="energy"),
    "8 requests/s, DeepSeek-V3, 32 H200": question("deepseek-v3", {**LONG, "request_rate_per_s": 8}, {"dgx-h200": 4}),
    "10 requests/s within 150 USD/h, 70B, 56 H100": question(
        "llama-3.1-70b",
        {**LONG, "request_rate_per_s": 10},
        {"dgx-h100": 7},
        objective="usd_per_million_tokens",
        constraints={"max_usd_per_hour": 150},
    ),
}


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        for name, asked in QUESTIONS.items():
            if wanted not in name:
                continue
            spec = Path(folder) / "question.json"
            spec.write_text(json.dumps(asked))
            command = [str(Path(sys.executable).parent / "meshplan"), "plan", str(spec), "--no-store"]
            command += ["--format", "json", "--db", f"sqlite:///{folder}/catalog.sqlite"]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode not in (0, EXIT_INFEASIBLE):
                raise SystemExit(done.stderr)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found = json.loads(done.stdout)["solution"]
            print(f"{name:54} {cpu_s:6.1f} s  {found['status']:10} {found.get('objective')}", flush=True)


if __name__ == "__main__":
    main()
