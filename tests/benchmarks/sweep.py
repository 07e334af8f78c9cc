"""Sweeps: python tests/benchmarks/sweep.py questions [--ray WHERE] [--kill] | study [--requests N] [--every K] [--plan]

``questions``: 200 small questions on two local processes, and with ``--ray WHERE`` on a Ray cluster of two cores (needs
meshplan[ray]; ``local-ray`` starts one, ``ray start --head --num-cpus 2`` leaves one running for ``auto``); with
``--kill`` each also killed with ``kill -9`` half-way and run again. Prints seconds, whether the answers are the same,
and how many points were begun more than once.

``study``: 256 pinned deployments (tensor parallelism × workers × running requests × tokens of a batch) of one model
under a generated trace of 500,000 requests, all of it, on two processes (``--every K``: each K-th of them); with
``--plan`` also one ``meshplan plan`` over the whole trace, whose search holds them all and more. Prints seconds,
processor seconds, peak memory, and how many deployments keep the SLO.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

PROCESSES = 2
BASE = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
    "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1},
}
QUESTIONS = {
    "workload.global_batch_size": [64 + 8 * step for step in range(50)],
    "workload.sequence_length": [2048, 4096],
    "cluster.nodes.0.count": [1, 2],
}
# Mean prompt and answer of about 1,500 and 250 tokens; 40 requests/s, so 3.5 hours.
RATE_PER_S, SEED = 40.0, 0
SERVED = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 8}]},
    "slo": {"ttft_p99_s": 1.0, "tpot_p95_s": 0.05},
    "objective": "usd_per_million_tokens",
    "constraints": {"rent": "device"},
}
DEPLOYMENTS = {
    "fixed.tensor_parallel": [1, 2, 4, 8],
    "fixed.num_workers": [1, 2, 4, 8],
    "fixed.max_num_seqs": [64, 128, 256, 512],
    "fixed.max_batched_tokens": [2048, 4096, 8192, 16384],
}


def write_trace(path: Path, num: int) -> None:
    rng = np.random.default_rng(SEED)
    arrival = np.cumsum(rng.exponential(1.0 / RATE_PER_S, num))
    prompts = np.clip(rng.lognormal(7.0, 0.8, num), 16, 16_000).astype(int)
    answers = np.clip(rng.lognormal(5.3, 0.7, num), 4, 2_000).astype(int)
    with path.open("w") as stream:
        stream.write("arrival_s,input_length,output_length\n")
        stream.writelines(f"{a:.4f},{p},{o}\n" for a, p, o in zip(arrival, prompts, answers, strict=True))


def write(folder: Path, name: str, document: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "meshplan.cli.main", *map(str, words)]


def timed(*words: object) -> tuple[float, float, float, Any]:
    """Seconds, processor seconds and peak GiB (of the largest process) of a command, and its JSON."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command(*words, "--format", "json"), capture_output=True, text=True, check=False)
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 5):
        sys.exit(done.stderr)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s, after.ru_maxrss / 2**20, json.loads(done.stdout)


def headlines(study: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers without the run's own clocks."""
    return [{key: value for key, value in row.items() if key != "cpu_s"} for row in study["points"]]


# --- 200 questions --------------------------------------------------------------------------------------------------


def questions(folder: Path, *, ray: str | None, kills: bool) -> None:
    sweep = write(folder, "questions", {"kind": "sweep", "base": BASE, "over": QUESTIONS})
    answers: dict[str, Any] = {}
    for where in ("local", *([ray] if ray else [])):
        options = ("sweep", sweep, "--on", where, "-n", PROCESSES, "--db")
        wall_s, _, _, study = timed(*options, database(folder, f"whole-{len(answers)}"))
        answers[where] = headlines(study)
        print(f"{where}: {len(answers[where])} questions, {wall_s:.1f} s", flush=True)
        if not kills:
            continue
        db = database(folder, f"killed-{len(answers)}")
        killed(command(*options, db), db, len(answers[where]) // 2)
        wall_s, _, _, study = timed(*options, db)
        print(f"{where}, killed half-way and run again: {wall_s:.1f} s more, {begun(db)}")
        print(f"  the same answers: {headlines(study) == answers[where]}")
    if ray:
        print(f"Ray and local give the same answers: {answers['local'] == answers[ray]}")


def database(folder: Path, name: str) -> Path:
    path = folder / f"{name}.sqlite"
    subprocess.run(command("catalog", "upgrade", "--db", path), capture_output=True, check=True)
    return path


def killed(words: list[str], db: Path, stored: int) -> None:
    """Run a command in a session of its own and kill it, and only it, once so many plans are stored."""
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while running.poll() is None and count(db, "SELECT COUNT(*) FROM plans") < stored:
        time.sleep(0.1)
    running.send_signal(signal.SIGKILL)
    running.wait()


def count(db: Path, query: str) -> int:
    with sqlite3.connect(db, timeout=60) as connection:
        return int(connection.execute(query).fetchone()[0])


def begun(db: Path) -> str:
    plans, points = count(db, "SELECT COUNT(*) FROM plans"), count(db, "SELECT COUNT(*) FROM study_points")
    again = count(db, "SELECT COUNT(*) FROM study_points WHERE attempts > 1")
    return f"{plans} plans of {points} points stored, {again} points begun twice (in hand when it was killed)"


# --- 256 deployments ------------------------------------------------------------------------------------------------


def study(folder: Path, num_requests: int, every: int, *, plans: bool) -> None:
    write_trace(folder / "trace.csv", num_requests)
    db = database(folder, "study")
    base = {**SERVED, "workload": {"trace": "trace.csv"}}
    combinations = list(itertools.product(*DEPLOYMENTS.values()))[::every]
    points = [dict(zip(DEPLOYMENTS, values, strict=True)) for values in combinations]
    sweep = write(folder, "study", {"kind": "sweep", "ask": "estimate", "base": base, "points": points})
    measured = timed("sweep", sweep, "-n", PROCESSES, "--db", db)
    shown(f"{len(points)} deployments over {num_requests:,} requests", measured)
    kept = [row for row in measured[3]["points"] if row["keeps_slo"] and "usd_per_million_tokens" in row]
    kept.sort(key=lambda row: row["usd_per_million_tokens"])
    print(f"  {len(kept)} keep the SLO; {measured[1] / len(points):.1f} processor seconds each")
    for row in kept[:4]:
        print(f"  {[row[name] for name in DEPLOYMENTS]} {row['usd_per_million_tokens']:.4f} $/Mtok")
    if not plans:
        return
    plan = timed("plan", write(folder, "plan", base), "--memory-limit", "4 GiB", "--db", db)
    shown(f"one plan over {num_requests:,} requests, one process", plan)
    found, solution = plan[3], plan[3]["solution"]
    usd = found["predicted"]["usd_per_million_tokens"]["value"]
    print(f"  {solution['num_candidates']} deployments, {solution['num_simulated']} simulated, gap {solution['gap']}")
    print(f"  {usd:.4f} $/Mtok: {[(one['num_workers'], one['layout']) for one in found['config']['pools']]}")


def shown(what: str, measured: tuple[float, float, float, Any]) -> None:
    wall_s, cpu_s, peak_gib, _ = measured
    print(
        f"{what}: {wall_s:.0f} s, {cpu_s:.0f} processor seconds, largest process so far {peak_gib:.2f} GiB", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["questions", "study"])
    parser.add_argument("--ray", metavar="WHERE")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--requests", type=int, default=500_000)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--plan", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        if given.what == "questions":
            questions(Path(scratch), ray=given.ray, kills=given.kill)
        else:
            study(Path(scratch), given.requests, given.every, plans=given.plan)


if __name__ == "__main__":
    main()
