"""Trainings that were measured on one H100, as files of planned plans ran them: tests/data/h100_runs.jsonl.

No constant was fitted to them. Each row has the spec that was planned before it ran, the software, and what was
measured: the median step after two (``step_s``, of ``steps``; after one where fewer ran), the peak that tensors held
and that the allocator had reserved, and the mean power. Weights were random and tokens synthetic. TorchTitan 0.2.2 was
given the settings of the plan by hand, because the release that meshplan writes files for (0.3.0) needs a newer PyTorch
than the machine had.
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

RUNS = Path(__file__).parents[1] / "data" / "h100_runs.jsonl"


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
    """All of them, in the order in which they ran."""
    return [MeasuredRun(**json.loads(line)) for line in RUNS.read_text(encoding="utf-8").splitlines()]
