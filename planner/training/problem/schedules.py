"""The pipeline schedules that are known: one row each, from which every other list of them is made.

What a schedule costs (bubble, activations in flight) is in :mod:`meshplan.planner.training.pipeline.closed_forms`; the
order of its passes in ``orders.py`` and ``list_scheduling.py`` beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum


class Searched(Enum):
    """When the search considers a schedule."""

    ALWAYS = "always"
    UNVALIDATED = "with constraints.unvalidated_schedules"
    PINNED = "only if fixed.pipeline_schedule names it"


class Priced(Enum):
    """How the time of a step is found."""

    FORMULA = "closed form"
    UNROLLED_IF_UNEQUAL = "closed form if all stages are equal, otherwise the order is unrolled"
    UNROLLED = "the order is unrolled, operation by operation"


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """One pipeline schedule.

    Args:
        name: as in ``fixed.pipeline_schedule``.
        source: citation.
        chunks: fewest model chunks per stage.
        chunk_step: more chunks per stage come in steps of so many; 0: exactly ``chunks``.
        searched: see :class:`Searched`.
        priced: see :class:`Priced`.
        validated: runs with this schedule were measured and compared (``meshplan validate``).
        is_zigzag: chunks lie on the stages there and back (a V, or waves); otherwise round and round.
        is_list_scheduled: its order is found by list scheduling; otherwise it is written down.
        splits_backward: weight gradients are computed apart from input gradients.
        flushes: the pipeline empties between steps.
        hides_neighbour_messages: stage-to-stage messages run behind compute.
    """

    name: str
    source: str
    _: KW_ONLY
    chunks: int = 1
    chunk_step: int = 0
    searched: Searched = Searched.ALWAYS
    priced: Priced = Priced.FORMULA
    validated: bool = False
    is_zigzag: bool = False
    is_list_scheduled: bool = False
    splits_backward: bool = False
    flushes: bool = True
    hides_neighbour_messages: bool = False

    def takes(self, chunks: int) -> bool:
        """Whether stages of that many chunks can run under it."""
        extra = chunks - self.chunks
        return extra == 0 or (self.chunk_step > 0 and extra > 0 and extra % self.chunk_step == 0)


_ZERO_BUBBLE = "Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241"
_CONTROLLABLE_MEMORY = "Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362"
# What a pipeline of one stage is called.
NO_PIPELINE = "none"
_ROWS = (
    PipelineSchedule(NO_PIPELINE, "one stage", validated=True, hides_neighbour_messages=True),
    # Never faster than 1F1B, and holds more activations: only if pinned.
    PipelineSchedule("gpipe", "Huang et al., GPipe, arXiv:1811.06965", searched=Searched.PINNED),
    PipelineSchedule("1f1b", "Narayanan et al., PipeDream-Flush, arXiv:2006.09503", validated=True),
    PipelineSchedule(
        "interleaved",
        "Narayanan et al., arXiv:2104.04473, §2.2",
        chunks=2,
        chunk_step=1,
        validated=True,
        hides_neighbour_messages=True,
    ),
    # ZB-1p written by hand: only if pinned.
    PipelineSchedule(
        "zb-h1",
        f"{_ZERO_BUBBLE}, §2.1",
        searched=Searched.PINNED,
        priced=Priced.UNROLLED_IF_UNEQUAL,
        splits_backward=True,
    ),
    PipelineSchedule(
        "zb-1p", _ZERO_BUBBLE, priced=Priced.UNROLLED_IF_UNEQUAL, validated=True, splits_backward=True, flushes=False
    ),
    PipelineSchedule(
        "zb-2p", _ZERO_BUBBLE, priced=Priced.UNROLLED_IF_UNEQUAL, validated=True, splits_backward=True, flushes=False
    ),
    PipelineSchedule(
        "zb-v",
        _CONTROLLABLE_MEMORY,
        chunks=2,
        priced=Priced.UNROLLED,
        is_zigzag=True,
        splits_backward=True,
        flushes=False,
    ),
    PipelineSchedule(
        "v-half",
        _CONTROLLABLE_MEMORY,
        chunks=2,
        searched=Searched.UNVALIDATED,
        priced=Priced.UNROLLED,
        is_zigzag=True,
        is_list_scheduled=True,
        splits_backward=True,
        flushes=False,
    ),
    PipelineSchedule(
        "v-min",
        _CONTROLLABLE_MEMORY,
        chunks=2,
        searched=Searched.UNVALIDATED,
        priced=Priced.UNROLLED,
        is_zigzag=True,
        is_list_scheduled=True,
        splits_backward=True,
        flushes=False,
    ),
    PipelineSchedule(
        "dualpipe-v",
        "DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, §3.2.1; github.com/deepseek-ai/DualPipe",
        chunks=2,
        searched=Searched.UNVALIDATED,
        priced=Priced.UNROLLED,
        is_zigzag=True,
        splits_backward=True,
    ),
    # Its list schedule is longer than the order of its paper: only if pinned.
    PipelineSchedule(
        "hanayo",
        "Liu et al., Hanayo, arXiv:2308.15762",
        chunks=2,
        chunk_step=2,
        searched=Searched.PINNED,
        priced=Priced.UNROLLED,
        is_zigzag=True,
        is_list_scheduled=True,
    ),
)
SCHEDULES: Mapping[str, PipelineSchedule] = {row.name: row for row in _ROWS}


def schedules_of(
    pipeline_parallel: int,
    virtual_pipeline_stages: int,
    *,
    allowed: Collection[str],
    pinned: str | None = None,
    unvalidated: bool = False,
) -> tuple[str, ...]:
    """The pipeline schedules that a split can run under, the usual one first.

    Args:
        pipeline_parallel: stages.
        virtual_pipeline_stages: chunks per stage.
        allowed: what the framework can run.
        pinned: the only one that the user asks for.
        unvalidated: whether schedules without measured runs count too.

    >>> schedules_of(4, 2, allowed=("none", "1f1b", "interleaved"))
    ('interleaved',)
    >>> schedules_of(4, 2, allowed=("interleaved", "v-half"), pinned="v-half")
    ('v-half',)
    """
    asked = {Searched.ALWAYS, Searched.UNVALIDATED} if unvalidated else {Searched.ALWAYS}
    if pipeline_parallel == 1:
        fitting = [SCHEDULES[NO_PIPELINE]]
    else:
        fitting = [row for row in _ROWS if row.name != NO_PIPELINE and row.takes(virtual_pipeline_stages)]
    return tuple(
        row.name
        for row in fitting
        if row.name in allowed and (row.searched in asked if pinned is None else row.name == pinned)
    )
