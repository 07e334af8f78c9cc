"""Two ranks under torchrun itself, whose agent owns the only store: every rail must be joined through it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.measurements.rows import Measurements

pytestmark = pytest.mark.torch

DEADLINE_S = 240

# Two groups, one after the other, over one interface; rank 1 comes to the second when rank 0 has long waited.
# A thread of Gloo that outlives its group now and then aborts the interpreter as it ends.
JOINED_TWICE = """
import os, time
from meshplan.profiler.links.launch import rank_environment
from meshplan.profiler.links.transport import TorchTransport, rendezvous_store

place = rank_environment(os.environ)
store = rendezvous_store(place, timeout_s=20.0)
for number in range(2):
    if number and place.rank == 1:
        time.sleep(1.0)
    transport = TorchTransport(place, store, number=number, rail="lo", timeout_s=20.0)
    assert transport.gather(place.rank) == [0, 1]
    assert transport.collective("all_reduce", [0, 1], 64)
    transport.barrier()
    assert len(os.listdir("/proc/self/task")) > 1
    transport.close()
    assert len(os.listdir("/proc/self/task")) == 1, "threads of the group are left"
"""


def torchrun(*arguments: str, cwd: Path) -> str:
    """What two ranks print."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: make test-netns")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_early_rank_waits_for_the_others_next_group(tmp_path: Path) -> None:
    script = tmp_path / "joined_twice.py"
    script.write_text(JOINED_TWICE, encoding="utf-8")
    torchrun(str(script), cwd=tmp_path)


def test_two_rails_under_torchrun(tmp_path: Path) -> None:
    database = tmp_path / "catalog.sqlite"
    command = ["-m", "meshplan.cli.main", "profile", "links", "--name", "lab", "--quick", "--timeout", "20"]
    # The loopback interface twice: there is no second one that every machine has.
    command += ["--rail", "lo", "--rail", "lo", "--db", str(database), "--format", "json"]
    done = torchrun(*command, cwd=tmp_path)
    assert json.loads(done)["rails"] == ["lo"]
    assert len(Measurements(open_database(str(database))).cluster("lab").links) == 2
