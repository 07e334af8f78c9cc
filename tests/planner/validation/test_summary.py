"""Scores: rank correlation, ranking quality and summaries by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.planner.core.plan import Interval
from meshplan.planner.validation.summary import ValidatedRow, rank_quality, spearman, summarise, summed_up

RATE = "tokens_per_s_per_device"


def scored(
    name: str, measured: float, predicted: float, *, question: str = "q", labels: Mapping[str, str] | None = None
) -> ValidatedRow:
    return ValidatedRow(
        id=name,
        group=name,
        question=question,
        labels=labels or {},
        status="ok",
        predicted={RATE: Interval(value=predicted, low=predicted / 1.1, high=predicted * 1.1)},
        measured={RATE: measured},
        error={RATE: predicted / measured - 1.0},
        breakdown_s={},
    )


def test_spearman_by_hand() -> None:
    """1 − 6·Σd²/(n(n² − 1)) without ties."""
    first, second = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(first, second) == pytest.approx(-29 / 165)
    assert spearman([1, 2, 3], [10, 20, 30]) == 1.0
    assert spearman([1, 2, 3], [3, 2, 1]) == -1.0


def test_spearman_with_ties_is_pearson_of_mean_ranks() -> None:
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
    assert spearman([1, 1, 1], [1, 2, 3]) is None


@given(st.lists(st.integers(-50, 50), min_size=3, max_size=20, unique=True))
def test_spearman_sees_order_only(values: list[int]) -> None:
    assert spearman(values, [math.exp(value / 10) for value in values]) == 1.0
    assert spearman(values, [-value for value in values]) == -1.0


def test_ranking_by_hand() -> None:
    """Measured 100, 90, 88, 50; predicted order 90, 100, 50, 88. Pairs above 5 %: all but (90, 88)."""
    rows = [scored("a", 100, 95), scored("b", 90, 99), scored("c", 88, 60), scored("d", 50, 70)]
    quality = rank_quality(rows)
    assert quality is not None
    assert (quality.num_groups, quality.num_pairs) == (1, 5)
    assert quality.pair_order == pytest.approx(3 / 5)  # a-c, a-d, b-d are right; a-b and c-d are not
    assert quality.mean_regret == quality.worst_regret == pytest.approx(100 / 90 - 1)


def test_regret_is_a_mean_over_questions() -> None:
    rows = [scored("a", 100, 1), scored("b", 50, 2), scored("c", 80, 9, question="r"), scored("d", 40, 1, question="r")]
    quality = rank_quality(rows)
    assert quality is not None
    assert (quality.num_groups, quality.mean_regret, quality.worst_regret) == (2, pytest.approx(0.5), pytest.approx(1))


def test_a_predicted_tie_is_half_in_order_whichever_row_comes_first() -> None:
    rows = [scored("fast", 100, 70), scored("slow", 50, 70)]
    for order in (rows, rows[::-1]):
        quality = rank_quality(order)
        assert quality is not None
        assert (quality.pair_order, quality.worst_regret) == (0.5, 0.5)


def test_nothing_to_rank() -> None:
    assert rank_quality([]) is None
    assert rank_quality([scored("a", 1, 1), scored("b", 1, 1, question="r")]) is None
    same = rank_quality([scored("a", 100, 1), scored("b", 101, 2)])
    assert same is not None
    assert (same.num_pairs, same.pair_order) == (0, 1.0)


@given(st.permutations(range(5)))
def test_ranking_does_not_depend_on_the_order_of_rows(order: list[int]) -> None:
    rows = [scored(str(i), 100 - 7 * i, 10 + (i * 3) % 5) for i in range(5)]
    assert rank_quality([rows[i] for i in order]) == rank_quality(rows)


def test_summary_by_hand() -> None:
    labels = {"framework": "f"}
    rows = [scored("a", 100, 110, labels=labels), scored("b", 100, 80, labels=labels), scored("c", 100, 101)]
    everything, framework = summarise(rows)
    assert (everything.group, everything.n, framework.group, framework.n) == ("all", 3, "framework=f", 2)
    assert everything.mape == pytest.approx((0.10 + 0.20 + 0.01) / 3)
    assert everything.median_ape == pytest.approx(0.10)
    assert everything.signed_median == pytest.approx(0.01)
    assert everything.p90_ape == pytest.approx(0.18)
    assert everything.interval_coverage == pytest.approx(2 / 3)  # 80 reaches to 88
    assert everything.spearman is None  # all measured alike
    assert framework.spearman is None
    assert summarise([]) == []


def test_only_rows_with_the_status_ok_are_judged_and_excluded_ones_count_as_answered() -> None:
    judged, excluded = scored("a", 100, 110), replace(scored("b", 100, 900), status="excluded")
    refused = replace(scored("c", 100, 900), status="unsupported")
    validation = summed_up([judged, excluded, refused])
    assert validation.rows == (judged, excluded, refused)
    assert validation.coverage == pytest.approx(2 / 3)
    assert [item.mape for item in validation.summary] == [pytest.approx(0.1)]
    assert summed_up([]).coverage == 0.0
