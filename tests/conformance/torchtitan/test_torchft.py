"""TorchTitan's parser over jobs with torchft, with the module that is written for them. On demand:
``make test-launchers``; torchft itself is not there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replica_plans import far_apart, replicated
from torchtitan_judge import Judge

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.emit.artifact import EmittedPlan
from meshplan.planner.service import emit_elastic, emit_plan, write_files

pytestmark = pytest.mark.launchers


@pytest.fixture
def catalog(seeded: Path) -> Catalog:
    return Catalog.open(str(seeded))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the module path, as launch.sh puts it there."""
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    monkeypatch.delitem(__import__("sys").modules, "meshplan_torchft", raising=False)


def parsed(files: EmittedPlan, folder: Path, inner: str, world_size: int) -> tuple[Any, Any]:
    write_files(files, folder)
    for file in (folder / inner).glob("*"):
        file.rename(folder / file.name) if inner else None
    lines = (folder / "torchtitan_args.txt").read_text().splitlines()
    words = [word for line in lines if line[0] != "#" for word in line.split()]
    return Judge().parse([*words[:-1], "--fault-tolerance.replica-id", "1", words[-1]], world_size=world_size)


def test_replica_groups_reach_torchft(catalog: Catalog, folder: Path) -> None:
    files = emit_elastic([replicated(catalog)], "torchtitan", catalog, "runbook")
    config, dims = parsed(files, folder, "replica-groups", 8)
    assert (dims.dp_replicate, dims.dp_shard) == (1, 8)
    groups = config.fault_tolerance
    assert (groups.enable, groups.semi_sync_method, groups.process_group) == (True, None, "nccl")
    assert (groups.group_size, groups.min_replica_size, groups.replica_id) == (4, 2, 1)
    # As experiments/torchft/trainer.py counts accumulation: whole numbers of calls for every group.
    batch, local = config.training.global_batch_size, config.training.local_batch_size
    assert batch % (local * dims.dp_shard * groups.group_size) == 0
    assert len(config.model_spec.model.layers) == 32


def test_local_updates_reach_torchft(catalog: Catalog, folder: Path) -> None:
    config, dims = parsed(emit_plan(far_apart(catalog), "torchtitan", catalog), folder, "", 4)
    assert dims.dp_shard == 4
    sites = config.fault_tolerance
    assert (sites.semi_sync_method, sites.sync_steps, sites.num_fragments) == ("diloco", 30, 3)
    assert sites.should_quantize
    assert sites.fragment_sync_delay < 10
