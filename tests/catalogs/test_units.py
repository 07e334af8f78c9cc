"""Amounts from outside: what is no number, or beyond all numbers, is refused in words."""

from __future__ import annotations

import pytest

from meshplan.catalogs.errors import UnitError
from meshplan.catalogs.units import parse_total_tokens


@pytest.mark.parametrize(
    "written", [10**400, "9" * 400, "1" + "0" * 320 + "T", float("inf"), float("nan"), True, "x", None]
)
def test_tokens_of_a_run_are_finite(written: object) -> None:
    with pytest.raises(UnitError) as refused:
        parse_total_tokens(written)
    assert len(str(refused.value)) < 500
