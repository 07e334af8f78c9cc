"""Scripts that meshplan wrote: their flags stand in files beside them, a flag and its value in every line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from meshplan.catalogs.errors import Problem, SpecError, why
from meshplan.catalogs.untrusted.documents import read_text
from meshplan.catalogs.untrusted.limits import MAX_YAML_BYTES

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
    told = [line for line in lines if line and not line.startswith("#")]
    flags = shlex.join([word for line in told for word in line.split(" ", 1)])
    words = shlex.join([word for line in told for word in line.split()])
    counts = _COUNTS.search(script)
    if counts is not None:
        script = script.replace(_PROCESSES, str(int(counts[2]) // int(counts[1])))
    script = _READS_FLAGS.sub(lambda _: f"  flags=({flags})", script)
    return _READS_PROGRAM.sub(lambda _: f"program+=({words})", script)


def _refused(message: str) -> SpecError:
    return SpecError([Problem(path="", message=message)], of="what is imported")
