"""Our own ``launch.sh`` of a serving plan as the command that it starts, and what ``workers.txt`` beside it says.

The script runs one command for each line of ``workers.txt``; its shell around that (addresses, checks, waiting) holds
nothing that a plan chooses. ``planner/emit/serving/script.py`` writes both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import SpecError, why
from meshplan.catalogs.untrusted.documents import read_text
from meshplan.catalogs.untrusted.limits import MAX_YAML_BYTES
from meshplan.planner.emit.serving.script import WORKERS_FILE

# The function of a role: where the flags stand, and what is started with them. What follows is where it listens.
_COMMAND = re.compile(
    r"^[a-z0-9_]+_command\(\) \{\n(?:  .*\n)*?(?P<flags>  (?:read_flags|flags=).*\n)(?P<command>  command=\(.*\)\n)",
    re.MULTILINE,
)
_ROW = re.compile(r"(?P<worker>\d{1,9}) (?P<role>[a-z0-9_]+) (?P<host>\d{1,9}) \d+ \d+ \d+ \d+ [\d,]+")
_SHARE = re.compile(r"# device share: (?P<way>mig|mps) (?P<value>[\w.+]+)")
_POWER = re.compile(r"# power limit: (?P<watts>[0-9]{1,7}(?:\.[0-9]{1,3})?) W")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServers:
    """What our files say beside the flags of a server.

    Args:
        script: the command alone, as shell text.
        num_workers: servers.
        num_hosts: hosts that they run on.
        stated: fields of a serving spec: ``mig``, ``mps``, ``power_caps_w``.
    """

    script: str
    num_workers: int
    num_hosts: int
    stated: Mapping[str, Any]


def own_servers(script: str, folder: Path) -> OwnServers | None:
    """A script of ours that starts servers of one role, its flags in it already; None for any other.

    Args:
        script: text of the script.
        folder: where it lies.

    Raises:
        SpecError: ``workers.txt`` is not there, or is not one of ours.
    """
    found = _COMMAND.search(script)
    if found is None or not script.startswith("#!/usr/bin/env bash\n# meshplan plan "):
        return None
    try:
        lines = read_text(folder / WORKERS_FILE, MAX_YAML_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise _refused(f"the script takes its workers from {WORKERS_FILE} beside it: {why(error)}") from error
    written = [line for line in lines if line and not line.startswith("#")]
    rows = [row for row in map(_ROW.fullmatch, written) if row is not None]
    if not rows or len(rows) != len(written):
        raise _refused(f"{WORKERS_FILE} is not as meshplan writes it: emit the plan again, or give the file of flags")
    return OwnServers(
        script=f'{found["flags"]}{found["command"]}"${{command[@]}}"\n',
        num_workers=len({row["worker"] for row in rows}),
        num_hosts=len({row["host"] for row in rows}),
        stated=_stated(lines),
    )


def _stated(lines: list[str]) -> dict[str, Any]:
    """How devices are shared and held down, by the comments that say so."""
    found: dict[str, Any] = {}
    for line in lines:
        if (share := _SHARE.fullmatch(line)) is not None:
            value = share["value"]
            found[share["way"]] = [int(value) if value.isdecimal() else value]
        elif (power := _POWER.fullmatch(line)) is not None:
            found["power_caps_w"] = [float(power["watts"])]
    return found


def _refused(message: str) -> SpecError:
    return SpecError.at("", message, of="what is imported")
