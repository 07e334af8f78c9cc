"""An elastic job: its files. Real agents that lose a host and get one back: ``tests/benchmarks/elastic_agents.py``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from elastic_job import question, write_job

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError
from meshplan.planner.service import emit_elastic, make_plan


@pytest.fixture(scope="module")
def folder(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("elastic")
    write_job(catalog, out)
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
        # Otherwise ranks find addresses of the meeting before, and never come together (torch 2.13).
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
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
        emit_elastic([made], "megatron", catalog, "runbook")
