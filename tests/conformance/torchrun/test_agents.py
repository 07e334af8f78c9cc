"""Two real torchrun agents on this machine hand out the ranks and devices of the plan's table.

On demand: ``make test-launchers``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B, config_for, plan_for, request_for

from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit

pytestmark = pytest.mark.launchers

# Stands in for pretrain_gpt.py: each rank notes its arguments.
PROGRAM = """
import json, os, pathlib
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}
pathlib.Path(os.environ["NOTES"], told["RANK"]).write_text(json.dumps(told))
"""
START_LIMIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_ranks_are_those_of_the_table(tmp_path: Path) -> None:
    config = config_for(LLAMA_70B, tensor_parallel=4)
    table = ((1, 6), (0, 3), (0, 0), (0, 2))
    request = request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, rank_table=table), hosts=("a", "b"))
    write_artifacts(emit("megatron", request).artifacts, tmp_path / "out")
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "pretrain_gpt.py").write_text(PROGRAM)
    variables = {
        "PATH": os.environ["PATH"],
        "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
        "MEGATRON_LM": str(tmp_path),
        "NOTES": str(notes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "MESHPLAN_SKIP_CHECKS": "1",
    }
    agents = [
        subprocess.Popen([str(tmp_path / "out" / f"launch_host_{node_rank:03d}.sh")], env=variables)
        for node_rank in range(2)
    ]
    try:
        assert [agent.wait(timeout=START_LIMIT_S) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    told = [json.loads((notes / str(rank)).read_text()) for rank in range(len(table))]
    assert {entry["WORLD_SIZE"] for entry in told} == {"4"}
    devices = [int(entry["CUDA_VISIBLE_DEVICES"].split(",")[int(entry["LOCAL_RANK"])]) for entry in told]
    assert devices == [device for _, device in table]
