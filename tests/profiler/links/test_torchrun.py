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


def test_two_rails_under_torchrun(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: make test-netns")
    database = tmp_path / "catalog.sqlite"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "meshplan.cli.main", "profile", "links", "--name", "lab", "--quick", "--timeout", "20"]
    # The loopback interface twice: there is no second one that every machine has.
    command += ["--rail", "lo", "--rail", "lo", "--db", str(database), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["rails"] == ["lo"]
    assert len(Measurements(open_database(str(database))).cluster("lab").links) == 2
