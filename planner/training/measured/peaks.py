"""Measured peaks that are not compared: those of runs that saved memory in a way that no plan can ask for, or of less
than the run's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_bytes
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.validation.fields import Section, caveats

PEAKS = ("peak_memory_bytes", "total_memory_bytes")
# How published rows name what saves memory and is no choice of a plan.
SAVERS = (
    "8-bit",
    "paged optimizer",
    "optimizer in backward",
    "fused into the backward",
    "chunked cross entropy",
    "cpu offload",
    "activation offloading",
)
# A published peak is rounded, and counts GB or GiB.
LEAST_SHARE = 0.9


def peak_left_out(
    row: Mapping[str, Any],
    choices: Section,
    problem: TrainingProblem,
    config: TrainingConfig,
    measured: Mapping[str, Any],
) -> str:
    """Why the measured peak is not compared; empty where it is.

    A rank holds its weights all the time. A peak below their bytes is that of another run.

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
    used += [key for key in ("cpu_offload", "activation_offload") if choices.flag(key, default=False)]
    if used:
        return f"the run saved memory in a way that plans do not: {', '.join(used)}"
    return below_weights(problem, config, peak)


def below_weights(problem: TrainingProblem, config: TrainingConfig, peak: float) -> str:
    """Why a peak is not that of the run, which holds its weights all the time; empty where it may be.

    Args:
        problem: what was run.
        config: the choices that were run.
        peak: measured, bytes.
    """
    weights = min(stage.components["weights"] for stage in price(problem, config).stages)
    if peak < LEAST_SHARE * weights:
        return f"{format_bytes(peak)} is less than the weights of a rank, {format_bytes(weights)}"
    return ""
