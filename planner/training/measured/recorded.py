"""A recorded training plan as a measured run: what ``meshplan calibrate --recorded`` adapts constants to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.own import own_name
from meshplan.catalogs.constants.training import Calibration
from meshplan.planner.core.measurable import PEAK
from meshplan.planner.core.plan import Interval
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.exclusions import below_states, exclusion
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.own_runs import refine
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.recorded import OUTLIER_WIDTHS, RecordedRun, Recording, contradiction

STEP = "iteration_s"
# Rates that count what the plan says a step does, over its time; model FLOPs are counted in too many ways.
RATES = ("tokens_per_s", "tokens_per_s_per_device", "samples_per_s")
# A peak beyond the safe bound is what own peaks are for: up to twice the estimate it is believed in any case.
PEAK_WIDTH = math.log(2.0) / OUTLIER_WIDTHS


def recorded_training_run(
    recording: Recording,
    predicted: Mapping[str, Interval],
    problem: TrainingProblem,
    config: TrainingConfig,
    *,
    start: Calibration,
    cluster: str,
) -> RecordedRun:
    """The run that a recording says a plan was.

    Args:
        recording: what was measured.
        predicted: of the plan.
        problem: what the plan answers, priced under its mapping.
        config: its choices.
        start: constants of the framework on the generation, without own runs of the cluster.
        cluster: identity of the cluster.

    Raises:
        UnsupportedError: it cannot have been this plan, or nothing in it says anything about constants.
    """
    steps = _implied_steps(recording.figures, predicted)
    peak = recording.figures.get(PEAK)
    device, framework = problem.machine.device, problem.rules.name
    problem = replace(
        problem.with_calibration(start),
        limits=replace(problem.limits, memory_bytes=float(device.usable_memory_bytes)),
    )
    run = ObservedRun(
        id=recording.name,
        group=recording.plan_id,
        problem=problem,
        config=config,
        framework=framework,
        measured={
            **({STEP: statistics.median(steps.values())} if steps else {}),
            **({} if peak is None else {PEAK: peak}),
        },
        derived={},
        filled=(),
        expects_oom=False,
    )
    reason = contradiction(steps) or exclusion(problem, config, run.measured)
    if not reason and peak is not None:
        reason = below_states(problem, config, peak)
    if reason:
        raise UnsupportedError(reason)
    if not run.measured:
        known = ", ".join((STEP, *RATES, PEAK))
        raise UnsupportedError(f"no constant is fitted to {', '.join(recording.figures)}, but to {known}")
    return RecordedRun(
        recording=recording,
        key=(recipe_named(framework).calibrated_as, device.architecture),
        cluster=cluster,
        run=run,
        start=start,
        off=_off(run),
        unused=tuple(sorted(set(recording.figures) - {STEP, *RATES, PEAK})),
    )


def _implied_steps(figures: Mapping[str, float], predicted: Mapping[str, Interval]) -> dict[str, float]:
    """Metric → the step time that it means; a rate is so many times the predicted one as the step is shorter."""
    steps = {name: predicted[STEP].value * predicted[name].value / figures[name] for name in RATES if name in figures}
    return {**({STEP: figures[STEP]} if STEP in figures else {}), **steps}


def _off(run: ObservedRun) -> dict[str, tuple[float, float]]:
    """How far the run is from the constants that it may move, with the width of what is believed."""
    priced = price(run.problem, run.config)
    found = {}
    if STEP in run.measured:
        width = math.log1p(run.problem.calibration.error_p90[run.problem.kind_of_work])
        found[STEP] = (run.measured[STEP] / priced.step_s, width)
    if PEAK in run.measured:
        width = max(math.log(priced.safe_bytes / priced.typical_bytes), PEAK_WIDTH)
        found[PEAK] = (run.measured[PEAK] / priced.typical_bytes, width)
    return found


def refine_recorded(runs: Sequence[RecordedRun], *, source: str, date: str) -> Calibration:
    """The set of one framework on one cluster, adapted to all of its recorded runs.

    Args:
        runs: of one key and one cluster.
        source: what they are.
        date: of the set, ISO 8601.
    """
    first = runs[0]
    (made,) = refine([item.run for item in runs], lambda *_: first.start, source=source, date=date).calibrations
    framework, generation = first.key
    return replace(made, framework=framework, architecture=own_name(generation, first.cluster))
