"""A job under Slurm: ``sbatch job.sbatch``. Any rank table can be honoured.

Where each host's ranks are consecutive, srun starts one torchrun on each host. Otherwise srun starts one task a rank:
``--distribution=arbitrary`` puts task r on line r of ``SLURM_HOSTFILE``, and each task reads its devices from a file.
Host i of the rank table is node i of the allocation, in the order of ``scontrol show hostnames``; named hosts are asked
for by name (``--nodelist``) and keep their names in the lookup, whatever order Slurm lists them in.

Hosts of several types are a heterogeneous job (https://slurm.schedmd.com/heterogeneous_jobs.html): one component for
each run of hosts of a type, and in each of them one job step (``srun --het-group``) with a task on each node, which
finds its node rank by the name of its node. A step that fails ends the others.

A container image is started by pyxis (github.com/NVIDIA/pyxis, srun ``--container-*``), which takes enroot's names of
images: ``REGISTRY#IMAGE:TAG``, or the path of a squashfs file.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.emit.artifact import Artifact, EmittedPlan, commented, stamp
from meshplan.planner.emit.gpu_checks import gpu_checks
from meshplan.planner.emit.hosts import HostPlacement, check_places, host_placements, is_contiguous, runs_by_type
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import readme, torchrun
from meshplan.planner.emit.training.job import Job
from meshplan.planner.emit.training.request import TrainingRequest

TARGET = "slurm"
SBATCH_FILE = PurePosixPath("job.sbatch")
RANK_TASK_FILE = PurePosixPath("rank_task.sh")
RANKS_FILE = PurePosixPath("ranks.txt")
_IMAGE = re.compile(r"[\w./@#:+-]+")
_STAND_IN = "run with stand-ins for srun and scontrol; #SBATCH options from Slurm's manual, no parser"
_FOLDER = "The folder must be on a file system that every node sees."
_NOTE = f"Time limit, partition and account are not decided by the plan: pass them to sbatch. {_FOLDER}"
_TYPES_NOTE = (
    "The job is heterogeneous: each block of #SBATCH lines is for one node type. Where ##SBATCH stands, write how your "
    f"cluster finds these nodes (#SBATCH --partition or --constraint), with time limit and account. {_FOLDER}"
)
_CONTAINER_NOTE = (
    "The image is started by Slurm's plugin pyxis. This folder is mounted in it; name what else it needs (data, a "
    "checkout) in MESHPLAN_MOUNTS, as HOST_PATH:PATH,HOST_PATH:PATH."
)


def wrap(job: Job) -> EmittedPlan:
    """``job.sbatch`` around the framework's scripts.

    Raises:
        CannotExpressError: the framework's own starter cannot place single ranks, and the plan needs that.
        EmitError: no rank table, or a host without a name.
    """
    check_places(job.rank_table)
    if is_contiguous(job.rank_table) or job.request.host_pools:  # of several types: torchrun's refusal, if any
        launch = torchrun.launch_of(job)
        scripts = [artifact for artifact in torchrun.scripts(launch) if not torchrun.is_host_script(artifact)]
    else:
        launch, scripts = _one_task_a_rank(job)
    first = _TYPES_NOTE if job.request.host_pools else _NOTE
    notes = (first, *([_CONTAINER_NOTE] if job.request.image else []))
    text = _het_sbatch(launch) if job.request.host_pools else _sbatch(launch)
    sbatch = Artifact(path=SBATCH_FILE, content=text, executable=True)
    start = f"Start with `sbatch {SBATCH_FILE}` in this folder; what follows the file is handed to the program."
    overview = readme.overview(launch, start=start, notes=notes)
    return EmittedPlan(
        target=TARGET,
        artifacts=(overview, sbatch, *job.files, *scripts),
        parser_verified=job.verified,
        notes=(*job.notes, *notes),
    )


def features() -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return (
        Feature(
            name="rank_table",
            expressed_by="one torchrun per host; scattered ranks: srun --distribution=arbitrary with SLURM_HOSTFILE",
            verified_by=_STAND_IN,
        ),
        Feature(
            name="hosts",
            expressed_by="--nodes, --nodelist, --gpus-per-node, --exclusive; several node types: #SBATCH hetjob",
            verified_by=_STAND_IN,
        ),
        Feature(
            name="configuration", expressed_by="the files of --framework, unchanged", verified_by="as the framework's"
        ),
    )


def _one_task_a_rank(job: Job) -> tuple[torchrun.Launch, list[Artifact]]:
    if job.starter:
        raise CannotExpressError(
            job.target,
            "a rank table that returns to a host: its own starter counts ranks host by host",
            "the same plan with the ranks of each host consecutive (plan with the mapping 'identity')",
        )
    # Sorting by host keeps, within a host, the order of the ranks: local rank i is the host's i-th rank.
    order = sorted(range(len(job.rank_table)), key=lambda rank: (job.rank_table[rank][0], rank))
    placements = host_placements([job.rank_table[rank] for rank in order], job.request.hosts, target=TARGET)
    launch = torchrun.Launch(job=job, placements=placements)
    tasks = Artifact(path=RANK_TASK_FILE, content=_rank_task(job), executable=True)
    rows = Artifact(path=RANKS_FILE, content=_ranks_text(job, placements))
    return launch, [tasks, rows, torchrun.rank_table(launch)]


def _ranks_text(job: Job, placements: tuple[HostPlacement, ...]) -> str:
    devices = {placement.host: placement.devices for placement in placements}
    seen: dict[int, int] = {}
    lines = []
    for rank, (host, _) in enumerate(job.rank_table):
        local_rank = seen.get(host, 0)
        seen[host] = local_rank + 1
        lines.append(f"{rank} {host} {local_rank} {','.join(map(str, devices[host]))}\n")
    head = commented((*stamp(job.request.plan, job.verified), "rank host local_rank devices of the host's ranks"))
    return head + "".join(lines)


def _rank_task(job: Job) -> str:
    return (
        "#!/usr/bin/env bash\n"
        + commented(stamp(job.request.plan, job.verified))
        + _RANK_TASK.format(
            ranks_file=RANKS_FILE,
            world_size=job.request.world_size,
            environment=torchrun.environment_text(job.environment),
        )
        + job.program
        + _RANK_CHECKS.format(gpu_checks=gpu_checks(job.request.device))
    )


def enroot_image(image: str) -> str:
    """The name of an image as enroot writes it: a registry ends with ``#``.

    >>> enroot_image("nvcr.io/nvidia/pytorch:25.06-py3")
    'nvcr.io#nvidia/pytorch:25.06-py3'
    >>> enroot_image("/images/pytorch.sqsh")
    '/images/pytorch.sqsh'

    Raises:
        EmitError: it is no name of an image.
    """
    if not _IMAGE.fullmatch(image):
        raise EmitError(f"--image {image!r} is no name of an image; use letters, digits and ._:/@#+-")
    registry, slash, rest = image.partition("/")
    has_registry = bool(slash) and ("." in registry or ":" in registry or registry == "localhost")
    return f"{registry}#{rest}" if has_registry and "#" not in image and not image.startswith(".") else image


def _sbatch(launch: torchrun.Launch) -> str:
    request = launch.job.request
    by_host = sorted(launch.placements, key=lambda placement: placement.host)
    most_devices = request.devices_per_host or 1 + max(max(placement.devices) for placement in by_host)
    options = [
        f"--job-name=meshplan-{request.plan.plan_id}",
        f"--nodes={len(by_host)}",
        f"--gpus-per-node={most_devices}",
        "--exclusive",
        "--mem=0",
    ]
    if request.hosts:
        options.append("--nodelist=" + ",".join(placement.hostname for placement in by_host))
    contiguous = is_contiguous(launch.job.rank_table)
    names = " ".join(shell_word(placement.hostname) for placement in by_host) if request.hosts else ""
    return (
        "#!/usr/bin/env bash\n"
        + commented(options, sign="#SBATCH")
        + commented(stamp(request.plan, launch.job.verified))
        + _HEAD
        + _SBATCH.format(
            num_hosts=len(by_host),
            nodes=f"nodes=({names})"
            if names
            else 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            hosts=" ".join(str(placement.host) for placement in by_host),
            master_host=launch.job.rank_table[0][0],
            master_port=request.master_port,
            container=_container(request),
        )
        + (_ONE_AGENT_A_HOST if contiguous else _ONE_TASK_A_RANK).format(
            node_hosts=" ".join(str(placement.host) for placement in launch.placements),
            world_size=request.world_size,
            launch_script=torchrun.LAUNCH_SCRIPT,
            rank_task_file=RANK_TASK_FILE,
            ranks_file=RANKS_FILE,
        )
    )


def _container(request: TrainingRequest) -> str:
    return _CONTAINER.format(image=shell_word(enroot_image(request.image))) if request.image else _NONE


def _het_sbatch(launch: torchrun.Launch) -> str:
    """The job as one component for each run of hosts of a type."""
    request = launch.job.request
    runs = runs_by_type(launch.placements, request.host_pools)
    blocks, parts = [], []
    for number, (pool, run) in enumerate(runs):
        options = [f"--nodes={len(run)}", f"--gpus-per-node={pool.devices_per_host}", "--exclusive", "--mem=0"]
        first = [f"--job-name=meshplan-{request.plan.plan_id}"] if not number else ["hetjob"]
        asked = f"##SBATCH --partition=  # of nodes like {pool.node_type} ({pool.device.name})\n"
        blocks.append(commented([*first, *options], sign="#SBATCH") + asked)
        ranks = " ".join(str(placement.node_rank) for placement in run)
        parts.append(f"add_part {number} {ranks}  # {pool.node_type}\n")
    return (
        "#!/usr/bin/env bash\n"
        + "".join(blocks)
        + commented(stamp(request.plan, launch.job.verified))
        + _HEAD
        + _HET_SBATCH.format(
            parts="".join(parts),
            num_parts=len(parts),
            master_port=request.master_port,
            container=_container(request),
            launch_script=torchrun.LAUNCH_SCRIPT,
        )
    )


_HEAD = r"""# usage: sbatch job.sbatch [more flags of the program]
set -euo pipefail
fail() {
  printf 'job.sbatch: %s\n' "$1" >&2
  exit 1
}
# sbatch runs a copy of this file: the others lie where it was submitted.
here=${MESHPLAN_DIR:-${SLURM_SUBMIT_DIR:-$PWD}}
[[ -f $here/rank_table.json ]] || fail "no rank_table.json in $here; submit from this folder or set MESHPLAN_DIR"
"""

_SBATCH = r"""
{nodes}
[[ ${{#nodes[@]}} == {num_hosts} ]] || fail "the plan needs {num_hosts} nodes, the allocation has ${{#nodes[@]}}"
hosts=({hosts})  # host numbers of the rank table
declare -A node_of_host
for index in "${{!hosts[@]}}"; do
  node_of_host[${{hosts[index]}}]=${{nodes[index]}}
done
export MASTER_ADDR=${{MASTER_ADDR:-${{node_of_host[{master_host}]}}}}
export MASTER_PORT=${{MASTER_PORT:-{master_port}}}
SLURM_HOSTFILE=$(mktemp "$here/.hostfile.XXXXXX")
export SLURM_HOSTFILE
trap 'rm -f -- "$SLURM_HOSTFILE"' EXIT
{container}
"""

_HET_SBATCH = r"""parts=${{SLURM_HET_SIZE:-1}}
[[ $parts == {num_parts} ]] || fail "the plan needs a job of {num_parts} parts, this one has $parts"

MESHPLAN_NODE_RANKS=" "  # NODE=NODE_RANK of every node
first=""
sizes=()
add_part() {{  # number of the part, then the node ranks of its nodes
  local part=$1 list="SLURM_JOB_NODELIST_HET_GROUP_$1" nodes node
  shift
  mapfile -t nodes < <(scontrol show hostnames "${{!list}}")
  [[ ${{#nodes[@]}} == "$#" ]] || fail "part $part of the plan needs $# nodes, the allocation has ${{#nodes[@]}}"
  sizes+=("$#")
  for node in "${{nodes[@]}}"; do
    MESHPLAN_NODE_RANKS+="$node=$1 "
    [[ $1 != 0 ]] || first=$node
    shift
  done
}}
{parts}export MESHPLAN_NODE_RANKS
export MASTER_ADDR=${{MASTER_ADDR:-$first}}
export MASTER_PORT=${{MASTER_PORT:-{master_port}}}
{container}

# One step for each part, one agent on each node.
steps=()
for part in "${{!sizes[@]}}"; do
  srun --het-group="$part" --ntasks="${{sizes[part]}}" --ntasks-per-node=1 --cpu-bind=none --gpu-bind=none \
    --kill-on-bad-exit=1 ${{container[@]+"${{container[@]}}"}} bash -c '
      node_rank=${{MESHPLAN_NODE_RANKS#* "$SLURMD_NODENAME"=}}
      exec "$0/{launch_script}" "${{node_rank%% *}}" "$@"' "$here" "$@" &
  steps+=($!)
done
# A part that fails ends the others: they would wait for it.
for _ in "${{steps[@]}}"; do
  wait -n || {{
    status=$?
    kill "${{steps[@]}}" 2> /dev/null || true
    exit "$status"
  }}
done
"""

_NONE = "container=()"
_CONTAINER = (
    "container=(--container-image={image} "
    '"--container-mounts=$here:$here${{MESHPLAN_MOUNTS:+,$MESHPLAN_MOUNTS}}" "--container-workdir=$here")'
)

# Both forms list a host for each task, so that the order of the nodes is ours and not that of Slurm.
_ONE_AGENT_A_HOST = r"""
# One agent per host: task n runs on the host with node rank n.
for host in {node_hosts}; do
  printf '%s\n' "${{node_of_host[$host]}}"
done > "$SLURM_HOSTFILE"
srun --distribution=arbitrary --ntasks="${{#nodes[@]}}" --cpu-bind=none --gpu-bind=none --kill-on-bad-exit=1 \
  ${{container[@]+"${{container[@]}}"}} bash -c 'exec "$0/{launch_script}" "$SLURM_PROCID" "$@"' "$here" "$@"
"""

_ONE_TASK_A_RANK = r"""
# One task per rank: the ranks of a host are not consecutive, which torchrun cannot express.
while read -r rank host _; do
  [[ $rank =~ ^[0-9]+$ ]] || continue
  printf '%s\n' "${{node_of_host[$host]}}"
done < "$here/{ranks_file}" > "$SLURM_HOSTFILE"
srun --distribution=arbitrary --ntasks={world_size} --cpu-bind=none --gpu-bind=none --kill-on-bad-exit=1 \
  ${{container[@]+"${{container[@]}}"}} "$here/{rank_task_file}" "$@"
"""

_RANK_TASK = r"""# Runs in every task of srun: task r is rank r.
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
fail() {{
  printf 'rank_task.sh: %s\n' "$1" >&2
  exit 1
}}
: "${{SLURM_PROCID:?start this with srun, see job.sbatch}}" "${{MASTER_ADDR:?}}" "${{MASTER_PORT:?}}"
devices=""
while read -r row_rank _ row_local_rank row_devices; do
  if [[ $row_rank == "$SLURM_PROCID" ]]; then
    local_rank=$row_local_rank
    devices=$row_devices
  fi
done < "$here/{ranks_file}"
[[ -n $devices ]] || fail "no rank $SLURM_PROCID in {ranks_file}"
IFS=, read -r -a host_devices <<< "$devices"
device_list=("${{host_devices[local_rank]}}")
hostname=$(hostname)
export CUDA_VISIBLE_DEVICES=$devices  # local rank i runs on the i-th of these
export RANK=$SLURM_PROCID LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=${{#host_devices[@]}} WORLD_SIZE={world_size}
{environment}
"""

_RANK_CHECKS = r"""
check_gpus() {{
{gpu_checks}
  return 0
}}
[[ ${{MESHPLAN_SKIP_CHECKS:-0}} == 1 ]] || check_gpus
exec "${{PYTHON:-python}}" "${{program[@]}}" "$@"
"""
