"""Fitting the estimator's named constants to measured training runs, and saying how well they carry over.

*Published runs* give the sets that ship: a global one, whose prior is the literature, and one for each framework on a
hardware generation, whose prior is the global one. *Error:* a whole source is left out and its runs are predicted by
sets that were fitted without it; likewise a framework, a device, a group
(:mod:`~meshplan.planner.training.measured.unseen`). *A user's own runs* adapt the catalog's set, however few they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import KINDS_OF_WORK, Basis, Calibration, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.constants_fit import (
    PARAMETERS,
    REFINED_SPREAD,
    SPREAD,
    Row,
    fit,
    key_of,
    linearised,
)
from meshplan.planner.training.measured.memory_fit import MemoryFit, UnseenBounds, calibrate_memory, unseen_bounds
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.unseen import (
    TOGETHER,
    half_width,
    judged,
    left_out,
    local_prior,
    unseen_half_width,
    with_coverage,
    with_generations_covered,
)
from meshplan.planner.validation.fitting import Prior
from meshplan.planner.validation.held_out import (
    Calibrated,
    HeldOut,
    Key,
    by_key,
    leave_one_out,
    p90,
    refined_sets,
    today,
)

ANY = "any"
FEWEST_FOR_P90 = 5  # own runs of a kind of work from which their own errors are the interval


def calibrate(
    runs: Iterable[ObservedRun],
    *,
    source: str,
    date: str | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Calibrated[Calibration]:
    """Fit all sets and their errors on what is held out.

    Args:
        runs: measured training runs; those without ``iteration_s`` serve the memory constants only.
        source: what the observations are, stored with every set.
        date: day of the fit, ISO 8601; None for today.
        log: called with a line per step.
    """
    observed = list(runs)
    rows = [Row(run) for run in observed if run.measured.get("iteration_s")]
    literature = Prior(mean=PARAMETERS.vector(TimeConstants()), spread=SPREAD)
    log(f"fit: {len(rows)} runs")
    overall = fit(rows, literature)
    linear = linearised(rows, overall)
    folds: dict[str, tuple[HeldOut, ...]] = {}
    for together in TOGETHER:
        log(f"{together} held out")
        folds[together] = left_out(rows, linear, literature, together)
    memory = calibrate_memory(observed)
    sets = _Sets(rows=rows, folds=folds, memory=memory, unseen=unseen_bounds(observed), source=source, date=date)
    local = [
        sets.made(key, fit(members, local_prior(overall)), members, Basis.FRAMEWORK)
        for key, members in sorted(by_key(rows).items())
    ]
    return Calibrated(
        calibrations=(
            sets.made((ANY, ANY), overall, rows, Basis.ANY),
            # Memory is the framework's on every generation: it has a set even where no time was measured.
            *(sets.made((framework, ANY), overall, rows, Basis.ANY) for framework in sorted(memory)),
            *local,
        ),
        folds={name: _covered(name, folds, sets.found) for name in folds},
        memory=memory,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sets:
    """Makes sets of constants with their intervals and their memory.

    Args:
        rows: all runs with a step time.
        folds: what was held out → the errors on it.
        memory: framework → its fit.
        unseen: bounds of frameworks without peaks.
        source: what the observations are.
        date: day of the fit; None for today.
    """

    rows: Sequence[Row]
    folds: Mapping[str, tuple[HeldOut, ...]]
    memory: Mapping[str, MemoryFit]
    unseen: UnseenBounds
    source: str
    date: str | None

    @property
    def found(self) -> list[HeldOut]:
        """What a new cluster meets: a device that was left out says nothing more, and would count its sources twice."""
        return [*self.folds["source"], *self.folds["framework"]]

    def made(self, key: Key, theta: FloatArray, members: Sequence[Row], basis: Basis) -> Calibration:
        """The set with the constants ``theta``, fitted to ``members``."""
        framework, architecture = key
        fitted = self.memory.get(framework)
        held, rests_on = self.unseen.constants(framework) if fitted is None else (fitted.constants, fitted.basis)
        found, groups, generations = self.found, self.folds["group"], self.folds["generation"]
        return Calibration(
            framework=framework,
            architecture=architecture,
            time=PARAMETERS.replaced(TimeConstants(), theta),
            memory=held,
            memory_basis=rests_on,
            recipe=recipe_named(framework).recipe,
            num_runs=len(members),
            source=self.source,
            date=self.date or today(),
            error_p90=_widths(found, basis, framework, groups),
            related_error_p90=_widths(found, Basis.RELATED, framework),
            unseen_error_p90={kind: _fraction(unseen_half_width(generations, kind)) for kind in KINDS_OF_WORK},
            generations=sorted({row.key[1] for row in self.rows}),
            cluster_error_p90=_widths(groups, Basis.CLUSTER, framework),
            basis=basis.value,
        )


def _covered(name: str, folds: Mapping[str, tuple[HeldOut, ...]], found: Sequence[HeldOut]) -> tuple[HeldOut, ...]:
    """A fold's predictions, judged by the interval that a plan in the same place would have had."""
    if name == "generation":
        return with_generations_covered(folds[name], folds[name])
    if name == "group":
        return with_coverage(folds[name], folds["group"])
    return with_coverage(folds[name], found, folds["group"])


def _widths(found: Sequence[HeldOut], basis: Basis, framework: str, known: Sequence[HeldOut] = ()) -> dict[str, float]:
    """Kind of work → half-width as a fraction."""
    return {
        kind: _fraction(half_width(found, basis=basis, kind=kind, framework=framework, known=known))
        for kind in KINDS_OF_WORK
    }


def _fraction(log_width: float) -> float:
    return round(float(np.expm1(log_width)), 4)


# --- a user's own runs ----------------------------------------------------------------------------------------------


# What is left out together of a user's own runs: one run, a whole layout, as for a user who plans to change it, or all
# runs of a model on a device.
OWN_TOGETHER: Mapping[str, Callable[[Row], Hashable]] = {
    "run": lambda row: row.run.id,
    "layout": lambda row: replace(row.run.config, micro_batch_size=1, num_microbatches=1, global_batch_size=1),
    "group": lambda row: row.group,
}


def refine(
    runs: Iterable[ObservedRun],
    shipped: Callable[[str, str], Calibration],
    *,
    source: str,
    date: str | None = None,
    hold_out: str = "run",
) -> Calibrated[Calibration]:
    """Adapt the catalog's constants to a user's own runs, however few.

    Every set starts from the one in the catalog, which is also the prior, so three runs move the constants that they
    depend on and leave the rest.

    Args:
        runs: measured training runs of the user.
        shipped: (framework, architecture) → the catalog's set.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
        hold_out: what is left out together when errors are taken; a key of :data:`OWN_TOGETHER`.
    """
    together = OWN_TOGETHER[hold_out]
    observed = list(runs)
    rows = [Row(run, shipped(*key_of(run)).time) for run in observed if run.measured.get("iteration_s")]
    memory = calibrate_memory(observed, lambda *key: shipped(*key).memory)

    def adapted(members: Sequence[Row], start: Calibration) -> tuple[Calibration, list[HeldOut]]:
        prior = Prior(mean=PARAMETERS.vector(start.time), spread=REFINED_SPREAD)

        def without(left: Hashable) -> FloatArray:
            others = [row for row in members if together(row) != left]
            return fit(others, prior) if others else prior.mean

        found = leave_one_out(members, together, without, lambda row, theta: [judged(row, theta, Basis.CLUSTER)])
        framework = members[0].key[0]
        made = replace(
            start,
            framework=framework,
            time=PARAMETERS.replaced(start.time, fit(members, prior)),
            memory=memory[framework].constants if framework in memory else start.memory,
            memory_basis=memory[framework].basis if framework in memory else start.memory_basis,
            error_p90={kind: _own_width(found, start, kind) for kind in KINDS_OF_WORK},
            basis=Basis.CLUSTER.value,
        )
        return made, found

    made = refined_sets(rows, shipped, adapted, source=source, date=date, hold_out=hold_out)
    return replace(made, memory=memory)


def _own_width(found: Sequence[HeldOut], start: Calibration, kind: str) -> float:
    """The error of own runs that were held out; where they are few, the catalog's width narrowed by their number."""
    sizes = [abs(item.error) for item in found if item.kind == kind]
    catalogs = start.error_p90[kind]
    narrow = narrowed(catalogs, start.cluster_error_p90[kind], len(sizes))
    return p90([sizes], fewest=FEWEST_FOR_P90, otherwise=narrow)


def narrowed(unknown: float, known: float, num_runs: int) -> float:
    """Half-width of an interval on a cluster that ``num_runs`` runs are known of, as a fraction.

    The error of a run is that of its cluster, with variance u² − k², plus its own, with variance k²; both normal, in
    the logarithm. A mean of n runs leaves of the cluster's variance 1/(1/(u² − k²) + n/k²).

    Args:
        unknown: half-width where no run of the cluster is known.
        known: half-width on a cluster whose error is known.
        num_runs: n.

    >>> [round(narrowed(0.30, 0.10, runs), 2) for runs in (0, 1, 3)]
    [0.3, 0.14, 0.12]
    """
    outer, inner = np.log1p(unknown) ** 2, np.log1p(known) ** 2
    if num_runs == 0 or outer <= inner or inner == 0.0:
        return unknown
    cluster = 1.0 / (1.0 / (outer - inner) + num_runs / inner)
    return _fraction(float(np.sqrt(inner + cluster)))
