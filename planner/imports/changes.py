"""What a plan changes in somebody's own command: a line out for each flag that goes, a line in for each that comes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import yaml

from meshplan.planner.emit.artifact import Artifact
from meshplan.planner.emit.terms import flattened

_CONFIGURATIONS = ("deepspeed_config.json", "accelerate_config.yaml")


def settings_of(artifacts: Sequence[Artifact]) -> dict[str, str]:
    """Flags of every argument file, and keys of a framework's configuration; pools after each other."""
    found: dict[str, str] = {}
    files = [file for file in artifacts if file.path.name.endswith("_args.txt")]
    for file in files:
        pool = "" if len(files) == 1 else f"{file.path.name.removesuffix('_args.txt')}: "
        for line in file.content.splitlines():
            if line.strip() and not line.startswith("#"):
                flag, _, value = line.partition(" ")
                found[pool + flag] = value
    for file in artifacts:
        if file.path.name in _CONFIGURATIONS:
            document = json.loads(file.content) if file.path.suffix == ".json" else yaml.safe_load(file.content)
            found |= {key: str(value).lower() for key, value in flattened(document).items()}
    return found


def changed_lines(
    current: Mapping[str, str], proposed: Mapping[str, str], written: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(sign, setting) of every setting that differs, in the order of the proposal.

    Args:
        current: settings of what was imported, as the emitter writes them.
        proposed: those of the plan.
        written: settings as the user wrote them, such as ``-tp 4``; one of the same value as a setting that goes
            stands in its place.

    >>> list(changed_lines({"--tensor-parallel-size": "4", "--a": ""}, {"--tensor-parallel-size": "8", "--a": ""},
    ...                    ["-tp 4"]))
    [('-', '-tp 4'), ('+', '--tensor-parallel-size 8')]
    """
    for name in (*proposed, *(name for name in current if name not in proposed)):
        before, after = current.get(name), proposed.get(name)
        if before == after:
            continue
        if before is not None:
            yield "-", _as_written(name, before, written)
        if after is not None:
            yield "+", f"{name} {after}".strip()


def _as_written(name: str, value: str, written: Sequence[str]) -> str:
    """The user's own spelling: the flag itself, else a short form with that value whose letters the flag has."""
    plain = name.lstrip("-").replace("_", "-")
    for text in written:
        flag, _, given = text.partition(" ")
        short = flag.lstrip("-").replace("_", "-")
        initials = "".join(word[0] for word in plain.split("-") if word)
        if given.strip() == value and (short == plain or (short and initials.startswith(short))):
            return text
    return f"{name} {value}".strip()
