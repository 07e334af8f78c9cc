"""From recorded runs of stored plans to constants of their clusters (``meshplan calibrate --recorded``), and back.

All recordings of one framework or engine on one cluster make one set, adapted anew from the constants without own runs
each time: recordings count once, in whatever order they came. The set is stored beside the shipped ones under a name
that only plans on that cluster look for (:mod:`meshplan.catalogs.constants.own`), so that taking it away brings their
answers back as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.constants.own import SIGN
from meshplan.catalogs.errors import CatalogError, SpecError, StoreError
from meshplan.planner import store
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.recorded import RecordedRun, Recording, outlier

if TYPE_CHECKING:
    from meshplan.catalogs.database.plan_rows import PlanRow, PlanRows
    from meshplan.catalogs.database.repository import Catalog

# Recordings that the provenance of a set names; the others are counted.
LISTED = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A recording that no constant is adapted to."""

    plan_id: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """All recordings of a database.

    Args:
        runs: kind → those that constants are adapted to, the oldest first.
        left_out: the others.
    """

    runs: dict[str, list[RecordedRun]]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSet:
    """Constants of one cluster.

    Args:
        kind: of its plans.
        name: framework or engine.
        runs: what it was adapted to.
        calibration: the set of the kind.
    """

    kind: str
    name: str
    runs: tuple[RecordedRun, ...]
    calibration: Any

    @property
    def subject(self) -> str:
        """What ``catalog remove`` calls it."""
        return f"{self.name}/{self.calibration.architecture}"


def adapts(kind: str) -> bool:
    """Whether constants are behind plans of a kind, which own runs adapt."""
    return KINDS[kind].offers("recorded_run") is not None


def judged(made: Plan, recording: Recording, catalog: Catalog, *, accepted: Collection[str] = ()) -> RecordedRun:
    """A recording as a run that constants are adapted to.

    Args:
        made: the plan.
        recording: what was measured of it.
        catalog: the constants that it is held against.
        accepted: ids of plans whose recordings are believed although they are outliers.

    Raises:
        UnsupportedError: it is left out, with the reason.
    """
    if not adapts(made.kind):
        raise UnsupportedError(f"no constants are behind plans of the kind {made.kind}")
    problems = store.measured_problems(made, recording.figures)
    if problems:
        raise UnsupportedError("; ".join(str(problem) for problem in problems))
    try:
        run: RecordedRun = KINDS[made.kind].offers("recorded_run")(made, recording, catalog)
    except (SpecError, CatalogError) as error:
        raise UnsupportedError(f"the plan is not answered any more: {error}") from error
    why = "" if recording.plan_id in accepted else outlier(run)
    if why:
        raise UnsupportedError(why)
    return run


def gathered(rows: PlanRows, catalog: Catalog, *, accepted: Collection[str] = ()) -> Gathered:
    """Every recording of a database, judged.

    Args:
        rows: the stored plans.
        catalog: the constants that recordings are held against.
        accepted: see :func:`judged`.
    """
    runs: dict[str, list[RecordedRun]] = {}
    left_out = []
    for row in reversed(rows.list()):
        for made, recording in _recordings(row, rows):
            try:
                if isinstance(made, str):
                    raise UnsupportedError(made)
                runs.setdefault(row.kind, []).append(judged(made, recording, catalog, accepted=accepted))
            except UnsupportedError as error:
                left_out.append(LeftOut(plan_id=row.plan_id, number=recording.number, reason=str(error)))
    return Gathered(runs=runs, left_out=tuple(left_out))


def _recordings(row: PlanRow, rows: PlanRows) -> Iterator[tuple[Plan | str, Recording]]:
    """The recordings of a stored plan, with the plan or why it cannot be read."""
    recorded = rows.runs(row.plan_id)
    if not recorded:
        return
    made: Plan | str
    try:
        made = store.plan_from_document(row.document, name=f"stored plan {row.plan_id}")
    except StoreError as error:
        made = str(error)
    for number, run in enumerate(recorded, start=1):
        figures = run.document if isinstance(run.document, dict) else {}
        yield made, Recording(plan_id=row.plan_id, number=number, date=run.recorded_at[:10], figures=figures)


def own_sets(found: Gathered) -> tuple[OwnSet, ...]:
    """One set of constants for every framework or engine on every cluster that was recorded."""
    made = []
    for kind, runs in found.runs.items():
        members: dict[tuple[tuple[str, str], str], list[RecordedRun]] = {}
        for run in runs:
            members.setdefault((run.key, run.cluster), []).append(run)
        refine = KINDS[kind].offers("refine_recorded")
        for (key, _), own in sorted(members.items()):
            date = max(run.recording.date for run in own)
            made.append(
                OwnSet(
                    kind=kind,
                    name=key[0],
                    runs=tuple(own),
                    calibration=refine(own, source=_source(own), date=date),
                )
            )
    return tuple(made)


def _source(runs: Sequence[RecordedRun]) -> str:
    """The recordings behind a set: plans, days, figures."""
    listed = "; ".join(run.recording.text for run in runs[:LISTED])
    more = f"; and {len(runs) - LISTED} more" if len(runs) > LISTED else ""
    return f"{counted(len(runs), 'recorded run')}: {listed}{more}"


def stored_sets(catalog: Catalog) -> tuple[str, ...]:
    """The sets of clusters that the catalog has, as ``catalog remove`` calls them."""
    rows = catalog.own_rows()
    return tuple(str(row["subject"]) for row in rows if row["what"] == "constants" and SIGN in str(row["subject"]))


def keep(own: OwnSet, catalog: Catalog) -> None:
    """Store a set in place of an earlier one of the same cluster."""
    document = {key: value for key, value in own.calibration.to_document().items() if key != "recipe"}
    catalog.put_calibration(
        own.name, own.calibration.architecture, document, source=document["source"], date=document["date"]
    )


def undo(catalog: Catalog) -> tuple[str, ...]:
    """Take the sets of all clusters away; the recordings stay. Returns their names."""
    removed = stored_sets(catalog)
    for subject in removed:
        catalog.forget(subject)
    return removed
