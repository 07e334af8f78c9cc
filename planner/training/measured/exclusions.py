"""Measured training runs, and peaks of runs, that are excluded from errors and fits, for what their own row shows.

No prediction of a time is used: FLOPs and the bytes of states are counted. Peaks of runs that saved memory in a way
that no plan can ask for are not compared either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshplan.catalogs.units import format_bytes
from meshplan.planner.training.estimator.flops import TRAINING_PASSES, forward_flops_per_token
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.validation.fields import Section, caveats

# Passes over the layers' matrices that a publisher counts at least where all weights are trained: all three are counted
# whatever else is left out, and half a pass is left for what this count does not know of the model. Two passes are
# adapters on frozen weights, whose weight gradients nobody computes.
LEAST_PASSES = TRAINING_PASSES - 0.5
PEAKS = ("peak_memory_bytes", "total_memory_bytes")
# How published rows name what saves memory and is no choice of a plan.
SAVERS = ("paged optimizer", "cpu offload")
# How a row says that experts may be split over the devices in a way that it does not state.
PLACED = "solver places experts"
# A published peak is rounded, and counts GB or GiB.
LEAST_SHARE = 0.9


def exclusion(problem: TrainingProblem, config: TrainingConfig, measured: Mapping[str, float]) -> str | None:
    """The reason to exclude a run; None where there is none.

    Args:
        problem: what was run.
        config: the choices that were run.
        measured: metric → value.
    """
    return _beyond_the_peak(problem, config, measured) or _counted_as_adapters(problem, measured)


def _beyond_the_peak(problem: TrainingProblem, config: TrainingConfig, measured: Mapping[str, float]) -> str | None:
    """A step with F FLOPs of model and recompute on n devices takes at least F/(n · peak). A row with a shorter one
    does not state the run that was measured: another recompute, another device, tokens counted in another way.
    """
    step_s = measured.get("iteration_s")
    if not step_s:
        return None
    priced = price(problem, config)
    flops = priced.model_flops * (1.0 + priced.recompute_flops_share) / problem.machine.num_devices
    share = flops / step_s / peak_flops_per_s(problem.machine.device, problem.workload.precision)
    if share <= 1.0:
        return None
    return (
        f"the row states {share:.0%} of the devices' peak rate, recompute included: it is not the run that was measured"
    )


def _counted_as_adapters(problem: TrainingProblem, measured: Mapping[str, float]) -> str | None:
    """A row that says that all weights were trained, and whose FLOPs per token, its rate of model FLOPs over its rate
    of tokens, are fewer than the layers' matrices alone take: weight gradients were not counted.
    """
    rate, tokens_per_s = (measured.get(name) for name in ("model_flops_per_s_per_device", "tokens_per_s_per_device"))
    workload = problem.workload
    if not rate or not tokens_per_s or workload.phase.has_adapters:
        return None
    matrix = forward_flops_per_token(problem.shape, workload.sequence_length).matrix
    passes = rate / tokens_per_s / matrix
    if passes >= LEAST_PASSES:
        return None
    return (
        f"the row states {rate / tokens_per_s / 1e9:.0f} GFLOP per token, {passes:.1f} passes over the matrices of its "
        f"layers where training all weights takes {TRAINING_PASSES:.0f}: it is a run with adapters"
    )


def peak_left_out(
    row: Mapping[str, Any],
    choices: Section,
    problem: TrainingProblem,
    config: TrainingConfig,
    measured: Mapping[str, Any],
) -> str:
    """Why the measured peak is not compared; empty where it is.

    A rank holds its weights and optimizer states all the time. A peak below their bytes is that of another run, and so
    is one of experts of which the row does not say how many ranks share them.

    Args:
        row: the observation.
        choices: its ``parallelism``.
        problem: what was run.
        config: the choices that were run.
        measured: metric → value.
    """
    peak = measured.get("peak_memory_bytes")
    if not peak:
        return ""
    said = " ".join(caveats(row)).lower()
    used = [saver for saver in SAVERS if saver in said]
    used += ["cpu_offload"] * choices.flag("cpu_offload", default=False)
    if used:
        return f"the run saved memory in a way that plans do not: {', '.join(used)}"
    if PLACED in said and problem.machine.num_devices > 1 and not choices.values.get("expert_parallel"):
        return f"the {PLACED}, and the row does not say over how many devices"
    return below_states(problem, config, peak)


def below_states(problem: TrainingProblem, config: TrainingConfig, peak: float) -> str:
    """Why a peak is not that of the run, which holds weights and optimizer states all the time; empty where it may be.

    Args:
        problem: what was run.
        config: the choices that were run.
        peak: measured, bytes.
    """
    recipe = replace(problem.calibration.recipe, optimizer_step_bytes=0.0)
    plain = replace(problem, calibration=replace(problem.calibration, recipe=recipe))
    states = min(stage.components["weights"] + stage.components["optimizer"] for stage in price(plain, config).stages)
    if peak < LEAST_SHARE * states:
        return f"{format_bytes(peak)} is less than weights and optimizer states of a rank, {format_bytes(states)}"
    return ""
