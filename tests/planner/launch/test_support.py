"""The support matrix and the reference of choices: made from the table of choices by emitting probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from meshplan.planner.launch.support import RANK_TABLE, choice_rows, support_matrix
from meshplan.planner.training.problem.choices import CHOICES

Rows = tuple[Mapping[str, Any], ...]


@pytest.fixture(scope="module")
def matrix() -> Rows:
    return support_matrix()


@pytest.fixture(scope="module")
def reference() -> Rows:
    return choice_rows()


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed", "accelerate", "torchrun"])
def test_every_probed_choice_has_a_row_for_each_framework(target: str, matrix: Rows) -> None:
    rows = {row["feature"]: row for row in matrix if row["target"] == target}
    for name in [*(choice.name for choice in CHOICES if choice.tried), RANK_TABLE]:
        assert rows[name]["takes"] or rows[name]["refuses"]
        assert rows[name]["expressed_by"] or not rows[name]["takes"]


def test_the_reference_lists_every_choice_once_with_a_meaning(reference: Rows) -> None:
    assert [row["name"] for row in reference] == [choice.name for choice in CHOICES]
    assert all(row["about"] and row["type"] for row in reference)


@pytest.mark.parametrize(
    ("name", "frameworks"),
    [
        ("expert_tensor_parallel", "megatron 0.19.2"),
        ("zero_hpz_partition_size", "deepspeed 0.19.8"),
        ("pipeline_schedule", "megatron 0.19.2, torchtitan 0.3.0"),
        ("context_parallel", "megatron 0.19.2, torchtitan 0.3.0, accelerate 1.15.0, axolotl 0.19.0"),
        ("vocabulary_parallel", ""),
    ],
)
def test_frameworks_are_those_that_take_several_values(name: str, frameworks: str, reference: Rows) -> None:
    assert {row["name"]: row["frameworks"] for row in reference}[name] == frameworks
