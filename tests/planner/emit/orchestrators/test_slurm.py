"""``job.sbatch`` is run for real, with stand-ins for srun and scontrol that place tasks as Slurm would."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, config_for, plan_for, request_for
from golden_variants import difference

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.emit.orchestrators import slurm
from meshplan.planner.emit.training.megatron import job as megatron
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.emit.writer import write_artifacts
from meshplan.planner.launch.registry import emit

# Task n on line n of SLURM_HOSTFILE, as --distribution=arbitrary says; one after the other.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
assert words.pop(0) == "--distribution=arbitrary", words
tasks = int(words.pop(0).removeprefix("--ntasks="))
while words[0].startswith("--"):
    words.pop(0)
lines = open(os.environ["SLURM_HOSTFILE"]).read().split()
assert len(lines) == tasks, (lines, tasks)
for task, node in enumerate(lines):
    variables = {{**os.environ, "SLURM_PROCID": str(task), "SLURMD_NODENAME": node}}
    subprocess.run(words, env=variables, check=True)
"""
SCONTROL = "#!/usr/bin/env bash\nfor node in $SLURM_JOB_NODELIST; do echo $node; done\n"
NOTE = """#!/usr/bin/env bash
place="$SLURMD_NODENAME ${RANK:--} ${LOCAL_RANK:--} ${WORLD_SIZE:--} $CUDA_VISIBLE_DEVICES $MASTER_ADDR"
printf '%s' "$place" >> "$NOTES"
printf ' %s' "$@" >> "$NOTES"
printf '\\n' >> "$NOTES"
"""


def submit(folder: Path, request: TrainingRequest, *words: str, nodes: str) -> list[list[str]]:
    """What each started process got: node, rank, local rank, world size, devices, master, then its arguments."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", NOTE), ("python", NOTE)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "pretrain_gpt.py").write_text("")
    out = folder / "out"
    write_artifacts(emit("slurm", request, framework="megatron").artifacts, out)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "MEGATRON_LM": str(folder),
        "MESHPLAN_SKIP_CHECKS": "1",
        "SLURM_SUBMIT_DIR": str(out),
        "SLURM_JOB_NODELIST": nodes,
    }
    copy = folder / "slurm_script"  # sbatch runs a copy
    copy.write_bytes((out / "job.sbatch").read_bytes())
    done = subprocess.run(
        ["bash", str(copy), *words], env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    assert not list(out.glob(".hostfile*"))
    return [shlex.split(line) for line in (folder / "notes").read_text().splitlines()]


def on_table(table: tuple[tuple[int, int], ...], hosts: tuple[str, ...] = ()) -> TrainingRequest:
    config = config_for(LLAMA_70B, data_parallel=len(table))
    return request_for(LLAMA_70B, config, plan=plan_for(LLAMA_70B, config, rank_table=table), hosts=hosts)


def test_golden(golden) -> None:
    requests = (
        on_table(((0, 0), (1, 0), (0, 1), (1, 1))),
        replace(request_for(LLAMA_70B, LLAMA_70B_ON_64), devices_per_host=8),
    )
    own = {"README.md", "job.sbatch", "rank_task.sh", "ranks.txt"}
    scattered, contiguous = (
        {
            str(artifact.path): artifact.content
            for artifact in emit("slurm", request, framework="megatron").artifacts
            if artifact.path.name in own
        }
        for request in requests
    )
    for name, text in scattered.items():
        golden(f"emit/slurm/scattered/{name}", text)
    golden("emit/slurm/contiguous.diff", difference(contiguous, scattered))


def test_one_agent_a_host_in_the_order_of_the_table(tmp_path: Path) -> None:
    told = submit(tmp_path, on_table(((1, 6), (1, 4), (0, 3))), "--seed", "7", nodes="first second")
    assert [(row[0], row[4], row[5]) for row in told] == [("second", "6,4", "second"), ("first", "3", "second")]
    assert [row[row.index("--node-rank") + 1] for row in told] == ["0", "1"]
    assert [row[row.index("--nproc-per-node") + 1] for row in told] == ["2", "1"]
    assert told[0][-2:] == ["--seed", "7"]


def test_any_table_is_honoured_with_one_task_a_rank(tmp_path: Path) -> None:
    places = [(host, device) for host in range(3) for device in range(4)]
    random.Random(5).shuffle(places)
    table = tuple(places)
    told = submit(tmp_path, on_table(table), nodes="n0 n1 n2")
    assert len(told) == len(table)
    for rank, row in enumerate(told):
        node, own_rank, local_rank, world_size, devices, master = row[:6]
        assert (node, int(own_rank), int(world_size)) == (f"n{table[rank][0]}", rank, len(table))
        assert int(devices.split(",")[int(local_rank)]) == table[rank][1]
        assert master == f"n{table[0][0]}"
        assert row[6].endswith("pretrain_gpt.py")
    planned = [word for flag in megatron.arguments(on_table(table)) for word in flag]
    assert told[0][7 : 7 + len(planned)] == planned


def test_named_hosts_are_asked_for_by_name(tmp_path: Path) -> None:
    request = on_table(((1, 0), (0, 0)), hosts=("alpha", "beta"))
    told = submit(tmp_path, request, nodes="unused")
    assert [row[0] for row in told] == ["beta", "alpha"]
    sbatch = next(file for file in emit("slurm", request, framework="megatron").artifacts if file.executable)
    assert "#SBATCH --nodelist=alpha,beta\n" in sbatch.content


def test_allocation_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the plan needs 2 nodes, the allocation has 3"):
        submit(tmp_path, on_table(((1, 0), (0, 0))), nodes="a b c")


def test_a_device_twice_is_refused() -> None:
    with pytest.raises(EmitError, match="device 0 of host 0 more than once"):
        emit("slurm", on_table(((0, 0), (1, 0), (0, 0))), framework="megatron")


def test_hostile_host_names_are_refused() -> None:
    for table in (((0, 0), (1, 0)), ((0, 0), (1, 0), (0, 1))):
        with pytest.raises(EmitError, match="is no host name"):
            emit("slurm", on_table(table, hosts=("a", "b\n#SBATCH --uid=0")), framework="megatron")


def test_own_starters_cannot_place_single_ranks() -> None:
    request = on_table(((0, 0), (1, 0), (0, 1)))
    job = replace(megatron.job(request), starter="exec something\n")
    with pytest.raises(CannotExpressError, match="host by host"):
        slurm.wrap(job)


def test_frameworks_are_asked_for() -> None:
    request = on_table(((0, 0),))
    with pytest.raises(EmitError, match="add --framework, one of megatron"):
        emit("slurm", request)
    with pytest.raises(EmitError, match=r"unknown framework 'megatorn'; did you mean 'megatron'"):
        emit("slurm", request, framework="megatorn")
    with pytest.raises(EmitError, match="launches itself"):
        emit("megatron", request, framework="slurm")


@pytest.mark.parametrize("table", [((0, 0), (1, 0)), ((0, 0), (1, 0), (0, 1), (1, 1))])
def test_an_image_is_started_by_pyxis(tmp_path: Path, table: tuple[tuple[int, int], ...]) -> None:
    """Every task runs in the container, with the folder of the files mounted where it lies."""
    request = replace(on_table(table), image="nvcr.io/nvidia/pytorch:25.06-py3")
    script = {str(file.path): file.content for file in emit("slurm", request, framework="megatron").artifacts}
    assert "--container-image='nvcr.io#nvidia/pytorch:25.06-py3'" in script["job.sbatch"]
    assert "--container-mounts=$here:$here" in script["job.sbatch"]
    assert "MESHPLAN_MOUNTS" in script["README.md"]
    assert len(submit(tmp_path, request, nodes="a b")) == len(table)
    with pytest.raises(EmitError, match="no name of an image"):
        emit("slurm", replace(request, image="x; touch pwned"), framework="megatron")
