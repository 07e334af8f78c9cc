"""Real agents of torchrun over CPU processes: three hosts start an elastic job, one is killed, another one comes.

Prints after how many seconds each world of ranks ran with the plan for its number of hosts; needs torch, takes minutes.
How long the agents take is theirs: their rendezvous waits, and nothing here predicts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from elastic_job import write_job

from meshplan.planner import load_catalog

PATIENCE_S = 300.0


class Hosts:
    """Agents of one job, each with a log of its own.

    Args:
        folder: with the job's files below ``job``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RDZV_ENDPOINT": "127.0.0.1:29653",
            "SAVE_DIR": str(self.folder),
            "BEATS": str(self.folder / "beats"),
            "AGENT_PAUSE": "2",
        }
        with (self.folder / name).open("wb") as log:
            command = [str(self.folder / "job" / "elastic.sh")]
            self.agents[name] = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def kill(self, name: str) -> None:
        """End every process of a host: agents start their ranks in sessions of their own, which would live on."""
        for pid in (*_descendants(self.agents[name].pid), self.agents[name].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents[name].wait()

    def seconds_until(self, ranks: int, world: int, *names: str) -> str:
        """How long it takes until so many ranks of a world say that they run its plan."""
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE_S:
            said = "".join((self.folder / name).read_text(errors="replace") for name in names)
            if said.count(f"of {world} plan {world}\n") >= ranks:
                return f"{time.monotonic() - began:.0f} s"
            time.sleep(1.0)
        return f"not within {PATIENCE_S:.0f} s"


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [*own, *(other for child in own for other in _descendants(child))]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        hosts = Hosts(Path(name))
        write_job(load_catalog(str(hosts.folder / "catalog.sqlite")), hosts.folder)
        try:
            for host in ("one", "two", "three"):
                hosts.start(host)
            print("three hosts run", hosts.seconds_until(6, 6, "one", "two", "three"), flush=True)
            hosts.kill("three")
            print("one is killed, two run", hosts.seconds_until(4, 4, "one", "two"), flush=True)
            hosts.start("four")
            print("another comes, three run", hosts.seconds_until(2, 6, "four"), flush=True)
        finally:
            for host in hosts.agents:
                hosts.kill(host)


if __name__ == "__main__":
    main()
