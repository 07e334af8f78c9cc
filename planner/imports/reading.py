"""What a configuration states: values, the flags that state them, what was assumed, what was not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshplan.catalogs.errors import Problem
from meshplan.planner.emit.terms import Arguments, ReadBack
from meshplan.planner.imports.own_servers import OwnServers

# What emitted folders hand to training scripts: every choice of the plan.
OUR_FILE = "training_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A value that nothing in the input states.

    Args:
        term: our name.
        value: what is taken.
        why: the framework's default, or what it follows from.
    """

    term: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher states about processes.

    Args:
        program: script or module, and its arguments; empty where the input is a file of flags.
        options: options of the launcher itself, dashes only.
        launcher: torchrun, deepspeed or accelerate; empty for others.
        num_hosts: None where it is not stated.
        devices_per_host: None where it is not stated.
        num_devices: all of them; None where that is not known.
        takes_all: a host starts a process for each of its devices, however many these are.
        problems: two launchers that disagree, values that are no numbers.
    """

    program: tuple[str, ...] = ()
    options: Arguments = field(default_factory=dict)
    launcher: str = ""
    num_hosts: int | None = None
    devices_per_host: int | None = None
    num_devices: int | None = None
    takes_all: bool = False
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLoad:
    """The load that a benchmark sends.

    Args:
        workload: keys of a serving spec's ``workload``.
        said_by: these keys → what states them.
        left_out: what has no key there.
    """

    workload: Mapping[str, Any]
    said_by: Mapping[str, str]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a source reads.

    Args:
        arguments: flags of the program → values; empty for a document alone.
        document: a configuration file as dotted keys; empty where there is none.
        launch: see :class:`Launch`.
        known: what meshplan's own ``training_config.json`` states, by term.
        loose: arguments that belong to no flag.
        num_replicas: how often a manifest starts the command.
        servers: what ``workers.txt`` of ours says of them.
        load: what a benchmark beside a server sends.
    """

    arguments: Arguments = field(default_factory=dict)
    document: Arguments = field(default_factory=dict)
    launch: Launch = field(default_factory=Launch)
    known: Mapping[str, Any] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    num_replicas: int = 1
    servers: OwnServers | None = None
    load: StatedLoad | None = None


@dataclass(slots=True)
class Reading:
    """What one source states; the reader of each framework fills it.

    Args:
        source: name in the registry.
        target: ``constraints.target`` of the spec.
        kind: ``training`` or ``serving``.
        launch: processes.
        values: by term.
        source_flags: by term, the arguments that state it.
        assumed: values that nothing states.
        unread: arguments that no table knows, as written.
        idle: flags on which no plan depends.
        left_out: what is understood and has no field in a spec.
        problems: contradictions, and values that cannot be meant.
        workload: keys of a serving spec's ``workload`` that a benchmark states.
        model: name or path as written; empty where only sizes are known.
        model_arguments: flags that describe the model, to find it by.
        num_positions: tokens that the model is built to read, 0 where nothing states it; to choose among models of
            the same sizes.
    """

    source: str
    target: str
    launch: Launch
    kind: str = "training"
    values: dict[str, Any] = field(default_factory=dict)
    source_flags: dict[str, str] = field(default_factory=dict)
    assumed: list[Assumption] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    workload: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    model_arguments: Arguments = field(default_factory=dict)
    num_positions: int = 0

    def take(self, read: ReadBack) -> None:
        """Values of a mapping table; a different value from another table is a contradiction."""
        for term, value in read.values.items():
            before = self.values.get(term)
            if before is not None and before != value:
                self.report(
                    term, f"{read.source_flags[term]} says {value}, {self.source_flags[term]} says {before}; keep one"
                )
            else:
                self.values[term] = value
                self.source_flags[term] = read.source_flags[term]
        self.problems += read.problems

    def assume(self, term: str, value: Any, why: str) -> Any:
        """Set ``value`` where nothing states another; returns what holds."""
        if term not in self.values:
            self.values[term] = value
            self.assumed.append(Assumption(term=term, value=value, why=why))
        return self.values[term]

    def report(self, path: str, message: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(path=path, message=message))


def as_written(key: str, value: Any) -> str:
    """A flag or key with its value, for lists of what was not read."""
    return f"{key} {value}".strip() if key.startswith("-") else f"{key}: {value}"


def with_dashes(arguments: Arguments) -> dict[str, Any]:
    """Long flags spelled with dashes, for programs that take underscores as well."""
    return {flag.replace("_", "-") if flag.startswith("--") else flag: value for flag, value in arguments.items()}
