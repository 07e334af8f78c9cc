"""Which rank this process is, from what torchrun, Slurm or MPI put into its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.errors import ProfileError

DEFAULT_PORT = 29_500
# Names and brackets of numbers in turn, up to a comma outside brackets or the end.
_FIRST_HOST = re.compile(r"([^,\[\]]+(?:\[[^,\[\]-][^\[\]]*\][^,\[\]]*)*)(?:,|\Z)")
_BRACKETS = re.compile(r"\[([^,\[\]-]+)[^\[\]]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """A process among the others.

    Args:
        rank: 0 … world_size − 1.
        world_size: number of processes.
        local_rank: number of the process on its host, which is the number of its device.
        master_address: host of rank 0.
        master_port: where rank 0 listens.
        launcher: which of the dialects was found.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    launcher: str


# (launcher, rank, world size, local rank), in the order in which they are looked for: torchrun inside a Slurm job
# counts, not the job.
_DIALECTS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Read the launcher's variables.

    Raises:
        ProfileError: none or half of them are there, or they contradict each other.
    """
    for launcher, rank_name, size_name, local_name in _DIALECTS:
        if rank_name in environ and size_name in environ:
            rank, size = _number(environ, rank_name), _number(environ, size_name)
            if not 0 <= rank < size:
                raise ProfileError(f"{launcher}: {rank_name}={rank} is not below {size_name}={size}")
            return RankEnvironment(
                rank=rank,
                world_size=size,
                local_rank=_number(environ, local_name) if local_name in environ else 0,
                master_address=_master(environ, launcher),
                master_port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else DEFAULT_PORT,
                launcher=launcher,
            )
    raise ProfileError(
        "links are measured between processes, and no launcher's variables are set; start one process per device, e.g. "
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 "
        "-m meshplan.cli.main profile links --name CLUSTER, or srun/mpirun with MASTER_ADDR set"
    )


def first_slurm_host(nodes: str) -> str:
    """The first host of Slurm's compressed list: the first number of each of its brackets, up to the first comma.

    Raises:
        ProfileError: the list is empty, cut off, or begins with brackets.

    >>> first_slurm_host("gpu[003-007,9],cpu1"), first_slurm_host("a,b"), first_slurm_host("rack[1-2]-gpu[3-4]")
    ('gpu003', 'a', 'rack1-gpu3')
    """
    match = _FIRST_HOST.match(nodes)
    if match is None:
        raise ProfileError(f"cannot read the first host of SLURM_JOB_NODELIST={nodes!r}; set MASTER_ADDR")
    return _BRACKETS.sub(r"\1", match.group(1))


def _master(environ: Mapping[str, str], launcher: str) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in environ:
            return first_slurm_host(environ[name])
    raise ProfileError(f"{launcher}: MASTER_ADDR is not set; set it to the host of rank 0, on every rank")


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ProfileError(f"{name}={environ[name]!r} is not a whole number") from None
