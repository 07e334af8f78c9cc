"""One measured training run against the estimate of its step time and memory.

Memory: ``value`` is the typical figure and ``high`` the safe bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.planner.core.plan import Interval
from meshplan.planner.training.admission import WITH_RECOMPUTE, Admission, admission, peak_interval
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.measured.exclusions import exclusion
from meshplan.planner.training.measured.memory.reported import reserve_of
from meshplan.planner.training.measured.observations import ObservationReader, ObservedRun
from meshplan.planner.training.measured.pools import is_pooled, validate_pooled
from meshplan.planner.training.measured.switches import CHOICES
from meshplan.planner.training.plan import time_interval
from meshplan.planner.training.problem.problem import Phase, TrainingProblem
from meshplan.planner.training.resolve import calibration_for
from meshplan.planner.training.unvalidated import unmeasured_share
from meshplan.planner.validation.summary import ValidatedRow
from meshplan.planner.validation.unused import unused_keys

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog

Metric = Callable[[ObservedRun, Priced], float]


def _tokens_per_s(run: ObservedRun, priced: Priced) -> float:
    return run.problem.workload.tokens_per_step / priced.step_s


def _model_rate(run: ObservedRun, priced: Priced) -> float:
    return priced.model_flops / priced.step_s / run.problem.machine.num_devices


def _peak(run: ObservedRun) -> float:
    return peak_flops_per_s(run.problem.machine.device, run.problem.workload.precision)


def _component(*names: str) -> Metric:
    return lambda _, priced: sum(priced.stages[0].components[name] for name in names)


def _reported(run: ObservedRun, priced: Priced, *, most: bool = False) -> float:
    """The peak as the run's source reports it: expected, or its safe bound."""
    fullest = max(priced.stages, key=lambda stage: stage.typical_bytes)
    work = fullest.components["activations"] + fullest.components["logits"]
    needed = priced.typical_bytes
    if most:
        needed, work = priced.safe_bytes, work * run.problem.calibration.memory.safe_activation_factor
    return reserve_of(run).reported_bytes(needed, work, most=most)


# Keys of a row's workload that are read.
WORKLOAD = frozenset({"sequence_length", "phase", "quantization"})
# Every metric of the observation format that a training estimate can predict.
METRICS: Mapping[str, Metric] = {
    "iteration_s": lambda _, priced: priced.step_s,
    "tokens_per_s_per_device": lambda run, p: _tokens_per_s(run, p) / run.problem.machine.num_devices,
    "samples_per_s": lambda run, p: run.problem.workload.global_batch_size / p.step_s,
    "model_flops_per_s_per_device": _model_rate,
    "hardware_flops_per_s_per_device": lambda run, p: _model_rate(run, p) * (1.0 + p.recompute_flops_share),
    "mfu": lambda run, p: _model_rate(run, p) / _peak(run),
    "hfu": lambda run, p: _model_rate(run, p) * (1.0 + p.recompute_flops_share) / _peak(run),
    "gradient_reduce_s": lambda _, priced: priced.gradient_reduce_s,
    "peak_memory_bytes": _reported,
    "activation_bytes": _component("activations"),
    "params_and_optimizer_bytes": _component("weights", "gradients", "optimizer"),
    "weights_and_gradients_bytes": _component("weights", "gradients"),
    "optimizer_bytes": _component("optimizer"),
    "total_memory_bytes": lambda _, priced: priced.typical_bytes,
}


# Bytes of components may be a publisher's arithmetic; every other figure shows that its row was run.
COUNTED_BYTES = frozenset(name for name in METRICS if name.endswith("_bytes")) - {"peak_memory_bytes"}


def interval_of(problem: TrainingProblem, metric: str, priced: Priced, value: float) -> Interval:
    """The interval of one predicted metric, as a plan shows it."""
    if metric in ("peak_memory_bytes", "total_memory_bytes"):
        return peak_interval(value, priced.safe_bytes)
    share = unmeasured_share(problem, priced)
    return time_interval(problem, value, config=priced.config, unmeasured_share=share)


def validate_run(run: ObservedRun) -> ValidatedRow:
    """Price one run and hold it against its measurement."""
    priced = price(run.problem, run.config)
    measured = {
        name: float(value)
        for name, value in {**run.derived, **run.measured}.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    predicted = {}
    for name in dict.fromkeys(["iteration_s", "peak_memory_bytes", *measured]):
        if name in METRICS:
            predicted[name] = interval_of(run.problem, name, priced, METRICS[name](run, priced))
    peak = predicted["peak_memory_bytes"]
    predicted["peak_memory_bytes"] = replace(peak, high=_reported(run, priced, most=True))
    reason = exclusion(run.problem, run.config, run.measured)
    error = {name: predicted[name].value / measured[name] - 1.0 for name in predicted if measured.get(name)}
    return ValidatedRow(
        id=run.id,
        group=run.group,
        question=question(run),
        labels=_labels(run),
        status="ok" if reason is None else "excluded",
        reason=reason or (f"peak memory is not compared: {run.peak_left_out}" if run.peak_left_out else ""),
        predicted=predicted,
        measured=measured,
        error=error,
        filled=run.filled,
        oom=priced.safe_bytes > run.problem.limits.memory_bytes,
        admitted=_admitted(run, priced) if _has_worked(run) else "",
        breakdown_s=priced.breakdown_s,
    )


def _has_worked(run: ObservedRun) -> bool:
    """Whether the row shows a run that went through."""
    shown = METRICS.keys() & run.measured.keys() - COUNTED_BYTES
    return not run.expects_oom and bool(shown or run.peak_left_out)


def _admitted(run: ObservedRun, priced: Priced) -> str:
    """How a plan with the choices of a run that worked would have been admitted."""
    figure = admission(run.problem, priced)
    if figure is not Admission.NONE or "activation_recompute" not in run.filled:
        return figure.value
    again = price(run.problem, replace(run.config, activation_recompute="full", recompute_num_layers=0))
    return figure.value if admission(run.problem, again) is Admission.NONE else WITH_RECOMPUTE


def question(run: ObservedRun) -> str:
    """What the plans that are ranked against each other share: framework and release, model, machine, what is trained.

    Adapters and all weights, or two formats of frozen weights, are different work; two releases are different code.
    """
    problem, workload = run.problem, run.problem.workload
    frozen = f", frozen in {workload.frozen_weights}" if workload.phase is Phase.QLORA else ""
    return (
        f"{run.framework} {run.release}: {problem.shape.name} on {problem.machine.num_devices} × "
        f"{problem.machine.device.slug}, {workload.global_batch_size} × {workload.sequence_length} "
        f"{workload.precision}, {workload.phase.value}{frozen}"
    )


def _labels(run: ObservedRun) -> dict[str, str]:
    return {
        "framework": run.framework,
        "device": run.problem.machine.device.slug,
        "model": run.problem.shape.name,
        "strategy": run.strategy,
    }


def row_validator(
    rows: Iterable[Mapping[str, Any]], catalog: Catalog, traces: Path | None
) -> Callable[[Mapping[str, Any]], ValidatedRow]:
    """Row → its validation with the constants of the catalog; see :mod:`meshplan.planner.core.kinds`."""
    del rows, traces  # what training does not need
    reader = ObservationReader(catalog)
    constants = cache(partial(calibration_for, catalog))

    def validated(row: Mapping[str, Any]) -> ValidatedRow:
        if is_pooled(row):
            found = validate_pooled(reader, row, catalog)
        else:
            run = reader.training_run(row)
            calibration = constants(run.framework, run.architecture)
            found = validate_run(replace(run, problem=run.problem.with_calibration(calibration)))
        unused = unused_keys(row, workload=WORKLOAD, parallelism=CHOICES, predicted=found.predicted)
        return replace(found, unused=unused)

    return validated
