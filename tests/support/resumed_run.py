"""A host dies in the middle of a run: from the plan for four hosts to the one for three, over network namespaces.

Four hosts on a switch and a store of checkpoints behind its own link, all shaped. A small transformer is planned
(pipeline × data parallelism), ``meshplan replan --out`` writes the elastic job, and every host starts its
``elastic.sh``. After a step that no checkpoint holds, every process of one host is killed; the others meet again, load
the last checkpoint under the plan for three, and come to the step where they were. Needs root, ip, tc and torch.

What is predicted, put together before the kill:

    meeting    agents miss a dead one after three heartbeats of five seconds since its last, which is 2.5 s old on
               average, then wait the last call (torch.distributed.elastic.rendezvous.dynamic_rendezvous)
    starting   what the processes of the same run took from their begin to the first step at its first start
    loading    ``load_s`` of ``meshplan replan``
    again      steps since the checkpoint, each as long as the plan for three predicts
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from netns import Network, Shaping, network
from small_llama import small_llama

HOSTS, LINK, STORE_LINK = 4, 1_000_000, 500_000  # bit/s
# Bursts well below a message; queues of a second, so that few packets are dropped.
SHAPING = Shaping(burst="12kb", latency="1s")
MODEL = small_llama(32)
# 32 sequences do not split over three replicas: three hosts are a pipeline, four may be two by two.
BATCH, LENGTH, MICRO_BATCH = 32, 256, 4
SAVE_EVERY, KILLED_AFTER = 2, 3
HEARTBEAT_S, MISSED, LAST_CALL_S = 5.0, 3, 10.0
DEADLINE_S = 480.0
STORE_PORT, MEETING_PORT = 29_811, 29_812
PROGRAMS = Path(__file__).parents[1] / "end_to_end"
BIN = Path(sys.executable).parent


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Seconds of one run.

    Args:
        configs: choices for four hosts and for three.
        steps_s: a step of each, predicted.
        measured_steps_s: the same, measured.
        meeting_s, starting_s, loading_s, again_s: parts of the prediction.
        measured_s: from the kill to the end of the step at which the run had been.
    """

    configs: tuple[dict[str, Any], dict[str, Any]]
    steps_s: tuple[float, float]
    measured_steps_s: tuple[float, float]
    meeting_s: float
    starting_s: float
    loading_s: float
    again_s: float
    measured_s: float

    @property
    def predicted_s(self) -> float:
        """From the kill to the step at which the run had been."""
        return self.meeting_s + self.starting_s + self.loading_s + self.again_s


@dataclass(frozen=True, kw_only=True)
class Told:
    """A step that is done: by how many ranks, which one, when, and when they had begun."""

    ranks: int
    step: int
    at_s: float
    began_s: float


def resumed(folder: Path) -> Resumed:
    """Plan, train, kill one host, and wait for the others."""
    row, made = planned(folder)
    steps = folder / "steps"
    steps.touch()
    with network((*(LINK,) * HOSTS, STORE_LINK), (), SHAPING) as net, running(net, folder) as agents:
        told = wait_for(steps, agents, ranks=HOSTS, step=KILLED_AFTER)
        killed_s = time.time()
        kill_host(net, HOSTS - 1)
        again = wait_for(steps, agents[:-1], ranks=HOSTS - 1, step=KILLED_AFTER)
    first, last = next(one for one in told if one.step == 0), again[-1]
    return Resumed(
        configs=(made["config"], row["config"]),
        steps_s=(made["predicted"]["iteration_s"]["value"], row["iteration_s"]),
        measured_steps_s=(_step_s(told, HOSTS), _step_s(again, HOSTS - 1)),
        meeting_s=(MISSED - 0.5) * HEARTBEAT_S + LAST_CALL_S,
        starting_s=first.at_s - first.began_s,
        loading_s=row["load_s"],
        again_s=(KILLED_AFTER % SAVE_EVERY) * row["iteration_s"],
        measured_s=last.at_s - killed_s,
    )


def planned(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan without one host, as ``meshplan replan`` tells it, and that for all; the job lies in ``folder/job``."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    link = {"bandwidth": f"{LINK // 8} B/s", "latency": "1 ms"}
    spec = {
        "kind": "training",
        "model": str(folder / "config.json"),
        "cluster": {
            "devices": {"type": "h100-sxm-80gb", "per_node": 1, "nodes": HOSTS},
            "links": {"intra_node": link, "inter_node": link},
        },
        "workload": {"sequence_length": LENGTH, "global_batch_size": BATCH, "num_training_tokens": "1e9"},
        "constraints": {"target": "any", "min_devices": HOSTS - 1},
        "run": {"checkpoint": {"store_bandwidth": f"{STORE_LINK // 8} B/s"}},
        "fixed": {
            "tensor_parallel": 1,
            "context_parallel": 1,
            "zero_stage": 0,
            "virtual_pipeline_stages": 1,
            "pipeline_schedule": "1f1b",
            "activation_recompute": "none",
            "micro_batch_size": MICRO_BATCH,
        },
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    made = meshplan(folder, "plan", "spec.json")
    (folder / "plan.json").write_text(json.dumps(made))
    script = str(PROGRAMS / "resuming_train.py")
    files = ("--out", "job", "--target", "torchrun", "--script", script)
    (row,) = meshplan(folder, "replan", "plan.json", "--fewer", "1", "--no-store", *files)["rows"]
    return row, made


def meshplan(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "meshplan.cli.main", *arguments, "--db", "catalog.sqlite", "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"meshplan {' '.join(arguments)}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def running(net: Network, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The store, the place where agents meet, and the agent of every host; nothing of them is left afterwards."""
    store = [
        sys.executable,
        str(Path(__file__).with_name("checkpoint_store.py")),
        str(STORE_PORT),
        str(folder / "kept"),
    ]
    place = (
        f"import time; from torch.distributed import TCPStore; store = TCPStore('0.0.0.0', {MEETING_PORT}, "
        "is_master=True, wait_for_workers=False)\nwhile True: time.sleep(1)"
    )
    started = []
    try:
        started.append(inside(net, HOSTS, store, folder / "store.log"))
        started.append(inside(net, 0, [sys.executable, "-c", place], folder / "meeting.log"))
        time.sleep(5.0)  # torch is imported until the place answers
        agent = [str(folder / "job" / "elastic.sh")]
        agents = [
            inside(net, host, agent, folder / f"host{host}.log", environment(net, host, folder))
            for host in range(HOSTS)
        ]
        started += agents
        yield agents
    finally:
        for host in range(HOSTS + 1):
            kill_host(net, host)
        for process in started:
            process.wait()


def environment(net: Network, host: int, folder: Path) -> dict[str, str]:
    """What an operator would set on a host, and what the test's program asks for."""
    own = folder / f"torchrun{host}"
    own.write_text(f'#!/bin/sh\nexec {BIN / "torchrun"} --local-addr {net.address(host)} "$@"\n')
    own.chmod(0o755)
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TORCHRUN": str(own),
        "RDZV_ENDPOINT": f"{net.address(0)}:{MEETING_PORT}",
        "LAST_CALL_S": f"{LAST_CALL_S:.0f}",
        "SAVE_DIR": str(folder / "kept"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TEST_SHAPE": json.dumps({key: value for key, value in MODEL.items() if type(value) is int}),
        "TEST_STORE": f"http://{net.address(HOSTS)}:{STORE_PORT}",
        "TEST_STEPS_FILE": str(folder / "steps"),
        "TEST_SAVE_EVERY": str(SAVE_EVERY),
        "TEST_LAST_STEP": "1000",
    }


def inside(
    net: Network, host: int, command: Sequence[str], log: Path, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command on a host."""
    with log.open("wb") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", net.namespaces[host], *command],
            env={**os.environ, **(variables or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def kill_host(net: Network, host: int) -> None:
    """End every process of a host at once: agents start their ranks in sessions of their own."""
    found = subprocess.run(["ip", "netns", "pids", net.namespaces[host]], check=True, capture_output=True, text=True)
    for pid in map(int, found.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(steps: Path, agents: Sequence[subprocess.Popen[bytes]], *, ranks: int, step: int) -> list[Told]:
    """What was told by so many ranks, once they have done a step.

    Raises:
        RuntimeError: an agent has ended, or they take too long.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        told = [one for one in map(_told, steps.read_text().splitlines()) if one.ranks == ranks]
        if any(one.step >= step for one in told):
            return told
        ended = [number for number, agent in enumerate(agents) if agent.poll() is not None]
        if ended:
            raise RuntimeError(f"the agent of host {ended[0]} has ended: see its log in {steps.parent}")
        time.sleep(0.1)
    raise RuntimeError(f"{ranks} ranks have not done step {step} within {DEADLINE_S:.0f} s: see {steps.parent}")


def _told(line: str) -> Told:
    ranks, step, at, began = line.split()
    return Told(ranks=int(ranks), step=int(step), at_s=float(at), began_s=float(began))


def _step_s(told: Sequence[Told], ranks: int) -> float:
    """The shortest step: others had a checkpoint before them."""
    own = [one for one in told if one.ranks == ranks]
    return min(after.at_s - before.at_s for before, after in pairwise(own))
