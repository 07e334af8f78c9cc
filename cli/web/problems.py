"""Errors over HTTP: problem documents (RFC 9457) with the words of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshplan.catalogs.errors import (
    EXIT_BUG,
    EXIT_EMIT,
    EXIT_SOLVER,
    CatalogError,
    CatalogUnavailableError,
    EmitError,
    MeshplanError,
    SolverError,
    SpecError,
    StoreError,
    UnitError,
    UnknownEntryError,
)
from meshplan.catalogs.untrusted.text import shown

MEDIA_TYPE = "application/problem+json"
# The first class that an error is one of decides: status, title.
_STATUS: tuple[tuple[type[MeshplanError], int, str], ...] = (
    (SpecError, 422, "The question cannot be answered as it is written"),
    (UnitError, 422, "The question cannot be answered as it is written"),
    (UnknownEntryError, 404, "The catalog has no such entry"),
    (StoreError, 404, "There is no such plan"),
    (CatalogUnavailableError, 503, "The catalog cannot be used now"),
    (CatalogError, 422, "The catalog cannot answer"),
    (EmitError, 422, "These files cannot be written"),
    (SolverError, 503, "No answer was found within the limits"),
)
BUG = "This is a bug of meshplan, not of your input"


def problem(status: int, title: str, detail: str, **more: Any) -> dict[str, Any]:
    """A problem document.

    Args:
        status: of HTTP.
        title: the same for all problems of a kind.
        detail: what is wrong here, with the numbers and the fix.
        more: further members, such as ``errors``.
    """
    return {"type": "about:blank", "title": title, "status": status, "detail": shown(detail), **more}


def problem_of(error: BaseException) -> dict[str, Any]:
    """The problem document of an error; what meshplan did not raise on purpose is a bug, and says no more than that."""
    for kind, status, title in _STATUS:
        if isinstance(error, kind):
            return problem(status, title, str(error), exit_code=error.exit_code, **dict(_errors(error)))
    if isinstance(error, MemoryError):
        what, fix = "There is not enough memory for this", "ask a smaller question, or give a time limit"
        return problem(503, what, fix, exit_code=EXIT_SOLVER)
    if isinstance(error, OSError):  # a name that is too long, a full disk
        why = error.strerror or type(error).__name__
        return problem(422, "The system refuses this", why, exit_code=EXIT_EMIT)
    return problem(500, BUG, type(error).__name__, exit_code=EXIT_BUG)


def _errors(error: MeshplanError) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Where each problem of a spec is, so that a form can show it at its field."""
    if isinstance(error, SpecError):
        yield "errors", [{"path": shown(one.path), "message": shown(one.message)} for one in error.problems]
