"""How much a fit has seen of a run's like, and how wide an interval is for each such level.

A run is predicted by constants that were solved for without its source, framework, device or group
(:data:`TOGETHER`). What remains decides its *level of evidence*: other runs of its engine on its hardware generation,
of its engine elsewhere, or of other engines alone.

*Width.* Whoever asks brings a server that no source has measured, so the half-width at a level is what is expected of
one more source (:mod:`meshplan.planner.validation.between_sources`), by the errors on sources, devices or frameworks
that were held out whole: of all engines, moved by the sources of the same engine, then by those on the same generation.
How well a source's other models were predicted once some were known (the group held out) sets no width.

*Coverage.* Whether a measurement of a source lies inside is judged with half-widths from the other sources, so that no
source sets the interval that judges it; the constants behind the other sources' errors have seen it, though.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from meshplan.planner.core.text import counted
from meshplan.planner.serving.measured.prediction import TAIL_METRICS
from meshplan.planner.validation.between_sources import expected, log_size, source_errors
from meshplan.planner.validation.held_out import HeldOut, Key

if TYPE_CHECKING:
    from meshplan.planner.serving.measured.fit.rows import Row


class Evidence(StrEnum):
    """What a prediction's constants were fitted to, the nearest first."""

    SERVER = "engine and generation"
    ENGINE = "engine"
    ANY = "other engines"


# What is left out together. The source is the headline: whoever asks brings a server that no source has measured.
TOGETHER: Mapping[str, Callable[[Row], Hashable]] = {
    "source": lambda row: row.source,
    "group": lambda row: row.group,
    "framework": lambda row: row.key[0],
    "device": lambda row: row.key,
}
# What was left out together → predictions without it.
Folds = Mapping[str, Sequence[HeldOut]]
# What intervals are given for → the metrics whose error they take.
INTERVALS = {"ttft": ("ttft_s",), "tpot": ("tpot_s",), "throughput": ("output_tokens_per_s", "latency_s")}
# Metric → whose interval it takes. A tail has that of its latency, end to end that of the time per token, as in plans:
# too few sources print tails to give them one of their own. They are judged by it, and do not set it.
FAMILY = {metric: name for name, metrics in INTERVALS.items() for metric in metrics} | {
    metric: "ttft" if metric.startswith("ttft") else "tpot" for metric in TAIL_METRICS
}
# Level of evidence → what was left out to meet it.
FOLD_OF = {Evidence.SERVER: "source", Evidence.ENGINE: "device", Evidence.ANY: "framework"}
UNJUDGED_P90 = 1.0  # where no source was held out


def evidence_for(key: Key, seen: Collection[Key]) -> Evidence:
    """The level of a set of constants that was fitted to runs of the keys ``seen``.

    >>> evidence_for(("vllm", "ada"), {("vllm", "hopper")}).value
    'engine'
    """
    if key in seen:
        return Evidence.SERVER
    return Evidence.ENGINE if key[0] in {engine for engine, _ in seen} else Evidence.ANY


def half_width(name: str, key: Key, level: Evidence, folds: Folds) -> tuple[float, str]:
    """Half-width of an interval in the logarithm, and the sources that it rests on, in words.

    Args:
        name: one of :data:`INTERVALS`.
        key: engine and generation that are predicted.
        level: what their constants were fitted to.
        folds: what was left out → predictions of measured runs without it, with the level at which each was made.
    """
    engine = key[0]
    items = [item for item in folds[FOLD_OF[level]] if item.metric in INTERVALS[name]]
    if level is Evidence.ENGINE:  # a generation that was left out where other engines alone remain says of these
        items = [item for item in items if item.evidence == level]
    levels = [("all engines", items)]
    if level is not Evidence.ANY:
        levels.append((engine, [item for item in items if item.key[0] == engine]))
    if level is Evidence.SERVER:
        levels.append((" on ".join(key), [item for item in items if item.key == key]))
    found = expected([(words, source_errors(sample, _unit)) for words, sample in levels])
    if found is None:
        return UNJUDGED_P90, "assumed"
    return round(found.half_width, 4), f"{counted(found.num_sources, 'source')} of {found.level}"


def _unit(item: HeldOut) -> Hashable:
    return item.source, item.key


def with_coverage(judged: Iterable[HeldOut], folds: Folds) -> tuple[HeldOut, ...]:
    """The predictions, each with whether the interval that the other sources justify holds the measurement.

    Args:
        judged: predictions of runs that were held out.
        folds: predictions at every level; those of a source are not used for its own intervals.
    """

    @cache
    def width(source: str, name: str, key: Key, level: Evidence) -> float:
        others = {fold: [item for item in items if item.source != source] for fold, items in folds.items()}
        return half_width(name, key, level, others)[0]

    return tuple(
        replace(
            item,
            is_covered=log_size(item) <= width(item.source, FAMILY[item.metric], item.key, Evidence(item.evidence)),
        )
        for item in judged
    )
