"""From files and command lines to what a source reads. Nothing that is read is ever run."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import Problem, SpecError, why
from meshplan.catalogs.untrusted.documents import read_text, require_plain
from meshplan.catalogs.untrusted.limits import MAX_YAML_BYTES
from meshplan.planner.core.reading.documents import parse_document
from meshplan.planner.core.reading.doors import hint_of, refuse_other
from meshplan.planner.emit.terms import Arguments, flattened
from meshplan.planner.emit.training.torchtitan import SUBCOMMAND
from meshplan.planner.imports.containers import commands_of, is_manifest, silent_images, task_of
from meshplan.planner.imports.launchers import read_launch, repeated_flags, split_options
from meshplan.planner.imports.own_servers import OwnServers, own_servers
from meshplan.planner.imports.reading import Assumption, Given, Launch, Reading
from meshplan.planner.imports.registry import SOURCES, source_of
from meshplan.planner.imports.shell import Script, Statement, read_script
from meshplan.planner.imports.sources.benchmarks import stated_load
from meshplan.planner.imports.spec import Answers, Imported, complete
from meshplan.planner.imports.wrappers import expanded, located, with_flags

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

# Why what was read is what it is.
_DEFAULT = "the script's own default; --env sets another"
_TWICE = "it stands there twice; the last one holds"
# Where a command names the configuration that it reads.
_CONFIGURATION_FLAGS = ("--config-file", "--deepspeed-config", "--deepspeed", "--job.config-file")
_READS_A_FILE = frozenset({"llamafactory-cli", "axolotl", "swift"})
_OURS = "plan_digest"
_MOST_LISTED = 5  # arguments of an unknown program, commands of a script; the last commands are the likelier ones
_DOCUMENTS = re.compile(r"^---\s*$", re.MULTILINE)
_OUTSIDE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]?)\b")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def import_command(
    inputs: Sequence[str],
    catalog: Catalog,
    answers: Answers,
    *,
    source: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Imported:
    """A spec of an imported configuration.

    Args:
        inputs: paths of files, or the words of one command (one word with blanks is split as a shell would).
        catalog: models and hardware to name things by.
        answers: what the input cannot state.
        source: name in the registry; found by the input where None.
        variables: values of shell variables from outside.

    Raises:
        SpecError: unreadable or contradictory, or something is missing; every problem at once.
    """
    return complete(read_inputs(inputs, source=source, variables=variables), answers, catalog)


def read_inputs(
    inputs: Sequence[str], *, source: str | None = None, variables: Mapping[str, str] | None = None
) -> Reading:
    """What one source states, before the catalog is asked."""
    given, notes, unknown, where = _given(inputs, source, variables or {})
    found = source_of(given, source)
    if found is None:
        missing = _missing_configuration(given)
        if missing:
            raise _refused(
                f"the command reads {missing!r}, which is not here: run this where it is, or give the file too"
            )
        known = "; ".join(f"{one.name}: {one.summary}" for one in SOURCES)
        raise _refused(f"{_unknown(given, where)} ({known}); name its kind with --from NAME")
    reading = found.read(given)
    if reading.kind == "serving" and given.load is not None:
        reading.workload |= given.load.workload
        reading.source_flags |= {f"workload.{name}": words for name, words in given.load.said_by.items()}
        reading.left_out += given.load.left_out
    reading.assumed += notes
    reading.unread = [where(entry) for entry in reading.unread]
    reading.problems = [_with_variable(one) for one in reading.problems]
    reading.unread += [f"{name} (a variable from outside or a substitution; set it with --env)" for name in unknown]
    return reading


def _unknown(given: Given, where: Callable[[str], str]) -> str:
    """What it was that no source knows, with the line where it stands."""
    words = given.launch.program
    if not words:
        return "no command stands here that starts a framework"
    flags = [where(word) for word in words[1:] if word.startswith("-")]
    arguments = f", nor its arguments ({', '.join(flags[:_MOST_LISTED])}{' …' if len(flags) > _MOST_LISTED else ''})"
    subcommands = itertools.takewhile(str.isalpha, words[1:])
    return f"{shlex.join([words[0], *subcommands])} is nothing that is known{arguments if flags else ''}"


def _with_variable(problem: Problem) -> Problem:
    """A value that only a shell knows can be stated."""
    found = _OUTSIDE.search(problem.message)
    if found is None or "--env" in problem.message:
        return problem
    return replace(problem, message=f"{problem.message}; --env {found[1]}=VALUE sets it")


def _missing_configuration(given: Given) -> str:
    """A configuration that the command names and that is not here; empty for none."""
    named = (given.launch.options.get(name) or _spelled(given.arguments, name) for name in _CONFIGURATION_FLAGS)
    files = (word for word in given.loose if word.endswith((".yaml", ".yml")))
    return next((str(value) for value in (*named, *files) if value and not _is_file(str(value))), "")


@dataclass(slots=True, kw_only=True)
class _Content:
    """What the named files hold, or the command that stands in their place.

    Args:
        text: of the last script, whose lines messages name.
        script: its statements.
        servers: what the files beside a launch script of ours say.
        deployed: commands of containers.
        documents: keys of configurations.
        known: choices out of a configuration of ours.
    """

    text: str = ""
    script: Script = field(default_factory=lambda: Script(statements=()))
    servers: OwnServers | None = None
    deployed: list[Statement] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)

    def add(self, path: Path, variables: Mapping[str, str]) -> None:
        """Take what one file holds.

        Raises:
            SpecError: it is no document that a framework reads, or its containers do not say what they run.
        """
        content = _read(path)
        if isinstance(content, str):
            self.text = content
            self.script, self.servers = _script(content, path.parent, variables)
        elif (task := task_of(content)) is not None:
            self.script = read_script(task[0], {**task[1], **variables})
        elif is_manifest(content):
            self.deployed += [
                Statement(line=1, words=one.words, num_hosts=one.num_hosts, num_replicas=one.num_replicas)
                for one in commands_of(content, variables)
            ]
            if not self.deployed and (images := silent_images(content)):
                raise _refused(f"no container says what it runs, and what its image starts is not known ({images})")
        elif _OURS in content and isinstance(content.get("config"), dict):
            choices = content["config"].items()
            self.known |= {name: value for name, value in choices if isinstance(value, str | int | bool)}
        else:
            refuse_other(content, "", name=str(path), means="what a framework reads")
            self.documents |= flattened(content)


def _given(
    inputs: Sequence[str], source: str | None, variables: Mapping[str, str]
) -> tuple[Given, list[Assumption], tuple[str, ...], Callable[[str], str]]:
    """Documents and command lines of everything that is named; and how a flag is told with its line."""
    found = _Content()
    are_files = bool(inputs) and all(_is_file(word) for word in inputs)
    folders = (Path(), *(Path(word).parent for word in inputs if are_files))
    for path in map(Path, inputs) if are_files else ():
        found.add(path, variables)
    if not are_files:
        found.script = _command(inputs, variables)
    script = replace(found.script, statements=tuple(expanded((*found.script.statements, *found.deployed), variables)))
    statement, notes = _statement(script, source, found.documents)
    words = statement.words if statement is not None else ()
    hosts = (f"--nodes={statement.num_hosts}",) if statement is not None and statement.num_hosts > 1 else ()
    launch = read_launch(words, (*script.batch_options, *hosts))
    arguments = launch.program[1:] if launch.program[:1] and not launch.program[0].startswith("-") else launch.program
    flags, loose = split_options(arguments)
    notes += [
        *(Assumption(term=f"${name}", value=value, why=_DEFAULT) for name, value in script.defaults.items()),
        *(Assumption(term=flag, value=flags[flag], why=_TWICE) for flag in repeated_flags(arguments)),
    ]
    given = Given(
        arguments=flags,
        document=found.documents or _named_configuration(launch, flags, folders),
        launch=launch,
        known=found.known,
        loose=tuple(loose),
        num_replicas=1 if statement is None else statement.num_replicas,
        servers=found.servers,
        load=stated_load(script.statements),
    )
    return given, notes, script.unknown, located(found.text, 1 if statement is None else statement.line)


def _named_configuration(launch: Launch, flags: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """What the first configuration holds that a command names and that lies in one of the folders; empty without."""
    named = (str(launch.options.get(name) or _spelled(flags, name)) for name in _CONFIGURATION_FLAGS)
    words = (str(flags.get("--extra_llm_api_options", "")), *launch.program[1:])
    files = (word for word in words if word.endswith((".yml", ".yaml")))
    here = (found for value in (*named, *files) if value and (found := _beside(value, folders)))
    return next((dict(held) for found in here if (held := _configuration(found))), {})


def _script(text: str, folder: Path, variables: Mapping[str, str]) -> tuple[Script, OwnServers | None]:
    """A file of flags or a script; of a launch script of ours what its files hold."""
    whole = with_flags(text, folder)
    servers = own_servers(whole, folder)
    return _flag_file(text) or read_script(whole if servers is None else servers.script, variables), servers


def _flag_file(text: str) -> Script | None:
    """A file with a flag in every line, as our emitters write; no shell reads it, so ``|`` and ``(`` are signs."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines or not all(line.lstrip().startswith(("--", SUBCOMMAND)) for line in lines):
        return None
    try:
        words = tuple(word for line in lines for word in shlex.split(line, comments=True))
    except ValueError as error:
        raise _refused(f"a line of flags cannot be split: {error}") from error
    return Script(statements=(Statement(line=1, words=words),))


def _spelled(flags: Arguments, name: str) -> str:
    """The value of a flag in either spelling."""
    return next((str(value) for flag, value in flags.items() if flag.replace("_", "-") == name), "")


def _command(inputs: Sequence[str], variables: Mapping[str, str]) -> Script:
    if not inputs or not any(word.strip() for word in inputs):
        raise _refused("give a file, or the command after --")
    if len(inputs) == 1:
        word = inputs[0]
        if " " not in word.strip():
            if Path(word).is_dir():
                raise _refused(f"{word} is a folder; give a file of it")
            raise _refused(f"no file {word!r}; give a file, or the command after --")
        return read_script(word, variables)
    # The caller's shell has split these already; variables before a program stay words of its command line.
    first = next((place for place, word in enumerate(inputs) if not _VARIABLE.match(word)), len(inputs))
    return Script(statements=(Statement(line=1, words=tuple(inputs[first:])),))


def _statement(script: Script, source: str | None, documents: Arguments) -> tuple[Statement | None, list[Assumption]]:
    """The one command that trains or serves."""
    statements = script.statements
    fitting = [one for one in statements if _fits(one, source, documents)]
    if not fitting and len(statements) == 1:
        fitting = list(statements)
    if not fitting:
        if statements and not documents:
            places = ", ".join(f"line {one.line}: {' '.join(one.words[:2])}" for one in statements[-_MOST_LISTED:])
            raise _refused(
                f"none of the {len(statements)} commands of the script starts a framework that is known ({places}); "
                "give the command itself after --, or name its kind with --from NAME"
            )
        return None, []
    notes = [
        Assumption(term=f"${name}", value="the last value before its use", why="the script sets it more than once")
        for name in script.reassigned
    ]
    if len(fitting) > 1:
        lines = ", ".join(str(one.line) for one in fitting)
        why = f"the script starts it on lines {lines}; branches are not followed"
        notes.append(Assumption(term="command", value=f"line {fitting[-1].line}", why=why))
    return fitting[-1], notes


def _fits(statement: Statement, source: str | None, documents: Arguments) -> bool:
    launch = read_launch(statement.words)
    if documents or source in {"deepspeed", "accelerate"}:
        return bool(launch.program) and launch.num_devices is not None
    if any(launch.options.get(name) for name in _CONFIGURATION_FLAGS[:1]):
        return True
    flags, loose = split_options(launch.program)
    if any(word.endswith((".yaml", ".yml")) for word in loose[1:]) and loose[0] in _READS_A_FILE:
        return True
    if any(_spelled(flags, name) for name in _CONFIGURATION_FLAGS):
        return True
    return source_of(Given(arguments=flags, launch=launch), source) is not None and len(statement.words) > 1


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):
        return False


def _beside(name: str, folders: Sequence[Path]) -> str:
    """A file that a command names, from where it is run or from where its script lies; empty where it is not there."""
    return next((str(folder / name) for folder in folders if _is_file(str(folder / name))), "")


def _configuration(name: str) -> Arguments:
    """The file that a command names."""
    content = _read(Path(name))
    if isinstance(content, str):
        raise _refused(f"{name} is no JSON, YAML or TOML document")
    return flattened(content)


def _holds(part: str) -> bool:
    """Whether a part of a YAML file is more than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in part.splitlines())


def _read(path: Path) -> dict[str, Any] | str:
    """A document by its suffix, else text."""
    try:
        text = read_text(path, MAX_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise _refused(f"cannot read {path}: {why(error)}") from error
    if "\0" in text:
        raise _refused(f"{path} is no text")
    if path.suffix in {".json", ".yaml", ".yml"}:
        parts = [text] if path.suffix == ".json" else [part for part in _DOCUMENTS.split(text) if _holds(part)]
        documents = [parse_document(part, is_json=path.suffix == ".json", name=str(path)) for part in parts or [text]]
        # Several objects in one file are what Kubernetes calls a List.
        return documents[0] if len(documents) == 1 else {"apiVersion": "v1", "kind": "List", "items": documents}
    if path.suffix == ".jsonl" and (rows := hint_of(path)):
        raise _refused(f"{path} starts nothing{rows}")
    if path.suffix == ".toml":
        try:
            document = tomllib.loads(text)
            require_plain(document, str(path))
        except (ValueError, RecursionError) as error:
            raise _refused(f"{path} is no TOML that meshplan reads: {error}") from error
        return document
    return text


def _refused(message: str) -> SpecError:
    return SpecError.at("", message, of="what is imported")
