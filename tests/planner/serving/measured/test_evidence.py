"""Intervals come from the nearest level with evidence, and no source sets the interval that judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshplan.planner.serving.measured.evidence import (
    FOLD_OF,
    UNJUDGED_P90,
    Evidence,
    Folds,
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


def test_evidence_is_of_the_server_the_engine_or_any() -> None:
    seen = {VLLM}
    assert evidence_for(VLLM, seen) is Evidence.SERVER
    assert evidence_for(ELSEWHERE, seen) is Evidence.ENGINE
    assert evidence_for(OTHER, seen) is Evidence.ANY


def folds(*items: HeldOut) -> Folds:
    """Each error in the fold whose levels it is from."""
    found: dict[str, list[HeldOut]] = {name: [] for name in ("group", *FOLD_OF.values())}
    for item in items:
        found[FOLD_OF[Evidence(item.evidence)]].append(item)
    return found


def test_the_nearest_level_with_sources_moves_the_width() -> None:
    near = errors("a", VLLM, Evidence.SERVER, [0.1] * 20)
    same_engine = errors("b", ELSEWHERE, Evidence.SERVER, [0.4] * 20)
    others = [item for source in "cdef" for item in errors(source, OTHER, Evidence.SERVER, [0.4])]
    far = [item for source in "abc" for item in errors(source, OTHER, Evidence.ANY, [0.9])]
    found = folds(*near, *same_engine, *others, *far)
    own, words = half_width("ttft", VLLM, Evidence.SERVER, found)
    assert words == "1 source of vllm on hopper"
    engine, words = half_width("ttft", ("vllm", "cdna3"), Evidence.SERVER, found)
    assert words == "2 sources of vllm"
    assert 0.1 < own < engine
    assert half_width("ttft", OTHER, Evidence.ANY, found)[1] == "3 sources of all engines"
    assert half_width("tpot", VLLM, Evidence.SERVER, found) == (UNJUDGED_P90, "assumed")


def test_one_source_with_many_runs_does_not_make_an_interval_narrow() -> None:
    """What made vLLM on Hopper too narrow: ninety runs of one model of one benchmark, each within a few per cent."""
    others = [item for source in "bcde" for item in errors(source, OTHER, Evidence.SERVER, [0.4])]
    for runs in (1, 1000):
        width, _ = half_width(
            "ttft", VLLM, Evidence.SERVER, folds(*others, *errors("a", VLLM, Evidence.SERVER, [0.05] * runs))
        )
        assert width > 0.4


def test_errors_on_known_sources_set_no_width() -> None:
    """A group that was held out of a source whose others are known says nothing of an unknown source."""
    known = {**folds(*errors("a", VLLM, Evidence.SERVER, [0.3])), "group": errors("a", VLLM, Evidence.SERVER, [0.01])}
    assert half_width("ttft", VLLM, Evidence.SERVER, known) == half_width(
        "ttft", VLLM, Evidence.SERVER, {**known, "group": []}
    )


def test_no_source_sets_the_interval_that_judges_it() -> None:
    """However wrong a source is predicted, its own intervals stay those of the others."""
    sizes = np.linspace(0.01, 0.5, 50)
    others = errors("b", VLLM, Evidence.SERVER, sizes.tolist())
    bad = errors("a", VLLM, Evidence.SERVER, (sizes + 3.0).tolist())
    judged = with_coverage(bad + others, folds(*bad, *others))
    assert not any(item.is_covered for item in judged if item.source == "a")
    assert all(item.is_covered for item in judged if item.source == "b")  # from a's errors, which are larger


def test_alike_sources_are_covered_as_often_as_intervals_say() -> None:
    rng = np.random.default_rng(0)
    found = [
        replace(item, group=f"{source}|{number % 10}")
        for source in "abcdefghijkl"
        for number, item in enumerate(
            errors(source, VLLM, Evidence.SERVER, rng.normal(0.0, 0.2, 100).tolist(), "tpot_s")
        )
    ]
    judged = with_coverage(found, folds(*found))
    assert np.mean([bool(item.is_covered) for item in judged]) == pytest.approx(0.9, abs=0.02)
    assert [replace(item, is_covered=None) for item in judged] == found
