"""Jobs on hosts of several types: a heterogeneous Slurm job is run with stand-ins, a JobSet held to its schema."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.service import emit_plan, estimate_plan

# One task on each node of the part, as --ntasks-per-node=1 says; one after the other.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word[2:].split("=") for word in words if word.startswith("--") and "=" in word)
while words[0].startswith("--"):
    words.pop(0)
nodes = os.environ["SLURM_JOB_NODELIST_HET_GROUP_" + options["het-group"]].split()
assert len(nodes) == int(options["ntasks"]) and options["ntasks-per-node"] == "1", (nodes, options)
for node in nodes:
    subprocess.run(words, env={{**os.environ, "SLURMD_NODENAME": node}}, check=True)
"""
SCONTROL = '#!/usr/bin/env bash\nfor node in $3; do echo "$node"; done\n'
NOTE = """#!/usr/bin/env bash
printf '%s' "$SLURMD_NODENAME $MASTER_ADDR $CUDA_VISIBLE_DEVICES" >> "$NOTES"
printf ' %s' "$@" >> "$NOTES"
printf '\\n' >> "$NOTES"
"""
NVIDIA_SMI = """#!/usr/bin/env bash
for device in 0 1 2 3 4 5 6 7; do echo "$device, $GPU, 85000"; done
"""
NODES = {"SLURM_JOB_NODELIST_HET_GROUP_0": "old-7 old-9", "SLURM_JOB_NODELIST_HET_GROUP_1": "new-1"}


def stage(node_type: str, layers: int) -> dict[str, Any]:
    return {"node_type": node_type, "num_layers": layers, "tensor_parallel": 2, "data_parallel": 4}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    """Sixteen layers on two nodes of A100, as many on one of H100; a second node of H100 is not used."""
    stages = [stage("dgx-a100-40gb", 8), stage("dgx-a100-40gb", 8), stage("dgx-h100", 16)]
    return estimate_plan(
        {
            "kind": "training",
            "model": "llama-3.1-8b",
            "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}, {"type": "dgx-a100-40gb", "count": 2}]},
            "workload": {"sequence_length": 4096, "global_batch_size": 128, "precision": "bf16"},
            "fixed": {"stages": stages},
        },
        catalog,
    )


def submit(folder: Path, plan: Plan, catalog: Catalog, **environment: str) -> tuple[list[list[str]], str]:
    """What each started agent got, and what was said."""
    tools, out = folder / "tools", folder / "out"
    tools.mkdir()
    scripts = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": NOTE, "nvidia-smi": NVIDIA_SMI}
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "pretrain_gpt.py").write_text("")
    write_artifacts(emit_plan(plan, "slurm", catalog, framework="megatron").artifacts, out)
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "MEGATRON_LM": str(folder),
        "SLURM_SUBMIT_DIR": str(out),
        "SLURM_HET_SIZE": "2",
        **NODES,
        **environment,
    }
    command = ["bash", str(out / "job.sbatch"), "--seed", "7"]
    done = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True, check=False)
    notes = folder / "notes"
    told = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return told, done.stderr


def test_each_part_of_a_slurm_job_starts_its_node_ranks(tmp_path: Path, plan: Plan, catalog: Catalog) -> None:
    told, said = submit(tmp_path, plan, catalog, MESHPLAN_SKIP_CHECKS="1")
    assert said == ""
    ranks = {row[0]: row[row.index("--node-rank") + 1] for row in told}
    assert ranks == {"old-7": "0", "old-9": "1", "new-1": "2"}
    assert {row[1] for row in told} == {"old-7"}
    assert all(row[-2:] == ["--seed", "7"] and row[2] == "0,1,2,3,4,5,6,7" for row in told)


def test_a_host_of_another_type_ends_the_job(tmp_path: Path, plan: Plan, catalog: Catalog) -> None:
    """All nodes have A100: the part that is for H100 says so."""
    _, said = submit(tmp_path, plan, catalog, GPU="NVIDIA A100-SXM4-40GB", MASTER_ADDR="127.0.0.1")
    assert "GPU 0 is NVIDIA A100-SXM4-40GB, the plan is for H100" in said.replace("  ", " ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_HET_SIZE": "1"}, "needs a job of 2 parts, this one has 1"),
        ({"SLURM_JOB_NODELIST_HET_GROUP_0": "a"}, "part 0 of the plan needs 2 nodes, the allocation has 1"),
    ],
)
def test_another_allocation_is_refused(
    tmp_path: Path, plan: Plan, catalog: Catalog, change: dict[str, str], said: str
) -> None:
    told, error = submit(tmp_path, plan, catalog, **change)
    assert said in error
    assert not told


def test_golden(golden, plan: Plan, catalog: Catalog) -> None:
    artifacts = emit_plan(plan, "slurm", catalog, framework="megatron").artifacts
    for name in ("job.sbatch", "hosts.txt"):
        golden(f"emit/slurm/node_types/{name}", next(one.content for one in artifacts if one.path.name == name))


def test_a_jobset_has_one_group_for_each_type(plan: Plan, catalog: Catalog) -> None:
    from kubeflow_trainer_api import models

    artifacts = emit_plan(plan, "jobset", catalog, framework="megatron").artifacts
    document = list(yaml.safe_load_all(next(one.content for one in artifacts if one.path.name == "jobset.yaml")))[-1]
    assert models.JobsetV1alpha2JobSet.from_dict(document).to_dict() == document  # no field is unknown
    found = {}
    for group in document["spec"]["replicatedJobs"]:
        job = group["template"]["spec"]
        pod = job["template"]["spec"]
        container = pod["containers"][0]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        for index in range(job["completions"]):
            words = subprocess.run(
                ["bash", "-c", container["command"][-1].replace("exec /meshplan/launch.sh", "echo")],
                env={"JOB_COMPLETION_INDEX": str(index)},
                capture_output=True,
                text=True,
                check=True,
            )
            found[int(words.stdout)] = pod["nodeSelector"]["meshplan/node-type"]
        address = next(one["value"] for one in container["env"] if one["name"] == "MASTER_ADDR")
        assert address.startswith(f"{document['metadata']['name']}-node-000-0-0.")
    assert found == {0: "dgx-a100-40gb", 1: "dgx-a100-40gb", 2: "dgx-h100"}


@pytest.mark.parametrize("target", ["job", "trainjob", "skypilot"])
def test_targets_with_hosts_of_one_kind_name_those_that_take_several(target: str, plan: Plan, catalog: Catalog) -> None:
    with pytest.raises(CannotExpressError, match=r"dgx-h100 and dgx-a100-40gb.*target slurm"):
        emit_plan(plan, target, catalog, framework="megatron")
