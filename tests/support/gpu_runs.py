"""What we ran ourselves on one H100 and one H200. No constant was fitted to any of it.

``tests/data/h100_runs.jsonl`` has trainings as files of planned plans ran them. Each row has the spec that was planned
before it ran, the software, and what was measured: the median step after two (``step_s``, of ``steps``; after one where
fewer ran), the peak that tensors held and that the allocator had reserved, and the mean power. Weights were random and
tokens synthetic. TorchTitan 0.2.2 was given the settings of the plan by hand, because the release that meshplan writes
files for (0.3.0) needs a newer PyTorch than the machine had.

``tests/data/h200_runs.jsonl`` and ``h100_observations.jsonl`` have observations, as ``meshplan validate`` reads them:
TorchTitan and Accelerate on slices of models, a mixture of experts among them, and pipelines of Diffusers.
``h100_serving.jsonl`` has one vLLM server, started by the files of a plan, under five loads; ``h200_serving.jsonl`` a
hybrid and a mixture of experts of half its layers, with CUDA graphs and without, in closed loops.

``h200_attention.jsonl`` has PyTorch's attention alone, whose kernels with a mask ``seed/attention_kernels.yaml`` takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.measured.observations import ObservationReader, ObservedRun
from meshplan.planner.training.measured.own_runs import refine
from meshplan.planner.training.measured.validate import validate_run
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.service import resolve
from meshplan.planner.validation.summary import ValidatedRow

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One row.

    Args:
        name: of the run.
        software: releases that ran it.
        spec: what was planned.
        measured: metric → value, SI units.
    """

    name: str
    software: str
    spec: dict[str, Any]
    measured: dict[str, float]

    def priced(self, catalog: Catalog) -> Priced:
        """What the shipped constants say of it."""
        problem = resolve(self.spec, catalog).problem
        return price(problem, fixed_config(problem))

    def observed(self, catalog: Catalog) -> ObservedRun:
        """It as a user's own run."""
        problem = resolve(self.spec, catalog).problem
        names = {"step_s": "iteration_s", "allocated_bytes": "peak_memory_bytes"}
        return ObservedRun(
            id=self.name,
            group=self.name,
            problem=problem,
            config=fixed_config(problem),
            framework=problem.rules.name,
            measured={names[name]: value for name, value in self.measured.items() if name in names},
            derived={},
            filled=(),
            expects_oom=False,
        )


def own_runs(catalog: Catalog) -> list[ObservedRun]:
    """All trainings, of both devices, as a user's own runs."""
    reader = ObservationReader(catalog)
    return [
        *(run.observed(catalog) for run in measured_runs()),
        *(reader.training_run(row) for row in observations("training")),
    ]


def without_and_with(
    point: ObservedRun, run: ObservedRun, shipped: Callable[[str, str], Calibration]
) -> tuple[ValidatedRow, ValidatedRow]:
    """A run as the shipped constants predict it, and as those do that were adapted to the point.

    Args:
        point: the only own run; of the framework and the device of the other.
        run: the other.
        shipped: (framework, hardware generation) → the set to start from.
    """
    own = refine([point], lambda *_: shipped(point.framework, point.architecture), source="one own run").calibrations[0]
    start = shipped(run.framework, run.architecture)
    without, given = (
        validate_run(replace(run, problem=run.problem.with_calibration(constants)))
        for constants in (start, replace(own, recipe=start.recipe))
    )
    return without, given


def measured_runs() -> list[MeasuredRun]:
    """Those of the H100, in the order in which they ran."""
    return [MeasuredRun(**row) for row in _rows("h100_runs.jsonl")]


def observations(task: str) -> list[dict[str, Any]]:
    """Those of one task: ``training``, ``diffusion`` or ``serving``."""
    files = ("h200_runs.jsonl", "h100_observations.jsonl", "h100_serving.jsonl", "h200_serving.jsonl")
    return [row for name in files for row in _rows(name) if row["task"] == task]


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
