"""Sweeps on a Ray cluster of this machine: the answers are those of local processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_cases import write_sweep

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.sweep.answer import Outcome, Setting, answer
from meshplan.planner.sweep.points import Question
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
    """The process of the first task is killed as it begins; the file ``mark`` says that it was."""

    def __init__(self, setting: Setting, mark: Path) -> None:
        super().__init__(LOCAL_RAY, setting, 1)
        where = str(mark)

        def killed_once(question: Question, shared: Setting) -> Outcome:
            try:
                os.close(os.open(where, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return answer(question, shared)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a killed process goes on")

        self._answer = ray.remote(num_cpus=1, max_retries=0)(killed_once)


def test_a_worker_that_is_killed_loses_nothing(store: Catalog, tmp_path: Path) -> None:
    study = open_study(write_sweep(tmp_path), store)
    mark = tmp_path / "killed"
    done = Loop(study, store, Killed(setting_of(study, store, travels=True), mark)).run()
    assert mark.exists()
    assert (done.answered, done.failed) == (4, 0)
    assert len(PlanRows(store.engine).list()) == 4


def test_a_task_that_takes_too_long_is_given_up(store: Catalog, tmp_path: Path) -> None:
    text = "kind: sweep\nbase: base.yaml\nlimit_s: 0.05\nover: {model: [llama-3.1-8b]}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    assert Loop(study, store, RayRunner(LOCAL_RAY, setting_of(study, store, travels=True), 1)).run().failed == 1
