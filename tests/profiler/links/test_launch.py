"""Ranks from the variables of torchrun, MPI and Slurm."""

from __future__ import annotations

import pytest

from meshplan.catalogs.errors import ProfileError
from meshplan.profiler.links.launch import first_slurm_host, rank_environment

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[07-09,12]"}


@pytest.mark.parametrize(
    ("environ", "launcher", "address", "port"),
    [
        (TORCHRUN, "torchrun", "node0", 1234),
        (OPEN_MPI, "Open MPI", "node0", 29500),
        (SLURM, "Slurm", "gpu07", 29500),
        (SLURM | TORCHRUN, "torchrun", "node0", 1234),
    ],
)
def test_each_dialect(environ: dict[str, str], launcher: str, address: str, port: int) -> None:
    place = rank_environment(environ)
    assert (place.rank, place.world_size, place.local_rank) == (3, 8, 1)
    assert (place.launcher, place.master_address, place.master_port) == (launcher, address, port)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no launcher's variables are set.*torchrun"),
        ({"RANK": "0"}, "no launcher's variables"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (SLURM | {"SLURM_JOB_NODELIST": "[1-2]"}, "cannot read the first host"),
    ],
)
def test_what_is_missing_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        rank_environment(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("gpu[003-007,9],cpu1", "gpu003"),
        ("c1-[01-02],d", "c1-01"),
        # What stands behind the first brackets was left out, and nobody listened at the host that was named.
        ("rack[1-2]-gpu[3-4]", "rack1-gpu3"),
        ("gpu[1-3]-ib,gpu7-ib", "gpu1-ib"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "gpu[", "gpu[]", "gpu[1-2", "gpu]1", "[1-2]", ",a"])
def test_a_list_that_is_cut_off_is_refused(nodes: str) -> None:
    with pytest.raises(ProfileError, match="set MASTER_ADDR"):
        first_slurm_host(nodes)
