"""A worker by itself: what it keeps when it has to end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from web_cases import PATIENCE_S, until

from meshplan.catalogs.database.job_rows import Job, JobState
from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.jobs.crew import crew
from meshplan.cli.web.jobs.worker import Worker
from meshplan.cli.web.settings import Settings

# Seconds after which one that was interrupted would have ended by itself.
LATE_S = 1.0
# Takes many seconds to prove; a plan is found in the first.
LONG = {
    "kind": "training",
    "model": "deepseek-v3",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1280}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 15360},
}


class Asked:
    """A catalog with one question in it that waits for a worker."""

    def __init__(self, database: Path) -> None:
        self.database = database
        self.catalog = Catalog.open(str(database))
        self.jobs = Jobs(self.catalog.engine)
        self.job_id = self.jobs.submit({"spec": LONG, "options": {}}, kind="plan", digest="a", client="me").job_id

    def now(self) -> Job:
        found = self.jobs.get(self.job_id)
        assert found is not None
        return found

    def until_a_plan_is_found(self) -> None:
        until(lambda: (self.now().progress or {}).get("incumbent") is not None)

    def is_kept(self) -> bool:
        """The best so far is stored; whether it was searched to the end, and only then passes for the answer."""
        ended = self.now()
        assert ended.plan_id is not None
        is_whole = PlanRows(self.catalog.engine).get(ended.plan_id).document["solution"]["status"] == "optimal"
        assert ended.state is (JobState.DONE if is_whole else JobState.CANCELLED)
        return is_whole

    def is_kept_and_open(self) -> None:
        assert not self.is_kept()
        assert self.jobs.answered(kind="plan", digest="a") is None, "who asks again has it searched to the end"


@pytest.fixture
def asked(seeded: Path, tmp_path: Path) -> Iterator[Asked]:
    database = tmp_path / "catalog.sqlite"
    database.write_bytes(seeded.read_bytes())
    made = Asked(database)
    yield made
    made.catalog.engine.dispose()


def test_a_worker_that_ends_keeps_the_best_so_far_and_the_question_stays_open(asked: Asked) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=Worker(Settings(db=str(asked.database)), asked.catalog).run, args=(stop,))
    thread.start()
    asked.until_a_plan_is_found()
    stop.set()
    thread.join(PATIENCE_S)
    asked.is_kept_and_open()


def test_ctrl_c_in_the_terminal_of_workers_leaves_the_question_open(asked: Asked) -> None:
    """It reaches the searches, too: one that ended by itself was stored as if it were finished."""
    command = (sys.executable, "-m", "meshplan.cli.main", "work", "--db", str(asked.database))
    work = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        asked.until_a_plan_is_found()
        work.send_signal(signal.SIGSTOP)  # a service that waits for its last readers answers late
        os.killpg(work.pid, signal.SIGINT)
        time.sleep(LATE_S)
        work.send_signal(signal.SIGCONT)
        _, said = work.communicate(timeout=PATIENCE_S)
    finally:
        work.kill()
    assert "Traceback" not in said
    asked.is_kept()


def test_ctrl_c_while_workers_start_is_left_to_the_parent(asked: Asked, capfd: pytest.CaptureFixture[str]) -> None:
    """One that was still importing printed its traceback and was gone; a search of it can be ended all the same."""
    before = set(multiprocessing.active_children())
    with crew(Settings(db=str(asked.database), workers=1)):
        (starting,) = set(multiprocessing.active_children()) - before
        assert starting.pid is not None
        os.kill(starting.pid, signal.SIGINT)
        asked.until_a_plan_is_found()
        started_s = time.monotonic()
    assert time.monotonic() - started_s < PATIENCE_S
    assert "Traceback" not in capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # our own is heard again
    asked.is_kept_and_open()
