"""Sweeps on a Ray cluster of this machine: the answers are those of local processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_cases import write_sweep

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.sweep.answer import Outcome
from meshplan.planner.sweep.runners.ray import LOCAL_RAY, RayRunner
from meshplan.planner.sweep.study import Loop, open_study, rows_of, setting_of

ray = pytest.importorskip("ray")
# Ray leaves sockets and files of its own processes to the garbage collector.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def store(database: Path) -> Iterator[Catalog]:
    opened = Catalog.open(str(database))
    yield opened
    opened.engine.dispose()


def test_the_answers_are_those_of_single_plans(store: Catalog, tmp_path: Path) -> None:
    study = open_study(write_sweep(tmp_path), store)
    runner = RayRunner(LOCAL_RAY, setting_of(study, store, travels=True), 2)
    assert Loop(study, store, runner).run().answered == 4
    for question, row in zip(study.questions, rows_of(study.document, store), strict=True):
        assert row["plan_id"] == make_plan(question.document, store).plan_id
    assert len(PlanRows(store.engine).list()) == 4
    assert not ray.is_initialized()


def test_files_travel(store: Catalog, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,input_length,output_length\n0,500,50\n0.5,400,40\n")
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "kind: sweep\nask: estimate\nbase:\n  kind: serving\n  model: llama-3.1-8b\n"
        "  cluster: {nodes: [{type: dgx-h100, count: 1}]}\n  workload: {trace: trace.csv}\n"
        "over: {fixed.tensor_parallel: [1, 2]}\n"
    )
    study = open_study(path, store)
    runner = RayRunner(LOCAL_RAY, setting_of(study, store, travels=True), 1)
    assert Loop(study, store, runner).run().answered == 2
    row = rows_of(study.document, store)[0]
    single = estimate_plan(study.questions[0].document, store, base=tmp_path)
    assert {name: row[name] for name in single.predicted} == {n: i.value for n, i in single.predicted.items()}


class Killed(RayRunner):
    """Kills the first worker that has a task."""

    killed: int | None = None

    def ended(self, wait_s: float) -> list[tuple[str, Outcome]]:
        pids = working_pids() if self.killed is None else []
        if pids:
            self.killed = pids[0]
            os.kill(self.killed, signal.SIGKILL)
        return list(super().ended(wait_s))


def working_pids() -> list[int]:
    """Ray names a worker's process after its task; only descendants of this process are this test's own."""
    parents, working = {}, []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(b"ray::answer"):
                working.append(pid)
    return [pid for pid in working if os.getpid() in ancestors(pid, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents:
        pid = parents[pid]
        found.append(pid)
    return found


def test_a_worker_that_is_killed_loses_nothing(store: Catalog, tmp_path: Path) -> None:
    study = open_study(write_sweep(tmp_path), store)
    runner = Killed(LOCAL_RAY, setting_of(study, store, travels=True), 1)
    done = Loop(study, store, runner).run()
    assert runner.killed is not None
    assert (done.answered, done.failed) == (4, 0)
    assert len(PlanRows(store.engine).list()) == 4


def test_a_task_that_takes_too_long_is_given_up(store: Catalog, tmp_path: Path) -> None:
    text = "kind: sweep\nbase: base.yaml\nlimit_s: 0.05\nover: {model: [llama-3.1-8b]}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    assert Loop(study, store, RayRunner(LOCAL_RAY, setting_of(study, store, travels=True), 1)).run().failed == 1
