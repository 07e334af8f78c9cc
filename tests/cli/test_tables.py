"""Tables that need no wrapping are laid out by hand: as rich lays them out, whatever their cells hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshplan.cli.render import Column
from meshplan.cli.tables import fitting_lines, table_lines, wrapped_lines

# Letters, what rich reads as markup or emoji, our own signs, and what is wider or narrower than one cell.
TEXTS = st.one_of(
    st.sampled_from(["", " ", "–", "✔", "55.73 s", "[bold]", ":b:", "[/]", "中", "é", "e\u0301", "a\tb", " a", "b "]),
    st.text(st.sampled_from("ab1 .,%[]/\\×–…"), max_size=12),
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Column], list[list[str]], str]:
    count = draw(st.integers(1, 5))
    heads = st.sampled_from(["", "TP", "TTFT p99", "dev.", "tok/s/dev", "what is meant"])
    columns = [
        Column(key=str(index), title=draw(heads), right=draw(st.booleans()), wrap=draw(st.booleans()))
        for index in range(count)
    ]
    cells = draw(st.lists(st.lists(TEXTS, min_size=count, max_size=count), max_size=4))
    return columns, cells, draw(TEXTS)


@given(tables(), st.sampled_from([20, 40, 80]))
def test_without_wrapping_as_with_it(table: tuple[list[Column], list[list[str]], str], width: int) -> None:
    columns, cells, title = table
    by_hand = fitting_lines(columns, cells, title=title, width=width)
    assert by_hand in ([], wrapped_lines(columns, cells, title=title, width=width))


def test_what_fits_is_laid_out_by_hand_and_what_does_not_is_wrapped() -> None:
    columns = [Column(key="a", title="plan"), Column(key="b", title="step", right=True)]
    cells = [["tp 4 pp 4 cp 2", "55.73 s"], [" ", "1 s"]]
    lines = ["plan               step", "─" * 23, "tp 4 pp 4 cp 2  55.73 s", "                    1 s"]
    assert fitting_lines(columns, cells, title="", width=23) == table_lines(columns, cells, width=23) == lines
    assert fitting_lines(columns, cells, title="", width=22) == []
    assert len(table_lines(columns, cells, width=22)) == 5
