"""Measured peaks that are not compared: those of runs that saved memory in a way that no plan can ask for, or of less
than the run's own states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshplan.catalogs.units import format_bytes
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem
from meshplan.planner.validation.fields import Section, caveats

PEAKS = ("peak_memory_bytes", "total_memory_bytes")
# How published rows name what saves memory and is no choice of a plan.
SAVERS = ("paged optimizer", "cpu offload")
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

    A rank holds its weights and optimizer states all the time. A peak below their bytes is that of another run.

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
