"""A user's own training runs: the constants adapted to them, and how much narrower that makes an interval.

The one way from own runs to constants: ``meshplan calibrate FILE``, ``meshplan calibrate --recorded`` and the proof,
``meshplan validate --from-points``, all call :func:`refine`.

*Constants.* The set to start from is the prior (:mod:`.constants_fit`), so that few runs move what they depend on and
leave the rest. Repeats of a run share a group, and k of them weigh √k: their prediction tends to what was measured.
Each measured model has its own constants, and there is one set for the others: what a model is off by is partly its
own, so a run says less of other models than of its own (:func:`row_noise`). Without that distinction one run of a model
made other models of its cluster worse.

*Interval.* What is left of the width that the start has, by the model and the way that a plan shares with the runs:
:mod:`.own_widths`. Errors on own runs that were left out in turn scale the result
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
from meshplan.planner.training.measured.own_widths import MODEL_SHARE, Plans, own_width
from meshplan.planner.training.measured.unseen import judged
from meshplan.planner.training.problem.ways import way_of
from meshplan.planner.validation.between_sources import log_size, surprise
from meshplan.planner.validation.fitting import Prior
from meshplan.planner.validation.held_out import Calibrated, HeldOut, Key, leave_one_out, refined_sets, today

DEVIATIONS_OF_P90 = 1.6449  # 90 % of a normal distribution lie within so many standard deviations


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
    must not tell more than one of them: √(σ² + k·b²), b being what the models of a known cluster differ by: their share
    (:mod:`.own_widths`) of the variance there. Where the start is a relative's its own variance holds more: what
    frameworks differ by, which any run of this one tells.

    Args:
        model: its slug; empty for models without own runs.
        rows: own runs.
        start: the set that is adapted, with its half-widths.
    """
    counts = Counter(map(_model, rows))

    def noise(row: Row) -> float:
        if _model(row) == model:
            return NOISE
        kind = row.run.problem.kind_of_work
        width = float(np.log1p(min(start.error_p90[kind], start.cluster_error_p90[kind]))) / DEVIATIONS_OF_P90
        return float(np.sqrt(NOISE**2 + counts[_model(row)] * MODEL_SHARE * width**2))

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
    by_way: dict[str, dict[str, dict[str, float]]] = {}
    for kind in KINDS_OF_WORK:
        alike = [row for row in members if row.run.problem.kind_of_work == kind]
        unknown, plans = float(np.log1p(start.error_p90[kind])), _plans(alike)
        scale = _surprise(alike, found, unknown)
        models, ways = (sorted({cell[place] for cell in plans}) for place in (0, 1))
        left = {
            (model, way): _fraction(scale * own_width(unknown, plans, model, way))
            for model in ("", *models)
            for way in ("", *ways)
        }
        own[kind] = left["", ""]
        if plans:
            by_model[kind] = {model: left[model, ""] for model in models}
            by_way[kind] = {model: {way: left[model, way] for way in ways} for model in ("", *models)}
    return {
        "error_p90": own,
        "error_basis": {},
        "by_kernels": {},
        "model_error_p90": by_model,
        "way_error_p90": by_way,
        "start_error_p90": start.error_p90,
    }


def _plans(rows: Iterable[Row]) -> Plans:
    """(model, way) → different plans among runs."""
    return Counter(_cell(row) for row in {repeated(row.run): row for row in rows}.values())


def _cell(row: Row) -> tuple[str, str]:
    return _model(row), way_of(row.run.problem.workload, row.run.config)


def _model(row: Row) -> str:
    return str(row.run.problem.shape.slug)


def _surprise(rows: Sequence[Row], found: Sequence[HeldOut], unknown: float) -> float:
    """By how much own runs that were left out are farther off than expected, in the square mean, as a factor.

    One plan alone tells nothing: what it was off from the start is what adapting has taken away.
    """
    ran = {row.run.id: row for row in rows}
    different = {repeated(row.run) for row in rows}
    if len(different) <= 1 or unknown == 0.0:
        return 1.0
    sizes: dict[Hashable, list[float]] = {}
    for item in found:
        if item.id in ran:
            row = ran[item.id]
            rest = _plans(other for other in rows if repeated(other.run) != repeated(row.run))
            expected = own_width(unknown, rest, *_cell(row)) / DEVIATIONS_OF_P90
            sizes.setdefault(repeated(row.run), []).append(log_size(item) / expected)
    return surprise(sizes.values())


def _fraction(log_width: float) -> float:
    return round(float(np.expm1(log_width)), 4)
