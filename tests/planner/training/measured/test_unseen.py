"""What is left out whole says nothing to its prediction, and no source sets the interval that judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshplan.catalogs.constants.training import DENSE, EXPERTS, Basis, Calibration
from meshplan.planner.training.measured.unseen import (
    UNJUDGED,
    balanced_p90,
    half_width,
    unseen_half_width,
    with_coverage,
    with_generations_covered,
)
from meshplan.planner.validation.held_out import HeldOut


def errors(source: str, sizes: Sequence[float], basis: Basis = Basis.FRAMEWORK, kind: str = DENSE) -> list[HeldOut]:
    """Predictions e^size times too long."""
    return [
        HeldOut(
            id=f"{source}{number}",
            group=f"{source}|model|device",
            key=("megatron", "hopper"),
            metric="iteration_s",
            error=float(np.expm1(size)),
            kind=kind,
            evidence=basis,
        )
        for number, size in enumerate(sizes)
    ]


def test_a_source_with_many_runs_does_not_outvote_the_others() -> None:
    many = errors("a", [0.1] * 1000)
    few = [item for source in "bcd" for item in errors(source, [0.4] * 3)]
    assert balanced_p90(many) == pytest.approx(0.1)
    assert balanced_p90(many + few) == pytest.approx(0.4)
    assert balanced_p90([]) == pytest.approx(np.log1p(UNJUDGED))


def test_the_nearest_basis_with_enough_sources_gives_the_width() -> None:
    near = [item for source in "abc" for item in errors(source, [0.1])]
    far = [item for source in "abc" for item in errors(source, [0.5], Basis.ANY)]
    experts = [item for source in "abc" for item in errors(source, [0.9], kind=EXPERTS)]
    found = near + far + experts

    def width(basis: Basis, kind: str) -> float:
        return half_width(found, basis=basis, kind=kind, framework="another")

    assert width(Basis.FRAMEWORK, DENSE) == pytest.approx(0.1)
    assert width(Basis.ANY, DENSE) == pytest.approx(0.5)
    assert width(Basis.FRAMEWORK, EXPERTS) == pytest.approx(0.9)
    # Nobody was priced from a relative: what is known of this kind of work.
    assert width(Basis.RELATED, DENSE) == pytest.approx(0.5)


def test_a_framework_with_few_sources_is_not_taken_for_a_known_one() -> None:
    known = [item for source in "abc" for item in errors(source, [0.1])]
    poor, good = (replace(item, key=("rare", "hopper")) for item in errors("d", [0.6]) + errors("e", [0.01]))

    def width(framework: str, *more: HeldOut) -> float:
        return half_width([*known, *more], basis=Basis.FRAMEWORK, kind=DENSE, framework=framework)

    assert width("rare", poor) == pytest.approx(0.6)
    assert width("rare", good) == pytest.approx(0.1)  # one good source proves no more than the others
    assert width(known[0].key[0], poor) == pytest.approx(0.1)  # its own three sources decide
    # Missed on a cluster that was known, it is not hit on another.
    missed = [replace(poor, error=float(np.expm1(0.8)), evidence=Basis.CLUSTER)]
    unseen = half_width(known, basis=Basis.FRAMEWORK, kind=DENSE, framework="rare", known=missed)
    assert unseen == pytest.approx(0.8)


def test_generations_weigh_the_same_where_none_is_known() -> None:
    """A generation with many runs says no more of another one than a generation with few."""
    many = errors("a", [0.1] * 500)
    few = [replace(item, key=("any", name)) for name in ("volta", "cdna3", "tpu") for item in errors(name, [0.7])]
    assert unseen_half_width(many + few, DENSE) == pytest.approx(0.7)
    judged = with_generations_covered(many + few, many + few)
    assert all(item.is_covered for item in judged)
    worst = [replace(item, key=("any", "odd")) for item in errors("odd", [2.0])]
    assert not any(item.is_covered for item in with_generations_covered(worst, many + few + worst))


def test_the_set_of_all_frameworks_is_wider_where_it_has_seen_no_such_device() -> None:
    shared = Calibration(
        framework="any",
        architecture="any",
        error_p90={DENSE: 0.2},
        unseen_error_p90={DENSE: 0.6},
        basis=Basis.ANY.value,
        generations=["hopper", "ampere"],
    )
    assert shared.for_generation("hopper") == shared
    elsewhere = shared.for_generation("cdna2")
    assert (elsewhere.error_p90[DENSE], elsewhere.basis) == (0.6, Basis.UNSEEN)


def test_no_source_sets_the_interval_that_judges_it() -> None:
    """However wrong a source is predicted, its own intervals stay those of the others."""
    sizes = np.linspace(0.01, 0.5, 50)
    good = [item for source in "bcde" for item in errors(source, sizes.tolist())]
    bad = errors("a", (sizes + 3.0).tolist())
    judged = with_coverage(bad + good, bad + good)
    assert not any(item.is_covered for item in judged if item.source == "a")


def test_alike_sources_are_covered_as_often_as_intervals_say() -> None:
    random = np.random.default_rng(0)
    found = [item for source in "abcdef" for item in errors(source, random.normal(0.0, 0.2, 400).tolist())]
    judged = with_coverage(found, found)
    assert np.mean([bool(item.is_covered) for item in judged]) == pytest.approx(0.9, abs=0.02)
    assert [replace(item, is_covered=None) for item in judged] == found
