"""An elastic job: its files, and real agents of torchrun on CPU processes that lose a host and get one back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError
from meshplan.planner.core.kinds import Question
from meshplan.planner.service import emit_elastic, make_plan, write_files
from meshplan.planner.training.replanning.replan import elastic_plans
from meshplan.planner.training.service import replan

LINKS = {
    "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
    "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
}
# Says which rank of which plan it is; ends where another rank is gone, as a collective would.
SCRIPT = """
import json, os, pathlib, sys, time
config = json.load(open(os.environ["MESHPLAN_CONFIG"]))["config"]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
beats = pathlib.Path(os.environ["BEATS"]) / f'{world}-{os.environ["TORCHELASTIC_RESTART_COUNT"]}'
beats.mkdir(parents=True, exist_ok=True)
print("rank", rank, "of", world, "plan", config["data_parallel"] * config["tensor_parallel"], flush=True)
began = time.time()
while True:
    (beats / str(rank)).touch()
    time.sleep(0.5)
    files = [beats / str(other) for other in range(world)]
    late = [path for path in files if not path.exists() or time.time() - path.stat().st_mtime > 5]
    if late and time.time() - began > 20:
        sys.exit(f"rank {late[0].name} is gone")
"""


def question(target: str = "any") -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"devices": {"type": "h100-sxm-80gb", "nodes": 3, "per_node": 2}, "links": LINKS},
        "workload": {"sequence_length": 4096, "global_batch_size": 480, "num_training_tokens": "300B"},
        "constraints": {"target": target},
        "run": {"failures_per_node_day": 0.5},
    }


@pytest.fixture(scope="module")
def folder(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_plan(question(), catalog)
    rows = replan(Question(document=made.spec, catalog=catalog), made, fewer=1)
    out = tmp_path_factory.mktemp("elastic")
    (out / "train.py").write_text(SCRIPT)
    files = emit_elastic(elastic_plans(made, rows), "torchrun", catalog, "night", script=str(out / "train.py"))
    write_files(files, out / "job")
    return out


def test_every_script_is_one(folder: Path) -> None:
    for script in (folder / "job").rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_agents_know_the_range_and_enough_restarts(folder: Path) -> None:
    for name in ("elastic.sh", "elastic_nvrx.sh"):
        text = (folder / "job" / name).read_text()
        assert "--nnodes 2:3 " in text
        assert "--nproc-per-node 2 " in text
        assert int(text.split("--max-restarts ")[1].split()[0]) >= 100
    assert "--ft-rank-heartbeat-timeout" in text


def test_a_process_becomes_a_rank_of_the_plan_for_its_number_of_nodes(folder: Path) -> None:
    probe = folder / "probe.sh"
    probe.write_text('#!/usr/bin/env bash\necho "$MESHPLAN_CONFIG $CUDA_VISIBLE_DEVICES $*"\n')
    probe.chmod(0o755)
    for world, name in ((4, "nodes-2"), (6, "nodes-3"), (8, "")):
        agent = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "a"}
        done = subprocess.run(
            [str(folder / "job" / "rank.sh")],
            env={**os.environ, **agent, "PYTHON": str(probe)},
            capture_output=True,
            text=True,
            check=False,
        )
        if name:
            assert f"{name}/training_config.json 0,1 -u " in done.stdout, done.stderr
        else:
            assert "no plan for 4 nodes" in done.stderr


def test_one_number_of_hosts_is_no_elastic_job(catalog: Catalog) -> None:
    made = make_plan(question("megatron"), catalog)
    with pytest.raises(EmitError, match="neighbouring numbers"):
        emit_elastic([made], "megatron", catalog, "night")


def _until(is_so: Callable[[], bool], seconds: float = 240.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(1.0)
    return False


@pytest.mark.torch
def test_a_host_dies_and_another_comes(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RDZV_ENDPOINT": "127.0.0.1:29653",
        "SAVE_DIR": str(tmp_path),
        "BEATS": str(tmp_path / "beats"),
        "AGENT_PAUSE": "2",
    }

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [str(folder / "job" / "elastic.sh")]
        with (tmp_path / name).open("wb") as log:
            return subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def ranks(world: int, *names: str) -> int:
        text = "".join((tmp_path / name).read_text(errors="replace") for name in names)
        return text.count(f"of {world} plan {world}\n")

    agents = {name: start(name) for name in ("one", "two", "three")}
    try:
        assert _until(lambda: ranks(6, "one", "two", "three") >= 6)
        os.killpg(agents["three"].pid, signal.SIGKILL)
        assert _until(lambda: ranks(4, "one", "two") >= 4)
        agents["four"] = start("four")
        assert _until(lambda: ranks(6, "four") >= 2)
    finally:
        for agent in agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
