"""How much narrower own runs make the interval of a step time, by what a plan shares with them.

*Model.* ln(measured/predicted) of a plan on a cluster that no source is from has the variance U, the squared half-width
of its interval, in three parts: one that all plans of its model share, one that all plans share which work in the same
way (:mod:`meshplan.planner.training.problem.ways`), and the plan's own::

    cov(i, j) = U·(m·[same model] + w·[same way] + p·[same plan])        m + w + p = 1

With K the covariance of the plans that ran and k that of a plan with them, normal parts leave of its variance

    U − kᵀ·K⁻¹·k.

n plans of one model and way count as their mean, whose own part is p/n.

*Shares.* Every source of published runs is priced with constants fitted to the others, and z are its errors over the
standard deviation of its intervals. The mean of z_i·z_j over pairs of plans on one cluster is 0.77 where they share the
model alone, 0.16 where they share the way alone, −0.03 where they share neither; that of z² is 1.42 (2026-11-27: 790
runs of 17 sources, each source counting once, within four times the median). Over the variance: m = 0.54, w = 0.11, and
nothing that all plans of a cluster share: a run says nothing of another model that works in another way. With one
source left out m is 0.46 to 0.66 and w 0.10 to 0.16. By likelihood instead of moments w is more and m less (0.51, 0.16,
0.06 for the cluster); such widths hold 88 % of plans like what ran and 96 % of others (three runs), these 92 and 95 %.

Sources: Searle, Casella, McCulloch, Variance Components (1992), sections 5.2 (moments) and 7.4 (prediction).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

MODEL_SHARE = 0.54
WAY_SHARE = 0.11
PLAN_SHARE = 1.0 - MODEL_SHARE - WAY_SHARE

# (model, way) → different plans of them that ran.
Plans = Mapping[tuple[str, str], int]


def own_width(unknown: float, plans: Plans, model: str, way: str) -> float:
    """Half-width of an interval on a cluster with own runs, in the logarithm.

    Args:
        unknown: half-width where no run of the cluster is known, √U.
        plans: what ran.
        model: that of the plan that is asked about, which is none of those that ran.
        way: that it works in.

    >>> [round(own_width(0.3, {("a", "x"): runs} if runs else {}, "a", "x"), 3) for runs in (0, 1, 3)]
    [0.3, 0.228, 0.201]
    >>> [round(own_width(0.3, {("a", "x"): 3}, *other), 3) for other in (("a", "y"), ("b", "x"), ("b", "y"))]
    [0.236, 0.298, 0.3]
    """
    if not plans:
        return unknown
    ran = list(plans)
    between = np.array([[_shared(one, other) for other in ran] for one in ran])
    between += np.diag([PLAN_SHARE / plans[cell] for cell in ran])
    asked = np.array([_shared(cell, (model, way)) for cell in ran])
    left = 1.0 - float(asked @ np.linalg.solve(between, asked))
    return unknown * float(np.sqrt(max(left, 0.0)))


def _shared(one: tuple[str, str], other: tuple[str, str]) -> float:
    return MODEL_SHARE * (one[0] == other[0]) + WAY_SHARE * (one[1] == other[1])
