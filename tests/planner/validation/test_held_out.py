"""Leaving groups out: nothing is judged by what was fitted to its own group."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.validation.held_out import leave_one_out, p90

ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers()), max_size=12)


@given(ROWS)
def test_every_row_is_judged_once_and_never_by_its_own_group(rows: list[tuple[str, int]]) -> None:
    fits: list[str] = []

    def fitted_without(group: str) -> list[tuple[str, int]]:
        fits.append(group)
        return [row for row in rows if row[0] != group]

    def judged(row: tuple[str, int], fitted: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        assert row not in fitted
        assert len(fitted) == sum(other[0] != row[0] for other in rows)
        yield row

    found = leave_one_out(rows, lambda row: row[0], fitted_without, judged)
    assert sorted(found) == sorted(rows)
    assert fits == list(dict.fromkeys(row[0] for row in rows))  # one fit per group


def test_p90_is_that_of_the_first_sample_with_enough_runs() -> None:
    few, enough = [0.9, 0.9], [0.1, 0.2, 0.3]
    assert p90([few, enough, [1.0] * 9], fewest=3, otherwise=0.5) == 0.28
    assert p90([few], fewest=3, otherwise=0.5) == 0.5
    assert p90([], fewest=0, otherwise=0.5) == 0.5
