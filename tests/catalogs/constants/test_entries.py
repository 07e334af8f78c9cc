"""Entries of seed files become objects by the names of their keys; a misspelt key is not passed over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshplan.catalogs.constants.entries import read_entry


@dataclass(frozen=True)
class Thing:
    name: str
    parts: tuple[str, ...] = ()


def test_keys_are_fields_and_lists_tuples() -> None:
    assert read_entry(Thing, {"parts": ["a", "b"]}, name="x") == Thing("x", ("a", "b"))


@pytest.mark.parametrize("entry", [{"name": "x", "part": ["a"]}, {"parts": []}])
def test_unknown_and_missing_keys_are_errors(entry: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        read_entry(Thing, entry)
