"""What a file is that was given to the wrong command, and the command that takes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshplan.catalogs.errors import SpecError
from meshplan.catalogs.untrusted.documents import DocumentError, parse

SPEC, STUDY, PLAN, RUN, ENTRIES = "a spec", "a study", "a plan", "a measured run", "catalog entries"
_TAKEN_BY = {
    SPEC: "meshplan plan {name} answers it",
    STUDY: "meshplan sweep {name} answers its questions",
    PLAN: "meshplan explain {name} shows it",
    RUN: "meshplan validate {name} predicts it, meshplan calibrate {name} learns from it",
    ENTRIES: "meshplan catalog import {name} reads them",
}
_HEAD_BYTES = 65_536  # of a file whose first line says what it is


def what_it_is(document: Mapping[str, Any]) -> str:
    """One of the kinds of file above by its keys; empty for anything else (a framework's configuration, say)."""
    keys = document.keys()
    if "spec" in keys and keys & {"plan_id", "spec_digest"}:
        return PLAN
    if {"measured", "hardware"} <= keys:
        return RUN
    if str(document.get("format", "")).startswith("meshplan-catalog/"):
        return ENTRIES
    if document.get("kind") == "sweep":
        return STUDY
    is_question = isinstance(document.get("kind"), str) and "apiVersion" not in keys and len(keys) > 1  # Kubernetes
    return SPEC if is_question or {"cluster", "workload"} <= keys else ""


def other_than(document: Mapping[str, Any], wanted: str, *, name: str, means: str = "") -> str:
    """A sentence where ``document`` is known to be something else; empty where it may be what is wanted.

    Args:
        document: what was read.
        wanted: one of the kinds of file above; anything else for none of them.
        name: how messages and commands call the file.
        means: how messages call what is wanted, where that is not ``wanted``.
    """
    found = what_it_is(document)
    if found in ("", wanted):
        return ""
    return f"{name} is {found}, not {means or wanted}: {_TAKEN_BY[found].format(name=name)}"


def refuse_other(document: Mapping[str, Any], wanted: str, *, name: str, means: str = "") -> None:
    """Refuse a document that another command takes; see :func:`other_than`.

    Raises:
        SpecError: names what it is and that command.
    """
    message = other_than(document, wanted, name=name, means=means)
    if message:
        raise SpecError.at("", message, of="what is asked")


def hint_of(path: Path) -> str:
    """What a file that is no document may be, by its first line; empty where that says nothing."""
    if not path.is_file():  # a pipe can be read once
        return ""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    first = head.partition("\n")[0]
    if first.startswith("#!"):
        return f"; it is a script: meshplan import {path} reads what it starts"
    try:
        row = parse(first, is_json=True, name="the line")
    except DocumentError:
        return ""
    if isinstance(row, dict) and what_it_is(row) == RUN:
        return f"; its lines are measured runs: meshplan validate {path}"
    return ""
