"""Intervals are over sources: no source sets the one that judges it, and few sources or a far level make it wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from meshplan.catalogs.constants.training import ADAPTERS, DENSE, EXPERTS, OTHER_KERNELS, Basis, Calibration
from meshplan.planner.training.measured.intervals import UNJUDGED, Folds, half_width, with_coverage
from meshplan.planner.training.problem.kernels import kind_of_kernels
from meshplan.planner.validation.held_out import HeldOut

KEY = ("megatron", "hopper")


def errors(source: str, sizes: Sequence[float], basis: Basis = Basis.FRAMEWORK, kind: str = DENSE) -> list[HeldOut]:
    """Predictions e^size times too long."""
    return [
        HeldOut(
            id=f"{source}{number}",
            group=f"{source}|model|device",
            key=KEY,
            metric="iteration_s",
            error=float(np.expm1(size)),
            kind=kind,
            evidence=basis,
        )
        for number, size in enumerate(sizes)
    ]


def sources(names: str, size: float, basis: Basis = Basis.FRAMEWORK, kind: str = DENSE) -> list[HeldOut]:
    return [item for name in names for item in errors(name, [size], basis, kind)]


def width(folds: Folds, basis: Basis = Basis.FRAMEWORK, kind: str = DENSE, key: tuple[str, str] = KEY) -> float:
    return half_width(folds, basis=basis, kind=kind, key=key).log


def test_a_source_with_many_runs_does_not_outvote_the_others() -> None:
    few = sources("bcd", 0.4)
    assert width({"source": errors("a", [0.1] * 1000) + few}) == pytest.approx(
        width({"source": errors("a", [0.1]) + few})
    )
    assert width({}) == pytest.approx(np.log1p(UNJUDGED))


def test_each_basis_and_kind_of_work_has_the_width_of_its_own_errors() -> None:
    far = sources("abcde", 0.5, Basis.ANY)
    near = sources("abcde", 0.1) + sources("abcde", 0.9, kind=EXPERTS)
    folds = {"source": near + far}
    assert width(folds) < width(folds, Basis.ANY) < width(folds, kind=EXPERTS)
    # Nobody ran adapters: what is known of all work with that basis.
    assert width(folds) < width(folds, kind=ADAPTERS) < width(folds, kind=EXPERTS)


def test_a_framework_moves_the_width_by_its_sources_and_the_words_say_which() -> None:
    elsewhere = [replace(item, key=("another", "ampere")) for item in sources("abcdef", 0.1)]
    folds = {"source": elsewhere + sources("gh", 0.6)}
    found = half_width(folds, basis=Basis.FRAMEWORK, kind=DENSE, key=KEY)
    assert found.rests_on == "2 sources of dense models on megatron and hopper"
    assert found.log > width(folds, key=("unknown", "hopper")) > width({"source": elsewhere})
    assert half_width(folds, basis=Basis.FRAMEWORK, kind=DENSE, key=("unknown", "hopper")).rests_on == (
        "8 sources of dense models"
    )


def test_one_good_source_does_not_make_an_interval_narrow() -> None:
    elsewhere = [replace(item, key=("another", "ampere")) for item in sources("abcdef", 0.2)]
    one = width({"source": elsewhere + sources("g", 0.01)})
    many = width({"source": elsewhere + sources("ghijklmn", 0.01)})
    assert one > 0.15 > many


def test_generations_weigh_the_same_where_none_is_known() -> None:
    """A generation with many runs says no more of another one than a generation with few."""

    def found(runs: int) -> Folds:
        many = errors("a", [0.1] * runs, Basis.UNSEEN)
        few = [
            replace(item, key=("any", name))
            for name in ("volta", "cdna3", "tpu")
            for item in errors(name, [0.7], Basis.UNSEEN)
        ]
        return {"generation": many + few}

    assert width(found(500), Basis.UNSEEN) == pytest.approx(width(found(1), Basis.UNSEEN))
    assert "generations" in half_width(found(1), basis=Basis.UNSEEN, kind=DENSE, key=("any", "odd")).rests_on


def test_the_set_of_all_frameworks_is_wider_where_it_has_seen_no_such_device() -> None:
    shared = Calibration(
        framework="any",
        architecture="any",
        error_p90={DENSE: 0.2},
        unseen_error_p90={DENSE: 0.6},
        unseen_error_basis={DENSE: "4 generations"},
        basis=Basis.ANY.value,
        generations=["hopper", "ampere"],
    )
    assert shared.for_generation("hopper") == shared
    elsewhere = shared.for_generation("cdna2")
    assert (elsewhere.error_p90[DENSE], elsewhere.basis) == (0.6, Basis.UNSEEN)
    assert elsewhere.error_basis[DENSE] == "4 generations"


SIXTEEN, THIRTY_TWO = (kind_of_kernels(name, fuses_attention=name == "bf16") for name in ("bf16", "fp32"))


def test_sources_with_the_same_kernels_say_more_than_others() -> None:
    """A level of its own between the kind of work and the framework, at every basis that rests on sources."""
    alike = [replace(item, kernels=SIXTEEN, key=("another", "ampere")) for item in sources("abcdef", 0.1)]
    unlike = [replace(item, kernels=THIRTY_TWO, key=("another", "ampere")) for item in sources("ghij", 0.5)]
    folds = {"source": alike + unlike}

    def of(kernels: str) -> float:
        return half_width(folds, basis=Basis.FRAMEWORK, kind=DENSE, key=KEY, kernels=kernels).log

    assert of(SIXTEEN) < of("") < of(THIRTY_TWO)
    found = half_width(folds, basis=Basis.FRAMEWORK, kind=DENSE, key=KEY, kernels=SIXTEEN)
    assert found.rests_on == f"6 sources of dense models with {SIXTEEN}"
    # Kernels that no run has move nothing at this level: they have a basis of their own.
    assert of("kernels of another kind") == of("")


def test_kernels_that_no_run_has_are_as_far_off_as_kinds_left_out_whole() -> None:
    """Each kind counts once, however many sources it has, and none sets the width that judges it."""
    kinds = [f"kernels {number}" for number in range(5)]

    def left_out(runs: int, size: float = 0.3) -> list[HeldOut]:
        return [
            replace(item, kernels=kernels)
            for kernels in kinds
            for item in errors(kernels, [size] * runs, Basis.KERNELS)
        ]

    near = sources("abcdefgh", 0.1)
    width_of = {runs: width({"source": near, "kernels": left_out(runs)}, Basis.KERNELS) for runs in (1, 50)}
    assert width_of[1] == pytest.approx(width_of[50])
    assert width_of[1] > 0.3 > width({"source": near})
    odd = [replace(item, kernels=kinds[0]) for item in errors("odd", [2.0], Basis.KERNELS)]
    folds = {"source": near + odd, "kernels": [*left_out(1)[1:], *odd]}
    assert not any(item.is_covered for item in with_coverage(odd, folds))


def test_what_a_stranger_differs_by_is_expected_beside_kernels_that_no_run_has() -> None:
    """A kind left out leaves its sources' other runs in: the more sources differ, the wider."""
    kinds = [
        replace(item, kernels=f"kernels {number}")
        for number in range(5)
        for item in errors(f"kernels {number}", [0.2], Basis.KERNELS)
    ]

    def of(strangers: float) -> float:
        return width({"source": sources("abcdefgh", strangers, Basis.ANY), "kernels": kinds}, Basis.KERNELS)

    alone = of(0.0)
    assert alone < of(0.1) < of(0.3)
    assert of(0.3) < alone + width({"source": sources("abcdefgh", 0.3, Basis.ANY)}, Basis.ANY)
    found = half_width(
        {"source": sources("abcdefgh", 0.1, Basis.ANY), "kernels": kinds}, basis=Basis.KERNELS, kind=DENSE, key=KEY
    )
    assert found.rests_on == "5 kernel kinds of dense models and 8 sources of dense models on megatron"


def test_a_set_is_as_wide_as_what_is_known_of_the_kernels() -> None:
    shared = Calibration(
        framework="megatron",
        architecture="hopper",
        error_p90={DENSE: 0.2, EXPERTS: 0.3},
        related_error_p90={DENSE: 0.25, EXPERTS: 0.35},
        by_kernels={
            SIXTEEN: {"error_p90": {DENSE: 0.15}, "related_error_p90": {DENSE: 0.22}},
            OTHER_KERNELS: {"error_p90": {DENSE: 0.5, EXPERTS: 0.6}, "error_basis": {DENSE: "4 kinds"}},
        },
        basis=Basis.FRAMEWORK.value,
    )
    assert shared.for_kernels(SIXTEEN).error_p90 == {DENSE: 0.15, EXPERTS: 0.3}
    assert shared.for_a_relative(None).for_kernels(SIXTEEN).error_p90 == {DENSE: 0.22, EXPERTS: 0.35}
    other = shared.for_kernels(THIRTY_TWO)
    assert (other.error_p90, other.basis) == ({DENSE: 0.5, EXPERTS: 0.6}, Basis.KERNELS)
    assert other.error_basis[DENSE] == "4 kinds"
    # One's own runs say it of themselves, and a set that knows of no kernels stays as it is.
    own = replace(shared, basis=Basis.CLUSTER.value)
    assert own.for_kernels(THIRTY_TWO) == own
    assert Calibration.from_document(shared.to_document()) == shared


def test_no_source_sets_the_interval_that_judges_it() -> None:
    """However wrong a source is predicted, its own intervals stay those of the others."""
    sizes = np.linspace(0.01, 0.5, 50)
    good = [item for source in "bcde" for item in errors(source, sizes.tolist())]
    bad = errors("a", (sizes + 3.0).tolist())
    judged = with_coverage(bad + good, {"source": bad + good})
    assert not any(item.is_covered for item in judged if item.source == "a")
    # Nor does a generation, where it was left out whole.
    odd = [replace(item, key=("any", "odd"), evidence=Basis.UNSEEN) for item in bad]
    usual = [replace(item, key=("any", item.source), evidence=Basis.UNSEEN) for item in good]
    judged = with_coverage(odd + usual, {"generation": odd + usual})
    assert not any(item.is_covered for item in judged if item.key[1] == "odd")


def test_alike_sources_are_covered_as_often_as_intervals_say() -> None:
    random = np.random.default_rng(0)
    found = [
        item
        for number in range(40)
        for item in errors(f"s{number}", (random.normal(0.0, 0.15) + random.normal(0.0, 0.15, 100)).tolist())
    ]
    judged = with_coverage(found, {"source": found})
    assert np.mean([bool(item.is_covered) for item in judged]) == pytest.approx(0.9, abs=0.04)
    assert [replace(item, is_covered=None) for item in judged] == found
