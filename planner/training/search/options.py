"""What a search of degrees may be told besides its question."""

from __future__ import annotations

from typing import TypedDict

from meshplan.planner.training.search.incumbents import Incumbents
from meshplan.planner.training.search.seen import Seen
from meshplan.planner.training.search.space import Space


class SearchOptions(TypedDict, total=False):
    """Options of :func:`~meshplan.planner.training.search.degrees.search_degrees`, each of which may be left out.

    Args:
        keep: incumbents to keep.
        space: what there is to search; None to make it.
        usual_splits: layers are split as evenly as possible only, for a comparison that needs no proof.
        incumbents: what keeps candidates, in a search that looks at no other splits of the layers; None: the best.
        cutoff: objective of a plan that is known already; the search then proves what is better, or that nothing is.
        seen: what a search of the space, or of one that it is a part of, has seen; it begins with what that has priced.
    """

    keep: int
    space: Space | None
    usual_splits: bool
    incumbents: Incumbents | None
    cutoff: float
    seen: Seen | None
