"""Fitting the estimator's named constants to measured training runs, and saying how well they carry over.

*Published runs* give the sets that ship: a global one, whose prior is the literature, and one for each framework on a
hardware generation, whose prior is the global one. *Error:* a whole source is left out and its runs are predicted by
sets that were fitted without it; likewise a framework, a device, a group
(:mod:`~meshplan.planner.training.measured.unseen`). A user's own runs adapt a set that is there:
:mod:`~meshplan.planner.training.measured.own_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import KINDS_OF_WORK, OTHER_KERNELS, Basis, Calibration, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.constants_fit import (
    PARAMETERS,
    SPREAD,
    Row,
    fit,
    linearised,
)
from meshplan.planner.training.measured.intervals import Folds, Width, half_width, with_coverage
from meshplan.planner.training.measured.memory.fit import MemoryFit, UnseenBounds, calibrate_memory, unseen_bounds
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.unseen import TOGETHER, left_out, local_prior
from meshplan.planner.validation.fitting import Linear, Prior
from meshplan.planner.validation.held_out import Calibrated, HeldOut, Key, by_key, today

ANY = "any"
Widths = Mapping[str, Width]  # kind of work → half-width
LITERATURE = Prior(mean=PARAMETERS.vector(TimeConstants()), spread=SPREAD)  # of the global set


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
    made = evidence(observed, source=source, date=date, log=log)
    rows, folds, memory = made.rows, made.folds, made.memory
    local = [
        made.set_of(key, fit(members, local_prior(made.overall)), members, Basis.FRAMEWORK)
        for key, members in sorted(by_key(rows).items())
    ]
    return Calibrated(
        calibrations=(
            made.set_of((ANY, ANY), made.overall, rows, Basis.ANY),
            # Memory is the framework's on every generation: it has a set even where no time was measured.
            *(made.set_of((framework, ANY), made.overall, rows, Basis.ANY) for framework in sorted(memory)),
            *local,
        ),
        folds={name: with_coverage(items, folds) for name, items in folds.items()},
        memory=memory,
    )


def evidence(
    runs: Iterable[ObservedRun], *, source: str, date: str | None = None, log: Callable[[str], None] = lambda _: None
) -> Evidence:
    """Fit the global set and everything that is held out; the arguments are those of :func:`calibrate`."""
    observed = list(runs)
    rows = [Row(run) for run in observed if run.measured.get("iteration_s")]
    log(f"fit: {len(rows)} runs")
    overall = fit(rows, LITERATURE)
    linear = linearised(rows, overall)
    folds: dict[str, tuple[HeldOut, ...]] = {}
    for together in TOGETHER:
        log(f"{together} held out")
        folds[together] = left_out(rows, linear, LITERATURE, together)
    return Evidence(
        rows=rows,
        overall=overall,
        linear=linear,
        folds=folds,
        memory=calibrate_memory(observed),
        unseen=unseen_bounds(observed),
        source=source,
        date=date,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What measured runs say; it makes sets of constants with their intervals and their memory.

    Args:
        rows: all runs with a step time.
        overall: the global set, fitted to all of them.
        linear: the rows linearised there.
        folds: what was held out → the errors on it.
        memory: framework → its fit.
        unseen: bounds of frameworks without peaks.
        source: what the observations are.
        date: day of the fit; None for today.
    """

    rows: Sequence[Row]
    overall: FloatArray
    linear: Linear
    folds: Mapping[str, tuple[HeldOut, ...]]
    memory: Mapping[str, MemoryFit]
    unseen: UnseenBounds
    source: str
    date: str | None

    def set_of(self, key: Key, theta: FloatArray, members: Sequence[Row], basis: Basis) -> Calibration:
        """The set with the constants ``theta``, fitted to ``members``."""
        framework, architecture = key
        fitted = self.memory.get(framework)
        held, rests_on = self.unseen.constants(framework) if fitted is None else (fitted.constants, fitted.basis)
        own, related, unseen, cluster = (
            _widths(self.folds, each, key) for each in (basis, Basis.RELATED, Basis.UNSEEN, Basis.CLUSTER)
        )
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
            error_p90=_fractions(own),
            error_basis=_words(own),
            related_error_p90=_fractions(related),
            related_error_basis=_words(related),
            unseen_error_p90=_fractions(unseen),
            unseen_error_basis=_words(unseen),
            generations=sorted({row.key[1] for row in self.rows}),
            by_kernels=self._by_kernels(key, own=own, related=related, basis=basis),
            cluster_error_p90=_fractions(cluster),
            basis=basis.value,
        )

    def _by_kernels(
        self, key: Key, *, own: Widths, related: Widths, basis: Basis
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Kind of kernels → what differs there from the widths of all kernels."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for kernels in sorted({row.kernels for row in self.rows}):
            near, far = (
                _beyond(_widths(self.folds, each, key, kernels), usual)
                for each, usual in ((basis, own), (Basis.RELATED, related))
            )
            widths: dict[str, dict[str, Any]] = {
                "error_p90": _fractions(near),
                "error_basis": _words(near),
                "related_error_p90": _fractions(far),
                "related_error_basis": _words(far),
            }
            found[kernels] = {name: by_kind for name, by_kind in widths.items() if by_kind}
        other = _widths(self.folds, Basis.KERNELS, key)
        return {**found, OTHER_KERNELS: {"error_p90": _fractions(other), "error_basis": _words(other)}}


def _widths(folds: Folds, basis: Basis, key: Key, kernels: str = "") -> Widths:
    """Kind of work → half-width."""
    return {kind: half_width(folds, basis=basis, kind=kind, key=key, kernels=kernels) for kind in KINDS_OF_WORK}


def _beyond(widths: Widths, usual: Widths) -> Widths:
    """Those that differ from the usual ones."""
    return {kind: width for kind, width in widths.items() if width != usual[kind]}


def _fractions(widths: Widths) -> dict[str, float]:
    return {kind: width.fraction for kind, width in widths.items()}


def _words(widths: Widths) -> dict[str, str]:
    return {kind: width.rests_on for kind, width in widths.items()}
