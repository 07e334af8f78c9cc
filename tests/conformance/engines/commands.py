"""The command that a launcher would start one node of a worker with."""

from __future__ import annotations

from meshplan.planner.emit.serving.job import PoolProgram, Template

VALUES = {"port": "8100", "head": "10.0.0.1", "own": "10.0.0.1", "files": "/files", "mpi_hosts": "a:8,b:8"} | {
    f"{name}_port": str(20000 + offset) for offset, name in enumerate(("internal", "rpc", "side", "bootstrap"))
}


def command_of(program: PoolProgram, node_rank: int = 0) -> list[str]:
    """The whole command of node ``node_rank`` with addresses and ports filled in."""
    values = {**VALUES, "node_rank": str(node_rank)}
    arguments = program.command(head=node_rank == 0)
    return [argument.filled(values) if isinstance(argument, Template) else argument for argument in arguments]
