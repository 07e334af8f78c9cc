"""Scripts that would loop, or grow to gigabytes: read or refused in the time that their length allows."""

from __future__ import annotations

import contextlib

import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.shell import read_script


@pytest.mark.parametrize("text", ["X=(a >b)", "X=(a <b)", "X=(>", "X=(a <<E)\nE\n", "X=(a; b)", "X=(a"])
def test_an_array_that_bash_refuses_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="the array X"):
        read_script(text)


def test_a_process_in_the_place_of_a_file_is_one_unknown_word() -> None:
    script = read_script('ARGS=(--a <(cat "x y") --b)\nrun "${ARGS[@]}" <(ls) > out\n')
    assert script.statements[0].words == ("run", "--a", '<(cat"xy")', "--b", "<(ls)")
    assert '<(cat "x y")' in script.unknown


def test_arrays_that_double_are_refused() -> None:
    for word in ("x", ""):
        text = f'A=("{word}" "{word}")\n' + 'A=("${A[@]}" "${A[@]}")\n' * 60
        with pytest.raises(SpecError, match=r"grows beyond|more than"):
            read_script(text)
    with pytest.raises(SpecError, match="more than"):
        read_script('A=("" "")\n' + 'A+=("${A[@]}")\n' * 15 + "run " + '"${A[@]}"' * 5000)


def test_a_long_value_many_times_is_refused() -> None:
    with pytest.raises(SpecError, match="grows beyond"):
        read_script(f"A={'x' * 60_000}\n" + "run $A\n" * 100_000)


@pytest.mark.parametrize(
    "text",
    [
        "cat << E\n" + "\n" * 200_000,
        "cat << E\n" + " \n" * 100_000 + "E\nrun --a 1\n",
        "a\n" * 100_000,
        "A+=(x)\n" * 50_000,
        "A=1\n" * 50_000 + "x $((A))\n" * 50_000,
        "x" * 60_000 + " " + "y" * 60_000,
        "".join(f"cat <<E{n} " for n in range(50_000)),
        "$((" + "(" * 50_000 + ")" * 50_000 + "))",
        "$((" + "-" * 100_000 + "1))",
        '"' * 100_000,
        "$(" * 100_000,
        "\\\n" * 200_000,
    ],
)
def test_the_time_grows_with_the_length_only(text: str) -> None:
    """Quadratic reading of these takes minutes, which the suite's own limit would show."""
    with contextlib.suppress(SpecError):
        read_script(text)
