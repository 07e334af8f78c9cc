"""Degree-search benchmark: python tests/benchmarks/degree_search.py [NAME …]

Prints CPU seconds, peak resident memory, candidates considered and priced a second, status and gap of some training
questions, each in a fresh process, beside the targets of the design; last the start-up time of `meshplan --help`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# name → model, node type, nodes, sequence length, global batch, precision; then the targets (CPU s, MB).
CASES: dict[str, tuple[str, str, int, int, int, str, float | None, float | None]] = {
    "8b-8": ("llama-3.1-8b", "dgx-h100", 1, 8192, 128, "bf16", None, None),
    "70b-64": ("llama-3.1-70b", "dgx-h100", 8, 8192, 512, "bf16", 1.0, None),
    "405b-10240": ("llama-3.1-405b", "dgx-h100", 1280, 8192, 2048, "bf16", 10.0, 500.0),
    "deepseek-v3-2048": ("deepseek-v3", "dgx-h100", 256, 4096, 15360, "fp8", 10.0, 500.0),
    "deepseek-v3-8192": ("deepseek-v3", "dgx-h100", 256, 4096, 8192, "fp8", 10.0, 500.0),
}
HELP_TARGET_S = 0.4
HELP_RUNS = 5
HEAD = (
    f"{'question':18} {'cpu_s':>7} {'target':>7} {'peak_MB':>8} {'target':>7} {'considered':>11} {'priced':>9} "
    f"{'considered/s':>13} {'priced/s':>10}  {'status':9} {'gap':>7}  best"
)


def main() -> None:
    names = sys.argv[1:]
    if names[:1] == ["--child"]:
        print(json.dumps(measure(names[1])))
        return
    print(HEAD)
    for name in names or CASES:
        child = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True, check=True)
        report(name, json.loads(child.stdout))
    help_s = min(start_up_s() for _ in range(HELP_RUNS))
    print(f"meshplan --help: {help_s:.2f} CPU s (best of {HELP_RUNS}, target {HELP_TARGET_S})")


def measure(name: str) -> dict[str, Any]:
    """Search one question in this process; imports and look-ups are not counted as CPU time of the search."""
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.planner.training.search.degrees import search_degrees
    from meshplan.planner.training.service import resolve

    model, node, count, sequence, batch, precision, *_ = CASES[name]
    document = {
        "kind": "training",
        "model": model,
        "cluster": {"nodes": [{"type": node, "count": count}]},
        "workload": {"sequence_length": sequence, "global_batch_size": batch, "precision": precision},
    }
    with tempfile.TemporaryDirectory() as folder:
        problem = resolve(document, Catalog.open(str(Path(folder) / "catalog.sqlite"))).problem
    begin = time.process_time()
    solution, search = search_degrees(problem)
    cpu_s = time.process_time() - begin
    best = solution.assignment
    return {
        "cpu_s": cpu_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000.0,
        "considered": search.report.considered,
        "priced": search.report.priced,
        "status": solution.status.value,
        "gap": solution.gap,
        "best": "" if best is None else describe(best.config, best.step_s),
    }


def describe(config: Any, step_s: float) -> str:
    return (
        f"{step_s:.3f} s: tp {config.tensor_parallel} pp {config.pipeline_parallel}×{config.virtual_pipeline_stages} "
        f"cp {config.context_parallel} dp {config.data_parallel} ep {config.expert_parallel} "
        f"zero {config.zero_stage} mbs {config.micro_batch_size} recompute {config.activation_recompute}"
    )


def report(name: str, row: dict[str, Any]) -> None:
    *_, cpu_target, mb_target = CASES[name]
    gap = "-" if row["gap"] is None else f"{row['gap']:.2%}"
    print(
        f"{name:18} {row['cpu_s']:7.2f} {cpu_target or '-':>7} {row['peak_mb']:8.0f} {mb_target or '-':>7} "
        f"{row['considered']:11,} {row['priced']:9,} {row['considered'] / row['cpu_s']:13,.0f} "
        f"{row['priced'] / row['cpu_s']:10,.0f}  {row['status']:9} {gap:>7}  {row['best']}",
        flush=True,
    )


def start_up_s() -> float:
    """CPU seconds, of this process's children, that `meshplan --help` takes."""
    before = os.times()
    program = Path(sys.executable).with_name("meshplan")
    subprocess.run([str(program), "--help"], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    main()
