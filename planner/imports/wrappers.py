"""What stands around a command: ``bash -c``, ``docker run``, ``uv run``, a launch script that meshplan wrote; and on
which line of a file a flag stands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from meshplan.catalogs.errors import SpecError, why
from meshplan.catalogs.untrusted.documents import read_text
from meshplan.catalogs.untrusted.limits import MAX_YAML_BYTES
from meshplan.planner.imports.containers import inside_docker, inside_image_file
from meshplan.planner.imports.shell import Statement, read_script

MAX_NESTING = 4  # srun docker run … bash -c "…"
_SHELLS = ("bash", "sh", "zsh", "dash")
_SHELL_COMMAND = re.compile(r"-[a-z]*c")
# Programs that start another one: their own words until it begins.
_RUNNER_SWITCHES = frozenset({"--no-sync", "--no-capture-output", "--live-stream"})
_RUNNERS = {"uv": "run", "poetry": "run", "pipenv": "run", "conda": "run", "pixi": "run"}
# As `planner/emit/serving/script.py` writes it into the command of each role, and the trainers' scripts into theirs.
_READS_FLAGS = re.compile(r"^  read_flags (?P<file>[a-z0-9_]+\.txt)$", re.MULTILINE)
_READS_PROGRAM = re.compile(
    r"^while read -r -a words; do\n(?:  .*\n)+done < \"\$here/(?P<file>[a-z_]+\.txt)\"$", re.MULTILINE
)
# How a trainer's script counts its processes, and what the count of one host is taken from.
_PROCESSES = '"${#device_list[@]}"'
_COUNTS = re.compile(r"^num_hosts=([1-9][0-9]*)\nworld_size=([1-9][0-9]*)$", re.MULTILINE)
_READS = (_READS_FLAGS, _READS_PROGRAM)
_STAMP = "# meshplan plan "


def expanded(statements: Iterable[Statement], variables: Mapping[str, str], depth: int = 0) -> Iterator[Statement]:
    """Statements with shells, containers and runners taken away; a launcher before them (srun) stays in front."""
    for statement in statements:
        inner = None if depth >= MAX_NESTING else _inside(statement, variables)
        if inner is None:
            yield statement
        else:
            yield from expanded(inner, variables, depth + 1)


def _inside(statement: Statement, variables: Mapping[str, str]) -> list[Statement] | None:
    """The commands inside one; None where nothing stands around it."""
    words = statement.words
    for place, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        options = [
            index for index in (place + 1, place + 2) if _SHELL_COMMAND.fullmatch("".join(words[index : index + 1]))
        ]
        if name in _SHELLS and options:
            try:
                script = read_script("".join(words[options[0] + 1 : options[0] + 2]), variables)
            except SpecError:
                return None
            return [replace(statement, words=(*words[:place], *one.words)) for one in script.statements]
        if name in {"docker", "podman", "nerdctl"}:
            found = inside_docker(words[place:])
            return None if found is None else [replace(statement, words=(*_launcher(words[:place]), *found))]
        if name in {"apptainer", "singularity"}:
            found = inside_image_file(words[place:])
            return None if found is None else [replace(statement, words=(*_launcher(words[:place]), *found))]
        if name in _RUNNERS and words[place + 1 : place + 2] == (_RUNNERS[name],):
            return [replace(statement, words=(*words[:place], *_after_runner(words[place + 2 :])))]
    return None


def _launcher(words: tuple[str, ...]) -> tuple[str, ...]:
    """What stands before a container, where it starts processes."""
    return words if words and words[0].rsplit("/", 1)[-1] in {"srun", "mpirun"} else ()


def _after_runner(words: tuple[str, ...]) -> tuple[str, ...]:
    """``-n NAME`` and the like belong to the runner."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += (
            1 if "=" in words[place] or words[place] in {"--no-sync", "--no-capture-output", "--live-stream"} else 2
        )
    return words[place:]


def located(text: str, first_line: int) -> Callable[[str], str]:
    """A flag, as it is listed → the same with the line of the file where it stands, from a statement's line on."""
    lines = text.splitlines()

    def where(entry: str) -> str:
        flag = entry.split(maxsplit=1)[0] if entry.startswith("--") else ""
        name = re.escape(flag).replace("\\-", "[-_]")
        for number, line in enumerate(lines, start=1):
            if flag and number >= first_line and re.search(rf"(?<![\w-]){name}(?![\w-])", line):
                return f"line {number}: {entry}"
        return entry

    return where


def with_flags(script: str, folder: Path) -> str:
    """A launch script of ours with the flags of its program in it, as its shell sets them; any other script as it is.

    Args:
        script: text of the script.
        folder: where it lies.

    Raises:
        SpecError: it starts servers of several roles, of which a spec pins one; or the file of flags is not readable.
    """
    if _STAMP not in script:
        return script
    files = list(dict.fromkeys(found["file"] for reads in _READS for found in reads.finditer(script)))
    if not files:
        return script
    if len(files) > 1:
        message = f"the script of meshplan starts {len(files)} roles with flags of their own ({', '.join(files)}); "
        raise _refused(f"{message}give the file of one, with --from ENGINE and --model")
    try:
        lines = read_text(folder / files[0], MAX_YAML_BYTES).splitlines()
    except (OSError, ValueError) as error:
        message = f"the script takes its flags from {files[0]} beside it, which is not there: {why(error)}"
        raise _refused(message) from error
    # A server's value is all that follows its flag, a trainer's are words.
    arguments = [line for line in lines if line and not line.startswith("#")]
    flags = shlex.join([word for line in arguments for word in line.split(" ", 1)])
    words = shlex.join([word for line in arguments for word in line.split()])
    counts = _COUNTS.search(script)
    if counts is not None:
        script = script.replace(_PROCESSES, str(int(counts[2]) // int(counts[1])))
    script = _READS_FLAGS.sub(lambda _: f"  flags=({flags})", script)
    return _READS_PROGRAM.sub(lambda _: f"program+=({words})", script)


def _refused(message: str) -> SpecError:
    return SpecError.at("", message, of="what is imported")
