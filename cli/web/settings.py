"""How a service runs: its limits, and who may ask."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
GIB = 2**30
# Names of this machine alone: a page of somebody else that a browser here shows cannot ask by them.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the person who starts the service decides. Every limit is one client's or one request's.

    Args:
        db: database as ``--db`` names it; None for the default.
        token: what a request must bear; empty: none, which is for loopback alone.
        hosts: names by which the service may be addressed (``Host``); ``*`` for any.
        workers: processes that answer jobs.
        callers: processes that answer what takes a moment: estimates, explanations, files.
        most_body_bytes: of a request.
        call_s: longest time of such a call.
        job_s: longest search; a question may ask for less.
        job_bytes: memory of a search from which on the best so far is taken; twice as much ends its process.
        most_waiting: jobs of one client that wait or run.
    """

    db: str | None = None
    token: str = ""
    hosts: tuple[str, ...] = LOOPBACK
    workers: int = 1
    callers: int = 2
    most_body_bytes: int = MIB
    call_s: float = 30.0
    job_s: float = 600.0
    job_bytes: int = 2 * GIB
    most_waiting: int = 50
