"""What a degree search looks through: templates, splits of the layers, bounds of the ones under the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshplan.planner.core.arrays import IntArray
from meshplan.planner.training.estimator.candidates import PipelineSplit
from meshplan.planner.training.problem.choices import SPLIT
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.bounds.cell_bounds import CellBounds
from meshplan.planner.training.search.bounds.memory_bounds import MemoryBounds
from meshplan.planner.training.search.templates import Templates, make_templates, pipeline_splits


@dataclass(frozen=True, kw_only=True)
class Space:
    """What there is to search: templates, splits of the layers, and bounds of the ones under the others.

    Args:
        templates: all choices but the pipeline split.
        splits: every pipeline split.
        bounds: of the templates.
        memory: what the templates must recompute at least.
        rows: where the templates stand in the space that this is a part of [n]; None: it is none.
    """

    templates: Templates
    splits: tuple[PipelineSplit, ...]
    bounds: CellBounds
    memory: MemoryBounds
    rows: IntArray | None = None

    @classmethod
    def of(cls, problem: TrainingProblem) -> Space:
        """The space of a question."""
        templates = make_templates(problem)
        bounds = CellBounds(problem, templates)
        memory = MemoryBounds(problem, templates.columns, bounds)
        return cls(templates=templates, splits=tuple(pipeline_splits(problem)), bounds=bounds, memory=memory)

    def pinned(self, problem: TrainingProblem, choices: Mapping[str, Any]) -> Space:
        """The part of the space that has some choices, with chunks that are alike.

        Args:
            problem: the question with these choices pinned.
            choices: choice → value.
        """
        templates, rows = self.templates.pinned(problem, choices)
        splits = tuple(
            split
            for split in self.splits
            if all(getattr(split, one.split) == choices[one.name] for one in SPLIT if one.name in choices)
            and (split.virtual_pipeline_stages == 1 or _are_alike(split.layers_per_chunk))
        )
        bounds = self.bounds.pinned(problem, templates, rows)
        memory = self.memory.pinned(problem, templates, rows, bounds)
        whole = rows if self.rows is None else self.rows[rows]
        return Space(templates=templates, splits=splits, bounds=bounds, memory=memory, rows=whole)

    def under(self, problem: TrainingProblem) -> Space:
        """The same space under other links between nodes, none of which are uniform."""
        return replace(self, bounds=self.bounds.under(problem), memory=self.memory.under(problem))


def _are_alike(layers_per_chunk: Sequence[int]) -> bool:
    """Whether all chunks hold as many layers, the embedding and the LM head counted as one each if need be."""
    first, *between, last = layers_per_chunk
    return len({first, *between, last}) == 1 or len({first + 1, *between, last + 1}) == 1
