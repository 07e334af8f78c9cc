"""``meshplan work``: further workers for the database of a service."""

from __future__ import annotations

import signal
import threading

import typer

from meshplan.cli.options import DatabaseOption
from meshplan.cli.web.options import WorkersOption, needs_service

# Seconds after which it is looked whether a signal has come.
LOOK_S = 1.0

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def work(workers: WorkersOption = 1, db: DatabaseOption = None) -> None:
    """Answer the questions that wait in the database of a service.

    Ctrl-C ends it; the search in hand keeps its best plan.
    """
    needs_service()
    from meshplan.cli.web.jobs.crew import crew
    from meshplan.cli.web.settings import Settings

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with crew(Settings(db=db, workers=workers)):
        # In pieces: a signal that comes while the process is stopped may reach another thread, and would wake nobody.
        while not ended.wait(LOOK_S):
            pass
