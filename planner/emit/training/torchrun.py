"""Launch scripts for any program that torchrun starts: one common script, one small script per host, a rank table.

The rendezvous is static with an explicit node rank: with the c10d rendezvous torchrun drops ``--node-rank`` without a
word, and a planned placement would be lost. Every host looks up its devices in ``hosts.txt``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.emit.artifact import Artifact, commented, stamp, stamp_fields
from meshplan.planner.emit.gpu_checks import gpu_checks
from meshplan.planner.emit.hosts import MAX_HOST_SCRIPTS, HostPlacement, host_placements, runs_by_type
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.text import MANIFEST_CHECK
from meshplan.planner.emit.training.job import Job

LAUNCH_SCRIPT = PurePosixPath("launch.sh")
HOST_SCRIPT = "launch_host_{}.sh"
HOSTS_FILE = PurePosixPath("hosts.txt")
RANK_TABLE_FILE = PurePosixPath("rank_table.json")
NO_HOSTNAME = "-"
LOCAL_HOST = "127.0.0.1"

RANK_TABLE = Feature(
    name="rank_table",
    expressed_by="torchrun --node-rank, --nproc-per-node and CUDA_VISIBLE_DEVICES on each host",
    verified_by="torchrun's own parser and agents; other tables are refused",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One job on its hosts.

    Args:
        job: what runs.
        placements: hosts by node rank.
    """

    job: Job
    placements: tuple[HostPlacement, ...]


def launch_of(job: Job) -> Launch:
    """``job`` on the hosts of its rank table.

    Raises:
        CannotExpressError: torchrun has no flags for this rank table.
        EmitError: no rank table, or a host without a name.
    """
    return Launch(job=job, placements=host_placements(job.rank_table, job.request.hosts, target=job.target))


def scripts(launch: Launch) -> tuple[Artifact, ...]:
    """``launch.sh``, ``hosts.txt``, ``launch_host_NNN.sh`` (up to :data:`MAX_HOST_SCRIPTS`), rank table."""
    files = [
        Artifact(path=LAUNCH_SCRIPT, content=_launch_script(launch), executable=True),
        Artifact(path=HOSTS_FILE, content=_hosts_text(launch)),
        rank_table(launch),
    ]
    if len(launch.placements) <= MAX_HOST_SCRIPTS:
        files += [_host_script(launch, placement) for placement in launch.placements]
    return tuple(files)


def rank_table(launch: Launch) -> Artifact:
    """``rank_table.json``: (host, device) of each rank."""
    return Artifact(path=RANK_TABLE_FILE, content=_rank_table_text(launch))


def is_host_script(artifact: Artifact) -> bool:
    """Whether it is the script of one host, which no orchestrator needs."""
    return artifact.path.match(HOST_SCRIPT.format("*"))


def _hosts_text(launch: Launch) -> str:
    types = (
        f"node rank{'s' if len(run) > 1 else ''} {_span(run)}: {pool.node_type} ({pool.device.name})"
        for pool, run in runs_by_type(launch.placements, launch.job.request.host_pools)
    )
    columns = "node_rank hostname devices (one process each)"
    head = commented((*stamp(launch.job.request.plan, launch.job.verified), *types, columns))
    rows = (
        f"{placement.node_rank} {placement.hostname or NO_HOSTNAME} {','.join(map(str, placement.devices))}\n"
        for placement in launch.placements
    )
    return head + "".join(rows)


def _span(run: Sequence[HostPlacement]) -> str:
    """Consecutive node ranks, as text."""
    first, last = run[0].node_rank, run[-1].node_rank
    return str(first) if first == last else f"{first} to {last}"


def _rank_table_text(launch: Launch) -> str:
    """(host, device) of each rank, and in which order the parallel dimensions count the ranks."""
    table = launch.job.request.plan.rank_table or ()
    rows = ",\n    ".join(json.dumps(list(place)) for place in table)
    fields = {
        **stamp_fields(launch.job.request.plan, launch.job.verified),
        "world_size": len(table),
        "rank_order": list(launch.job.rank_order),
        "hosts": [placement.hostname or None for placement in launch.placements],
    }
    head = json.dumps(fields, indent=2, ensure_ascii=True)
    return head.removesuffix("\n}") + f',\n  "rank_table": [\n    {rows}\n  ]\n}}\n'


def _host_script(launch: Launch, placement: HostPlacement) -> Artifact:
    name = f" ({placement.hostname})" if placement.hostname else ""
    content = (
        "#!/usr/bin/env bash\n"
        + commented(stamp(launch.job.request.plan, launch.job.verified))
        + f"# Run this on host {placement.host}{name}: ranks {placement.first_rank} to "
        f"{placement.first_rank + len(placement.devices) - 1}.\n"
        "set -euo pipefail\n"
        f'exec "$(dirname -- "${{BASH_SOURCE[0]}}")/{LAUNCH_SCRIPT}" {placement.node_rank} "$@"\n'
    )
    return Artifact(
        path=PurePosixPath(HOST_SCRIPT.format(f"{placement.node_rank:03d}")), content=content, executable=True
    )


def master_address(launch: Launch) -> str:
    """Where the first host is unless MASTER_ADDR says so; empty where only the user knows."""
    return launch.placements[0].hostname or (LOCAL_HOST if len(launch.placements) == 1 else "")


def _launch_script(launch: Launch) -> str:
    master = master_address(launch)
    address = (
        f"export MASTER_ADDR=${{MASTER_ADDR:-{shell_word(master)}}}"
        if master
        else ': "${MASTER_ADDR:?set MASTER_ADDR to the name of the first host}"\nexport MASTER_ADDR'
    )
    return (
        "#!/usr/bin/env bash\n"
        + commented(stamp(launch.job.request.plan, launch.job.verified))
        + _PROLOGUE.format(
            hosts_file=HOSTS_FILE,
            manifest_check=MANIFEST_CHECK,
            master_address=address,
            master_port=launch.job.request.master_port,
            environment=environment_text(launch.job.environment),
        )
        + launch.job.program
        + _CHECKS.format(
            gpu_checks=_gpu_checks(launch),
            starter_check=_TORCHRUN_CHECK if not launch.job.starter else ":  # the starter looks for itself",
        )
        + _COUNTS.format(num_hosts=len(launch.placements), world_size=launch.job.request.world_size)
        + (launch.job.starter or _START)
    )


def _gpu_checks(launch: Launch) -> str:
    """Checks of a host's GPUs; where hosts are of several types, of the type that the node rank belongs to."""
    request = launch.job.request
    if not request.host_pools:
        return gpu_checks(request.device)
    cases = "".join(
        f"  {'|'.join(str(placement.node_rank) for placement in run)})  # {pool.node_type}\n"
        f"{gpu_checks(pool.device)}\n  ;;\n"
        for pool, run in runs_by_type(launch.placements, request.host_pools)
    )
    return f"  case $node_rank in\n{cases}  esac"


def environment_text(environment: Mapping[str, str | None]) -> str:
    """Bash that sets and unsets the variables of every rank."""
    lines = [
        f"unset {name}" if value is None else f"export {name}={shell_word(value)}"
        for name, value in environment.items()
    ]
    return "\n".join(lines) if lines else "# no variable needs a value"


_PROLOGUE = r"""# usage: launch.sh NODE_RANK [more flags of the program]
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
fail() {{
  printf 'launch.sh: %s\n' "$1" >&2
  exit 1
}}

{manifest_check}
[[ ${{1:-}} =~ ^[0-9]+$ ]] || fail "usage: launch.sh NODE_RANK [more flags]; node ranks are in {hosts_file}"
node_rank=$1
shift
devices=""
while read -r row_rank row_host row_devices; do
  if [[ $row_rank == "$node_rank" ]]; then
    hostname=$row_host
    devices=$row_devices
  fi
done < "$here/{hosts_file}"
[[ -n $devices ]] || fail "no node rank $node_rank in {hosts_file}"
IFS=, read -r -a device_list <<< "$devices"

# --- where, and with which variables ------------------------------------------------------------------------------
{master_address}
export MASTER_PORT=${{MASTER_PORT:-{master_port}}}
export CUDA_VISIBLE_DEVICES=$devices  # local rank i runs on the i-th of these
{environment}
"""

_CHECKS = r"""
# --- checks before the start (MESHPLAN_SKIP_CHECKS=1 skips them) --------------------------------------------------
check_gpus() {{
{gpu_checks}
  return 0
}}
check_master() {{
  [[ $node_rank != 0 ]] || return 0
  local answer
  # The port opens when node rank 0 starts: a refused connection still proves that the host answers.
  answer=$(timeout 10 bash -c 'exec 3<> "/dev/tcp/$1/$2"' _ "$MASTER_ADDR" "$MASTER_PORT" 2>&1) && return 0
  [[ $answer == *refused* ]] || fail "cannot reach MASTER_ADDR=$MASTER_ADDR port $MASTER_PORT: ${{answer:-no answer}}"
}}
if [[ ${{MESHPLAN_SKIP_CHECKS:-0}} != 1 ]]; then
  {starter_check}
  check_gpus
  check_master
fi
"""

_TORCHRUN_CHECK = (
    'command -v "${TORCHRUN:-torchrun}" > /dev/null || fail "torchrun is not on the PATH (or set TORCHRUN)"'
)


_COUNTS = r"""
num_hosts={num_hosts}
world_size={world_size}
"""

_START = r"""exec "${TORCHRUN:-torchrun}" \
  --nnodes "$num_hosts" \
  --node-rank "$node_rank" \
  --nproc-per-node "${#device_list[@]}" \
  --rdzv-backend static \
  --master-addr "$MASTER_ADDR" \
  --master-port "$MASTER_PORT" \
  --max-restarts 0 \
  "${program[@]}" "$@"
"""
