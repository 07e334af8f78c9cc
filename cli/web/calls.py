"""What takes a moment, answered in processes of their own: estimates, explanations, comparisons, files, rows.

Requests hold text from anybody. A process that reads it may open no file that it names, has a limit of memory, and is
ended where it takes too long; the service itself never runs an estimator. What comes back is text: the documents that
the command line prints, or a problem document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as OutOfTimeError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from threading import Lock
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from meshplan.cli.render import Format, rendered_document
from meshplan.cli.web.problems import MEDIA_TYPE, problem, problem_of
from meshplan.cli.web.sandbox import closed_catalog
from meshplan.cli.web.settings import GIB, Settings
from meshplan.planner.core.kinds import KINDS, kind_of

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

JSON = "application/json"
ZIP = "application/zip"
# A process is replaced after so many calls: what searches keep in memory for the next one adds up.
CALLS_OF_A_PROCESS = 500
CALL_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request gets.

    Args:
        status: of HTTP.
        media_type: of the body.
        body: of the response.
    """

    status: int
    media_type: str
    body: bytes


Call = Callable[..., Answer]


def document_answer(document: Mapping[str, Any], *, status: int = 200, media_type: str = JSON) -> Answer:
    """The text of ``--format json``."""
    return Answer(status=status, media_type=media_type, body=rendered_document(document, Format.JSON).encode())


def problem_answer(document: Mapping[str, Any]) -> Answer:
    """A problem document with its own status."""
    return document_answer(document, status=document["status"], media_type=MEDIA_TYPE)


class Calls:
    """Processes that answer calls.

    Args:
        settings: of the service.
        modules: with further calls, loaded before the first is made.
    """

    def __init__(self, settings: Settings, modules: Sequence[str] = ()) -> None:
        self.settings = settings
        # Forked from a process that has loaded everything and opened nothing: a new one takes milliseconds instead of
        # the seconds of its imports, for which requests would wait whenever one is replaced.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *_modules(), *modules])
        self._replacing = Lock()
        self._is_closed = False
        self._pool = self._new_pool()

    def warm_up(self) -> None:
        """Begin the processes, so that the first requests do not wait for them."""
        for _ in range(self.settings.callers):
            self._scheduled(warm, ())

    def answer(self, call: Call, *arguments: Any) -> Answer:
        """The answer of a call; a problem where it fails, takes too long, or takes its process down.

        Args:
            call: a function of a catalog and of the arguments, at the top of a module.
            arguments: plain data.
        """
        future = self._scheduled(call, arguments)
        try:
            return future.result()
        except OutOfTimeError:
            seconds = f"{self.settings.call_s:g} s"
            return problem_answer(problem(503, "It takes too long", f"no answer within {seconds}: ask as a plan"))
        except (ProcessExpired, BrokenProcessPool):
            return problem_answer(problem(503, "It takes too much", "the process that answered it has ended"))

    def close(self) -> None:
        """End the processes, whatever they do; no call is answered afterwards."""
        with self._replacing:
            self._is_closed = True
            self._end_pool()

    def _scheduled(self, call: Call, arguments: Sequence[Any]) -> ProcessFuture[Answer]:
        """A call on its way, in new processes where the old ones are of no use any more.

        Where a process ends that answers nothing – the system is short of memory and ends one, say – pebble gives all
        of them up and takes no further call.
        """
        with self._replacing:
            try:
                return self._sent(call, arguments)
            except RuntimeError:  # the pool has given up, or the service ends
                if self._is_closed:
                    raise
                self._end_pool()
                self._pool = self._new_pool()
                return self._sent(call, arguments)

    def _sent(self, call: Call, arguments: Sequence[Any]) -> ProcessFuture[Answer]:
        return self._pool.schedule(_run, args=(self.settings.db, call, arguments), timeout=self.settings.call_s)

    def _end_pool(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]  # pebble leaves this one untyped
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self.settings.callers,
            max_tasks=CALLS_OF_A_PROCESS,
            initializer=_prepared,
            initargs=(self.settings.db,),
            context=self._context,
        )


@cache
def _prepared(db: str | None) -> Catalog:
    """The catalog of this process, opened before the first request is read; from then on nothing else is."""
    return closed_catalog(db, CALL_BYTES)


def _run(db: str | None, call: Call, arguments: Sequence[Any]) -> Answer:
    """One call; what it raises becomes a problem here, since errors do not survive the way between processes."""
    try:
        return call(_prepared(db), *arguments)
    except Exception as error:  # noqa: BLE001 - refusals, and bugs, which are reported as such and end no process
        return problem_answer(problem_of(error))


# --- the calls --------------------------------------------------------------------------------------------------------


def checked(_: Catalog, document: Mapping[str, Any]) -> Answer:
    """Nothing, or what is wrong with an instance."""
    kind_of(document).offers("check")(document)
    return document_answer({})


def refused(catalog: Catalog, document: Mapping[str, Any]) -> Answer:
    """Everything that ``meshplan plan`` says is wrong with a malformed question."""
    from meshplan.planner.service import make_plan

    make_plan(document, catalog)
    return document_answer({})


def estimate(catalog: Catalog, state: str, document: Mapping[str, Any]) -> Answer:
    """``meshplan estimate``, of a catalog in that state."""
    from meshplan.catalogs.database.state import steady
    from meshplan.planner.service import estimate_plan

    return document_answer(estimate_plan(document, steady(catalog, state)).to_document())


def stored(catalog: Catalog, handle: str) -> Answer:
    """``meshplan plans show``."""
    return document_answer(stored_plan(catalog, handle).to_document())


def explained(catalog: Catalog, handle: str, instead: Sequence[str]) -> Answer:
    """``meshplan explain``, with ``--instead`` where choices are given."""
    from meshplan.cli.answers.plans import explanation_document, instead_of, read_choices

    made = stored_plan(catalog, handle)
    choices = read_choices(instead, made)
    document = instead_of(made, choices, catalog).to_document(made) if choices else explanation_document(made)
    return document_answer(document)


def compared(catalog: Catalog, handles: Sequence[str]) -> Answer:
    """``meshplan compare``."""
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.cli.answers.plans import compared as compare

    plans = [stored_plan(catalog, handle) for handle in handles]
    return document_answer(compare(plans, PlanRows(catalog.engine)).to_document())


def files(catalog: Catalog, handle: str, target: str | None, options: Mapping[str, Any]) -> Answer:
    """``meshplan emit`` as a ZIP archive; the same plan gives the same bytes."""
    from meshplan.catalogs.errors import EmitError
    from meshplan.planner.emit.writer import packed
    from meshplan.planner.service import emit_plan, plan_target

    made = stored_plan(catalog, handle)
    wanted = target or plan_target(made)
    if wanted is None:
        raise EmitError(f"plan {made.plan_id} is of the kind {made.kind!r}, which has no launcher files")
    emitted = emit_plan(made, wanted, catalog, **options)
    return Answer(status=200, media_type=ZIP, body=packed(emitted.artifacts))


def recorded(catalog: Catalog, handle: str, measured: Mapping[str, Any]) -> Answer:
    """``meshplan plans record``: the rows that it prints."""
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.cli.reports.comparison import measured_rows
    from meshplan.planner import store

    made = stored_plan(catalog, handle)
    store.record(handle, measured, PlanRows(catalog.engine))
    return document_answer({"plan_id": made.plan_id, "metrics": measured_rows(made, measured)}, status=201)


def validated(catalog: Catalog, text: str) -> Answer:
    """``meshplan validate`` of the rows in a text; rows that replay a recorded trace, which is a file, are refused."""
    from meshplan.cli.reports.measured.validation import validation_document
    from meshplan.planner.validate import validate_rows
    from meshplan.planner.validation.machines import rows_of

    return document_answer(validation_document(validate_rows(rows_of(text.splitlines(), name="the body"), catalog)))


def imported(catalog: Catalog, document: Mapping[str, Any]) -> Answer:
    """``meshplan catalog import`` of a document."""
    from meshplan.catalogs.database.transfer import import_document

    changes = import_document(catalog.engine, document, name="the body")
    counts = {"added": changes.added, "replaced": changes.replaced, "unchanged": changes.unchanged}
    return document_answer(counts, status=201)


def stored_plan(catalog: Catalog, handle: str) -> Any:
    """A stored plan; a handle of a request is never a path.

    Raises:
        StoreError: there is none, or it was edited.
    """
    from meshplan.catalogs.database.plan_rows import PlanRows
    from meshplan.planner.store import plan_from_document

    row = PlanRows(catalog.engine).get(handle)
    return plan_from_document(row.document, name=f"stored plan {handle}")


def warm(_: Catalog) -> Answer:
    """Nothing: a process that has answered it is there and has opened its catalog."""
    return document_answer({})


def _modules() -> Sequence[str]:
    """What calls need of the planner."""
    return ("meshplan.planner.service", *(kind.service for kind in KINDS.values()))


def schema(kind: str) -> dict[str, Any]:
    """``meshplan catalog schema``."""
    from meshplan.planner.core.reading.spec_reader import spec_schema

    asked = kind_of({"kind": kind})
    model = asked.offers("SPEC")
    found: dict[str, Any] = asked.offers("SCHEMA") if model is None else spec_schema(model)
    return found
