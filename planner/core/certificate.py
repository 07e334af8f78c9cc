"""A second opinion on a plan: what another, independent way says of the same question.

A kind offers ``certify(question, plan)``, which answers the question again without the functions of its search
(another solver, another enumeration, a referee simulation) and returns a :class:`Certificate`. The first answer is
not changed by it: a certificate stands beside the plan, and no digest of the plan covers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

AGREES, DISAGREES, UNFINISHED = "agrees", "disagrees", "unfinished"
# Two ways that compute the same sum in another order agree within this relative distance.
SAME_RELATIVE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One statement of the plan, held against the second way.

    Args:
        what: the statement in the user's words, with its unit.
        stated: value in the plan.
        found: value by the second way.
        agrees: whether the two are compatible.
    """

    what: str
    stated: float | str | None
    found: float | str | None
    agrees: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a second way says of a plan.

    Args:
        method: the second way, as a phrase: "enumeration apart from the search", "CBC instead of SCIP".
        covers: which part of the question was looked at again; says so where it is a sample only.
        checks: the statements that were held against it; none where it did not come to an end.
    """

    method: str
    covers: str
    checks: tuple[Check, ...]

    @property
    def outcome(self) -> str:
        """:data:`AGREES`, :data:`DISAGREES`, or :data:`UNFINISHED` where nothing was checked."""
        if not self.checks:
            return UNFINISHED
        return AGREES if all(check.agrees for check in self.checks) else DISAGREES

    def to_document(self) -> dict[str, Any]:
        """The certificate as plain JSON."""
        return {
            "outcome": self.outcome,
            "method": self.method,
            "covers": self.covers,
            "checks": [asdict(check) for check in self.checks],
        }


def same_value(what: str, stated: float, found: float) -> Check:
    """Both ways give one number, within the rounding of sums."""
    near = abs(stated - found) <= SAME_RELATIVE * max(abs(stated), abs(found))
    return Check(what=what, stated=stated, found=found, agrees=near)


def none_better(what: str, bound: float, best: float, *, maximise: bool = False) -> Check:
    """The best that the second way finds does not beat the plan's bound.

    Args:
        what: the statement in the user's words.
        bound: the plan's bound.
        best: the best value of the second way.
        maximise: larger is better.
    """
    slack = SAME_RELATIVE * abs(bound)
    holds = best <= bound + slack if maximise else best >= bound - slack
    return Check(what=what, stated=bound, found=best, agrees=holds)


def disagrees(certificate: Mapping[str, Any] | None) -> bool:
    """Whether a plan's certificate speaks against it."""
    return certificate is not None and certificate["outcome"] == DISAGREES
