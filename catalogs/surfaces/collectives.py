"""Times of collectives inside one node or NVLink domain, interpolated from published measurements.

One line α + bytes/β cannot follow NCCL, which changes algorithm and protocol with the size (held-out error 6 to 22 %
in the median), and the measured points zigzag by up to 20 %. So the points are kept, smoothed as far as each predicts
the others best (:mod:`meshplan.profiler.fitting.curve_fit`), and interpolated linearly in the logarithms. Points out of
order are pooled to their geometric mean (isotonic regression of the logarithms), so that more bytes never take less
time and one outlier lifts its neighbours a little only. Below the smallest size time is constant (latency), above the
largest it grows in proportion (bandwidth).

Sizes are full buffers, as nccl-tests counts them. Besides NCCL, the serving engines' own all-reduce kernels (inside a
CUDA graph, 16-bit elements) are there under the engine's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshplan.catalogs.seed import SEED_FOLDER

CURVE_FILE = SEED_FOLDER / "collective_curves.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Times of one collective among the devices of one node.

    Args:
        device: slug.
        collective: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        num_devices: in the group.
        library: ``nccl``, or ``trtllm``, ``vllm``, ``sglang`` for the kernels of an engine.
        sizes_bytes: full buffers, rising.
        times_s: smoothed times, never falling.
        median_error: |predicted/measured − 1|, each inner point predicted from the others.
        source: citation.
    """

    device: str
    collective: str
    num_devices: int
    library: str
    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    median_error: float
    source: str

    def time_s(self, size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds for a full buffer of ``size_bytes``, any shape."""
        sizes = np.asarray(self.sizes_bytes)
        wanted = np.maximum(np.asarray(size_bytes, dtype=float), sizes[0])
        inside = np.exp(np.interp(np.log(wanted), np.log(sizes), np.log(self.times_s)))
        return np.asarray(inside * np.maximum(1.0, wanted / sizes[-1]))


def collective_curve(device: str, collective: str, num_devices: int, library: str = "nccl") -> CollectiveCurve | None:
    """The shipped curve; None where there is none."""
    return shipped_curves().get((device, collective, num_devices, library))


def never_falling(times_s: Sequence[float]) -> tuple[float, ...]:
    """The rising sequence nearest to positive times in least squares of their logarithms: pool-adjacent-violators.

    >>> [round(time, 3) for time in never_falling([1.0, 4.0, 1.0, 8.0])]
    [1.0, 2.0, 2.0, 8.0]
    """
    pools: list[tuple[float, int]] = []
    for time_s in times_s:
        mean, count = math.log(time_s), 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean, count = (before * members + mean * count) / (members + count), members + count
        pools.append((mean, count))
    return tuple(math.exp(mean) for mean, count in pools for _ in range(count))


@cache
def shipped_curves(path: Path = CURVE_FILE) -> Mapping[tuple[str, str, int, str], CollectiveCurve]:
    """(device, collective, number of devices, library) → curve, for all that ship."""
    content = json.loads(path.read_text(encoding="utf-8"))
    curves = [
        CollectiveCurve(
            **{name: row[name] for name in ("device", "collective", "num_devices", "library", "median_error")},
            sizes_bytes=tuple(row["sizes_bytes"]),
            times_s=never_falling(row["times_s"]),
            source=f"{content['source']}, {row['library']} {row['version']}",
        )
        for row in content["curves"]
    ]
    return {(curve.device, curve.collective, curve.num_devices, curve.library): curve for curve in curves}
