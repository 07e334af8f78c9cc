"""The queue: who gets a job, who may end it, and what becomes of it when its worker dies."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from meshplan.catalogs.database.job_rows import Beat, Job, JobState
from meshplan.catalogs.database.jobs import Jobs

QUESTION = {"kind": "training", "cluster": {"nodes": [1, 2.5, None, "ä"]}}
# Every worker counts as dead: its last word is older than a time to come.
ANY_AGE_S = -60.0


@pytest.fixture
def jobs(empty_engine: Engine) -> Jobs:
    return Jobs(empty_engine)


def submitted(jobs: Jobs, digest: str = "a", **options: Any) -> Job:
    return jobs.submit(QUESTION, kind="training", digest=digest, **options)


def claimed(jobs: Jobs, worker: str = "w") -> Job:
    job = jobs.claim(worker)
    assert job is not None
    return job


def got(jobs: Jobs, job: Job) -> Job:
    found = jobs.get(job.job_id)
    assert found is not None
    return found


def test_a_job_comes_back_as_it_went_in(jobs: Jobs) -> None:
    job = submitted(jobs, client="me")
    assert (job.state, job.document, job.client, job.attempts) == (JobState.QUEUED, QUESTION, "me", 0)
    assert job.submitted_at.tzinfo is UTC
    found = got(jobs, job)
    assert (found.job_id, found.submitted_at, found.is_finished) == (job.job_id, job.submitted_at, False)
    assert found.waited_s >= 0
    assert jobs.get("nothing") is None


def test_from_the_queue_to_the_plan(jobs: Jobs) -> None:
    job = submitted(jobs)
    claim = claimed(jobs)
    assert (claim.job_id, claim.state, claim.worker, claim.attempts) == (job.job_id, JobState.RUNNING, "w", 1)
    assert jobs.claim("other") is None
    assert jobs.beat(claim, {"gap": 0.5}) is Beat.GO_ON
    assert jobs.beat(claim) is Beat.GO_ON
    assert got(jobs, job).progress == {"gap": 0.5}
    assert jobs.finish(claim, plan_id="p")
    done = got(jobs, job)
    assert (done.state, done.plan_id, done.is_finished) == (JobState.DONE, "p", True)
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.submitted_at <= done.started_at <= done.finished_at <= done.read_at
    assert not jobs.finish(claim, plan_id="q")
    assert not jobs.fail(claim, {"title": "no"})
    assert jobs.beat(claim) is Beat.LOST
    assert got(jobs, job).plan_id == "p"


def test_the_last_answer_to_a_question_is_found(jobs: Jobs) -> None:
    assert jobs.answered(kind="training", digest="a") is None
    for plan_id in ("p", None, "q"):
        submitted(jobs)
        jobs.finish(claimed(jobs), plan_id=plan_id)
    submitted(jobs)
    jobs.fail(claimed(jobs), {"title": "broken"})
    submitted(jobs)
    found = jobs.answered(kind="training", digest="a")
    assert found is not None
    assert (found.state, found.plan_id) == (JobState.DONE, "q")
    assert jobs.answered(kind="serving", digest="a") is None


def test_the_same_question_is_one_job_while_it_is_open(jobs: Jobs) -> None:
    first = submitted(jobs)
    assert submitted(jobs, client="other").job_id == first.job_id
    assert submitted(jobs, "b").job_id != first.job_id
    assert jobs.submit(QUESTION, kind="serving", digest="a").job_id != first.job_id
    claim = claimed(jobs)
    assert submitted(jobs).job_id == first.job_id
    jobs.fail(claim, {"title": "broken"})
    assert submitted(jobs).job_id != first.job_id


def test_the_oldest_comes_first(jobs: Jobs) -> None:
    order = [submitted(jobs, digest) for digest in "abc"]
    assert [jobs.ahead_of(job) for job in order] == [0, 1, 2]
    assert [claimed(jobs).job_id for _ in order] == [job.job_id for job in order]
    assert jobs.ahead_of(order[2]) == 0


def test_a_waiting_job_is_cancelled_at_once(jobs: Jobs) -> None:
    job = jobs.cancel(submitted(jobs).job_id)
    assert job is not None
    assert (job.state, job.is_finished, job.started_at) == (JobState.CANCELLED, True, None)
    assert jobs.claim("w") is None
    assert jobs.cancel("nothing") is None


def test_a_running_job_is_asked_to_stop_and_keeps_its_incumbent(jobs: Jobs) -> None:
    job = submitted(jobs)
    claim = claimed(jobs)
    asked = jobs.cancel(job.job_id)
    assert asked is not None
    assert (asked.state, asked.cancel_asked) == (JobState.RUNNING, True)
    assert jobs.beat(claim, {"gap": 0.1}) is Beat.STOP
    again = submitted(jobs)
    assert again.job_id != job.job_id, "a job that stops is not joined by those who ask later"
    assert jobs.stop(claim, plan_id="incumbent")
    assert (got(jobs, job).state, got(jobs, job).plan_id) == (JobState.CANCELLED, "incumbent")


def test_a_job_goes_on_while_somebody_wants_its_answer(jobs: Jobs) -> None:
    job = submitted(jobs, client="me")
    assert submitted(jobs, client="you").job_id == job.job_id
    assert jobs.askers(job.job_id) == {"me", "you"}
    for client in ("stranger", "me", "me"):
        left = jobs.cancel(job.job_id, client=client)
        assert left is not None
        assert (left.state, left.cancel_asked) == (JobState.QUEUED, False)
    assert jobs.askers(job.job_id) == {"you"}
    last = jobs.cancel(job.job_id, client="you")
    assert last is not None
    assert last.state is JobState.CANCELLED
    assert jobs.askers(job.job_id) == set()


def test_of_two_who_leave_at_once_the_last_one_cancels(jobs: Jobs) -> None:
    for digest in map(str, range(10)):
        job = submitted(jobs, digest, client="0")
        clients = [str(number) for number in range(4)]
        for client in clients:
            submitted(jobs, digest, client=client)
        all_at_once(lambda client, job=job: jobs.cancel(job.job_id, client=client), clients)
        assert got(jobs, job).state is JobState.CANCELLED


def test_no_client_has_more_jobs_than_it_may_however_many_it_asks_at_once(jobs: Jobs) -> None:
    found: list[Job | None] = []
    digests = [str(number) for number in range(12)]
    all_at_once(lambda digest: found.append(submitted(jobs, digest, client="me", most=3)), digests)
    assert sum(job is not None for job in found) == jobs.counts(client="me")[JobState.QUEUED] == 3
    first = next(job for job in found if job)
    assert submitted(jobs, first.digest, client="me", most=3) is not None, "what is asked already is no job more"
    assert submitted(jobs, "other", client="you", most=3) is not None
    jobs.cancel(first.job_id)
    assert submitted(jobs, "another", client="me", most=3) is not None


def all_at_once(act: Callable[[str], object], arguments: list[str]) -> None:
    """Call with every argument in a thread of its own, all at the same time."""
    ready = threading.Barrier(len(arguments))

    def run(argument: str) -> None:
        ready.wait()
        act(argument)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_is_over_stays_as_it_is(jobs: Jobs) -> None:
    job = submitted(jobs)
    jobs.finish(claimed(jobs), plan_id="p")
    late = jobs.cancel(job.job_id)
    assert late is not None
    assert (late.state, late.cancel_asked, late.plan_id) == (JobState.DONE, False, "p")


def test_a_worker_that_ends_gives_its_job_back(jobs: Jobs) -> None:
    first, second = submitted(jobs), submitted(jobs, "b")
    claim = claimed(jobs)
    assert jobs.release(claim)
    assert not jobs.release(claim)
    assert claimed(jobs).job_id == first.job_id
    assert claimed(jobs).job_id == second.job_id


def test_a_cancelled_job_that_is_given_back_is_cancelled(jobs: Jobs) -> None:
    job = submitted(jobs)
    claim = claimed(jobs)
    jobs.cancel(job.job_id)
    assert jobs.release(claim)
    assert got(jobs, job).state is JobState.CANCELLED
    assert got(jobs, job).finished_at is not None


def test_a_dead_workers_job_is_claimed_anew(jobs: Jobs) -> None:
    job = submitted(jobs)
    dead = claimed(jobs)
    assert jobs.requeue(older_than_s=60.0, most_attempts=3) == ()
    assert [found.state for found in jobs.requeue(older_than_s=ANY_AGE_S, most_attempts=3)] == [JobState.QUEUED]
    assert jobs.beat(dead) is Beat.LOST
    # The same worker: it is the attempt that tells the claims apart.
    alive = claimed(jobs)
    assert (alive.job_id, alive.attempts) == (job.job_id, 2)
    assert not jobs.finish(dead, plan_id="late")
    assert jobs.beat(dead, {"gap": 1}) is Beat.LOST
    assert jobs.finish(alive, plan_id="p")
    assert got(jobs, job).plan_id == "p"


def test_a_job_that_kills_its_workers_fails(jobs: Jobs) -> None:
    job = submitted(jobs)
    for _ in range(2):
        claimed(jobs)
        jobs.requeue(older_than_s=ANY_AGE_S, most_attempts=2)
    failed = got(jobs, job)
    assert failed.state is JobState.FAILED
    assert failed.problem is not None
    assert "2 of 2 attempts" in failed.problem["detail"]
    assert jobs.claim("w") is None


def test_a_dead_workers_cancelled_job_is_cancelled(jobs: Jobs) -> None:
    job = submitted(jobs)
    claimed(jobs)
    jobs.cancel(job.job_id)
    newer = submitted(jobs)
    assert [found.state for found in jobs.requeue(older_than_s=ANY_AGE_S, most_attempts=1)] == [JobState.CANCELLED]
    assert claimed(jobs).job_id == newer.job_id


def test_jobs_are_counted_listed_and_forgotten(jobs: Jobs) -> None:
    order = [submitted(jobs, digest, client="me" if digest in "ab" else "") for digest in "abcd"]
    jobs.finish(claimed(jobs), plan_id=None)
    jobs.fail(claimed(jobs), {"title": "broken"})
    claimed(jobs)
    assert jobs.counts() == {
        JobState.QUEUED: 1, JobState.RUNNING: 1, JobState.DONE: 1, JobState.FAILED: 1, JobState.CANCELLED: 0
    }  # fmt: skip
    assert jobs.counts(client="me")[JobState.QUEUED] == 0
    page = jobs.listed(limit=3)
    assert [job.digest for job in page] == ["d", "c", "b"]
    assert [job.digest for job in jobs.listed(limit=3, before=page[-1].number)] == ["a"]
    assert [job.digest for job in jobs.listed(state=JobState.FAILED)] == ["b"]
    assert [job.digest for job in jobs.listed(client="me")] == ["b", "a"]
    assert jobs.forget(older_than_s=60.0) == 0
    assert jobs.forget(older_than_s=ANY_AGE_S) == 2
    assert jobs.get(order[0].job_id) is None
    assert [job.digest for job in jobs.listed()] == ["d", "c"]


def test_a_worker_that_hears_of_a_job_does_not_wait(jobs: Jobs) -> None:
    """The pause ends when the submitter says so, and the job is there."""
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        submitted(jobs)

    assert jobs.claim("w", wait_s=3600.0, pause=pause) is not None
    assert len(pauses) == 1


def test_a_worker_waits_for_a_job(jobs: Jobs) -> None:
    assert jobs.claim("w", wait_s=0.01) is None
    found: list[Job | None] = []
    waiting = threading.Thread(target=lambda: found.append(jobs.claim("w", wait_s=60.0)))
    waiting.start()
    job = submitted(jobs)
    waiting.join()
    assert [one.job_id for one in found if one] == [job.job_id]


def test_threads_share_the_work(jobs: Jobs) -> None:
    """Six threads submit the same 20 questions, six claim: every question is one job, every job is done once."""
    questions, done, failures = [str(number) for number in range(20)], Counter[str](), []
    all_in = threading.Barrier(6)

    def submit() -> None:
        all_in.wait()
        for digest in questions:
            submitted(jobs, digest)

    def work() -> None:
        while job := jobs.claim(threading.current_thread().name):
            done[job.digest] += 1
            if jobs.beat(job) is not Beat.GO_ON or not jobs.finish(job, plan_id=job.digest):
                failures.append(job)

    for role in (submit, work):
        threads = [threading.Thread(target=role) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert done == Counter(questions)
    assert jobs.counts()[JobState.DONE] == len(questions) == len(jobs.listed())
