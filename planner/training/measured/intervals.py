"""How wide the interval of a step time is at each level of evidence, and whether such intervals hold.

Whoever asks brings a cluster that no source has measured, so the half-width is what is expected of one more source
(:mod:`meshplan.planner.validation.between_sources`), by the errors on what was held out whole.

*Basis.* Only errors of predictions with the same :class:`~meshplan.catalogs.constants.training.Basis` count: constants
of the framework on the generation are nearer than those of all frameworks, and on a generation that no run is from it
is whole generations, not sources, that were left out; of kernels that no run has it is whole kinds of kernels. Where a
kind of kernels was left out, its sources' runs of other kinds were not: :data:`UNSHOWN` of what a source differs by is
expected beside it.

*Levels.* From all runs with that basis to those of the same kind of work, with the same kernels, of the same framework,
and of the framework on the generation; each moves what is expected by its own sources, and the words of the nearest say
what the interval rests on. One's own cluster is known by other models of it, that is by groups left out.

*Coverage.* A source is judged by the width that the *other* sources give, so that no run decides its own interval.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from meshplan.catalogs.constants.training import ADAPTERS, DENSE, EXPERTS, Basis
from meshplan.planner.core.text import counted
from meshplan.planner.validation.between_sources import Expected, expected, log_size, source_errors
from meshplan.planner.validation.held_out import HeldOut, Key

# What was left out → predictions without it.
Folds = Mapping[str, Sequence[HeldOut]]
# Basis of a prediction → what was left out where predictions had it. A framework that was left out meets its relatives,
# or what all frameworks share; a device that was left out says nothing more, and would count its sources twice.
FOLDS_OF: Mapping[Basis, Sequence[str]] = {
    Basis.FRAMEWORK: ("source",),
    Basis.RELATED: ("source", "framework"),
    Basis.ANY: ("source", "framework"),
    Basis.UNSEEN: ("generation",),
    Basis.KERNELS: ("kernels",),
    Basis.CLUSTER: ("group",),
}
KIND_WORDS = {DENSE: "dense models", ADAPTERS: "adapters", EXPERTS: "mixtures of experts"}
# Of what a stranger's source differs by, the share that kernels left out whole do not show. Seven pairs of a source and
# a kind of kernels (dense models; dgxc, torchtitan, Megatron-Bridge, NeMo) have a mean square of 0.0100 in the
# logarithm where both are left out, 0.0079 where the kernels are and 0.0087 where the source is (2026-11-26, global
# sets linearised): (0.0100 − 0.0079)/0.0087. Of single pairs it is −0.2 to 0.9.
UNSHOWN = 0.25
UNJUDGED = 0.5  # half-width, as a fraction, where nothing at all could be held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Half-width of an interval.

    Args:
        log: in the logarithm: the interval is [predicted/e^log, predicted·e^log].
        rests_on: which sources it is from, in words.
    """

    log: float
    rests_on: str

    @property
    def fraction(self) -> float:
        """The interval is [predicted/(1 + fraction), predicted·(1 + fraction)]."""
        return round(float(np.expm1(self.log)), 4)


def half_width(folds: Folds, *, basis: Basis, kind: str, key: Key, kernels: str = "") -> Width:
    """Half-width of the interval of a step time that holds 90 % of the runs of one more source.

    Args:
        folds: what was left out → predictions of measured runs without it.
        basis: what the constants of the prediction were fitted to.
        kind: of work.
        key: framework and hardware generation.
        kernels: that the runs have, where that is known.
    """
    found = _expected(folds, basis, kind, key, kernels)
    if found is None:
        return Width(log=float(np.log1p(UNJUDGED)), rests_on="")
    _, name = UNITS.get(basis, (_source, "source"))
    rests_on = f"{counted(found.num_sources, name)} of {found.level}"
    if basis is Basis.KERNELS:
        strangers = _expected(folds, Basis.ANY, kind, key)
        if strangers is not None:
            found = found.beside(replace(strangers, square=UNSHOWN * strangers.square))
            rests_on += f" and {counted(strangers.num_sources, 'source')} of {strangers.level}"
    return Width(log=found.half_width, rests_on=rests_on)


def _expected(folds: Folds, basis: Basis, kind: str, key: Key, kernels: str = "") -> Expected | None:
    """What is expected of one more unit of a basis; None where nothing could be held out."""
    items = [item for fold in FOLDS_OF[basis] for item in folds.get(fold, ()) if item.evidence == basis]
    if not items:  # a basis that nothing was predicted from: what is known of all others
        items = [item for fold in FOLDS_OF[Basis.ANY] for item in folds.get(fold, ())]
    alike = [item for item in items if item.kind == kind]
    levels = [("all runs", items), (KIND_WORDS[kind], alike)]
    if kernels and basis in BY_KERNELS:
        same = [item for item in alike if item.kernels == kernels]
        levels.append((f"{KIND_WORDS[kind]} with {kernels}", same))
    if basis not in UNITS:
        levels.append((f"{KIND_WORDS[kind]} on {key[0]}", [item for item in alike if item.key[0] == key[0]]))
    if basis in (Basis.FRAMEWORK, Basis.CLUSTER):
        near = [item for item in alike if item.key == key]
        levels.append((f"{KIND_WORDS[kind]} on {key[0]} and {key[1]}", near))
    unit, _ = UNITS.get(basis, (_source, ""))
    return expected([(words, source_errors(sample, unit)) for words, sample in levels])


def _source(item: HeldOut) -> Hashable:
    return item.source, item.key


def _generation_name(item: HeldOut) -> str:
    return item.key[1]


def _kernels_name(item: HeldOut) -> str:
    return item.kernels


# Basis → what was left out whole, and so counts once, where that is not a source.
UNITS: Mapping[Basis, tuple[Callable[[HeldOut], str], str]] = {
    Basis.UNSEEN: (_generation_name, "generation"),
    Basis.KERNELS: (_kernels_name, "kernel kind"),
}
# Where runs with the same kernels say more than others.
BY_KERNELS = (Basis.FRAMEWORK, Basis.RELATED, Basis.ANY)


def with_coverage(judged: Iterable[HeldOut], folds: Folds) -> tuple[HeldOut, ...]:
    """The predictions, each with whether the interval that the other sources justify holds the measurement.

    Args:
        judged: predictions of runs that were held out.
        folds: predictions at every basis; those of a source are not used for its own intervals, nor, where whole
            generations or kinds of kernels were left out, those of its own.
    """

    @cache
    def others(apart: str, label: Callable[[HeldOut], str]) -> Folds:
        return {fold: [item for item in items if label(item) != apart] for fold, items in folds.items()}

    @cache
    def width(apart: str, label: Callable[[HeldOut], str], basis: Basis, kind: str, key: Key, kernels: str) -> float:
        return half_width(others(apart, label), basis=basis, kind=kind, key=key, kernels=kernels).log

    def covered(item: HeldOut) -> bool:
        basis = Basis(item.evidence)
        label, _ = UNITS.get(basis, (_source_name, ""))
        return log_size(item) <= width(label(item), label, basis, item.kind, item.key, item.kernels)

    return tuple(replace(item, is_covered=covered(item)) for item in judged)


def _source_name(item: HeldOut) -> str:
    return item.source
