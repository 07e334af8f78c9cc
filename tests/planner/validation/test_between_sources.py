"""Intervals over sources hold what they say for a source that nobody has measured, whatever runs the others have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from meshplan.planner.validation.between_sources import (
    PARENT_WORTH,
    Expected,
    SourceError,
    expected,
    log_size,
    source_errors,
    student_95,
)
from meshplan.planner.validation.held_out import HeldOut


def errors(source: str, groups: Sequence[Sequence[float]]) -> list[HeldOut]:
    """Predictions e^size times too long, by group."""
    return [
        HeldOut(
            id=f"{source}{number}{index}",
            group=f"{source}|model{number}|device",
            key=("vllm", "hopper"),
            metric="ttft_s",
            error=float(np.expm1(size)),
        )
        for number, sizes in enumerate(groups)
        for index, size in enumerate(sizes)
    ]


def width(*levels: Sequence[HeldOut]) -> float:
    """Half-width at the last of the levels."""
    return found(*levels).half_width


def found(*levels: Sequence[HeldOut]) -> Expected:
    """What is expected at the last of the levels."""
    made = expected([("", source_errors(items, lambda item: item.source)) for items in levels])
    assert made is not None
    return made


@pytest.mark.parametrize("num_sources", [3, 6, 15])
def test_a_new_source_is_inside_as_often_as_the_interval_says(num_sources: int) -> None:
    """Sources with a bias of their own, models with another: nine in ten runs of the next source, over many draws."""
    random = np.random.default_rng(num_sources)
    inside = []
    for _ in range(300):
        sources = [
            errors(
                f"s{number}", (random.normal(0.0, 0.2) + random.normal(0.0, 0.2, (4, 1)) + np.zeros((4, 3))).tolist()
            )
            for number in range(num_sources + 1)
        ]
        half = width([item for source in sources[1:] for item in source])
        inside.append(np.mean([log_size(item) <= half for item in sources[0]]))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.035)


def test_runs_do_not_make_an_interval_narrow() -> None:
    few = [item for source in "abc" for item in errors(source, [[0.3]])]
    many = [item for source in "abc" for item in errors(source, [[0.3] * 500])]
    assert width(many) == pytest.approx(width(few))
    wide = [item for source in "abcdefghijklmno" for item in errors(source, [[0.3]])]
    assert width(wide) < width(few)


def test_groups_count_as_far_as_they_differ() -> None:
    """Groups of a source that are all off by the same are one; groups that have nothing in common are many."""
    shared = [item for source in "abc" for item in errors(source, [[0.3]] * 4)]
    apart = [item for source in "abc" for item in errors(source, [[0.3], [-0.3], [0.3], [-0.3]])]
    assert found(shared).worth == pytest.approx(3.0)
    assert found(apart).worth == pytest.approx(12.0)
    assert width(apart) < width(shared)


def test_one_good_source_does_not_decide_and_many_do() -> None:
    everywhere = [item for source in "abcdefgh" for item in errors(source, [[0.3]])]
    one, many = errors("z", [[0.05]]), [item for source in "ijklmnopqrstu" for item in errors(source, [[0.05]])]
    assert width(everywhere, one) > 0.3
    assert width(everywhere, many) < 0.25
    alone = found(everywhere, one)
    assert alone.square == pytest.approx((PARENT_WORTH * 0.09 + 0.0025) / (PARENT_WORTH + 1.0))


def test_a_level_without_sources_is_that_above_and_none_is_none() -> None:
    assert expected([("all", [SourceError(square=0.01, product=None, num_groups=1)]), ("own", [])]) == Expected(
        square=0.01, worth=1.0, level="all", num_sources=1
    )
    assert expected([("all", [])]) is None


def test_the_quantile_falls_with_the_degrees_of_freedom() -> None:
    quantiles = [student_95(degrees) for degrees in np.linspace(1.0, 60.0, 200)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert student_95(20) == pytest.approx(1.725, abs=0.003)
