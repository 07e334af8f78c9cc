"""What we ran ourselves on one H100 and one H200. No constant was fitted to any of it.

``tests/data/h100_runs.jsonl`` has trainings as files of planned plans ran them. Each row has the spec that was planned
before it ran, the software, and what was measured: the median step after two (``step_s``, of ``steps``; after one where
fewer ran), the peak that tensors held and that the allocator had reserved, and the mean power. Weights were random and
tokens synthetic. TorchTitan 0.2.2 was given the settings of the plan by hand, because the release that meshplan writes
files for (0.3.0) needs a newer PyTorch than the machine had.

``tests/data/h200_runs.jsonl`` has observations, as ``meshplan validate`` reads them: TorchTitan and Accelerate on
slices of models, a mixture of experts among them, and pipelines of Diffusers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.pinned import fixed_config
from meshplan.planner.training.service import resolve

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


def measured_runs() -> list[MeasuredRun]:
    """Those of the H100, in the order in which they ran."""
    return [MeasuredRun(**row) for row in _rows("h100_runs.jsonl")]


def observations(task: str) -> list[dict[str, Any]]:
    """Those of the H200 of one task: ``training`` or ``diffusion``."""
    return [row for row in _rows("h200_runs.jsonl") if row["task"] == task]


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
