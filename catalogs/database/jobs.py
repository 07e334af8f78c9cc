"""Jobs in the database: a queue that many submitters fill and many workers empty, on one machine or several.

::

    submit ─► queued ──claim──► running ──finish──► done
                │  ▲               │ ├────fail────► failed
                │  └──release──────┤ └────stop────► cancelled
                │  └──requeue──────┘ (its worker died; failed after the last attempt)
                └─────cancel─────────────────────► cancelled

A job is claimed by exactly one worker. The claim is the :class:`Job` that :meth:`Jobs.claim` returns: it names the
worker and the number of the attempt, and whoever holds an older one – a worker that was thought dead and comes back –
can neither beat nor finish it. Every change is one statement that decides by the row it locks, so none can be lost to
another one between reading and writing; PostgreSQL runs them side by side, SQLite one after another. Ages are told by
the clock of the database.

A job tells nothing about what its plan is. A worker that dies after it has stored the plan and before it has finished
the job leads to a second attempt, which finds the same plan under the same id: it is stored once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, overload

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine

from meshplan.catalogs.database.connection import queueing, reading
from meshplan.catalogs.database.job_rows import FINISHED, JOB_COLUMNS, Beat, Job, JobState, clock, job_of
from meshplan.catalogs.database.tables import job_askers, jobs

# 64 random bits: nobody guesses another one's job.
_ID_BYTES = 8
# How often a worker without work looks again: soon at first, then less often, so that an idle fleet costs little.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# Names the advisory locks of clients among PostgreSQL's; any number that nothing else here uses.
_CLIENTS_LOCK = 0x6A6F6273


class Jobs:
    """The queue of one database.

    Args:
        engine: an opened catalog.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # --- those who ask --------------------------------------------------------------------------------------------

    @overload
    def submit(
        self, document: Mapping[str, Any], *, kind: str, digest: str, client: str = "", most: None = None
    ) -> Job: ...

    @overload
    def submit(
        self, document: Mapping[str, Any], *, kind: str, digest: str, client: str = "", most: int
    ) -> Job | None: ...

    def submit(
        self, document: Mapping[str, Any], *, kind: str, digest: str, client: str = "", most: int | None = None
    ) -> Job | None:
        """Put a question into the queue; where a job for the same one waits or runs, that job is returned.

        The client counts as one who asked it, in either case.

        Args:
            document: the question, plain JSON.
            kind: of the question.
            digest: of the question.
            client: who asks.
            most: how many jobs of its own the client may have waiting or running, this one included; None for any
                number. However many it submits at once, there are never more.

        Returns:
            The job; None where the client has ``most`` already and nobody else has asked this question.
        """
        row = {
            "job_id": secrets.token_hex(_ID_BYTES),
            "kind": kind,
            "digest": digest,
            "document": dict(document),
            "client": client,
            "state": JobState.QUEUED,
            "attempts": 0,
            "cancel_asked": False,
            "submitted_s": clock(),
        }
        new = _insert(self.engine, jobs).values(row).on_conflict_do_nothing().returning(*JOB_COLUMNS)
        asked = sa.and_(jobs.c.kind == kind, jobs.c.digest == digest, _IS_ACTIVE, ~jobs.c.cancel_asked)
        same = sa.select(*JOB_COLUMNS).where(asked).with_for_update()  # so that nobody cancels it before it is joined
        # The job that stood in the way can end before it is read; then there is room for a new one.
        while True:
            with queueing(self.engine) as connection:
                found = connection.execute(same).mappings().first()
                if found is None:
                    if most is not None and _is_full(connection, client, most):
                        return None
                    found = connection.execute(new).mappings().first()
                if found is not None:
                    asker = {"job_id": found["job_id"], "client": client}
                    connection.execute(_insert(self.engine, job_askers).values(asker).on_conflict_do_nothing())
                    return job_of(found)

    def cancel(self, job_id: str, *, client: str | None = None) -> Job | None:
        """Cancel a job: one that waits at once, one that runs by asking its worker; one that is over stays as it is.

        Args:
            job_id: of the job.
            client: who no longer wants the answer; the job goes on while somebody else does. None: it is cancelled
                whoever waits for it.

        Returns:
            The job as it stands now; None where there is none of that id.
        """
        waits, here = jobs.c.state == JobState.QUEUED, job_askers.c.job_id == job_id
        change = (
            sa.update(jobs)
            .where(jobs.c.job_id == job_id, _IS_ACTIVE)
            .values(
                cancel_asked=True,
                state=sa.case((waits, JobState.CANCELLED), else_=jobs.c.state),
                finished_s=sa.case((waits, clock()), else_=jobs.c.finished_s),
            )
        )
        with queueing(self.engine) as connection:
            # Of two who leave at once, the second sees that the first has left.
            connection.execute(sa.select(jobs.c.number).where(jobs.c.job_id == job_id).with_for_update())
            leaving = sa.true() if client is None else job_askers.c.client == client
            connection.execute(sa.delete(job_askers).where(here, leaving))
            if connection.execute(sa.select(job_askers.c.client).where(here).limit(1)).first() is None:
                connection.execute(change)
            return _first(connection, jobs.c.job_id == job_id)

    def askers(self, job_id: str) -> frozenset[str]:
        """The clients that want the answer of a job."""
        with reading(self.engine) as connection:
            query = sa.select(job_askers.c.client).where(job_askers.c.job_id == job_id)
            return frozenset(connection.execute(query).scalars())

    def get(self, job_id: str) -> Job | None:
        """The job of that id; None where there is none (any more)."""
        with reading(self.engine) as connection:
            return _first(connection, jobs.c.job_id == job_id)

    def answered(self, *, kind: str, digest: str) -> Job | None:
        """The last job for a question that is done; None where there is none."""
        done = sa.and_(jobs.c.kind == kind, jobs.c.digest == digest, jobs.c.state == JobState.DONE)
        with reading(self.engine) as connection:
            query = sa.select(*JOB_COLUMNS).where(done).order_by(jobs.c.number.desc()).limit(1)
            row = connection.execute(query).mappings().first()
        return None if row is None else job_of(row)

    def listed(
        self, *, state: JobState | None = None, client: str | None = None, limit: int = 100, before: int | None = None
    ) -> tuple[Job, ...]:
        """Jobs, newest first.

        Args:
            state: only those that stand there.
            client: only those of one client.
            limit: how many at most.
            before: only those with a lower number: the last one of the page before.
        """
        query = sa.select(*JOB_COLUMNS).order_by(jobs.c.number.desc()).limit(limit)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if client is not None:
            query = query.where(jobs.c.client == client)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with reading(self.engine) as connection:
            return tuple(job_of(row) for row in connection.execute(query).mappings())

    def counts(self, *, client: str | None = None) -> Mapping[JobState, int]:
        """How many jobs stand in each state; of one client, where it is given."""
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        if client is not None:
            query = query.where(jobs.c.client == client)
        with reading(self.engine) as connection:
            found = {JobState(state): int(count) for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in JobState}

    def ahead_of(self, job: Job) -> int:
        """How many waiting jobs will be claimed before this one; 0 of one that does not wait."""
        if job.state is not JobState.QUEUED:
            return 0
        query = sa.select(sa.func.count()).where(jobs.c.state == JobState.QUEUED, jobs.c.number < job.number)
        with reading(self.engine) as connection:
            return int(connection.execute(query).scalar_one())

    # --- those who work -------------------------------------------------------------------------------------------

    def claim(self, worker: str, *, wait_s: float = 0.0, pause: Callable[[float], object] = time.sleep) -> Job | None:
        """Take the job that waits longest; no other worker gets it.

        Args:
            worker: name of the claimer; several may share one.
            wait_s: how long to wait for a job where there is none.
            pause: waits for so many seconds between two looks, or less where it hears that there is work.

        Returns:
            The job, which the other methods take as the proof of the claim; None where none came.
        """
        oldest = (
            sa.select(jobs.c.number)
            .where(jobs.c.state == JobState.QUEUED)
            .order_by(jobs.c.number)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        change = (
            sa.update(jobs)
            .where(jobs.c.number == oldest)
            .values(
                state=JobState.RUNNING,
                worker=worker,
                attempts=jobs.c.attempts + 1,
                started_s=clock(),
                beat_s=clock(),
                progress=sa.null(),
            )
            .returning(*JOB_COLUMNS)
        )
        end, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
        while True:
            # A look costs no lock: idle workers do not keep SQLite's one writer out.
            if self._has_queued():
                with queueing(self.engine) as connection:
                    row = connection.execute(change).mappings().first()
                if row is not None:
                    return job_of(row)
            left = end - time.monotonic()
            if left <= 0:
                return None
            pause(min(pause_s, left))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def beat(self, job: Job, progress: Mapping[str, Any] | None = None) -> Beat:
        """Say that the claim is alive, and hear whether to go on.

        Args:
            job: the claim.
            progress: what to tell those who wait; None leaves what was told before.
        """
        reported = {} if progress is None else {"progress": dict(progress)}
        change = sa.update(jobs).where(_held(job)).values(beat_s=clock(), **reported).returning(jobs.c.cancel_asked)
        with queueing(self.engine) as connection:
            row = connection.execute(change).first()
        if row is None:
            return Beat.LOST
        return Beat.STOP if row.cancel_asked else Beat.GO_ON

    def finish(self, job: Job, *, plan_id: str | None) -> bool:
        """The work is done, also where somebody has asked meanwhile to cancel it.

        Args:
            job: the claim.
            plan_id: the stored plan; None for an answer that is not stored ("no plan exists" is in the progress).

        Returns:
            Whether the claim still held; where not, nothing has changed.
        """
        return self._end(job, state=JobState.DONE, plan_id=plan_id)

    def stop(self, job: Job, *, plan_id: str | None = None) -> bool:
        """The work was ended because the job is cancelled; ``plan_id`` is the incumbent, where there was one."""
        return self._end(job, state=JobState.CANCELLED, plan_id=plan_id)

    def fail(self, job: Job, problem: Mapping[str, Any]) -> bool:
        """There is no answer, and trying again would not help; ``problem`` says why, plain JSON."""
        return self._end(job, state=JobState.FAILED, problem=dict(problem))

    def release(self, job: Job) -> bool:
        """Give the job back, at its old place in the queue: the worker has to end. A cancelled one is cancelled."""
        with queueing(self.engine) as connection:
            return connection.execute(sa.update(jobs).where(_held(job)).values(_given_back())).rowcount > 0

    # --- those who keep house -------------------------------------------------------------------------------------

    def requeue(self, *, older_than_s: float, most_attempts: int) -> tuple[Job, ...]:
        """Take the jobs of dead workers from them: back into the queue, or failed after the last attempt.

        Any worker may do this at any time; a job is taken once.

        Args:
            older_than_s: a worker counts as dead that has not been heard of for so long, several times the interval
                of its heartbeats.
            most_attempts: a job that has killed so many workers is not given to another.

        Returns:
            The jobs as they stand now.
        """
        dead = (
            sa.select(jobs.c.number, jobs.c.attempts, jobs.c.cancel_asked)
            .where(jobs.c.state == JobState.RUNNING, jobs.c.beat_s < clock() - older_than_s)
            .order_by(jobs.c.number)
            .with_for_update(skip_locked=True)
        )
        taken = []
        with queueing(self.engine) as connection:
            for number, attempts, cancel_asked in connection.execute(dead).all():
                change = _given_back()
                if attempts >= most_attempts and not cancel_asked:
                    problem = {
                        "title": "the job's workers died",
                        "detail": f"{attempts} of {most_attempts} attempts ended without a word from the worker; "
                        "out of memory, or killed",
                    }
                    change = {"state": JobState.FAILED, "finished_s": clock(), "problem": problem}
                row = connection.execute(
                    sa.update(jobs).where(jobs.c.number == number).values(change).returning(*JOB_COLUMNS)
                )
                taken.append(job_of(row.mappings().one()))
        return tuple(taken)

    def forget(self, *, older_than_s: float) -> int:
        """Delete the jobs that have been over for so long; their plans stay. Returns how many."""
        over = sa.delete(jobs).where(jobs.c.state.in_(FINISHED), jobs.c.finished_s < clock() - older_than_s)
        with queueing(self.engine) as connection:
            return connection.execute(over).rowcount

    def _has_queued(self) -> bool:
        with reading(self.engine) as connection:
            query = sa.select(jobs.c.number).where(jobs.c.state == JobState.QUEUED).limit(1)
            return connection.execute(query).first() is not None

    def _end(self, job: Job, **values: Any) -> bool:
        change = sa.update(jobs).where(_held(job)).values(finished_s=clock(), **values)
        with queueing(self.engine) as connection:
            return connection.execute(change).rowcount > 0


_IS_ACTIVE = jobs.c.state.in_([JobState.QUEUED, JobState.RUNNING])


def _insert(engine: Engine, table: sa.Table) -> Any:
    dialect = postgresql if engine.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _is_full(connection: Connection, client: str, most: int) -> bool:
    """Whether a client has so many open jobs; until the transaction ends, nobody else counts them."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer in any case
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CLIENTS_LOCK, sa.func.hashtext(client))))
    query = sa.select(sa.func.count()).where(_IS_ACTIVE, jobs.c.client == client)
    return int(connection.execute(query).scalar_one()) >= most


def _held(job: Job) -> sa.ColumnElement[bool]:
    """The claim still stands: the same worker, in the same attempt."""
    return sa.and_(
        jobs.c.job_id == job.job_id,
        jobs.c.state == JobState.RUNNING,
        jobs.c.worker == job.worker,
        jobs.c.attempts == job.attempts,
    )


def _given_back() -> dict[str, Any]:
    """Queued again; cancelled where that was asked."""
    asked = jobs.c.cancel_asked
    return {
        "state": sa.case((asked, JobState.CANCELLED), else_=JobState.QUEUED),
        "finished_s": sa.case((asked, clock()), else_=sa.null()),
    }


def _first(connection: Connection, condition: sa.ColumnElement[bool]) -> Job | None:
    row = connection.execute(sa.select(*JOB_COLUMNS).where(condition)).mappings().first()
    return None if row is None else job_of(row)
