"""torchrun's own argument parser over what the host scripts of random rank tables hand to it.

On demand: ``make test-launchers``.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from emit_cases import LLAMA_70B, config_for, plan_for, request_for

from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500
MAX_HOSTS, DEVICES_PER_HOST = 3, 8


@pytest.fixture(scope="module")
def parser() -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for torchrun: writes down its arguments."""
    path = tmp_path_factory.mktemp("recorder") / "torchrun"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$TOLD"\nprintf "%s" "$CUDA_VISIBLE_DEVICES" > "$TOLD.devices"\n')
    path.chmod(0o755)
    return path


def random_table(draw: random.Random) -> tuple[tuple[int, int], ...]:
    """Ranks of a host side by side, hosts in any order, some of the devices of each in any order."""
    hosts = draw.sample(range(MAX_HOSTS), draw.randint(1, MAX_HOSTS))
    places: list[tuple[int, int]] = []
    for host in hosts:
        used = draw.sample(range(DEVICES_PER_HOST), draw.randint(1, DEVICES_PER_HOST))
        places += [(host, device) for device in used]
    return tuple(places)


def told(folder: Path, node_rank: int, recorder: Path) -> tuple[list[str], list[int]]:
    """Arguments and devices that one host's script gives to torchrun."""
    notes = folder / f"told_{node_rank}"
    environment = {
        "PATH": "/usr/bin:/bin",
        "TORCHRUN": str(recorder),
        "TOLD": str(notes),
        "MASTER_ADDR": "127.0.0.1",
        "MESHPLAN_SKIP_CHECKS": "1",
        "SCRIPT": __file__,  # any file that exists: nothing runs it
    }
    subprocess.run([str(folder / f"launch_host_{node_rank:03d}.sh")], env=environment, check=True, capture_output=True)
    devices = Path(f"{notes}.devices").read_text()
    return notes.read_text().splitlines(), [int(device) for device in devices.split(",")]


def test_every_host_of_random_rank_tables_is_accepted_and_keeps_its_devices(
    parser: Any, recorder: Path, tmp_path: Path
) -> None:
    draw = random.Random(11)
    for case in range(NUM_RANDOM_PLANS):
        table = random_table(draw)
        config = config_for(LLAMA_70B, data_parallel=len(table), global_batch_size=len(table))
        plan = plan_for(LLAMA_70B, config, rank_table=table)
        hosts = tuple(f"host-{number}" for number in range(MAX_HOSTS))
        request = request_for(LLAMA_70B, config, plan=plan, hosts=hosts, script="train.py")
        folder = tmp_path / str(case)
        write_artifacts(emit("torchrun", request).artifacts, folder)
        num_hosts = len({host for host, _ in table})
        ranks: list[int] = []
        for node_rank in range(num_hosts):
            arguments, devices = told(folder, node_rank, recorder)
            read = parser.parse_args(arguments)
            assert int(read.node_rank) == node_rank
            assert int(read.nnodes.split(":")[0]) == num_hosts
            assert int(read.nproc_per_node) == len(devices)
            assert read.rdzv_backend == "static"
            ranks += devices
        assert ranks == [device for _, device in table]
