"""What a serving engine hands to a launcher: the words of its commands, with slots for what only the launcher knows.

An engine makes a :class:`ServingJob`; :mod:`.serving_script` starts it from scripts, the orchestrators (:mod:`.lws`,
:mod:`.kserve`, :mod:`.dynamo` …) put the same words into their documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.artifact import Artifact, ParserVerified
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.target import Feature
from meshplan.planner.serving.problem.config import Pool, Role
from meshplan.planner.serving.problem.engine_rules import EngineRules
from meshplan.planner.serving.problem.engines import PUBLISHED_SCHEMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A word that the launcher completes.

    Args:
        text: with ``{port}`` (of the worker's server), ``{head}`` (address of its first host), ``{own}`` (address of
            this host), ``{node_rank}``, ``{mpi_hosts}`` (``host:devices`` of all its hosts), a port of the worker's
            own (``internal``, ``rpc``, ``side``, ``bootstrap``: ``{side_port}``), or, for a router,
            ``{bootstrap_port_N}`` of prefill worker N.
    """

    text: str

    def filled(self, values: Mapping[str, str]) -> str:
        """The word with every slot replaced."""
        return self.text.format_map(values)


# Where servers and routers listen: they are to be reached from other hosts.
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104
Word = str | Slot
Flags = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProgram:
    """How the workers of one pool are started.

    Args:
        pool: the choices.
        num_nodes: hosts that one worker spans.
        flags: what the plan decides: (flag,) or (flag, value), the same on every node.
        before: words before the flags, on the head.
        head: words after the flags that say which node this is, on the head.
        follower: the same on the other nodes; empty where the head starts them.
        environment: variables of every node.
    """

    pool: Pool
    num_nodes: int
    flags: Flags
    before: tuple[Word, ...]
    head: tuple[Word, ...]
    follower: tuple[Word, ...] = ()
    environment: Mapping[str, Word]

    @property
    def name(self) -> str:
        """Short name for files and objects."""
        return self.pool.role.value

    @property
    def arguments_file(self) -> PurePosixPath:
        """File with the flags."""
        return PurePosixPath(f"{self.name}_args.txt")

    def words(self, *, head: bool) -> tuple[Word, ...]:
        """The whole command of a node."""
        flags = tuple(word for flag in self.flags for word in flag)
        return (*self.before, *flags, *(self.head if head else self.follower))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProgram:
    """What clients talk to where there are several workers.

    Args:
        words: command.
        file: name and text of a configuration that the command reads; None for none.
        verified: parser that judged the words; None where none has.
    """

    words: tuple[Word, ...]
    file: tuple[str, Slot] | None = None
    verified: ParserVerified | None = None


RouterOf = Callable[[Mapping[Role, Sequence[Word]]], RouterProgram]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """One serving plan as commands of an engine.

    Args:
        target: the engine's name in the registry.
        request: plan, model and hosts.
        verified: parser that judged the flags; None where none has.
        programs: pools in the plan's order.
        router: addresses of the workers (``host:port``) by role → router; None where one worker serves clients itself.
        health_path: URL path that answers 200 when a server is ready.
        files: what the commands read, beside the argument files.
        notes: what the user should know before launching.
    """

    target: str
    request: ServingRequest
    verified: ParserVerified | None
    programs: tuple[PoolProgram, ...]
    router: RouterOf | None
    health_path: str
    files: tuple[Artifact, ...] = ()
    notes: tuple[str, ...] = ()


def url(address: Word) -> Word:
    """HTTP address of a server."""
    return Slot(text=f"http://{address.text}") if isinstance(address, Slot) else f"http://{address}"


def above_one(flag: str, value: int) -> Mapping[str, str]:
    """A degree that the engine need not be told when it is 1."""
    return {flag: str(value)} if value > 1 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTerm:
    """How one term of a serving plan is said: a row of an engine's mapping table.

    Args:
        name: our term: a field of the pool's layout, limits or formats, or of the configuration.
        words: (request, pool) → the engine's flags and values ("" for a flag alone); empty where its default says it.
        said_by: the flags, for the support matrix.
        verified_by: what judged them.
    """

    name: str
    words: Callable[[ServingRequest, Pool], Mapping[str, str]]
    said_by: str
    verified_by: str


def flags_of(terms: Sequence[ServingTerm], request: ServingRequest, pool: Pool) -> Flags:
    """The flags of one pool, in the order of the table."""
    said: dict[str, str] = {}
    for term in terms:
        said.update(term.words(request, pool))
    return tuple((flag, value) if value else (flag,) for flag, value in said.items())


def term_rows(terms: Sequence[ServingTerm]) -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return tuple(Feature(name=term.name, expressed_by=term.said_by, verified_by=term.verified_by) for term in terms)


def refuse_serving(rules: EngineRules, request: ServingRequest) -> None:
    """Stop where the engine has no words for the plan.

    Raises:
        CannotExpressError: with what is wrong and the nearest that can be said.
    """
    config = request.config
    if config.engine != rules.name:
        raise CannotExpressError(
            rules.name,
            f"a plan for {config.engine}, whose times and limits are that engine's",
            f"target {config.engine}, or a plan with engine {rules.name}",
        )
    wrong = rules.broken(request.shape, config)
    if wrong:
        raise CannotExpressError(
            rules.name, "this configuration: " + "; ".join(wrong), f"what meshplan plan finds with engine {rules.name}"
        )


def one_scheme(rules: EngineRules, request: ServingRequest, pool: Pool) -> str | None:
    """The scheme that the engine has to make from a 16-bit checkpoint; None where the checkpoint holds the formats.

    Raises:
        CannotExpressError: the engine cannot make the formats itself.
    """
    formats = pool.quantization
    used = {formats.mlp, formats.attention}
    if request.shape.moe is not None:
        used.add(formats.experts)
    narrow = sorted(used - {"bf16", "fp16"})
    published = None if request.quantized_checkpoint is not None else PUBLISHED_SCHEMES.get(request.shape.family)
    if published is not None and published not in used:
        raise CannotExpressError(
            rules.name,
            f"{formats.label} from the published checkpoint, which holds {published}",
            f"a plan in {published}, or a checkpoint in 16 bits (quantized_checkpoint: false) or in the plan's formats",
        )
    if not narrow or all(request.is_quantized(scheme) for scheme in narrow):
        return None
    if len(used) > 1 or narrow[0] not in rules.online:
        raise CannotExpressError(
            rules.name,
            f"{formats.label} from a 16-bit checkpoint",
            "a checkpoint that holds these formats (quantized_checkpoint), or one of "
            + ", ".join(("bf16", *rules.online)),
        )
    return narrow[0]
