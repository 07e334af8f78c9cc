"""One point answered, in whichever process: the question goes in, a headline and perhaps a plan come out.

Nothing here knows where it runs. What it is given and what it returns is plain data, so that processes and Ray tasks
send it as it is; errors become documents, since exceptions do not survive the way between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.sqlite import engine_of
from meshplan.catalogs.errors import CatalogUnavailableError, MeshplanError
from meshplan.catalogs.scratch import scratch_folder
from meshplan.planner.core.plan import Plan, own_version
from meshplan.planner.core.solution import Status
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.sweep.points import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all points of a sweep are answered with.

    Args:
        key: one word for it: a process that has prepared it once finds it again.
        catalog_file: content of an SQLite catalog as the sweep found it; None where the catalog is a server's.
        db: URL of that server.
        folder: against which paths in the specs are resolved, where no files travel.
        files: name below that folder → content, for processes that do not see it.
        version: of meshplan.
    """

    key: str
    catalog_file: bytes | None = field(default=None, compare=False, repr=False)
    db: str | None = field(default=None, compare=False, repr=False)
    folder: str = field(default=".", compare=False)
    files: Mapping[str, bytes] | None = field(default=None, compare=False, repr=False)
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one attempt; exactly one of ``answer``, ``problem`` and ``died`` is given.

    Args:
        answer: headline of the answer, plain JSON.
        plan: document of the plan to store; None where none exists or nothing is stored.
        problem: why there is no answer and trying again would give none: ``title``, ``detail``.
        died: why this attempt ended without a word on the question; another may succeed.
    """

    answer: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    problem: Mapping[str, Any] | None = None
    died: str | None = None


class _Workplace:
    """A catalog and a folder of specs, as one process sees them."""

    def __init__(self, setting: Setting) -> None:
        self.catalog = (
            Catalog.open(setting.db) if setting.catalog_file is None else Catalog(engine_of(setting.catalog_file))
        )
        self.base = Path(setting.folder)
        if setting.files:
            self._scratch = scratch_folder()  # as long as the workplace lives
            self.base = Path(self._scratch.name)
            for name, content in setting.files.items():
                (self.base / name).parent.mkdir(parents=True, exist_ok=True)
                (self.base / name).write_bytes(content)


@lru_cache(maxsize=1)
def _workplace(setting: Setting) -> _Workplace:
    return _Workplace(setting)


def answer(question: Question, setting: Setting) -> Outcome:
    """Answer one question; never raises, unless the process is told to end."""
    here = own_version()
    if setting.version != here:
        return Outcome(died=f"a process with meshplan {here} cannot answer for {setting.version}: install the same")
    try:
        place = _workplace(setting)
        if question.ask == "plan":
            made = make_plan(question.document, place.catalog, base=place.base, **question.options)
        else:
            made = estimate_plan(question.document, place.catalog, base=place.base, beyond=False)
    except CatalogUnavailableError as error:  # locked, or its server is away: it may come back
        return Outcome(died=str(error))
    except MeshplanError as error:
        return Outcome(problem={"title": "not answered", "detail": str(error)})
    except MemoryError:
        return Outcome(problem={"title": "too little memory", "detail": "ask a smaller question, or allow less time"})
    except Exception as error:  # noqa: BLE001 - a bug costs its own point, and is told as one
        detail = f"{type(error).__name__}: {error}"
        return Outcome(problem={"title": "a bug of meshplan, not of your input", "detail": detail})
    stores = question.ask == "plan" and made.solution["status"] != Status.INFEASIBLE.value
    return Outcome(answer=headline(made), plan=made.to_document() if stores else None)


def headline(made: Plan) -> dict[str, Any]:
    """What a table of many plans says of one; every number is the plan's own."""
    solution = made.solution
    kept = {key: solution[key] for key in ("gap", "kept", "binding_constraint", "stopped", "cpu_s") if key in solution}
    if made.rank_table is not None:
        kept["num_devices"] = len(made.rank_table)
    if made.certificate is not None:
        kept["certificate"] = made.certificate["outcome"]
    return {
        "kind": made.kind,
        "status": solution["status"],
        **kept,
        "predicted": {name: interval.value for name, interval in made.predicted.items()},
    }
