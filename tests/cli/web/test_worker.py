"""A worker by itself: what it keeps when it has to end."""

from __future__ import annotations

import threading
from pathlib import Path

from web_cases import PATIENCE_S, until

from meshplan.catalogs.database.job_rows import Job, JobState
from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.web.jobs.worker import Worker
from meshplan.cli.web.settings import Settings

# Takes many seconds to prove; a plan is found in the first.
LONG = {
    "kind": "training",
    "model": "deepseek-v3",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1280}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 15360},
}


def test_a_worker_that_ends_keeps_the_best_so_far_and_the_question_stays_open(seeded: Path, tmp_path: Path) -> None:
    database = tmp_path / "catalog.sqlite"
    database.write_bytes(seeded.read_bytes())
    catalog = Catalog.open(str(database))
    jobs, stop = Jobs(catalog.engine), threading.Event()
    asked = jobs.submit({"spec": LONG, "options": {}}, kind="plan", digest="a", client="me")

    def now() -> Job:
        found = jobs.get(asked.job_id)
        assert found is not None
        return found

    thread = threading.Thread(target=Worker(Settings(db=str(database)), catalog).run, args=(stop,))
    thread.start()
    until(lambda: (now().progress or {}).get("incumbent") is not None)
    stop.set()
    thread.join(PATIENCE_S)
    ended = now()
    assert ended.state is JobState.CANCELLED
    assert ended.plan_id is not None
    assert PlanRows(catalog.engine).get(ended.plan_id).document["solution"]["status"] == "feasible"
    assert jobs.answered(kind="plan", digest="a") is None, "who asks again has it searched to the end"
