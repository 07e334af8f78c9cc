"""Amounts from outside: what is no number, or beyond all numbers, is refused in words."""

from __future__ import annotations

import pytest

from meshplan.catalogs.errors import UnitError
from meshplan.catalogs.units import Dimension, parse_quantity, parse_tokens, parse_total_tokens


@pytest.mark.parametrize(
    "written", [10**400, "9" * 400, "1" + "0" * 320 + "T", float("inf"), float("nan"), True, "x", None]
)
def test_tokens_of_a_run_are_finite(written: object) -> None:
    with pytest.raises(UnitError) as refused:
        parse_total_tokens(written)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("written", ["4.000", "1.024", "8.192.000", "4.0"])
def test_a_point_between_thousands_is_not_read_as_a_decimal_one(written: str) -> None:
    """``--lengths 4.000/1.000`` was a plan for prompts of 4 tokens."""
    with pytest.raises(UnitError, match=r"4000 or 4k|not a whole number of tokens"):
        parse_tokens(written, most=None)
    assert parse_tokens("1.5k", most=None) == 1536  # with a prefix it is a decimal one


def test_a_comma_in_a_number_is_named() -> None:
    """``max_run_time: 1,999 d`` had an unknown unit ``,999 d``."""
    with pytest.raises(UnitError, match="nothing between its thousands"):
        parse_quantity("1,999 d", Dimension.S)
