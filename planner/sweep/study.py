"""A study: the points of a sweep in the store, and the loop that lets them be answered.

The loop is the only one that writes. It claims a point, hands it to a runner, and stores what comes back; several such
loops, here and on other machines, share one study by the claims in the store. What is killed loses what was in its
hands: the claim of a dead loop lapses after :data:`DEAD_S`, that of a dead process is given back at once.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.sqlite import copy_without
from meshplan.catalogs.database.state import catalog_state
from meshplan.catalogs.database.studies.points import FINISHED, Points, PointState
from meshplan.catalogs.database.studies.study_rows import StudyRow, StudyRows
from meshplan.catalogs.database.tables import WRITTEN_BY_ANSWERS
from meshplan.catalogs.errors import CatalogUnavailableError
from meshplan.planner.core.kinds import kind_of
from meshplan.planner.core.plan import digest, own_version, plain
from meshplan.planner.core.reading.spec_reader import read_spec
from meshplan.planner.sweep.answer import Outcome, Setting
from meshplan.planner.sweep.points import Question, files_of, questions_of
from meshplan.planner.sweep.runners.runner import Runner
from meshplan.planner.sweep.spec import SweepSpec, read_sweep
from meshplan.planner.sweep.table import Row, study_rows

# Seconds between two signs of life of a loop, and after which one without any counts as dead.
BEAT_S = 1.0
DEAD_S = 15.0
# A point that has ended so many processes is not given to another.
MOST_DEATHS = 3
_ID_LENGTH = 12
_NAME_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A sweep written out.

    Args:
        study_id: digest of its questions, in order.
        name: what the user calls it.
        document: what is stored of it.
        questions: its points.
        base: folder against which paths in the specs are resolved.
    """

    study_id: str
    name: str
    document: Mapping[str, Any]
    questions: tuple[Question, ...]
    base: Path


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a study is.

    Args:
        total: different questions.
        finished: of them, those that were answered or have failed, whoever did it.
        failed: of these, those without an answer.
        running: at work in this loop.
        elsewhere: claimed by another loop.
        answered: stored by this loop.
    """

    total: int
    finished: int = 0
    failed: int = 0
    running: int = 0
    elsewhere: int = 0
    answered: int = 0


def open_study(path: Path, catalog: Catalog) -> Study:
    """Read a sweep file, write its points out, and store them as waiting where they are new.

    Raises:
        SpecError: the file, or a question in it, is malformed.
        CatalogError: the store cannot be written.
    """
    sweep, spec, base = read_sweep(path)
    questions = questions_of(sweep, spec, base, catalog_state=catalog_state(catalog.engine))
    name = sweep.name or path.stem
    study_id = digest([one.digest for one in questions])[:_ID_LENGTH]
    document = _document(sweep, questions)
    Points(catalog.engine).add([one.digest for one in questions])
    StudyRows(catalog.engine).put(study_id, name=name, document=document)
    return Study(study_id=study_id, name=name, document=document, questions=questions, base=base)


def _document(sweep: SweepSpec, questions: Sequence[Question]) -> dict[str, Any]:
    first = kind_of(questions[0].document)
    model = first.spec_model(questions[0].document)
    # Of a sweep over objectives, that of the first point: one metric compares them all.
    objective = None if model is None else getattr(read_spec(model, questions[0].document), "objective", None)
    return {
        "kind": first.name,
        "objective": plain(objective),
        "ask": sweep.ask,
        "fields": list(sweep.fields),
        "best": sweep.best,
        "group_by": sweep.group_by,
        "pareto": sweep.pareto,
        "points": [{"digest": one.digest, "values": dict(one.values)} for one in questions],
    }


def rows_of(document: Mapping[str, Any], catalog: Catalog) -> list[Row]:
    """The table of a study as it stands now."""
    return study_rows(document, Points(catalog.engine).of(one["digest"] for one in document["points"]))


def progress_of(document: Mapping[str, Any], catalog: Catalog) -> Progress:
    """How far a stored study is."""
    digests = {one["digest"] for one in document["points"]}
    states = list(Points(catalog.engine).states(digests).values())
    finished = sum(state in FINISHED for state in states)
    return Progress(total=len(digests), finished=finished, failed=states.count(PointState.FAILED))


def listed(catalog: Catalog) -> list[dict[str, Any]]:
    """The stored studies, newest first, with how far each is."""
    found = []
    for row in StudyRows(catalog.engine).list():
        progress = progress_of(row.document, catalog)
        about = {"study_id": row.study_id, "name": row.name, "kind": row.document["kind"], "created_at": row.created_at}
        numbers = {"points": len(row.document["points"]), "finished": progress.finished, "failed": progress.failed}
        found.append({**about, "varies": row.document["fields"], **numbers})
    return found


def find_study(handle: str, catalog: Catalog) -> StudyRow:
    """The stored study of an id, the beginning of one, a name, or ``latest``.

    Raises:
        StoreError: there is none.
    """
    return StudyRows(catalog.engine).get(handle)


# --- what travels to where points are answered ------------------------------------------------------------------------


def setting_of(study: Study, catalog: Catalog, *, travels: bool) -> Setting:
    """What the points of a study are answered with: the catalog as it is now, whoever changes it meanwhile.

    Args:
        study: whose points.
        catalog: an SQLite catalog goes along as a copy; a server's is opened where the points are answered.
        travels: the files that specs name below their folder go along too, to processes that do not see it.
    """
    named = {name for question in study.questions for name in files_of(question.document, study.base)}
    inside = [name for name in sorted(named) if not Path(name).is_absolute() and ".." not in Path(name).parts]
    is_file = catalog.engine.dialect.name == "sqlite"
    return Setting(
        key=study.study_id,
        catalog_file=copy_without(catalog.engine, WRITTEN_BY_ANSWERS) if is_file else None,
        db=None if is_file else catalog.engine.url.render_as_string(hide_password=False),
        folder=str(study.base.resolve()),
        files={name: (study.base / name).read_bytes() for name in inside} if travels else None,
        version=own_version(),
    )


# --- the loop ---------------------------------------------------------------------------------------------------------


class Loop:
    """Lets the unfinished points of a study be answered.

    Args:
        study: which points.
        catalog: the store.
        runner: where they are answered.

    ``tell`` is called with the progress after every change; it may be replaced.
    """

    def __init__(self, study: Study, catalog: Catalog, runner: Runner) -> None:
        self.study, self.runner = study, runner
        self.points = Points(catalog.engine)
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(_NAME_BYTES)}"
        self._questions = {question.digest: question for question in study.questions}
        self._running: set[str] = set()
        self._elsewhere: list[str] = []
        self.tell: Callable[[Progress], None] = lambda _: None
        states = self.points.states(self._questions)
        self._waiting = deque(one for one in self._questions if states.get(one) not in FINISHED)
        self.progress = Progress(
            total=len(self._questions),
            finished=len(self._questions) - len(self._waiting),
            failed=sum(state is PointState.FAILED for state in states.values()),
        )

    def run(self) -> Progress:
        """Work until every point is finished, by this loop or by others.

        Raises:
            KeyboardInterrupt: what was claimed has been given back.
        """
        try:
            with self._beating():
                while self._waiting or self._running or self._elsewhere:
                    self._fill()
                    for digest_, outcome in self.runner.ended(BEAT_S if self._running or self._elsewhere else 0.0):
                        self._keep(digest_, outcome)
                    self._look_elsewhere()
        finally:
            self.runner.close()
            self.points.release(self.owner)
        return self.progress

    def _fill(self) -> None:
        """Claim points while there is room for them; those that others hold are looked after later."""
        while self.runner.room > 0 and self._waiting:
            one = self._waiting.popleft()
            if self.points.claim(one, self.owner, dead_after_s=DEAD_S):
                self._running.add(one)
                self.runner.start(self._questions[one])
            else:
                self._elsewhere.append(one)
        self._report()

    def _keep(self, one: str, outcome: Outcome) -> None:
        """Store what became of a point, if the claim still holds; otherwise somebody else does."""
        self._running.discard(one)
        if outcome.died is not None:
            problem = {"title": "its processes ended", "detail": outcome.died}
            if self.points.died(one, self.owner, problem, most_deaths=MOST_DEATHS):
                self._waiting.append(one)
                return
        elif outcome.problem is not None:
            self.points.fail(one, self.owner, outcome.problem)
        else:
            assert outcome.answer is not None  # noqa: S101  (an outcome has exactly one of the three)
            stored = self.points.finish(one, self.owner, outcome.answer, plan=outcome.plan, name=self.study.name)
            self.progress.answered += stored
        self._elsewhere.append(one)

    def _look_elsewhere(self) -> None:
        """Count the points that are finished, whoever did it; those whose owner is dead are waiting again."""
        if not self._elsewhere:
            return
        states = self.points.states(self._elsewhere)
        done = [one for one in self._elsewhere if states.get(one) in FINISHED]
        self.progress.finished += len(done)
        self.progress.failed += sum(states[one] is PointState.FAILED for one in done)
        left = [one for one in self._elsewhere if states.get(one) not in FINISHED]
        # A claim that lapsed is found by trying to take it, once there is nothing better to do.
        self._elsewhere = left if self._waiting else []
        self._waiting.extend(() if self._waiting else left)
        self.progress.elsewhere = len(left)
        self._report()

    def _report(self) -> None:
        self.progress.running = len(self._running)
        self.tell(self.progress)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Signs of life from a thread of its own, since storing may have to wait for other writers."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT_S):
                try:
                    self.points.beat(self.owner)
                except CatalogUnavailableError:  # it may come back; a claim that lapsed meanwhile is not stored
                    continue

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def retried(study: Study, catalog: Catalog) -> int:
    """Let the failed points of a study wait again; how many."""
    return Points(catalog.engine).retry(question.digest for question in study.questions)
