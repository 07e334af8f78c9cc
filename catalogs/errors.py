"""Every error that meshplan raises on purpose, in one tree.

::

    MeshplanError                 exit code  a message with what, the numbers and the fix
    ├── SpecError                 2          the question is malformed; every problem at once, each with its path
    ├── UnitError                 2          a quantity without a unit, or with the wrong one
    ├── CatalogError              4          the catalog cannot answer
    │   ├── UnknownEntryError     4          no such device, node type, link or model (closest names are offered)
    │   ├── ModelConfigError      4          a config.json that does not describe a transformer
    │   └── CatalogUnavailableError 4        it cannot be used now: locked, read-only, no home directory
    │       └── CatalogVersionError 4        the database was written by another revision of meshplan
    ├── ProfileError              4          a probe cannot measure (what was measured before is kept)
    ├── StoreError                4          no such stored plan, or an ambiguous name
    ├── SolverError               5          a solver failed (not: found that nothing fits)
    └── EmitError                 6          launcher files cannot be written
        └── CannotExpressError    6          the target framework cannot express this plan

"No plan exists" is an answer, not an error: it is a :class:`meshplan.planner.core.plan.Plan` whose solution has the
status ``infeasible``, and the command line maps it to :data:`EXIT_INFEASIBLE`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshplan.catalogs.flag_names import keys_meant

EXIT_OK = 0
EXIT_BUG = 1
EXIT_SPEC = 2
EXIT_INFEASIBLE = 3
EXIT_CATALOG = 4
EXIT_SOLVER = 5
EXIT_EMIT = 6


class MeshplanError(Exception):
    """Root of the tree; ``exit_code`` is what the command line returns."""

    exit_code: int = EXIT_BUG


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with the user's input.

    Args:
        path: where, as a dotted path into the spec (``cluster.nodes[0].type``); empty for the whole document.
        message: what is wrong, with the numbers and the fix.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(MeshplanError):
    """The spec is malformed. Carries *every* problem found, so that one run is enough to mend them all."""

    exit_code = EXIT_SPEC

    def __init__(self, problems: Sequence[Problem], *, of: str = "the spec") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        head = f"1 problem in {of}" if count == 1 else f"{count} problems in {of}"
        super().__init__("\n".join([f"{head}:", *(f"  - {problem}" for problem in self.problems)]))

    @classmethod
    def at(cls, path: str, message: str, *, of: str = "the spec") -> SpecError:
        """The error of one problem."""
        return cls([Problem(path=path, message=message)], of=of)


class UnitError(MeshplanError):
    """A quantity has no unit, an unknown unit, or one of another dimension."""

    exit_code = EXIT_SPEC


class CatalogError(MeshplanError):
    """The catalog cannot answer: unreadable, read-only, malformed import."""

    exit_code = EXIT_CATALOG


class UnknownEntryError(CatalogError):
    """The catalog has no entry of that name; the message offers the closest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.suggestions: tuple[str, ...] = closest_names(name, known)
        super().__init__(f"unknown {kind} {name!r}{did_you_mean(self.suggestions)}")


class ModelConfigError(CatalogError):
    """A model configuration lacks what a transformer needs."""


class CatalogUnavailableError(CatalogError):
    """There is a catalog, or a place for one, that cannot be used now: locked, no right to write, no home."""


class CatalogVersionError(CatalogUnavailableError):
    """The database has another schema revision; upgrading happens on request only."""


class ProfileError(MeshplanError):
    """A probe cannot measure: no device, a lost rank, a full disk. What was measured before is kept."""

    exit_code = EXIT_CATALOG


class StoreError(MeshplanError):
    """A stored plan is missing, or its name fits several."""

    exit_code = EXIT_CATALOG


class SolverError(MeshplanError):
    """A solver broke. Finding no feasible plan is *not* this error."""

    exit_code = EXIT_SOLVER


class EmitError(MeshplanError):
    """Launcher files cannot be written."""

    exit_code = EXIT_EMIT


class CannotExpressError(EmitError):
    """The target cannot express a choice of the plan.

    Args:
        target: emit target, such as ``megatron``.
        what: the choice that cannot be expressed, with its numbers.
        nearest: the nearest plan that the target can express, as a sentence.
    """

    def __init__(self, target: str, what: str, nearest: str) -> None:
        self.target = target
        self.what = what
        self.nearest = nearest
        super().__init__(f"{target} cannot express {what}. Nearest it can: {nearest}")


def why(error: Exception) -> str:
    """Why a file cannot be read: of the system's errors the words, without number and a second time the path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def closest_names(name: str, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The names most like ``name``, best first; names that contain it count as close, and of a word that frameworks
    have for one of them (``tp_size``) it is that one alone.
    """
    names = sorted(set(known))
    meant = keys_meant(name, names)
    if meant:
        return meant[:limit]
    lowered = name.lower()
    close = difflib.get_close_matches(lowered, [known_name.lower() for known_name in names], n=limit, cutoff=0.5)
    by_lower = {known_name.lower(): known_name for known_name in names}
    found = [by_lower[match] for match in close]
    containing = [known_name for known_name in names if lowered and lowered in known_name.lower()]
    return tuple(dict.fromkeys(found + containing))[:limit]


def did_you_mean(suggestions: Sequence[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or nothing when there is no suggestion.

    >>> did_you_mean(["h100-sxm-80gb"])
    "; did you mean 'h100-sxm-80gb'?"
    """
    if not suggestions:
        return ""
    quoted = [repr(suggestion) for suggestion in suggestions]
    listing = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f"; did you mean {listing}?"
