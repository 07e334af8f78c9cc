"""Scripts that start a serving plan without an orchestrator: ``launch.sh HOST`` on every host, ``router.sh`` on one.

``workers.txt`` lists which share of which worker runs where; one flag file per pool holds the arguments. Values of the
user never become shell text: they are read from files line by line, or quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshplan.catalogs.constants.machines.device_shares import DeviceShare, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import MigProfile
from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.emit.artifact import Artifact, commented, stamp
from meshplan.planner.emit.gpu_checks import gpu_checks, mig_checks, mig_uuids
from meshplan.planner.emit.hosts import MAX_HOST_SCRIPTS
from meshplan.planner.emit.serving.hosts import Worker, place
from meshplan.planner.emit.serving.job import HEALTH_PATH, Argument, PoolProgram, RouterProgram, ServingJob, Template
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.text import MANIFEST_CHECK
from meshplan.planner.serving.problem.config import Role

LAUNCH_SCRIPT = PurePosixPath("launch.sh")
ROUTER_SCRIPT = PurePosixPath("router.sh")
WORKERS_FILE = PurePosixPath("workers.txt")
HOST_SCRIPT = "launch_host_{:03d}.sh"
# Ports: a block for each worker of a host, far from each other so that data-parallel ranks may count on from there.
WORKER_PORT = 8100
_INTERNAL_PORT = 20000
_PORT_BLOCK = 400
_SIDE_OFFSET, _RPC_OFFSET, _BOOTSTRAP_OFFSET = 10, 1, 390


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLaunch:
    """One serving job on its hosts.

    Args:
        job: what runs.
        workers: where; in the order of the pools.
    """

    job: ServingJob
    workers: tuple[Worker, ...]

    @property
    def num_hosts(self) -> int:
        """Hosts in use."""
        return 1 + max(node.host for worker in self.workers for node in worker.nodes)

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return sum(len(node.devices) for worker in self.workers for node in worker.nodes)

    def program(self, worker: Worker) -> PoolProgram:
        """How a worker is started."""
        return self.job.programs[worker.pool]

    def ordinal(self, worker: Worker) -> int:
        """How many workers before it share one of its hosts: workers of a host need ports of their own."""
        hosts = {node.host for node in worker.nodes}
        return self.job.request.workers_beside + sum(
            any(node.host in hosts for node in other.nodes) for other in self.workers if other.index < worker.index
        )

    def port(self, worker: Worker) -> int:
        """Port of a worker's server; the clients' port where there is no router."""
        return WORKER_PORT + self.ordinal(worker) if self.job.router is not None else self.job.request.port


def launch_of(job: ServingJob) -> ServingLaunch:
    """``job`` on its hosts.

    Raises:
        CannotExpressError: workers are not split evenly over hosts.
        EmitError: the rank table does not fit, or a host has no name.
    """
    return ServingLaunch(job=job, workers=place(job.request, target=job.target))


def scripts(launch: ServingLaunch) -> tuple[Artifact, ...]:
    """Flag files, ``workers.txt``, ``launch.sh``, ``router.sh`` (where there is one), one script per host."""
    files = [*launch.job.files, *(argument_file(launch.job, program) for program in launch.job.programs)]
    files.append(Artifact(path=WORKERS_FILE, content=_workers_text(launch)))
    files.append(Artifact(path=LAUNCH_SCRIPT, content=_launch_text(launch), executable=True))
    router = router_of(launch)
    if router is not None:
        files.append(Artifact(path=ROUTER_SCRIPT, content=_router_text(launch, router), executable=True))
    if launch.num_hosts <= MAX_HOST_SCRIPTS:
        files += [_host_script(launch, host) for host in range(launch.num_hosts)]
    return tuple(files)


def argument_file(job: ServingJob, program: PoolProgram) -> Artifact:
    """The flags that the plan decides: one per line, the first space ends the flag."""
    head = (*stamp(job.request.plan, job.verified), "One flag per line; what follows its first space is the value.")
    text = commented(head) + "".join(" ".join(flag) + "\n" for flag in program.flags)
    return Artifact(path=program.arguments_file, content=text)


def router_of(launch: ServingLaunch) -> RouterProgram | None:
    """The router over the addresses that the hosts turn out to have."""
    if launch.job.router is None:
        return None
    addresses: dict[Role, list[Argument]] = {}
    for worker in launch.workers:
        role = launch.program(worker).pool.role
        address = Template(text=f"{{address_{worker.nodes[0].host}}}:{launch.port(worker)}")
        addresses.setdefault(role, []).append(address)
    return launch.job.router(addresses)


def bootstrap_ports(launch: ServingLaunch) -> list[int]:
    """Bootstrap port of each prefill worker."""
    workers = (worker for worker in launch.workers if launch.program(worker).pool.role is Role.PREFILL)
    return [_internal_port(launch, worker) + _BOOTSTRAP_OFFSET for worker in workers]


def _internal_port(launch: ServingLaunch, worker: Worker) -> int:
    return _INTERNAL_PORT + _PORT_BLOCK * launch.ordinal(worker)


def _workers_text(launch: ServingLaunch) -> str:
    request = launch.job.request
    names, pools = request.hosts, request.config.pools
    shares = {pool.share for pool in pools if pool.share is not None}
    caps = {pool.power_cap_w for pool in pools if pool.power_cap_w is not None}
    head = (
        *stamp(request.plan, launch.job.verified),
        *(f"host {number}: {name}" for number, name in enumerate(names)),
        *map(_share_line, shares),
        *(f"power limit: {cap:g} W" for cap in sorted(caps)),
        f"{launch.num_devices} devices",
        "worker role host node_rank head_host port internal_port devices",
    )
    rows = (
        f"{worker.index} {launch.program(worker).name} {node.host} {rank} {worker.nodes[0].host} "
        f"{launch.port(worker)} {_internal_port(launch, worker)} {','.join(map(str, node.devices))}\n"
        for worker in launch.workers
        for rank, node in enumerate(worker.nodes)
    )
    return commented(head) + "".join(rows)


def _share_line(share: DeviceShare) -> str:
    """How the workers' devices are cut or shared; :mod:`meshplan.planner.imports.own_servers` reads it."""
    return (
        f"device share: mig {share.name}" if isinstance(share, MigProfile) else f"device share: mps {share.instances}"
    )


def _host_script(launch: ServingLaunch, host: int) -> Artifact:
    content = (
        "#!/usr/bin/env bash\n"
        + commented(stamp(launch.job.request.plan, launch.job.verified))
        + f'set -euo pipefail\nexec "$(dirname -- "${{BASH_SOURCE[0]}}")/{LAUNCH_SCRIPT}" {host} "$@"\n'
    )
    return Artifact(path=PurePosixPath(HOST_SCRIPT.format(host)), content=content, executable=True)


_VARIABLES = {
    "port": "$port",
    "head": "$head",
    "own": "$own",
    "node_rank": "$node_rank",
    "mpi_hosts": "$mpi_hosts",
    "files": "$here",
    "router_file": "$router_file",
    "internal_port": "$internal_port",
    "rpc_port": f"$((internal_port + {_RPC_OFFSET}))",
    "side_port": f"$((internal_port + {_SIDE_OFFSET}))",
    "bootstrap_port": f"$((internal_port + {_BOOTSTRAP_OFFSET}))",
}
_PLAIN = re.compile(r"[\w@%+=:,./-]+")


def _shell(argument: Argument, values: Mapping[str, str]) -> str:
    """An argument as shell text: quoted, or with the variables that fill its placeholders."""
    if isinstance(argument, Template):
        return f'"{argument.filled(values)}"'
    return argument if _PLAIN.fullmatch(argument) else shell_word(argument)


def _router_values(launch: ServingLaunch) -> dict[str, str]:
    addresses = {f"address_{host}": f"${{addresses[{host}]}}" for host in range(launch.num_hosts)}
    ports = {f"bootstrap_port_{number}": str(port) for number, port in enumerate(bootstrap_ports(launch))}
    return {**_VARIABLES, **addresses, **ports}


def _addresses_text(launch: ServingLaunch) -> str:
    """Bash that fills the array ``addresses``."""
    request = launch.job.request
    if request.hosts:
        return f"addresses=({' '.join(map(shell_word, request.hosts))})"
    if launch.num_hosts == 1:
        return 'read -r -a addresses <<< "${MESHPLAN_HOSTS:-127.0.0.1}"'
    return (
        f': "${{MESHPLAN_HOSTS:?set MESHPLAN_HOSTS to the addresses of the {launch.num_hosts} hosts, in order}}"\n'
        'read -r -a addresses <<< "$MESHPLAN_HOSTS"'
    )


def _launch_text(launch: ServingLaunch) -> str:
    share = launch.job.request.config.pools[0].share  # all pools have the same
    mig = share if isinstance(share, MigProfile) else None
    mps = share if isinstance(share, MpsShare) else None
    functions = "".join(_start_function(program) for program in launch.job.programs)
    return (
        "#!/usr/bin/env bash\n"
        + commented(stamp(launch.job.request.plan, launch.job.verified))
        + _PROLOGUE.format(
            workers_file=WORKERS_FILE,
            manifest_check=MANIFEST_CHECK,
            addresses=_addresses_text(launch),
            num_hosts=launch.num_hosts,
        )
        + functions
        + ("" if mig is None else mig_uuids(mig))
        + _CHECKS.format(gpu_checks=_gpu_checks(launch.job.request), program=_first_program(launch))
        + _START.format(
            health_path=HEALTH_PATH,
            visible=_VISIBLE if mig is None else _VISIBLE_INSTANCE,
            **_rounds(mps),
        )
    )


def _rounds(mps: MpsShare | None) -> dict[str, str]:
    """What lets the replicas of a device start one after the other; empty where each server has whole devices."""
    if mps is None:
        return dict.fromkeys(("open_round", "of_round", "close_round"), "")
    return {
        "open_round": _OPEN_ROUND.format(percentage=mps.thread_percentage, last=mps.instances - 1),
        "of_round": _OF_ROUND.format(replicas=mps.instances),
        "close_round": _CLOSE_ROUND,
    }


def _first_program(launch: ServingLaunch) -> str:
    return _shell(launch.job.programs[0].before[0], _VARIABLES)


def _gpu_checks(request: ServingRequest) -> str:
    """Bash that compares the GPUs of a worker with what its pool was planned for, by role."""
    branches = []
    config = request.config
    for name, pool in zip(config.pool_names, config.pools, strict=True):
        share = pool.share
        device = request.host_type(pool.node_type).device
        checks = mig_checks(share) if isinstance(share, MigProfile) else gpu_checks(device)
        branches.append(f"  {name})\n{checks}\n  ;;")
    return "\n".join(("  case $1 in", *branches, "  esac"))


def _start_function(program: PoolProgram) -> str:
    """Bash that fills ``command`` for one node of a worker, and exports what it needs."""
    environment = program.environment.items()
    exports = "".join(f"  export {name}={_shell(value, _VARIABLES)}\n" for name, value in environment)
    before = " ".join(_shell(argument, _VARIABLES) for argument in program.before)
    head = " ".join(_shell(argument, _VARIABLES) for argument in program.head)
    if program.num_nodes == 1:
        rest = f"  command+=({head})\n"
    elif program.follower:
        follower = " ".join(_shell(argument, _VARIABLES) for argument in program.follower)
        rest = f"  if (( node_rank == 0 )); then\n    command+=({head})\n  else\n    command+=({follower})\n  fi\n"
    else:
        # The head starts the processes of the other hosts.
        rest = f"  if (( node_rank > 0 )); then command=(); return; fi\n  command+=({head})\n"
    return (
        f"{program.name}_command() {{\n{exports}"
        f"  read_flags {program.arguments_file}\n"
        f'  command=({before} "${{flags[@]}}")\n{rest}}}\n'
    )


def _router_text(launch: ServingLaunch, router: RouterProgram) -> str:
    values = _router_values(launch)
    lines = [
        "#!/usr/bin/env bash\n" + commented(stamp(launch.job.request.plan, router.verified)),
        "# Start this on one host once the workers are up; clients talk to it.\nset -euo pipefail\n",
        _addresses_text(launch) + "\n",
        f'(( ${{#addresses[@]}} >= {launch.num_hosts} )) || {{ echo "router.sh: {launch.num_hosts} addresses are '
        'needed" >&2; exit 1; }\n',
    ]
    if router.file is not None:
        name, text = router.file
        lines.append(
            "folder=$(mktemp -d)\n"
            f'router_file="$folder/{name}"\n'
            f'cat > "$router_file" << MESHPLAN_END\n{text.filled(values)}MESHPLAN_END\n'
        )
    arguments: Sequence[str] = [_shell(argument, values) for argument in router.command]
    lines.append(f'exec {" ".join(arguments)} "$@"\n')
    return "".join(lines)


_PROLOGUE = r"""# usage: launch.sh HOST [more flags of every server]; HOST is a host number of {workers_file}
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
fail() {{
  printf 'launch.sh: %s\n' "$1" >&2
  exit 1
}}

{manifest_check}
[[ ${{1:-}} =~ ^[0-9]+$ ]] || fail "usage: launch.sh HOST [more flags]; host numbers are in {workers_file}"
host=$1
shift
(( host < {num_hosts} )) || fail "the plan has {num_hosts} host(s), numbered from 0"
{addresses}
(( ${{#addresses[@]}} >= {num_hosts} )) || fail "{num_hosts} host addresses are needed, there are ${{#addresses[@]}}"
own=${{addresses[host]}}
hostname=$own

read_flags() {{
  flags=()
  local line
  while IFS= read -r line; do
    [[ -n $line && $line != "#"* ]] || continue
    flags+=("${{line%% *}}")
    [[ $line != *" "* ]] || flags+=("${{line#* }}")
  done < "$here/$1"
}}

# --- the command of each role -------------------------------------------------------------------------------------
"""

_CHECKS = r"""
# --- checks before the start (MESHPLAN_SKIP_CHECKS=1 skips them) --------------------------------------------------
check_gpus() {{
{gpu_checks}
  return 0
}}
if [[ ${{MESHPLAN_SKIP_CHECKS:-0}} != 1 ]]; then
  command -v {program} > /dev/null || fail "{program} is not on the PATH"
fi
"""

_VISIBLE = "export CUDA_VISIBLE_DEVICES=$devices"
# A worker has one instance: devices is its number on the host.
_VISIBLE_INSTANCE = 'CUDA_VISIBLE_DEVICES=$(mig_uuids | sed -n "$((devices + 1))p"); export CUDA_VISIBLE_DEVICES'
# Replicas of a device start one after the other: a server measures what memory is free. In workers.txt devices are
# counted over all parts of a host.
_OPEN_ROUND = r"""command -v nvidia-cuda-mps-control > /dev/null || fail "nvidia-cuda-mps-control is not on the PATH"
if [[ -z ${{CUDA_MPS_PIPE_DIRECTORY:-}} ]]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY="$CUDA_MPS_PIPE_DIRECTORY"
  env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d || fail "the MPS daemon did not start"
  trap 'stop; echo quit | nvidia-cuda-mps-control > /dev/null || true' EXIT
fi
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}
for part in $(seq 0 {last}); do  # the first server of every device, then the second
"""
_OF_ROUND = r"""  (( devices % {replicas} == part )) || continue
  devices=$(( devices / {replicas} ))
"""
_CLOSE_ROUND = r"""waits=()
done
"""
_START = r"""
# --- start --------------------------------------------------------------------------------------------------------
logs=${{MESHPLAN_LOGS:-$here/logs}}
mkdir -p "$logs"
pids=()
waits=()
stop() {{
  (( ${{#pids[@]}} == 0 )) || kill "${{pids[@]}}" 2> /dev/null || true
}}
trap stop EXIT
trap 'exit 143' TERM INT
{open_round}while read -r worker role row_host node_rank head_host port internal_port devices <&3; do
  [[ $worker != "#"* && $row_host == "$host" ]] || continue
{of_round}  head=${{addresses[head_host]}}
  mpi_hosts=$(awk -v worker="$worker" -v list="${{addresses[*]}}" \
    'BEGIN {{ split(list, address, " ") }}
     $1 == worker {{ n = split($8, _, ","); printf "%s%s:%d", separator, address[$3 + 1], n; separator = "," }}' \
    "$here/workers.txt")
  IFS=, read -r -a device_list <<< "$devices"
  [[ ${{MESHPLAN_SKIP_CHECKS:-0}} == 1 ]] || check_gpus "$role"
  {visible}
  "${{role}}_command"
  (( ${{#command[@]}} > 0 )) || continue
  log="$logs/worker_${{worker}}_node_${{node_rank}}.log"
  "${{command[@]}}" "$@" > "$log" 2>&1 3<&- &
  pids+=($!)
  (( node_rank > 0 )) || waits+=("$! $port $log")
done 3< "$here/workers.txt"

# --- wait until the servers answer --------------------------------------------------------------------------------
deadline=$(( SECONDS + ${{MESHPLAN_READY_TIMEOUT_S:-3600}} ))
for wait_for in ${{waits[@]+"${{waits[@]}}"}}; do
  read -r pid port log <<< "$wait_for"
  until curl --silent --fail --max-time 5 --output /dev/null "http://127.0.0.1:$port{health_path}"; do
    kill -0 "$pid" 2> /dev/null || fail "the server of port $port ended; its log: $log"
    (( SECONDS < deadline )) || fail "the server of port $port does not answer; its log: $log"
    sleep 2
  done
  echo "port $port answers"
done
{close_round}echo "all workers of host $host are ready"
(( ${{#pids[@]}} > 0 )) || exit 0
wait -n "${{pids[@]}}" || true  # servers do not end by themselves
fail "a worker ended; logs are in $logs"
"""
