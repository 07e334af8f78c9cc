"""A recorded serving plan as a measured run: what ``meshplan calibrate --recorded`` adapts constants to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshplan.catalogs.constants.own import own_name
from meshplan.catalogs.constants.serving import ServingCalibration
from meshplan.planner.serving.measured.calibrate import refine_serving
from meshplan.planner.serving.measured.fit.rows import OWN_NOISE, Row
from meshplan.planner.serving.measured.observations import ServedRun
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.measured.validate import half_width
from meshplan.planner.serving.problem.config import ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.recorded import RecordedRun, Recording

# A plan's metric → the same in the observation format, for those that constants may be fitted to.
NAMES: Mapping[str, str] = {
    "ttft_mean_s": "ttft_s",
    "tpot_mean_s": "tpot_s",
    "e2e_mean_s": "latency_s",
    "output_tokens_per_s": "output_tokens_per_s",
}


def recorded_serving_run(
    recording: Recording, problem: ServingProblem, config: ServingConfig, *, start: ServingCalibration, cluster: str
) -> RecordedRun:
    """The run that a recording says a plan was.

    Args:
        recording: what was measured.
        problem: what the plan answers.
        config: its choices.
        start: constants of the engine on the generation, without own runs of the cluster.
        cluster: identity of the cluster.

    Raises:
        UnsupportedError: nothing in it says anything about constants.
    """
    workload = problem.workload
    if config.is_disaggregated:
        raise UnsupportedError("constants are fitted to aggregated deployments: prefill and decode share a queue here")
    if workload.request_rate_per_s is None and workload.concurrency is None:
        raise UnsupportedError("the plan chose its load itself: plan with the rate or concurrency that was measured")
    machine = problem.machines[config.pools[0].node_type]
    measured = {NAMES[name]: value for name, value in recording.figures.items() if name in NAMES}
    run = PreparedRun(
        ServedRun(
            id=recording.name,
            group=recording.plan_id,
            shape=problem.shape,
            machine=machine,
            config=config,
            workload=workload,
            recipe=problem.recipe,
            measured=measured,
            derived={},
            filled=(),
        )
    )
    metrics = Row(run, OWN_NOISE).metrics
    if not metrics:
        raise UnsupportedError(f"no constant is fitted to {', '.join(recording.figures)}, but to {', '.join(NAMES)}")
    predicted = run.predicted(start.for_load(run.own_load).constants)
    if not set(metrics) <= set(predicted):
        raise UnsupportedError("not every request fits the memory that the engine takes: it was another plan")
    return RecordedRun(
        recording=recording,
        key=run.key,
        cluster=cluster,
        run=run,
        start=start,
        off={name: (measured[name] / predicted[name], half_width(start, run.run, name)) for name in metrics},
        unused=tuple(sorted(name for name in recording.figures if NAMES.get(name) not in metrics)),
    )


def refine_recorded(runs: Sequence[RecordedRun], *, source: str, date: str) -> ServingCalibration:
    """The set of one engine on one cluster, adapted to all of its recorded runs.

    Args:
        runs: of one key and one cluster.
        source: what they are.
        date: of the set, ISO 8601.
    """
    first = runs[0]
    start: ServingCalibration = first.start
    (made,) = refine_serving([item.run for item in runs], lambda *_: start, source=source, date=date).calibrations
    engine, generation = first.key
    architecture = own_name(generation, first.cluster)
    return replace(made, engine=engine, architecture=architecture, start_error_p90=start.error_p90)
