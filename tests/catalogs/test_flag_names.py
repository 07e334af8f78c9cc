"""Words of frameworks and papers lead to our keys, and to none where a section has no such key."""

from __future__ import annotations

import pytest

from meshplan.catalogs.errors import closest_names
from meshplan.catalogs.flag_names import keys_meant
from meshplan.planner.training.problem.choice import Choice
from meshplan.planner.training.problem.choices import CHOICES

KEYS = {choice.name for choice in CHOICES}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_abbreviations_of_choices_are_words_for_them(choice: Choice) -> None:
    for short in choice.abbreviations:
        assert keys_meant(short, {choice.name}) == (choice.name,)


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--tensor-model-parallel-size", KEYS, ("tensor_parallel",)),
        ("CP", KEYS, ("context_parallel",)),
        ("dp", {"data_parallel", "attention_data_parallel"}, ("data_parallel", "attention_data_parallel")),
        ("dp", {"tensor_parallel"}, ()),
        ("tensor_parallel", KEYS, ()),
        ("gbs", {"global_batch_size"}, ("global_batch_size",)),
    ],
)
def test_a_word_means_the_keys_that_are_known(word: str, known: set[str], meant: tuple[str, ...]) -> None:
    assert keys_meant(word, known) == meant


def test_what_is_meant_for_sure_is_named_alone() -> None:
    assert closest_names("tp_size", KEYS) == ("tensor_parallel",)
    assert len(closest_names("parallel", KEYS)) > 1
