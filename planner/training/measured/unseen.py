"""What was left out whole – a source, a framework, a kind of kernels – predicted by what was fitted to the others.

A user's cluster is in no published source. What he meets is therefore the error on a *source held out whole*: all its
runs are priced with constants that were fitted without it, found as for a plan, and nothing else is known about it.

*Basis.* Constants come from the nearest :class:`~meshplan.catalogs.constants.training.Basis` that is left: what was
found in other sources of the same framework and generation is closer than what all frameworks share, which is closer
where runs on the generation are left. Where no run is left with kernels of its kind, that is its basis, whosever the
constants are.

Which intervals these errors justify: :mod:`meshplan.planner.training.measured.intervals`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Basis
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.constants_fit import (
    LOCAL_SPREAD,
    LOSS,
    MAX_MOVE,
    REFINED_SPREAD,
    Row,
    fit,
    weights_of,
)
from meshplan.planner.validation.fitting import Linear, Prior, most_probable
from meshplan.planner.validation.held_out import HeldOut, Key, by_key, leave_one_out

# When rows are left out, the constants of all rows are moved as far as the linearised rows say, and fitted from there.
LINEAR_ROUNDS = 6
# Solutions that move no constant farther than FAR, in fit units, are taken as they are. Fits of one set start at its
# prior, which is near.
WARM_ITERATIONS = 2
OWN_ITERATIONS = 3
FAR = 0.6


# What is left out together. The source is the headline: whoever asks brings a cluster that no source has measured.
TOGETHER: Mapping[str, Callable[[Row], str]] = {
    "source": lambda row: row.source,
    "framework": lambda row: row.key[0],
    "device": lambda row: row.run.problem.machine.device.slug,
    "generation": lambda row: row.key[1],
    "kernels": lambda row: row.kernels,
    "group": lambda row: row.group,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets:
    """Constants fitted to the runs that are left.

    Args:
        overall: the global set.
        local: key → set of a framework on a generation; where it has runs.
        generations: hardware generations that these runs are from.
        kernels: kinds of kernels that they have.
        own: (source, key) → set adapted to the source's own runs; where they count as the user's.
    """

    overall: FloatArray
    local: Mapping[Key, FloatArray]
    generations: Collection[str]
    kernels: Collection[str] = ()
    own: Mapping[tuple[str, Key], FloatArray] = field(default_factory=dict)

    def of(self, row: Row) -> tuple[FloatArray, Basis]:
        """The set that a plan of this framework on this hardware would be priced with, and its basis."""
        theta, basis = self._nearest(row)
        if basis not in (Basis.CLUSTER, Basis.UNSEEN) and row.kernels not in self.kernels:
            basis = Basis.KERNELS
        return theta, basis

    def _nearest(self, row: Row) -> tuple[FloatArray, Basis]:
        """The same whatever kernels these runs have."""
        generation = row.key[1]
        if (row.source, row.key) in self.own:
            return self.own[row.source, row.key], Basis.CLUSTER
        if row.key in self.local:
            return self.local[row.key], Basis.FRAMEWORK
        for relative in recipe_named(row.run.framework).relatives:
            if (relative, generation) in self.local:
                return self.local[relative, generation], Basis.RELATED
        return self.overall, Basis.ANY if generation in self.generations else Basis.UNSEEN


def local_prior(overall: FloatArray) -> Prior:
    """Where the constants of a framework on a generation are expected."""
    return Prior(mean=overall, spread=LOCAL_SPREAD)


def left_out(rows: Sequence[Row], linear: Linear, literature: Prior, together: str) -> tuple[HeldOut, ...]:
    """Every run priced with sets that were fitted without all that is left out together with it.

    Where a group is left out, the other runs of its source are taken for the user's own: its set is adapted to them as
    :func:`~meshplan.planner.training.measured.own_runs.refine` does.

    Args:
        rows: measured runs.
        linear: the rows linearised at the global set fitted to all of them: where the fits without a label start.
        literature: prior of the global set.
        together: what is left out; a key of :data:`TOGETHER`.
    """
    label = TOGETHER[together]
    without = sets_without(rows, linear, literature, label, adapts_to_source=together == "group")
    return tuple(leave_one_out(sorted(rows, key=label), label, without, _errors))


def sets_without(
    rows: Sequence[Row],
    linear: Linear,
    literature: Prior,
    label: Callable[[Row], Hashable],
    *,
    adapts_to_source: bool = False,
) -> Callable[[Hashable], Sets]:
    """Label → the sets that are fitted without all rows that have it.

    Args:
        rows: measured runs.
        linear: as for :func:`left_out`.
        literature: prior of the global set.
        label: what is left out together: the rows of one label.
        adapts_to_source: the labels are groups, and the set of each is adapted to the other runs of its source.
    """
    sets = by_key(rows)

    def fitted_without(left: Hashable) -> Sets:
        others = [row for row in rows if label(row) != left]
        if not others:
            return Sets(overall=literature.mean, local={}, generations=())
        overall = _global_without(rows, linear, lambda row: label(row) != left, literature)
        members = {
            key: [row for row in sets.get(key, ()) if label(row) != left]
            for key in _keys(row for row in rows if label(row) == left)
        }
        local = {
            key: fit(kept, local_prior(overall), iterations=OWN_ITERATIONS) for key, kept in members.items() if kept
        }
        own = _own([row for row in rows if label(row) == left], members, local) if adapts_to_source else {}
        generations, kernels = {row.key[1] for row in others}, {row.kernels for row in others}
        return Sets(overall=overall, local=local, generations=generations, kernels=kernels, own=own)

    return fitted_without


def _own(
    left: Iterable[Row], members: Mapping[Key, Sequence[Row]], local: Mapping[Key, FloatArray]
) -> dict[tuple[str, Key], FloatArray]:
    """The sets of the rows ``left``, adapted to the other runs of their source."""
    own = {}
    for source, key in {(row.source, row.key) for row in left}:
        known = [row for row in members[key] if row.source == source]
        if known:
            prior = Prior(mean=local[key], spread=REFINED_SPREAD)
            own[source, key] = fit(known, prior, iterations=OWN_ITERATIONS)
    return own


def _global_without(rows: Sequence[Row], linear: Linear, keeps: Callable[[Row], bool], literature: Prior) -> FloatArray:
    """The global set of the rows that are kept: solved with linearised rows, fitted from there if that is far."""
    start = _linear_solution(rows, linear, keeps, literature)
    if np.max(np.abs(start - linear.at)) <= FAR:
        return start
    return fit([row for row in rows if keeps(row)], literature, start=start, iterations=WARM_ITERATIONS)


def _linear_solution(rows: Sequence[Row], linear: Linear, keeps: Callable[[Row], bool], prior: Prior) -> FloatArray:
    """Most probable constants for the rows that are kept, as far as the linearised rows tell."""
    kept = [index for index, row in enumerate(rows) if keeps(row)]
    others = replace(linear.only(kept), weight=weights_of([rows[index] for index in kept]))
    return most_probable(others, prior, LOSS, rounds=LINEAR_ROUNDS, max_step=MAX_MOVE)


def _keys(rows: Iterable[Row]) -> set[Key]:
    """The sets that plans of these rows' frameworks and generations may be priced with."""
    keys = set()
    for row in rows:
        keys.add(row.key)
        keys |= {(relative, row.key[1]) for relative in recipe_named(row.run.framework).relatives}
    return keys


def _errors(row: Row, sets: Sets) -> list[HeldOut]:
    return [judged(row, *sets.of(row))]


def judged(row: Row, theta: FloatArray, basis: str = "") -> HeldOut:
    """The error of a run priced with ``theta``."""
    return HeldOut(
        id=row.run.id,
        group=row.group,
        key=row.key,
        metric="iteration_s",
        error=float(np.exp(row.log_predicted(theta[None])[0] - row.log_measured) - 1.0),
        strategy=row.run.strategy,
        kind=row.run.problem.kind_of_work,
        evidence=basis,
        kernels=row.kernels,
    )
