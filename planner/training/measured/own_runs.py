"""A user's own training runs: the constants adapted to them, and how much narrower that makes an interval.

The one way from own runs to constants: ``meshplan calibrate FILE``, ``meshplan calibrate --recorded`` and the proof,
``meshplan validate --from-points``, all call :func:`refine`.

*Constants.* The set to start from is the prior (:mod:`.constants_fit`), so that few runs move what they depend on and
leave the rest. Repeats of a run share a group, and k of them weigh √k: their prediction tends to what was measured.
Each measured model has its own constants, and there is one set for the others: what a model is off by is partly its
own, so a run says less of other models than of its own (:func:`row_noise`). Without that distinction one run of a model
made other models of its cluster worse.

*Interval.* The logarithm of measured over predicted is taken as the sum of three normal parts: one of the cluster, one
of the model on it, one of the plan. Their variances follow from three half-widths: on an unknown cluster (variance U of
the sum), on a cluster that other models are known of (C), on one that plans of the model are known of (M). With n_j
different plans of model j measured, what is left of the cluster's part and of the model's follows in closed form
(:func:`own_width`). Errors on own runs that were left out in turn scale the result
(:func:`~meshplan.planner.validation.between_sources.surprise`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from meshplan.catalogs.constants.checks import inside_limits
from meshplan.catalogs.constants.training import KINDS_OF_WORK, Basis, Calibration, TimeConstants
from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.training.measured.constants_fit import NOISE, PARAMETERS, REFINED_SPREAD, Row, fit, key_of
from meshplan.planner.training.measured.memory.fit import MemoryFit
from meshplan.planner.training.measured.memory.own_peaks import adapt_memory
from meshplan.planner.training.measured.memory.spread import PUBLISHED_SPREAD, PeakSpread
from meshplan.planner.training.measured.observations import ObservedRun, repeated
from meshplan.planner.training.measured.unseen import judged
from meshplan.planner.validation.between_sources import log_size, surprise
from meshplan.planner.validation.fitting import Prior
from meshplan.planner.validation.held_out import Calibrated, HeldOut, Key, leave_one_out, refined_sets, today

# Half-width in the logarithm where plans of a model are known on a cluster, over that on an unknown cluster. With whole
# sources held out and three runs of a model given, 90 % of its other runs are within 0.174, without within 0.310
# (sources weighing the same, 1,029 runs of 2026-11-23, ``meshplan validate FILES --from-points 3``).
SAME_MODEL_SHARE = 0.56
DEVIATIONS_OF_P90 = 1.6449  # 90 % of a normal distribution lie within so many standard deviations

Models = Mapping[str, int]


# What is left out together of a user's own runs: one run with its repeats, a whole layout, as for a user who plans to
# change it, or all runs of a model on a device.
OWN_TOGETHER: Mapping[str, Callable[[Row], Hashable]] = {
    "run": lambda row: repeated(row.run),
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
    peak_spread: PeakSpread = PUBLISHED_SPREAD,
) -> Calibrated[Calibration]:
    """Adapt constants to a user's own runs, however few.

    Every set starts from the one that ``shipped`` gives, which is also the prior, so three runs move the constants that
    they depend on and leave the rest. A framework that only peaks were measured of keeps its constants of time.

    Args:
        runs: measured training runs of the user.
        shipped: (framework, hardware generation) → the set to start from.
        source: what the runs are.
        date: day of the fit, ISO 8601; None for today.
        hold_out: what is left out together when errors are taken; a key of :data:`OWN_TOGETHER`.
        peak_spread: how far off peaks of sources are that nobody has measured.
    """
    together = OWN_TOGETHER[hold_out]
    observed = list(runs)
    rows = [Row(run, shipped(*key_of(run)).time) for run in observed if run.measured.get("iteration_s")]
    memory = adapt_memory(observed, lambda *key: shipped(*key).memory, peak_spread)

    def adapted(members: Sequence[Row], start: Calibration) -> tuple[Calibration, list[HeldOut]]:
        # Widths start from what is known of the kernels that most of the runs have, as a plan's do.
        start = start.for_kernels(Counter(row.kernels for row in members).most_common(1)[0][0])

        def without(left: Hashable) -> Callable[[str], FloatArray]:
            others = [row for row in members if together(row) != left]
            return cache(lambda model: fitted_for(model, others, start))

        found = leave_one_out(members, together, without, lambda row, of: [judged(row, of(_model(row)), Basis.CLUSTER)])
        framework = members[0].key[0]
        models = sorted({_model(row) for row in members})
        of_models = {name: adapted_time(name, members, start) for name in models}
        made = replace(
            start,
            framework=framework,
            time=adapted_time("", members, start),
            model_time={**start.model_time, **of_models},
            memory=memory[framework].constants if framework in memory else start.memory,
            memory_basis=(memory[framework].basis if framework in memory else "") or start.memory_basis,
            basis=Basis.CLUSTER.value,
            **_own_widths(members, found, start),
        )
        return made, found

    made = refined_sets(rows, shipped, adapted, source=source, date=date, hold_out=hold_out)
    untimed = {key_of(run) for run in observed if run.measured.get("peak_memory_bytes")} - {row.key for row in rows}
    more = tuple(_with_memory(key, shipped(*key), memory, source, date) for key in sorted(untimed))
    return replace(made, calibrations=(*made.calibrations, *more), memory=memory)


def adapted_time(model: str, rows: Sequence[Row], start: Calibration) -> TimeConstants:
    """Constants of the step time for plans of a model, adapted to own runs, as the catalog takes them.

    Args:
        model: its slug; empty for models without own runs.
        rows: own runs, of whatever models.
        start: the set that is adapted.
    """
    return inside_limits(PARAMETERS.replaced(start.time, fitted_for(model, rows, start)))


def fitted_for(model: str, rows: Sequence[Row], start: Calibration) -> FloatArray:
    """Constants of the step time for plans of a model, in fit units.

    Args:
        model: its slug; empty for models without own runs.
        rows: own runs, of whatever models.
        start: the set that is adapted.
    """
    prior = Prior(mean=PARAMETERS.vector(start.for_model(model).time), spread=REFINED_SPREAD)
    return fit(rows, prior, noise=row_noise(model, rows, start)) if rows else prior.mean


def row_noise(model: str, rows: Sequence[Row], start: Calibration) -> FloatArray:
    """By how much each own run may be off for what plans of a model do not share with it, relative, [n].

    Run-to-run noise σ for runs of the model. What another model is off by is shared by its k runs, so that their mean
    must not tell more than one of them: √(σ² + k·b²), b being the deviation of a model within its cluster.

    Args:
        model: its slug; empty for models without own runs.
        rows: own runs.
        start: the set that is adapted, with its half-widths.
    """
    counts = Counter(map(_model, rows))

    def noise(row: Row) -> float:
        if _model(row) == model:
            return NOISE
        _, cluster, plan = _variances(*_half_widths(start, row.run.problem.kind_of_work))
        return float(np.sqrt(NOISE**2 + counts[_model(row)] * (cluster - plan) / DEVIATIONS_OF_P90**2))

    return np.array([noise(row) for row in rows])


def _with_memory(
    key: Key, start: Calibration, memory: Mapping[str, MemoryFit], source: str, date: str | None
) -> Calibration:
    """The set of a framework that only peaks were measured of."""
    framework, architecture = key
    fitted = memory[framework]
    return replace(
        start,
        framework=framework,
        architecture=architecture,
        memory=fitted.constants,
        memory_basis=fitted.basis or start.memory_basis,
        source=f"memory: {source}; starting from: {start.source}",
        date=date or today(),
    )


# --- intervals ------------------------------------------------------------------------------------------------------


def _own_widths(members: Sequence[Row], found: Sequence[HeldOut], start: Calibration) -> dict[str, Any]:
    """The half-widths of a set that was adapted to own runs: fields of :class:`Calibration`.

    Args:
        members: the runs.
        found: their errors when they were left out.
        start: the set that was adapted.
    """
    own: dict[str, float] = {}
    by_model: dict[str, dict[str, float]] = {}
    for kind in KINDS_OF_WORK:
        alike = [row for row in members if row.run.problem.kind_of_work == kind]
        unknown, known = _half_widths(start, kind)
        models = _models(alike)
        scale = _surprise(alike, found, unknown, known)
        own[kind] = _fraction(scale * own_width(unknown, known, models, ""))
        if models:
            widths = {name: _fraction(scale * own_width(unknown, known, models, name)) for name in sorted(models)}
            by_model[kind] = widths
    return {
        "error_p90": own,
        "error_basis": {},
        "by_kernels": {},
        "model_error_p90": by_model,
        "start_error_p90": start.error_p90,
    }


def _half_widths(start: Calibration, kind: str) -> tuple[float, float]:
    """√U and √C of a kind of work."""
    return float(np.log1p(start.error_p90[kind])), float(np.log1p(start.cluster_error_p90[kind]))


def _variances(unknown: float, known: float) -> tuple[float, float, float]:
    """U ≥ C ≥ M of the module's text, in squared half-widths."""
    whole = unknown**2
    cluster = min(known**2, whole)
    return whole, cluster, min((SAME_MODEL_SHARE * unknown) ** 2, cluster)


def own_width(unknown: float, known: float, models: Models, model: str) -> float:
    """Half-width of an interval on a cluster with own runs, in the logarithm.

    With variances U ≥ C ≥ M as in the module's text, all in units of the squared half-width, other models leave of the
    cluster's part c = 1/(1/(U − C) + Σ_j 1/((C − M) + M/n_j)); a plan of a model without runs has the variance C + c.
    One of a model with n runs, j running over the others, has M + 1/(1/(C − M + c) + n/M).

    Args:
        unknown: half-width where no run of the cluster is known, √U.
        known: half-width on a cluster that other models are known of, √C; taken as √U where it is no less.
        models: model → different plans of it that were measured, n_j.
        model: that of the plan.

    >>> [round(own_width(0.3, 0.25, {"a": runs} if runs else {}, "a"), 3) for runs in (0, 1, 3)]
    [0.3, 0.218, 0.191]
    >>> round(own_width(0.3, 0.25, {"a": 3}, "b"), 3)
    0.282
    """
    if unknown == 0.0 or not models:
        return unknown
    whole, others, plan = _variances(unknown, known)
    told = sum(1.0 / (others - plan + plan / count) for name, count in models.items() if name != model)
    cluster = 1.0 / (1.0 / (whole - others) + told) if whole > others else 0.0
    count = models.get(model, 0)
    if not count:
        return float(np.sqrt(others + cluster))
    shared = others - plan + cluster
    left = 1.0 / (1.0 / shared + count / plan) if shared else 0.0
    return float(np.sqrt(plan + left))


def _models(rows: Iterable[Row]) -> Models:
    """Model → different plans among runs."""
    return Counter(_model(row) for row in {repeated(row.run): row for row in rows}.values())


def _model(row: Row) -> str:
    return str(row.run.problem.shape.slug)


def _surprise(rows: Sequence[Row], found: Sequence[HeldOut], unknown: float, known: float) -> float:
    """By how much own runs that were left out are farther off than expected, in the square mean, as a factor.

    One plan alone tells nothing: what it was off from the start is what adapting has taken away.
    """
    plans = {row.run.id: row for row in rows}
    different = {repeated(row.run) for row in rows}
    if len(different) <= 1 or unknown == 0.0:
        return 1.0
    sizes: dict[Hashable, list[float]] = {}
    for item in found:
        if item.id in plans:
            row = plans[item.id]
            rest = _models(other for other in rows if repeated(other.run) != repeated(row.run))
            expected = own_width(unknown, known, rest, _model(row)) / DEVIATIONS_OF_P90
            sizes.setdefault(repeated(row.run), []).append(log_size(item) / expected)
    return surprise(sizes.values())


def _fraction(log_width: float) -> float:
    return round(float(np.expm1(log_width)), 4)
