"""Times of matrix products interpolated from published measurements, by device and kernel; for small products too.

A surface is a formula and a correction. The formula is the three-parameter model of the training estimator with a
launch time t₀ added and a finer tile in m, where decode batches live::

    base = t₀ + ((2·⌈m⌉₆₄·⌈n⌉₁₂₈·(k + k₀)/R)⁴ + (bytes/B)⁴)^¼,    bytes = element·(m·k + k·n) + 2·m·n

The correction is log(measured/base) at every measured size in m, n and k, as kriging
(:mod:`meshplan.profiler.fitting.kriging`) draws it through the measurements, interpolated linearly in the logarithms
between them; outside the grid its edge is kept, so that the formula decides how times grow. Each surface states its
error on products that a fit had not seen.

Corrections are stored as multiples of :data:`STEP`, each as the difference from the one before in m: neighbours are
alike, and small numbers take less room. A surface is decoded (5 ms) when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meshplan.catalogs.surfaces.files import Rows, SurfaceFile
from meshplan.catalogs.surfaces.grid import FloatArray, grid_value, packed, unpacked
from meshplan.catalogs.surfaces.known_times import KnownTimes
from meshplan.catalogs.surfaces.time_tables import smooth_maximum

SURFACES = SurfaceFile("gemm_surfaces.json", key=("device", "kernel"), listed="surfaces")
TILE_M, TILE_N = 64, 128
OUTPUT_BYTES = 2.0
STEP = 2e-3  # resolution of a stored correction, in log(time)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSurface:
    """Times of one kernel on one device.

    Args:
        device: slug.
        kernel: as the source names it: ``bfloat16 fp8 fp8_block nvfp4 int8_wo int4_wo sq``.
        element_bytes: size of one weight or activation element in the formula.
        base: R FLOP/s, B bytes/s, k₀ elements, t₀ seconds.
        knots: grid positions in m, n and k.
        corrections: log(measured/base), [m, n, k].
        num_samples: products that it was fitted to.
        median_error: |predicted/measured − 1| of products that a fit had not seen, each random fifth in turn.
        p90_error: 90th percentile of the same.
        source: citation.
        known: what it was asked before.
    """

    device: str
    kernel: str
    element_bytes: float
    base: tuple[float, float, float, float]
    knots: tuple[FloatArray, FloatArray, FloatArray]
    corrections: FloatArray
    num_samples: int
    median_error: float
    p90_error: float
    source: str
    known: KnownTimes = field(default_factory=KnownTimes, repr=False, compare=False)

    def time_s(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> FloatArray:
        """Seconds of m×k by k×n; arrays broadcast."""
        return self.known.of(self._time_s, m=m, n=n, k=k)

    def _time_s(self, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> FloatArray:
        rows, columns, inner = np.broadcast_arrays(*(np.asarray(size, dtype=float) for size in (m, n, k)))
        points = (rows.ravel(), columns.ravel(), inner.ravel())
        correction = grid_value(self.knots, self.corrections, points).reshape(rows.shape)
        base = base_time_s(np.asarray(self.base), rows, columns, inner, element_bytes=self.element_bytes)
        return np.asarray(base * np.exp(correction))


def base_time_s(
    parameters: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray, *, element_bytes: float
) -> FloatArray:
    """The formula of the module's text for (R, B, k₀, t₀), seconds."""
    rate, bandwidth, saturation, launch_s = parameters
    tiles = np.ceil(m / TILE_M) * TILE_M * np.ceil(n / TILE_N) * TILE_N
    compute = 2.0 * tiles * (k + saturation) / rate
    memory = (element_bytes * (m * k + k * n) + OUTPUT_BYTES * m * n) / bandwidth
    return np.asarray(launch_s + smooth_maximum(compute, memory))


def gemm_surface(device: str, kernel: str) -> GemmSurface | None:
    """The shipped surface of a device and kernel, or the user's; None where there is none."""
    return SURFACES.find(surface_from_rows, device, kernel)


def surface_from_rows(rows: Rows) -> GemmSurface:
    """The surface that is stored; of several rows the last."""
    row = rows[-1]
    m, n, k = (np.array(row["knots"][axis], dtype=float) for axis in ("m", "n", "k"))
    rate, bandwidth, saturation, launch_s = row["base"]
    return GemmSurface(
        base=(rate, bandwidth, saturation, launch_s),
        knots=(m, n, k),
        corrections=np.cumsum(unpacked(row["corrections"], STEP).reshape(len(m), len(n), len(k)), axis=0),
        **{name: row[name] for name in ("device", "kernel", "element_bytes", "num_samples", "source")},
        **{name: row[name] for name in ("median_error", "p90_error")},
    )


def surface_row(surface: GemmSurface) -> dict[str, Any]:
    """The inverse of :func:`surface_from_rows`, without the source."""
    knots = dict(zip(("m", "n", "k"), surface.knots, strict=True))
    return {
        "device": surface.device,
        "kernel": surface.kernel,
        "element_bytes": surface.element_bytes,
        "base": [float(f"{parameter:.6g}") for parameter in surface.base],
        "knots": {axis: [int(position) for position in positions] for axis, positions in knots.items()},
        "num_samples": surface.num_samples,
        "median_error": round(surface.median_error, 4),
        "p90_error": round(surface.p90_error, 4),
        # Rounded before they are subtracted: rounding errors do not add up.
        "corrections": packed(np.diff(np.round(surface.corrections / STEP), axis=0, prepend=0.0) * STEP, STEP),
    }
