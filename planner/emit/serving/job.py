"""What a serving engine hands to a launcher: its commands, with placeholders for what only the launcher knows.

An engine (:mod:`.vllm`, :mod:`.sglang`, :mod:`.trtllm`) makes a :class:`ServingJob`. :mod:`.script` starts it from
scripts; the orchestrators (LeaderWorkerSet, KServe, Dynamo, Ray, SkyPilot) put the same commands into their documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshplan.planner.emit.artifact import Artifact, ParserVerified
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.serving.problem.config import Pool, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """An argument that the launcher completes.

    Args:
        text: with placeholders: ``{port}`` of the worker's server, ``{head}`` (address of its first host), ``{own}``
            (address of this host), ``{node_rank}``, ``{mpi_hosts}`` (``host:devices`` of all its hosts), further ports
            of the worker (``{internal_port}``, ``{rpc_port}``, ``{side_port}``, ``{bootstrap_port}``), or, for a
            router, ``{bootstrap_port_N}`` of prefill worker N.
    """

    text: str

    def filled(self, values: Mapping[str, str]) -> str:
        """The argument with every placeholder replaced."""
        return self.text.format_map(values)


# Where servers and routers listen.
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 - other hosts must reach them
HEALTH_PATH = "/health"  # answers 200 when a server is ready; the same in vLLM, SGLang and TensorRT-LLM
Argument = str | Template
Flags = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProgram:
    """How the workers of one pool are started.

    Args:
        name: of the pool, for files and objects.
        pool: the choices.
        num_nodes: hosts that one worker spans.
        flags: what the plan decides: (flag,) or (flag, value), the same on every node.
        before: arguments before the flags, on the head node.
        head: arguments after the flags that say which node this is, on the head node.
        follower: the same on the other nodes; empty where the head node starts them.
        environment: variables of every node.
    """

    name: str
    pool: Pool
    num_nodes: int
    flags: Flags
    before: tuple[Argument, ...]
    head: tuple[Argument, ...]
    follower: tuple[Argument, ...] = ()
    environment: Mapping[str, Argument]

    @property
    def arguments_file(self) -> PurePosixPath:
        """File with the flags."""
        return PurePosixPath(f"{self.name}_args.txt")

    def command(self, *, head: bool) -> tuple[Argument, ...]:
        """The whole command of a node."""
        flags = tuple(part for flag in self.flags for part in flag)
        return (*self.before, *flags, *(self.head if head else self.follower))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProgram:
    """What clients talk to where there are several workers.

    Args:
        command: program and arguments.
        file: name and text of a configuration that the command reads; None for none.
        verified: parser that checked the arguments; None where none has.
    """

    command: tuple[Argument, ...]
    file: tuple[str, Template] | None = None
    verified: ParserVerified | None = None


RouterOf = Callable[[Mapping[Role, Sequence[Argument]]], RouterProgram]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """One serving plan as commands of an engine.

    Args:
        target: the engine's name in the registry.
        request: plan, model and hosts.
        verified: parser that checked the flags; None where none has.
        programs: pools in the plan's order.
        router: addresses of the workers (``host:port``) by role → router; None where one worker serves clients itself.
        files: what the commands read, in addition to the argument files.
        notes: what the user should know before launching.
    """

    target: str
    request: ServingRequest
    verified: ParserVerified | None
    programs: tuple[PoolProgram, ...]
    router: RouterOf | None
    files: tuple[Artifact, ...] = ()
    notes: tuple[str, ...] = ()
