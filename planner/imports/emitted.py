"""Scripts that meshplan wrote: their flags stand in files beside them, a flag and its value in every line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from meshplan.catalogs.errors import Problem, SpecError, why
from meshplan.catalogs.untrusted.documents import read_text
from meshplan.catalogs.untrusted.limits import MAX_YAML_BYTES

# As `planner/emit/serving/script.py` writes it into the command of each role.
_READS_FLAGS = re.compile(r"^  read_flags (?P<file>[A-Za-z0-9_]+\.txt)$", re.MULTILINE)
_STAMP = "# meshplan plan "


def with_flags(script: str, folder: Path) -> str:
    """A launch script of ours with the flags of its server in it, as its shell sets them; any other script as it is.

    Args:
        script: text of the script.
        folder: where it lies.

    Raises:
        SpecError: it starts servers of several roles, of which a spec pins one; or the file of flags is not readable.
    """
    files = list(dict.fromkeys(found["file"] for found in _READS_FLAGS.finditer(script)))
    if _STAMP not in script or not files:
        return script
    if len(files) > 1:
        message = f"the script of meshplan starts {len(files)} roles with flags of their own ({', '.join(files)}); "
        raise _refused(f"{message}give the file of one, with --from ENGINE and --model")
    try:
        lines = read_text(folder / files[0], MAX_YAML_BYTES).splitlines()
    except (OSError, ValueError) as error:
        message = f"the script takes its flags from {files[0]} beside it, which is not there: {why(error)}"
        raise _refused(message) from error
    words = [word for line in lines if line and not line.startswith("#") for word in line.split(" ", 1)]
    return _READS_FLAGS.sub(lambda _: f"  flags=({shlex.join(words)})", script)


def _refused(message: str) -> SpecError:
    return SpecError([Problem(path="", message=message)], of="what is imported")
