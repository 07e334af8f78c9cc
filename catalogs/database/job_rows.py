"""One job as a frozen value, its states, and the clock that its ages are told by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from meshplan.catalogs.database.tables import jobs


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINISHED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class Beat(StrEnum):
    """What the database answers to a worker's heartbeat."""

    GO_ON = "go on"
    STOP = "stop"  # somebody has cancelled the job: end the work, keep what was found, then Jobs.stop
    LOST = "lost"  # another worker has it, or it is over: end the work, write nothing more about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One question on its way to a plan, as it stood when it was read.

    Args:
        job_id: what users call it by.
        number: order of submission: of two jobs the one with the lower number is claimed first.
        kind: of the question, such as ``training``; what else there is to do is up to the caller.
        digest: of the question; while a job for it waits or runs, there is no second one.
        document: the question, plain JSON.
        client: who asked, for limits; may be empty.
        state: where it stands.
        attempts: how often it was claimed; names this claim together with the worker.
        worker: who holds it or held it last; None where nobody did.
        cancel_asked: it was cancelled; while it runs, the worker has still to stop.
        progress: what the worker last told (incumbent, bound, gap …), plain JSON.
        plan_id: the stored plan; of a cancelled job the incumbent, where there was one.
        problem: why it failed, plain JSON.
        submitted_at: UTC, by the clock of the database, as all times here.
        started_at: of the last attempt.
        beat_at: when its worker was last heard of.
        finished_at: when it was done, failed or cancelled.
        read_at: now, when this was read; differences to it are ages.
    """

    job_id: str
    number: int
    kind: str
    digest: str
    document: Mapping[str, Any]
    client: str
    state: JobState
    attempts: int
    worker: str | None
    cancel_asked: bool
    progress: Mapping[str, Any] | None
    plan_id: str | None
    problem: Mapping[str, Any] | None
    submitted_at: datetime
    started_at: datetime | None
    beat_at: datetime | None
    finished_at: datetime | None
    read_at: datetime

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in FINISHED

    @property
    def waited_s(self) -> float:
        """Seconds from submission to the start of the last attempt, or to now."""
        return ((self.started_at or self.finished_at or self.read_at) - self.submitted_at).total_seconds()


class clock(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since 1970, UTC, by the clock of the database, when the statement reaches it."""

    type = sa.Float()
    inherit_cache = True


@compiles(clock, "sqlite")
def _sqlite_clock(_element: object, _compiler: object, **_: object) -> str:
    # Days since 4714 BC; 2440587.5 of them were over in 1970, and a day has 86,400 s. Exact to 0.1 ms.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock, "postgresql")
def _postgresql_clock(_element: object, _compiler: object, **_: object) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


# What a job is made of: its row, and the time at which it was read.
JOB_COLUMNS = (*jobs.c, clock().label("read_s"))


def job_of(row: Mapping[Any, Any]) -> Job:
    """The job that a row of :data:`JOB_COLUMNS` is."""
    values: dict[str, Any] = {
        field.name: _time(row[f"{field.name.removesuffix('_at')}_s"]) if field.name.endswith("_at") else row[field.name]
        for field in fields(Job)
    }
    return Job(**{**values, "state": JobState(row["state"])})


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
