"""A folder of a process that does not outlive it for long, also where it is killed.

A process holds a lock on a file in its folder. The system lets it go however the process ends, and the next process
that makes such a folder removes those that nobody holds: a worker of Ray is killed as a rule, and runs no clean-up;
so is a search beyond its memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "meshplan-scratch-"
# A lock is taken under the first name, and looked for under the second: nobody sees one that is not held yet.
_BEGUN, _HELD = ".begun", ".held"


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder of this process; those of processes that have ended are removed."""
    _remove_left_behind(Path(tempfile.gettempdir()))
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    begun = Path(made.name) / _BEGUN
    lock = os.open(begun, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)  # open as long as the process lives
    fcntl.flock(lock, fcntl.LOCK_EX)
    begun.rename(begun.with_name(_HELD))
    return made


def _remove_left_behind(place: Path) -> None:
    for held in place.glob(f"{_PREFIX}*/{_HELD}"):
        try:
            lock = os.open(held, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(held.parent, ignore_errors=True)
        except BlockingIOError:  # its process lives
            pass
        finally:
            os.close(lock)
