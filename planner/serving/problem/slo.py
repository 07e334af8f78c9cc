"""Service-level objectives: upper limits on a latency percentile, and whether they are met.

A spec writes them as ``{metric}_{percentile}_s``, such as ``ttft_p99_s: 3.0``. The metrics are TTFT (time to first
token), TPOT (time per output token), ITL (inter-token latency) and E2E (end-to-end latency); see
:mod:`meshplan.planner.serving.simulation.metrics` for their definitions and
:mod:`meshplan.planner.serving.search.slo_judgement` for the judgement of a simulated deployment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.catalogs.errors import closest_names, did_you_mean
from meshplan.catalogs.units import format_duration

PERCENTILES = ("mean", "p50", "p90", "p95", "p99")
LATENCIES = ("ttft", "tpot", "itl", "e2e")
_KEYS = tuple(f"{latency}_{percentile}_s" for latency in LATENCIES for percentile in PERCENTILES)
_KEY = re.compile(rf"({'|'.join(LATENCIES)})_({'|'.join(PERCENTILES)})_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """One service-level objective: an upper limit on one percentile of one latency.

    Args:
        metric: one of :data:`LATENCIES`.
        percentile: one of :data:`PERCENTILES`.
        limit_s: s.
    """

    metric: str
    percentile: str
    limit_s: float

    @property
    def key(self) -> str:
        """The key in a spec: ``ttft_p99_s``."""
        return f"{self.metric}_{self.percentile}_s"

    def is_met(self, latency_s: float) -> bool:
        """The latency is at most the limit."""
        return latency_s <= self.limit_s

    @property
    def limit_text(self) -> str:
        """``ttft_p99_s: SLO 3.00 s``."""
        return f"{self.key}: SLO {format_duration(self.limit_s)}"

    def excess_text(self, latency_s: float) -> str:
        """A violation in words: ``5.20 s, SLO 3.00 s``; ``without bound`` where queues grow or requests are lost."""
        reached = format_duration(latency_s) if math.isfinite(latency_s) else "without bound"
        return f"{reached}, SLO {format_duration(self.limit_s)}"


def known_slos(slo: dict[str, float]) -> dict[str, float]:
    """The limits of a spec, once every key is known to be one.

    Raises:
        ValueError: with the unknown keys.
    """
    unknown = [key for key in slo if not _KEY.fullmatch(key)]
    if unknown:
        raise ValueError(
            f"keys are {{{','.join(LATENCIES)}}}_{{{','.join(PERCENTILES)}}}_s, such as ttft_p99_s; "
            f"not {', '.join(unknown)}{did_you_mean(closest_names(unknown[0], _KEYS))}"
        )
    return slo


def slos_of(slo: Mapping[str, float]) -> tuple[Slo, ...]:
    """SLOs from keys such as ``ttft_p99_s`` and their limits in seconds, in one order however they are listed; other
    keys are ignored.
    """
    matches = [(_KEY.fullmatch(key), slo[key]) for key in _KEYS if key in slo]
    return tuple(Slo(metric=match[1], percentile=match[2], limit_s=limit) for match, limit in matches if match)
