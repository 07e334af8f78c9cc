"""What a profile run measured, as frozen values: measurements, the links of a cluster, and the fits made from them.

These types are what the profiler hands to the catalog and what the planner gets out of it; no SQL here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Metric(StrEnum):
    """What a measurement says, by its SI unit."""

    FLOPS_PER_S = "flops_per_s"
    BYTES_PER_S = "bytes_per_s"
    LATENCY_S = "latency_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A measured value with its spread.

    Args:
        value: median of the repeats, SI unit.
        low: 10th percentile of the repeats.
        high: 90th percentile.
        n: number of repeats.
    """

    value: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.high) and 0.0 < self.low <= self.value <= self.high and self.n > 0):
            raise ValueError(f"not 0 < low ≤ value ≤ high with n > 0: {self.low} {self.value} {self.high} n={self.n}")

    @classmethod
    def single(cls, value: float) -> Spread:
        """One value whose spread is not known."""
        return cls(value=value, low=value, high=value, n=1)

    @property
    def relative_width(self) -> float:
        """Half of (high − low) over the value."""
        return (self.high - self.low) / (2.0 * self.value)

    def overlaps(self, other: Spread) -> bool:
        """Whether the two spreads have a value in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One probe at one point.

    Args:
        probe: such as ``gemm`` or ``link_bandwidth``.
        device: what was measured, None for a link.
        link: ``from -> to``, or the group of a collective; None for a device.
        dtype: type of the data, None where it does not matter.
        parameters: shape (``m n k``) or ``size_bytes``.
        metric: what ``spread`` is.
        spread: value, low, high, n.
        source: tool and version that measured it, or the citation of an imported file.
        host: where it ran.
        measured_at: ISO 8601, UTC.
        warnings: what was odd: outliers, throttling, a clock that jumped.
    """

    probe: str
    metric: Metric
    spread: Spread
    parameters: Mapping[str, Any]
    source: str
    host: str
    measured_at: str
    device: str | None = None
    link: str | None = None
    dtype: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Identifies the point within a run: a resumed run skips the keys that it has."""
        return point_key(self.probe, self.device or self.link or "", self.dtype, self.parameters)

    def document(self) -> dict[str, Any]:
        """The measurement in the JSON of ``meshplan profile``."""
        spread = {"value": self.spread.value, "low": self.spread.low, "high": self.spread.high}
        size = {"size_bytes": self.parameters["size_bytes"]} if "size_bytes" in self.parameters else {}
        shape = {name: value for name, value in self.parameters.items() if name != "size_bytes"}
        return {
            "probe": self.probe,
            **({"device": self.device} if self.device else {"link": self.link}),
            **({"dtype": self.dtype} if self.dtype else {}),
            **({"shape": shape} if shape else {}),
            **size,
            self.metric.value: spread,
            "n": self.spread.n,
            "source": self.source,
            "host": self.host,
            "measured_at": self.measured_at,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
        }


def point_key(probe: str, subject: str, dtype: str | None, parameters: Mapping[str, Any]) -> str:
    """The identity of a point, as text.

    >>> point_key("gemm", "cpu", "fp32", {"n": 2, "m": 1})
    'gemm|cpu|fp32|m=1,n=2'
    """
    shape = ",".join(f"{name}={parameters[name]}" for name in sorted(parameters))
    return f"{probe}|{subject}|{dtype or ''}|{shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """One directed link of a cluster.

    Args:
        source: host (with ``/rank`` where a host has several) that sends.
        target: the host that receives.
        rail: name of the network interface or NIC, ``default`` where the transport chose.
        bandwidth_bytes_per_s: rate of a large message.
        latency_s: half the round trip of 8 bytes, which cannot separate the two directions.
    """

    source: str
    target: str
    rail: str
    bandwidth_bytes_per_s: Spread
    latency_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """What one run found out about a cluster.

    Args:
        name: given by the user.
        run_id: the run that measured it.
        measured_at: ISO 8601, UTC.
        endpoints: names of what the links join, by rank.
        links: every measured directed link.
        unmeasured: directed pairs that a sampled run left out.
        findings: slow links, slow hosts, asymmetries, as sentences.
    """

    name: str
    run_id: str
    measured_at: str
    endpoints: tuple[str, ...]
    links: tuple[MeasuredLink, ...]
    unmeasured: tuple[tuple[str, str], ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def rails(self) -> tuple[str, ...]:
        """Names of the rails, in order of first use."""
        return tuple(dict.fromkeys(link.rail for link in self.links))

    def bandwidths(self, rail: str | None = None) -> list[list[float | None]]:
        """The directed matrix in bytes/s, [from][to] in the order of ``endpoints``; None where not measured.

        Args:
            rail: one rail; None adds the rails up.
        """
        index = {name: position for position, name in enumerate(self.endpoints)}
        matrix: list[list[float | None]] = [[None] * len(index) for _ in index]
        for link in self.links:
            if rail is None or link.rail == rail:
                row, column = index[link.source], index[link.target]
                matrix[row][column] = (matrix[row][column] or 0.0) + link.bandwidth_bytes_per_s.value
        return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Parameters of a model fitted to measurements.

    Args:
        subject: device, link, class of links or group that it is about.
        model: name of the equation, such as ``alpha_beta``.
        coefficients: named parameters, SI units in the names.
        residual_median: |predicted/measured − 1| on the points of the fit.
        residual_p90: 90th percentile of the same.
        held_out_median: the same on points that a fit had not seen.
        held_out_p90: 90th percentile of the same.
        num_points: points of the fit.
        source: what was fitted.
    """

    subject: str
    model: str
    coefficients: Mapping[str, float]
    residual_median: float
    residual_p90: float
    held_out_median: float
    held_out_p90: float
    num_points: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """One run of the profiler, or one imported log.

    Args:
        run_id: unique.
        kind: ``device``, ``links`` or ``import``.
        cluster: name of the cluster profile it belongs to.
        host: where it was started.
        environment: clocks, driver and library versions.
        protocol: how it was measured.
        started_at: ISO 8601, UTC.
        finished_at: None where it was killed or still runs.
    """

    run_id: str
    kind: str
    host: str
    environment: Mapping[str, Any]
    protocol: Mapping[str, Any]
    started_at: str
    cluster: str | None = None
    finished_at: str | None = field(default=None)
