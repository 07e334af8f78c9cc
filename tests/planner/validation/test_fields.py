"""Fields of a measured run: right values, or a reason that names the field."""

from __future__ import annotations

import pytest

from meshplan.planner.validation.fields import Section, UnsupportedError, caveats, has_caveat, row_id

COLOURS = {"red": 1, "blue": 2}


def test_one_of_the_choices_or_a_reason_that_lists_them() -> None:
    paint = Section({"paint": {"colour": "blue", "lid": 3}}, "paint")
    assert paint.one_of("colour", COLOURS) == 2
    assert paint.one_of("primer", COLOURS, "red") == 1
    with pytest.raises(UnsupportedError, match=r"paint.lid must be a text"):
        paint.one_of("lid", COLOURS)
    with pytest.raises(UnsupportedError, match=r"paint.colour must be one of green, is 'blue'"):
        paint.one_of("colour", {"green": 3})
    with pytest.raises(UnsupportedError, match=r"does not state paint.primer"):
        paint.one_of("primer", COLOURS)


@pytest.mark.parametrize("stated", [None, 3, "remark", {"a": 1}])
def test_caveats_that_are_no_list_are_none(stated: object) -> None:
    assert caveats({"caveats": stated}) == ()
    assert not has_caveat({"caveats": stated}, "remark")


def test_caveats_are_searched_one_by_one() -> None:
    row = {"caveats": ["vendor internal run", 7]}
    assert has_caveat(row, "vendor internal")
    assert not has_caveat(row, "run 7")


@pytest.mark.parametrize("name", [None, 3, ["a"]])
def test_a_row_has_a_text_as_its_name(name: object) -> None:
    with pytest.raises(UnsupportedError, match="id must be a text"):
        row_id({"id": name})
