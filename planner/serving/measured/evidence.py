"""How much a fit has seen of a run's like, and how wide an interval is for each such level.

A run is predicted by constants that were solved for without its source, framework, device or group
(:data:`TOGETHER`). What remains decides its *level of evidence*: other runs of its engine on its hardware generation,
of its engine elsewhere, or of other engines alone. The half-width of an interval at a level is the 90th percentile of
|ln(predicted/measured)| over all predictions that were made at that level: of the same engine and generation if they
are enough, else of the engine, else of all.

*Coverage.* Whether a measurement of a source lies inside is judged with half-widths from the other sources, so that no
source sets the interval that judges it; the constants behind the other sources' errors have seen it, though.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from meshplan.planner.serving.measured.prediction import TAIL_METRICS
from meshplan.planner.validation.held_out import HeldOut, Key, p90

if TYPE_CHECKING:
    from meshplan.planner.serving.measured.constants_fit import Row


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
# What intervals are given for → the metrics whose error they take.
INTERVALS = {"ttft": ("ttft_s",), "tpot": ("tpot_s",), "throughput": ("output_tokens_per_s", "latency_s")}
# Metric → whose interval it takes. A tail has that of its latency, end to end that of the time per token, as in plans:
# too few sources print tails to give them one of their own. They are judged by it, and do not set it.
FAMILY = {metric: name for name, metrics in INTERVALS.items() for metric in metrics} | {
    metric: "ttft" if metric.startswith("ttft") else "tpot" for metric in TAIL_METRICS
}
FEWEST_FOR_P90 = 20
UNJUDGED_P90 = 1.0  # where no sample has enough runs


def evidence_for(key: Key, seen: Collection[Key]) -> Evidence:
    """The level of a set of constants that was fitted to runs of the keys ``seen``.

    >>> evidence_for(("vllm", "ada"), {("vllm", "hopper")}).value
    'engine'
    """
    if key in seen:
        return Evidence.SERVER
    return Evidence.ENGINE if key[0] in {engine for engine, _ in seen} else Evidence.ANY


def log_size(item: HeldOut) -> float:
    """|ln(predicted/measured)|."""
    return float(abs(np.log1p(max(item.error, -0.999))))


def half_width(name: str, key: Key, level: Evidence, found: Sequence[HeldOut]) -> tuple[float, str]:
    """Half-width of an interval in the logarithm, and the runs that it rests on, in words.

    Args:
        name: one of :data:`INTERVALS`.
        key: engine and generation that are predicted.
        level: what their constants were fitted to.
        found: predictions of measured runs, with the level at which each was made.
    """
    engine = key[0]
    for at in list(Evidence)[list(Evidence).index(level) :]:
        members = [item for item in found if item.evidence == at and item.metric in INTERVALS[name]]
        samples = [("all engines", members)]
        if at is not Evidence.ANY:
            samples.insert(0, (engine, [item for item in members if item.key[0] == engine]))
        if at is Evidence.SERVER:
            samples.insert(0, (" on ".join(key), [item for item in members if item.key == key]))
        for words, sample in samples:
            if len(sample) >= FEWEST_FOR_P90:
                return p90([[log_size(item) for item in sample]], fewest=1, otherwise=UNJUDGED_P90), words
    return UNJUDGED_P90, "assumed"


def with_coverage(judged: Iterable[HeldOut], found: Sequence[HeldOut]) -> tuple[HeldOut, ...]:
    """The predictions of sources left out, each with whether its interval holds the measurement.

    Args:
        judged: predictions without the run's source.
        found: predictions at every level; those of a source are not used for its own intervals.
    """

    @cache
    def width(source: str, name: str, key: Key, level: Evidence) -> float:
        return half_width(name, key, level, [item for item in found if item.source != source])[0]

    return tuple(
        replace(
            item,
            is_covered=log_size(item) <= width(item.source, FAMILY[item.metric], item.key, Evidence(item.evidence)),
        )
        for item in judged
    )
