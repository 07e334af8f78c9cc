"""Folders of processes: gone with them, and after a kill with the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = """
import sys
from meshplan.planner.sweep.answer import Setting, _Workplace
place = _Workplace(Setting(key="k", db=sys.argv[1], files={"trace.csv": b"arrival_s"}))
print((place.base / "trace.csv").read_text(), place.base, flush=True)
sys.stdin.readline()
"""


class Worker:
    """A process that has prepared its workplace below ``temporary``."""

    def __init__(self, temporary: Path, database: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, database],
            env={"TMPDIR": str(temporary), "PATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        content, folder = self.process.stdout.readline().split()
        assert content == "arrival_s"
        self.folder = Path(folder)


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.communicate()


def test_files_of_a_killed_process_are_removed_by_the_next_one(
    tmp_path: Path, database: Path, workers: list[Worker]
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    living, killed = Worker(temporary, database), Worker(temporary, database)
    workers += [living, killed]
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert killed.folder.is_dir()
    after = Worker(temporary, database)
    workers.append(after)
    assert {path.name for path in temporary.iterdir()} == {living.folder.name, after.folder.name}
    after.process.communicate("end\n")
    assert {path.name for path in temporary.iterdir()} == {living.folder.name}
