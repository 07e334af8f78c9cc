"""One table of pipeline schedules: whatever else lists them agrees with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.emit.training import torchtitan
from meshplan.planner.training.measured import observations
from meshplan.planner.training.pipeline.closed_forms import CLOSED_FORMS
from meshplan.planner.training.pipeline.lookup import V_UNITS, nominal_times, pipeline_order
from meshplan.planner.training.pipeline.orders import stage_of_chunk
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.schedules import NO_PIPELINE, SCHEDULES, Priced, Searched, schedules_of
from meshplan.planner.training.problem.spec import FixedSpec


def test_every_list_of_schedules_is_made_from_the_table_or_within_it() -> None:
    assert list(CLOSED_FORMS) == list(SCHEDULES)
    schema = FixedSpec.model_json_schema()["properties"]["pipeline_schedule"]["anyOf"][0]
    assert schema["enum"] == list(SCHEDULES)
    assert set(observations.SCHEDULES.values()) <= set(SCHEDULES)
    for framework in FRAMEWORKS.values():
        assert set(framework.pipeline_schedules) <= set(SCHEDULES)
    assert list(FRAMEWORKS["any"].pipeline_schedules) == list(SCHEDULES)
    assert {NO_PIPELINE, *torchtitan._SCHEDULES} == set(FRAMEWORKS["torchtitan"].pipeline_schedules)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != NO_PIPELINE])
def test_each_schedule_has_an_order_as_the_table_describes_it(name: str) -> None:
    row = SCHEDULES[name]
    order = pipeline_order(name, 4, row.chunks, 16, nominal=nominal_times(name, 1 / 3))
    assert len(order.stage_of_chunk) == 4 * row.chunks
    assert order.stage_of_chunk == stage_of_chunk(name, 4, row.chunks)
    assert order.splits_backward == row.splits_backward
    if row.is_zigzag:
        assert order.stage_of_chunk[4] == 3  # the second chunk of the last stage comes first on the way back
    assert name not in V_UNITS or row.is_list_scheduled


def test_what_the_search_may_take_is_validated_or_follows_a_formula_of_its_paper() -> None:
    """Schedules that no run confirmed are asked for, but ZB-V, whose order is written down in its paper."""
    unasked = [name for name, row in SCHEDULES.items() if row.searched is Searched.ALWAYS and not row.validated]
    assert unasked == ["zb-v"]
    assert all(row.priced is Priced.UNROLLED for row in SCHEDULES.values() if row.is_list_scheduled)


@given(
    stages=st.integers(min_value=1, max_value=8),
    chunks=st.integers(min_value=1, max_value=6),
    unvalidated=st.booleans(),
)
def test_a_pinned_schedule_is_the_only_one(stages: int, chunks: int, *, unvalidated: bool) -> None:
    free = schedules_of(stages, chunks, allowed=SCHEDULES, unvalidated=unvalidated)
    assert free
    for name, row in SCHEDULES.items():
        pinned = schedules_of(stages, chunks, allowed=SCHEDULES, pinned=name)
        assert pinned in ((), (name,))
        assert name not in free or pinned == (name,)
        assert (name == NO_PIPELINE) == (stages == 1) or not pinned
        assert row.searched is not Searched.PINNED or name not in free
