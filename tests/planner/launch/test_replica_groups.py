"""Copies of the states as torchft's replica groups: their files, what each group is told, and refusals."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from replica_plans import replicated

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.launch.training import beside_agents
from meshplan.planner.service import emit_elastic, write_files


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return replicated(catalog)


def emitted(plan: Plan, catalog: Catalog) -> dict[str, str]:
    found = emit_elastic([plan], "torchtitan", catalog, "runbook")
    return {str(one.path): one.content for one in found.artifacts}


def flags_of(text: str) -> dict[str, str]:
    return dict(line.partition(" ")[::2] for line in text.splitlines() if line[0] != "#")


def test_each_copy_is_a_job_of_its_own(plan: Plan, catalog: Catalog, tmp_path: Path) -> None:
    files = emitted(plan, catalog)
    flags = flags_of(files["replica-groups/torchtitan_args.txt"])
    assert flags["--parallelism.data-parallel-replicate-degree"] == "1"
    assert flags["--parallelism.data-parallel-shard-degree"] == "8"
    # TorchTitan divides by the groups itself.
    assert flags["--training.global-batch-size"] == "128"
    assert (flags["--fault-tolerance.group-size"], flags["--fault-tolerance.min-replica-size"]) == ("4", "2")
    assert files["replica-groups/hosts.txt"].splitlines()[-1].split()[-1] == "0,1,2,3,4,5,6,7"
    for name in ("launch.sh", "lighthouse.sh", "torchtitan_args.txt", "meshplan_torchft.py"):
        assert f"meshplan plan {plan.plan_id}" in files[f"replica-groups/{name}"]
    assert "32 of 128 sequences a step fewer" in files["OPERATOR.md"]
    write_files(emit_elastic([plan], "torchtitan", catalog, "runbook"), tmp_path)
    for script in tmp_path.rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_a_group_must_say_which_it_is(plan: Plan, catalog: Catalog, tmp_path: Path) -> None:
    write_files(emit_elastic([plan], "torchtitan", catalog, "runbook"), tmp_path)
    script = tmp_path / "replica-groups" / "launch.sh"
    for group, word in (("", "set REPLICA_GROUP"), ("4", "0 to 3")):
        variables = {"PATH": "/usr/bin:/bin", "TORCHFT_LIGHTHOUSE": "http://a:29510", "REPLICA_GROUP": group}
        done = subprocess.run([str(script), "0"], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert word in done.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_parallel_shard": 32}, "one copy of the states"),
        ({"zero_stage": 0, "data_parallel_shard": 1}, "states that are not sharded"),
        ({"data_parallel_shard": 4}, "8 copies on 4 hosts"),
    ],
)
def test_what_torchft_cannot_run_is_said_to_the_operator(
    plan: Plan, catalog: Catalog, change: dict[str, int], reason: str
) -> None:
    changed = replace(plan, config={**plan.config, **change})
    files, words = beside_agents(changed, "torchtitan", catalog, EmitOptions())
    assert not files
    assert reason in words
