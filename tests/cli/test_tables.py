"""Tables of plain text are laid out by hand: as rich lays them out, whatever their cells hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshplan.cli.render import Column
from meshplan.cli.tables import any_lines, plain_lines, table_lines

# Letters, what rich reads as markup or emoji, our own signs, and what is wider or narrower than one cell.
TEXTS = st.one_of(
    st.sampled_from(["", " ", "–", "✔", "55.73 s", "[bold]", ":b:", "[/]", "中", "é", "e\u0301", "a\tb", " a", "b "]),
    st.text(st.sampled_from("ab1 .,%[]/\\×→–…"), max_size=12),
    st.lists(st.text("ab×–", min_size=1, max_size=5), max_size=6).map(" ".join),
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


@given(tables(), st.integers(8, 80))
def test_by_hand_as_by_rich(table: tuple[list[Column], list[list[str]], str], width: int) -> None:
    columns, cells, title = table
    by_hand = plain_lines(columns, cells, title=title, width=width)
    assert by_hand in ([], any_lines(columns, cells, title=title, width=width))


def test_texts_are_wrapped_by_hand_where_no_word_is_broken() -> None:
    columns = [Column(key="a", title="plan"), Column(key="b", title="step", right=True)]
    cells = [["tp 4 pp 4 cp 2", "55.73 s"], [" ", "1 s"]]
    lines = ["plan               step", "─" * 23, "tp 4 pp 4 cp 2  55.73 s", "                    1 s"]
    assert plain_lines(columns, cells, title="", width=23) == table_lines(columns, cells, width=23) == lines
    wrapped = ["plan             step", "─" * 21, "tp 4 pp 4 cp  55.73 s", "2", "                  1 s"]
    assert plain_lines(columns, cells, title="", width=21) == table_lines(columns, cells, width=21) == wrapped
    assert plain_lines(columns, [["tp4pp4cp2dp1", "55.73 s"]], title="", width=20) == []  # a word would be broken
    assert plain_lines(columns, cells, title="", width=16) == []  # less than eight characters are left


def test_long_words_end_their_lines_at_separators() -> None:
    columns = [Column(key="a", title="Question"), Column(key="b", title="Stored", wrap=False)]
    lines = table_lines(columns, [["Qwen/Qwen2.5-7B-Instruct on 1 × dgx-a100-80gb", "2026-11-28 08:17"]], width=36)
    assert [line[:18].rstrip() for line in lines[2:]] == ["Qwen/Qwen2.5-7B-", "Instruct on 1 ×", "dgx-a100-80gb"]
    # A word without separators is broken where the line ends.
    assert [line[:8] for line in table_lines(columns, [["a" * 10, "b" * 10]], width=20)[2:]] == ["a" * 8, "aa"]
