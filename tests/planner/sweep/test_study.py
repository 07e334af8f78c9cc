"""Studies: each point once, whoever is killed; the numbers are those of a single plan."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from postgresql_server import postgresql_server, reason_without_server
from sweep_cases import TOO_LARGE, HereRunner, write_sweep

from meshplan.catalogs.database.plan_rows import PlanRows
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.studies.points import Points, PointState
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.sweep import study as studies
from meshplan.planner.sweep.answer import Outcome, _workplace, answer
from meshplan.planner.sweep.points import Question
from meshplan.planner.sweep.runners.local import LocalRunner
from meshplan.planner.sweep.study import Loop, Study, open_study, progress_of, retried, rows_of, setting_of


@pytest.fixture
def store(database: Path) -> Iterator[Catalog]:
    """A catalog of this test alone."""
    opened = Catalog.open(str(database))
    yield opened
    opened.engine.dispose()


def answered(question: Question) -> Outcome:
    content = {"kind": "training", "spec_digest": "s", "catalog_digest": "c", "spec": dict(question.document)}
    answer = {"kind": "training", "status": "optimal", "predicted": {"tokens_per_s": 1.0}}
    return Outcome(answer=answer, plan={"plan_id": question.digest[:12], **content})


def local(study: Study, store: Catalog, processes: int = 1, **_: Any) -> LocalRunner:
    return LocalRunner(setting_of(study, store, travels=False), processes)


def test_the_answers_are_those_of_single_plans(store: Catalog, tmp_path: Path) -> None:
    study = open_study(write_sweep(tmp_path), store)
    done = Loop(study, store, local(study, store, 2)).run()
    assert (done.finished, done.answered, done.failed) == (4, 4, 0)
    rows = rows_of(study.document, store)
    for question, row in zip(study.questions, rows, strict=True):
        single = make_plan(question.document, store)
        assert row["plan_id"] == single.plan_id
        stored = PlanRows(store.engine).get(single.plan_id).document
        assert stored["predicted"] == single.to_document()["predicted"]
        assert {name: row[name] for name in single.predicted} == {n: i.value for n, i in single.predicted.items()}
        assert (row["status"], row["gap"]) == (single.solution["status"], single.solution["gap"])
    assert sum(row["best"] for row in rows) == 2
    again = HereRunner(answered)
    assert Loop(open_study(tmp_path / "sweep.yaml", store), store, again).run().answered == 0
    assert again.answered == []


def test_pinned_serving_deployments_are_estimated_and_not_stored(store: Catalog, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        "arrival_s,input_length,output_length\n" + "".join(f"{0.2 * n},{500 + n},50\n" for n in range(200))
    )
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "kind: sweep\nask: estimate\nbase:\n  kind: serving\n  model: llama-3.1-8b\n"
        "  cluster: {nodes: [{type: dgx-h100, count: 1}]}\n  workload: {trace: trace.csv}\n"
        "  slo: {ttft_p99_s: 1.0}\nover: {fixed.tensor_parallel: [1, 2], fixed.num_workers: [1, 2]}\n"
    )
    study = open_study(path, store)
    assert Loop(study, store, local(study, store)).run().answered == 4
    for question, row in zip(study.questions, rows_of(study.document, store), strict=True):
        single = estimate_plan(question.document, store, base=tmp_path)
        assert {name: row[name] for name in single.predicted} == {n: i.value for n, i in single.predicted.items()}
        assert row["keeps_slo"] is single.solution["kept"] is True
    assert PlanRows(store.engine).list() == ()


def test_no_plan_is_an_answer_and_is_not_stored(store: Catalog, tmp_path: Path) -> None:
    study = open_study(write_sweep(tmp_path, TOO_LARGE), store)
    done = Loop(study, store, local(study, store)).run()
    assert (done.finished, done.failed) == (2, 0)
    first, second = rows_of(study.document, store)
    assert (first["status"], first["plan_id"], second["status"]) == ("infeasible", None, "optimal")
    assert "memory" in first["problem"]
    assert len(PlanRows(store.engine).list()) == 1


def test_an_estimate_that_cannot_run_says_why(store: Catalog, tmp_path: Path) -> None:
    text = "kind: sweep\nask: estimate\nbase: base.yaml\nover: {model: [llama-3.1-405b, llama-3.2-1b]}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    Loop(study, store, local(study, store)).run()
    first, second = rows_of(study.document, store)
    assert (first["status"], second["status"], second["problem"]) == ("infeasible", "feasible", None)
    assert "device memory" in first["problem"]
    assert "more than 78.4 GiB on the worst rank" in first["problem"]


def test_an_estimate_that_misses_its_slo_says_which(store: Catalog, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "kind: sweep\nask: estimate\nbase:\n  kind: serving\n  model: llama-3.1-8b\n"
        "  cluster: {nodes: [{type: dgx-h100, count: 1}]}\n"
        "  workload: {input_length: 500, output_length: 50, request_rate_per_s: 1, num_requests: 50}\n"
        "  fixed: {tensor_parallel: 1}\nover: {slo.tpot_p95_s: [1 us, 10 s]}\n"
    )
    study = open_study(path, store)
    Loop(study, store, local(study, store)).run()
    first, second = rows_of(study.document, store)
    assert (first["keeps_slo"], second["keeps_slo"], second["problem"]) == (False, True, None)
    assert "tpot_p95_s" in first["problem"]
    assert "SLO 1.0 us" in first["problem"]


def test_a_point_that_cannot_be_answered_costs_itself_and_is_told(store: Catalog, tmp_path: Path) -> None:
    text = "kind: sweep\nbase: base.yaml\nover: {model: [no-such-model, llama-3.1-8b]}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    done = Loop(study, store, local(study, store)).run()
    assert (done.finished, done.failed) == (2, 1)
    first, second = rows_of(study.document, store)
    assert (first["status"], second["status"]) == ("failed", "optimal")
    assert "no-such-model" in first["problem"]
    assert retried(study, store) == 1
    assert progress_of(study.document, store).finished == 1


def test_a_point_that_takes_too_long_is_given_up(store: Catalog, tmp_path: Path) -> None:
    text = "kind: sweep\nbase: base.yaml\nlimit_s: 0.05\nover: {model: [llama-3.1-8b]}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    assert Loop(study, store, local(study, store)).run().failed == 1
    assert rows_of(study.document, store)[0]["problem"].startswith("it takes too long: no answer within 0.05 s")


class Killed(LocalRunner):
    """Kills the process that has the first point, the given number of times."""

    times = 1

    def start(self, question: Question) -> None:
        super().start(question)
        if question.values["workload.global_batch_size"] == 64 and self.times:
            self.times -= 1
            for one in self._busy.values():
                if one.question is question and one.process.pid is not None:
                    os.kill(one.process.pid, signal.SIGKILL)


def test_ctrl_c_while_a_process_starts_is_left_to_the_parent(
    store: Catalog, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to all processes; one that was still importing printed its traceback."""
    study = open_study(write_sweep(tmp_path), store)
    runner = local(study, store)
    try:
        runner.start(study.questions[0])
        (starting,) = runner._busy.values()
        assert starting.process.pid is not None
        os.kill(starting.process.pid, signal.SIGINT)
        ((digest, outcome),) = runner.ended(300.0)
    finally:
        runner.close()
    assert (digest, outcome.died) == (study.questions[0].digest, None)
    assert "Traceback" not in capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # our own is heard again


@pytest.mark.parametrize(("times", "failed"), [(1, 0), (studies.MOST_DEATHS, 1)])
def test_a_process_that_is_killed_loses_nothing(store: Catalog, tmp_path: Path, times: int, failed: int) -> None:
    text = "kind: sweep\nbase: base.yaml\nover: {workload.global_batch_size: [64, 128]}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    runner = Killed(setting_of(study, store, travels=False), 1)
    runner.times = times
    done = Loop(study, store, runner).run()
    assert (done.finished, done.failed, done.answered) == (2, failed, 2 - failed)
    assert len(PlanRows(store.engine).list()) == 2 - failed
    found = Points(store.engine).of(question.digest for question in study.questions)
    assert sorted(one.attempts for one in found.values()) == [1, times + 1 if not failed else times]


def test_two_loops_at_once_answer_each_point_once(store: Catalog, tmp_path: Path) -> None:
    text = f"kind: sweep\nbase: base.yaml\nover: {{workload.global_batch_size: {list(range(8, 200, 8))}}}\n"
    study = open_study(write_sweep(tmp_path, text), store)
    runners = [HereRunner(answered) for _ in range(3)]
    loops = [Loop(study, store, runner) for runner in runners]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = sorted(digest for runner in runners for digest in runner.answered)
    assert everything == sorted(question.digest for question in study.questions)
    assert [loop.progress.finished for loop in loops] == [24, 24, 24]
    assert len(PlanRows(store.engine).list()) == 24


def test_what_a_dead_loop_held_is_taken_over(store: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = open_study(write_sweep(tmp_path), store)
    points = Points(store.engine)
    assert points.claim(study.questions[0].digest, "dead", dead_after_s=1.0)
    monkeypatch.setattr(studies, "DEAD_S", -60.0)
    runner = HereRunner(answered)
    assert Loop(study, store, runner).run().answered == 4
    assert points.of([study.questions[0].digest])[study.questions[0].digest].attempts == 2


def test_an_interrupted_loop_gives_back_what_it_held(store: Catalog, tmp_path: Path) -> None:
    study = open_study(write_sweep(tmp_path), store)
    number = iter(range(10))

    def interrupted(question: Question) -> Outcome:
        if next(number) == 1:
            raise KeyboardInterrupt
        return answered(question)

    runner = HereRunner(interrupted)
    with pytest.raises(KeyboardInterrupt):
        Loop(study, store, runner).run()
    assert runner.is_closed
    states = Points(store.engine).states(question.digest for question in study.questions)
    assert sorted(states.values()) == [PointState.DONE, *[PointState.WAITING] * 3]
    rest = HereRunner(answered)
    assert Loop(study, store, rest).run().answered == len(rest.answered) == 3


def test_a_wider_grid_asks_only_what_is_new(store: Catalog, tmp_path: Path) -> None:
    narrow = "kind: sweep\nbase: base.yaml\nover: {workload.global_batch_size: [64, 128]}\n"
    Loop(open_study(write_sweep(tmp_path, narrow), store), store, HereRunner(answered)).run()
    runner = HereRunner(answered)
    study = open_study(write_sweep(tmp_path, narrow.replace("128]", "128, 256]")), store)
    assert Loop(study, store, runner).run().finished == 3
    assert len(runner.answered) == 1


def test_files_travel_with_the_points_and_the_answers_are_the_same(store: Catalog, tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    here.mkdir()
    (here / "trace.csv").write_text("arrival_s,input_length,output_length\n" + "0,500,50\n0.5,400,40\n")
    path = here / "sweep.yaml"
    path.write_text(
        "kind: sweep\nask: estimate\nbase:\n  kind: serving\n  model: llama-3.1-8b\n"
        "  cluster: {nodes: [{type: dgx-h100, count: 1}]}\n  workload: {trace: trace.csv}\n"
        "over: {fixed.tensor_parallel: [1]}\n"
    )
    study = open_study(path, store)
    stays, travels = (setting_of(study, store, travels=one) for one in (False, True))
    assert set(travels.files or {}) == {"trace.csv"}
    first = answer(study.questions[0], stays)
    shutil.move(here, away)
    _workplace.cache_clear()
    second = answer(study.questions[0], travels)
    assert first.answer is not None
    assert second.answer is not None
    assert first.answer["predicted"] == second.answer["predicted"]


@pytest.mark.xdist_group("postgresql")
def test_a_study_in_postgresql_is_answered_by_processes_that_open_it_themselves(tmp_path: Path) -> None:
    reason = reason_without_server()
    if reason:
        pytest.skip(reason)
    text = "kind: sweep\nbase: base.yaml\nover: {workload.global_batch_size: [64, 128]}\n"
    with postgresql_server() as server:
        store = Catalog.open(server.new_database())
        study = open_study(write_sweep(tmp_path, text), store)
        assert Loop(study, store, local(study, store)).run().answered == 2
        rows = rows_of(study.document, store)
        assert rows[0]["plan_id"] == make_plan(study.questions[0].document, store).plan_id
        store.engine.dispose()
