"""The emitted files train a small model to the end, on CPU processes of several "hosts" of this machine.

Every rank asks the others where they are and compares the answers with ``rank_table.json``; then a linear regression
is trained data-parallel, and all ranks must end with the same weights, near the true ones. On demand:
``make test-launchers``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B, config_for, plan_for, request_for

from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit

pytestmark = pytest.mark.launchers

TABLE = ((2, 1), (0, 3), (0, 0), (1, 5), (1, 4))  # hosts in another order, unequal, devices shuffled
TIME_LIMIT_S = 180
TRAIN = """
import json, os, pathlib
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = json.loads(pathlib.Path(os.environ["MESHPLAN_CONFIG"]).read_text())["config"]
table = json.loads(pathlib.Path(os.environ["MESHPLAN_RANK_TABLE"]).read_text())["rank_table"]
device = int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["LOCAL_RANK"])])
seen = [None] * world
dist.all_gather_object(seen, [int(os.environ["TEST_HOST"]), device])
assert seen == table, (seen, table)
assert world == config["world_size"] == config["data_parallel"]

torch.manual_seed(rank)
truth = torch.tensor([1.0, -2.0, 3.0])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(80):
    inputs = torch.randn(config["micro_batch_size"] * 16, 3)
    loss = ((model(inputs).squeeze(1) - inputs @ truth) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = model.module.weight.detach().squeeze(0).tolist()
told = {"rank": rank, "weights": weights, "loss": loss.item()}
pathlib.Path(os.environ["NOTES"], str(rank)).write_text(json.dumps(told))
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(tmp_path: Path, hosts: tuple[int, ...]) -> list[int]:
    """Exit codes of the agents when node rank i runs on ``hosts[i]``."""
    config = config_for(LLAMA_70B, data_parallel=len(TABLE))
    plan = plan_for(LLAMA_70B, config, rank_table=TABLE)
    request = replace(request_for(LLAMA_70B, config, plan=plan, hosts=("a", "b", "c")), script="train.py")
    write_artifacts(emit("torchrun", request).artifacts, tmp_path / "out")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "notes").mkdir()
    variables = {
        "PATH": os.environ["PATH"],
        "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
        "NOTES": str(tmp_path / "notes"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MESHPLAN_SKIP_CHECKS": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    agents = [
        subprocess.Popen(
            [str(tmp_path / "out" / f"launch_host_{node_rank:03d}.sh")],
            env={**variables, "TEST_HOST": str(host)},
            cwd=tmp_path,
        )
        for node_rank, host in enumerate(hosts)
    ]
    try:
        return [agent.wait(timeout=TIME_LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


def test_training_runs_to_the_end_on_the_planned_ranks(tmp_path: Path) -> None:
    assert launch(tmp_path, (2, 0, 1)) == [0, 0, 0]
    told = [json.loads((tmp_path / "notes" / str(rank)).read_text()) for rank in range(len(TABLE))]
    assert all(entry["weights"] == pytest.approx(told[0]["weights"], abs=1e-6) for entry in told)
    assert told[0]["weights"] == pytest.approx([1.0, -2.0, 3.0], abs=0.02)


def test_swapped_hosts_are_noticed_by_the_ranks(tmp_path: Path) -> None:
    assert all(code != 0 for code in launch(tmp_path, (2, 1, 0)))
    assert not list((tmp_path / "notes").iterdir())
