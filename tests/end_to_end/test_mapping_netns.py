"""A real training run on links that differ: does the planned mapping win, and are plans ordered as predicted?

Eight hosts in network namespaces: two islands (their hosts are not numbered in a row), a degraded and an asymmetric
link. The links are profiled with ``meshplan profile links``; a small transformer is planned with pipeline × data
parallelism; every plan is emitted for torchrun, launched from the emitted files (torch on the CPU, Gloo), and its
steps are timed. Run with ``make test-netns``: needs root, ip, tc and torch; takes minutes. The table goes to standard
output (``pytest -s``) and, with ``MESHPLAN_MAPPING_TABLE=FILE``, into a file.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from netns import Cable, Network, Shaping, network, skip_unless_possible
from small_llama import small_llama

from meshplan.planner.validation.summary import spearman

pytestmark = pytest.mark.netns

FAST, BETWEEN, DEGRADED, BACKWARD = 10_000_000, 2_000_000, 1_000_000, 2_500_000  # bit/s
# A tenth of a message between stages, so that the bucket does not carry it at the speed of the processor.
SHAPING = Shaping(burst="12kb", latency="400ms")
ISLANDS = ((0, 1, 4, 6), (2, 3, 5, 7))
CABLES = (
    *(Cable(first=a, second=b, forward_bits_per_s=BETWEEN, backward_bits_per_s=BETWEEN)
      for a, b in itertools.product(*ISLANDS)),
    Cable(first=0, second=4, forward_bits_per_s=DEGRADED, backward_bits_per_s=DEGRADED),
    Cable(first=3, second=7, forward_bits_per_s=FAST, backward_bits_per_s=BACKWARD),
)  # fmt: skip
MODEL = small_llama(64)
BATCH, LENGTH, STEPS = 32, 128, 2
PINNED = {
    "tensor_parallel": 1,
    "context_parallel": 1,
    "zero_stage": 0,
    "virtual_pipeline_stages": 1,
    "pipeline_schedule": "1f1b",
    "activation_recompute": "none",
    "micro_batch_size": 4,
}
SHUFFLED = [3, 0, 5, 6, 1, 4, 7, 2]
# Beside the chosen plan: degrees with their best mapping, rank order, and a shuffled mapping.
OTHERS: tuple[tuple[str, dict[str, int], Any], ...] = (
    ("2 × 4, best", {"pipeline_parallel": 2, "data_parallel": 4}, "best"),
    ("2 × 4, rank order", {"pipeline_parallel": 2, "data_parallel": 4}, "identity"),
    ("4 × 2, best", {"pipeline_parallel": 4, "data_parallel": 2}, "best"),
    ("4 × 2, rank order", {"pipeline_parallel": 4, "data_parallel": 2}, "identity"),
    ("4 × 2, shuffled", {"pipeline_parallel": 4, "data_parallel": 2}, SHUFFLED),
    ("8 × 1, rank order", {"pipeline_parallel": 8, "data_parallel": 1}, "identity"),
)
DEADLINE_S = 240
MOST_REGRET = 0.05
LEAST_COMMUNICATION = 0.7
PORT = 29_713


@pytest.fixture(autouse=True)
def _requirements() -> None:
    skip_unless_possible("training")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One plan: what was predicted and what was measured."""

    name: str
    config: Mapping[str, Any]
    predicted_s: float
    measured_s: float
    communication_share: float


def meshplan(*arguments: str) -> str:
    command = [sys.executable, "-m", "meshplan.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes; what still runs at the deadline is killed."""
    deadline = time.monotonic() + DEADLINE_S
    try:
        return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def profiled(net: Network, database: Path, folder: Path) -> None:
    arguments = ["profile", "links", "--name", "lab", "--rail", "eth0", "--db", str(database), "--format", "json"]
    arguments += ["--quick", "--timeout", "60"]
    hosts = range(len(net.namespaces))
    codes = ended([net.start(host, arguments, log=folder / f"profile{host}.log") for host in hosts])
    assert codes == [0] * len(codes), (folder / "profile0.log").read_text()[-2000:]


def planned(folder: Path, database: Path, name: str, fixed: Mapping[str, Any], mapping: Any) -> dict[str, Any]:
    """Plan, emit for torchrun, and return the plan."""
    place = folder / name.replace(" ", "")
    place.mkdir()
    link = {"bandwidth": "1 GB/s", "latency": "100 us"}
    spec = {
        "kind": "training",
        "model": str(folder / "config.json"),
        "cluster": {
            "devices": {"type": "h100-sxm-80gb", "per_node": 1, "nodes": 8},
            "links": {"intra_node": link, "inter_node": link},
            "profile": "lab",
        },
        "workload": {"sequence_length": LENGTH, "global_batch_size": BATCH},
        "constraints": {"target": "any", "min_devices": 8},
        "fixed": {**PINNED, **fixed},
        "mapping": mapping,
    }
    (place / "spec.json").write_text(json.dumps(spec))
    text = meshplan("plan", str(place / "spec.json"), "--db", str(database), "--format", "json")
    (place / "plan.json").write_text(text)
    emit = ("emit", str(place / "plan.json"), "--target", "torchrun", "--out", str(place / "out"))
    meshplan(*emit, "--script", str(Path(__file__).with_name("pipeline_train.py")), "--db", str(database))
    plan: dict[str, Any] = json.loads(text)
    return plan


def trained(net: Network, folder: Path, name: str, plan: Mapping[str, Any]) -> Run:
    """Launch the emitted files on every host and time the steps."""
    place = folder / name.replace(" ", "")
    hosts = [host for host, _ in plan["rank_table"]]
    result = place / "result.json"
    environment = {
        **os.environ,
        "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
        "MASTER_ADDR": net.address(hosts[0]),
        "MASTER_PORT": str(PORT),
        "MESHPLAN_SKIP_CHECKS": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TEST_SHAPE": json.dumps({key: value for key, value in MODEL.items() if isinstance(value, int)}),
        "TEST_STEPS": str(STEPS),
        "TEST_RESULT": str(result),
    }
    processes = []
    for node_rank, host in enumerate(hosts):
        script = place / "out" / f"launch_host_{node_rank:03d}.sh"
        with (place / f"host{host}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", net.namespaces[host], str(script)],
                    env={**environment, "TEST_HOST": str(host)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = ended(processes)
    assert codes == [0] * len(codes), (place / f"host{hosts[0]}.log").read_text()[-3000:]
    told = json.loads(result.read_text())
    compute = max(statistics.median(rank) for rank in told["compute_s"])
    measured = statistics.median(told["step_s"])
    return Run(
        name=name,
        config=plan["config"],
        predicted_s=plan["predicted"]["iteration_s"]["value"],
        measured_s=measured,
        communication_share=1.0 - compute / measured,
    )


def table(runs: Sequence[Run]) -> str:
    lines = ["| plan (stages × replicas, mapping) | predicted s | measured s | communication |", "|---|---:|---:|---:|"]
    lines += [
        f"| {run.name} | {run.predicted_s:.2f} | {run.measured_s:.2f} | {run.communication_share:.0%} |"
        for run in sorted(runs, key=lambda run: run.measured_s)
    ]
    return "\n".join(lines)


def test_the_planned_mapping_wins(tmp_path: Path) -> None:
    database = tmp_path / "catalog.sqlite"
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with network((FAST,) * 8, CABLES, SHAPING) as net:
        profiled(net, database, tmp_path)
        plans = {"chosen": planned(tmp_path, database, "chosen", {}, "best")}
        degrees = {key: plans["chosen"]["config"][key] for key in ("pipeline_parallel", "data_parallel")}
        own = f"{degrees['pipeline_parallel']} × {degrees['data_parallel']}, rank order"
        others = {name: (fixed, mapping) for name, fixed, mapping in OTHERS} | {own: (degrees, "identity")}
        # The chosen degrees with their best mapping are the chosen plan itself.
        others = {name: other for name, other in others.items() if other != (degrees, "best")}
        plans |= {name: planned(tmp_path, database, name, *other) for name, other in others.items()}
        runs = [trained(net, tmp_path, name, plan) for name, plan in plans.items()]

    chosen, best = runs[0], min(run.measured_s for run in runs)
    rank_order = next(run for run in runs if run.name == own)
    agreement = spearman([run.predicted_s for run in runs], [run.measured_s for run in runs])
    regret = chosen.measured_s / best - 1.0
    summary = (
        f"{table(runs)}\n\nSpearman {agreement:.2f}, regret of the chosen plan {regret:.1%}, "
        f"gain over rank order {1.0 - chosen.measured_s / rank_order.measured_s:.0%}\n"
    )
    print(f"\n{summary}")  # noqa: T201 - the table is what the test is for
    if "MESHPLAN_MAPPING_TABLE" in os.environ:
        Path(os.environ["MESHPLAN_MAPPING_TABLE"]).write_text(summary)
    assert all(run.communication_share >= LEAST_COMMUNICATION for run in runs), summary
    assert regret <= MOST_REGRET, summary
    assert agreement >= 0.8, summary
    assert chosen.measured_s < rank_order.measured_s, summary
