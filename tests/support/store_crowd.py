"""Many processes on one store at once, for tests (a few) and benchmarks (many).

``python store_crowd.py ACTION URL PROCESSES EACH`` imports everything, forks, lets all go at the same moment and prints
what came of it as JSON. Forks of one small process start together; fresh interpreters would come one after the other.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading
from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.database.job_rows import Beat, JobState
from meshplan.catalogs.database.jobs import Jobs
from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.transfer import import_document
from meshplan.catalogs.database.upgrade import upgrade_database

# The keeper counts a worker as dead that has been silent for so long.
SILENCE_S = 1.0


def crowd(action: str, url: str, processes: int, each: int = 1, *, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run an action of this file in a process of its own; see :data:`ACTIONS`."""
    arguments = [sys.executable, __file__, action, url, str(processes), str(each)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer | {"errors": done.stderr[-4000:]}


def plan(plan_id: str) -> dict[str, Any]:
    return {"plan_id": plan_id, "kind": "training", "spec_digest": "s", "catalog_digest": "c", "figures": [1.5] * 200}


# --- one process of the crowd ---------------------------------------------------------------------------------------


def first_use(url: str, number: int, _each: int) -> None:
    """Open a catalog that nobody has made, and store a plan with a tag."""
    PlanRows(open_database(url)).insert(plan(f"{number:012x}"), tag=f"tag-{number}")


def upgrade(url: str, _number: int, _each: int) -> None:
    upgrade_database(url)


def import_(url: str, number: int, _each: int) -> None:
    """Import a device of one's own, and one that all import."""
    numbers = {"memory_bytes": 80e9, "usable_memory_bytes": 79e9, "memory_bandwidth_bytes_per_s": 1e12}
    common = {"level": "datasheet", "source": "a test", "date": "2026-01-01"}
    facts = [{"field": field, "value": value, **common} for field, value in numbers.items()]
    facts.append({"field": "peak_flops_per_s.bf16", "value": 1e14, **common})
    entry = {"name": "A device", "vendor": "v", "architecture": "a", "facts": facts}
    import_document(open_database(url), {"format": FORMAT, "devices": {f"own-{number}": entry, "common": entry}})


def write(url: str, number: int, each: int) -> None:
    """Store plans of one's own, each after a plan that all store; all want the same tag."""
    rows = PlanRows(open_database(url))
    for index in range(each):
        rows.insert(plan(f"ffff{index:08x}"))
        rows.insert(plan(f"{number:04x}{index:08x}"), tag="newest")


def tag(url: str, number: int, each: int) -> None:
    """Tag a plan of one's own once, then, in turn with all others, one plan that all share."""
    rows = PlanRows(open_database(url))
    rows.insert(plan("ffff00000000"))
    rows.insert(plan(f"{number:04x}00000000"))
    rows.tag(f"{number:04x}00000000", f"own-{number}")
    for index in range(each):
        mine = f"shared-{number}-{index}"
        told = rows.tag("ffff00000000", mine).tag
        if told != mine:
            raise RuntimeError(f"{mine} was given, {told} is told")


def submit(url: str, number: int, each: int) -> None:
    """Ask questions that others ask, too, in another order."""
    jobs = Jobs(open_database(url))
    for index in random.Random(number).sample(range(each), each):
        jobs.submit({"question": index}, kind="training", digest=f"{index:012x}", client=str(number))


def work(url: str, number: int, _each: int) -> None:
    """Claim, work, store and finish until nothing is left."""
    engine = open_database(url)
    jobs, rows = Jobs(engine), PlanRows(engine)
    while job := jobs.claim(f"worker-{number}", wait_s=0.2):
        if jobs.beat(job, {"gap": 0.5}) is not Beat.GO_ON:
            continue
        time.sleep(0.002)
        rows.insert(plan(job.digest))
        jobs.finish(job, plan_id=job.digest)


# --- the crowd ------------------------------------------------------------------------------------------------------


def fork(action: Callable[[str, int, int], None], url: str, number: int, each: int, *, start: float = 0.0) -> int:
    """A child that runs an action from a moment on (of the monotonic clock); returns its id."""
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        time.sleep(max(0.0, start - time.monotonic()))
        action(url, number, each)
    except BaseException:  # noqa: BLE001 - a child must not go on in its parent's frames
        traceback.print_exc(limit=-2)
        code = 1
    os._exit(code)


def all_at_once(action: Callable[[str, int, int], None], url: str, processes: int, each: int) -> dict[str, Any]:
    """How long all processes took together, and how many failed (their errors are on stderr)."""
    start = time.monotonic() + 0.1 + 0.01 * processes
    children = [fork(action, url, number, each, start=start) for number in range(processes)]
    failures = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return {"seconds": time.monotonic() - start, "failures": failures}


def kill(url: str, processes: int, each: int) -> dict[str, Any]:
    """Kill working processes at random moments, ``each`` in all, and start others until all jobs are done."""
    random_, jobs, begin = random.Random(0), Jobs(open_database(url)), time.monotonic()
    killed = failures = submitted = started = 0
    children: list[int] = []
    while True:
        counts = jobs.counts()
        open_jobs = counts[JobState.QUEUED] + counts[JobState.RUNNING]
        if killed >= each and not open_jobs:
            break
        while killed < each and open_jobs < 4 * processes:
            jobs.submit({"question": submitted}, kind="training", digest=f"{submitted:012x}")
            submitted, open_jobs = submitted + 1, open_jobs + 1
        jobs.requeue(older_than_s=SILENCE_S, most_attempts=each + 1)
        while len(children) < processes:
            children.append(fork(work, url, started, each))
            started += 1
        time.sleep(random_.random() * 0.05)
        if killed < each:
            child = random_.choice(children)
            os.kill(child, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
            children.remove(child)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                children.remove(child)
                failures += status != 0
    failures += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return {"seconds": time.monotonic() - begin, "failures": failures, "kills": killed, "submitted": submitted}


def outcome(url: str) -> dict[str, Any]:
    """What the store holds."""
    engine = open_database(url)
    plans, queue = tables.plans, tables.jobs
    with reading(engine) as connection:
        ids = set(connection.execute(sa.select(plans.c.plan_id)).scalars())
        sequences = sorted(connection.execute(sa.select(plans.c.sequence)).scalars())
        done = list(connection.execute(sa.select(queue.c.plan_id).where(queue.c.state == JobState.DONE)).scalars())
        devices = connection.execute(
            sa.select(tables.devices.c.slug).where(tables.devices.c.origin == "user")
        ).scalars()
        return {
            "plans": len(ids),
            "sequences_differ": len(set(sequences)) == len(ids),  # a plan that is stored again moves to the end
            "tags": connection.execute(sa.select(sa.func.count(plans.c.tag))).scalar(),
            "devices": sorted(devices),
            "jobs": {state.value: count for state, count in Jobs(engine).counts().items() if count},
            "questions": connection.execute(sa.select(sa.func.count(queue.c.digest.distinct()))).scalar(),
            "done_without_plan": sum(plan_id not in ids for plan_id in done),
            "attempts": connection.execute(sa.select(sa.func.sum(queue.c.attempts))).scalar(),
        }


ACTIONS = {
    "first-use": first_use,
    "upgrade": upgrade,
    "import": import_,
    "write": write,
    "tag": tag,
    "submit": submit,
    "work": work,
}


def main() -> None:
    """Run one action, and say what came of it."""
    name, url, processes, each = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    did = kill(url, processes, each) if name == "kill" else all_at_once(ACTIONS[name], url, processes, each)
    json.dump({**did, **outcome(url)}, sys.stdout)


if __name__ == "__main__":
    main()
