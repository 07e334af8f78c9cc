"""Intervals come from the nearest level with evidence, and no source sets the interval that judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshplan.planner.serving.measured.evidence import (
    FEWEST_FOR_P90,
    UNJUDGED_P90,
    Evidence,
    evidence_for,
    half_width,
    with_coverage,
)
from meshplan.planner.validation.held_out import HeldOut

VLLM, ELSEWHERE, OTHER = ("vllm", "hopper"), ("vllm", "ada"), ("sglang", "hopper")


def errors(
    source: str, key: tuple[str, str], level: Evidence, sizes: Sequence[float], metric: str = "ttft_s"
) -> list[HeldOut]:
    """Predictions e^size times too long."""
    return [
        HeldOut(id=f"{source}{i}", group=f"{source}|m", key=key, metric=metric, error=np.expm1(size), evidence=level)
        for i, size in enumerate(sizes)
    ]


def test_levels() -> None:
    seen = {VLLM}
    assert evidence_for(VLLM, seen) is Evidence.SERVER
    assert evidence_for(ELSEWHERE, seen) is Evidence.ENGINE
    assert evidence_for(OTHER, seen) is Evidence.ANY


def test_the_nearest_level_with_enough_runs_gives_the_width() -> None:
    many = FEWEST_FOR_P90
    near = errors("a", VLLM, Evidence.SERVER, [0.1] * many)
    same_engine = errors("a", ELSEWHERE, Evidence.SERVER, [0.4] * many)
    far = errors("a", OTHER, Evidence.ANY, [0.9] * many)
    found = near + same_engine + far
    assert half_width("ttft", VLLM, Evidence.SERVER, found) == (0.1, "vllm on hopper")
    fewer = half_width("ttft", VLLM, Evidence.SERVER, near[:-1] + same_engine + far)
    assert fewer == (pytest.approx(0.4), "vllm")
    assert half_width("ttft", OTHER, Evidence.ANY, found) == (pytest.approx(0.9), "all engines")
    assert half_width("tpot", VLLM, Evidence.SERVER, found) == (UNJUDGED_P90, "assumed")


def test_no_source_sets_the_interval_that_judges_it() -> None:
    """However wrong a source is predicted, its own intervals stay those of the others."""
    sizes = np.linspace(0.01, 0.5, 50)
    others = errors("b", VLLM, Evidence.SERVER, sizes.tolist())
    bad = errors("a", VLLM, Evidence.SERVER, (sizes + 3.0).tolist())
    judged = with_coverage(bad + others, bad + others)
    assert not any(item.is_covered for item in judged if item.source == "a")
    assert all(item.is_covered for item in judged if item.source == "b")  # from a's errors, which are larger


def test_alike_sources_are_covered_as_often_as_intervals_say() -> None:
    rng = np.random.default_rng(0)
    found = [
        item
        for source in "abcd"
        for item in errors(source, VLLM, Evidence.SERVER, rng.normal(0.0, 0.2, 500).tolist(), "tpot_s")
    ]
    judged = with_coverage(found, found)
    assert np.mean([bool(item.is_covered) for item in judged]) == pytest.approx(0.9, abs=0.02)
    assert [replace(item, is_covered=None) for item in judged] == found
