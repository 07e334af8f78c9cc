"""Makes ``catalogs/seed/collective_curves.json`` from published tables of NCCL and of serving engines.

What ships are smoothed times (:mod:`meshplan.profiler.fitting.curve_fit`) at the measured sizes.

Run by hand when the tables change (they are not part of meshplan)::

    python -m meshplan.profiler.shipped.fit_collectives nccl.csv.gz AICONFIGURATOR_CORE catalogs/seed
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.importers.kernel_tables import read_collective_table
from meshplan.catalogs.importers.perf_tables import (
    SYSTEMS,
    all_versions,
    data_folder,
    fastest,
    is_copied,
    read_perf_table,
    where,
)
from meshplan.catalogs.surfaces.collectives import CURVE_FILE
from meshplan.catalogs.surfaces.files import FRAMEWORKS, listing
from meshplan.profiler.fitting.curve_fit import left_out_error, smoothed_time_s
from meshplan.profiler.shipped.command import write_files

SOURCE = "Times published with AIConfigurator (https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
# The table has the same sizes for one-byte and two-byte elements; training and serving reduce 16-bit numbers.
DTYPE = "half"
# The engines' tables count elements of this size.
ENGINE_ELEMENT_BYTES = 2

# Device, collective, number of devices, library, version.
Key = tuple[str, str, int, str, str]


def nccl_points(path: Path) -> dict[Key, list[tuple[float, float]]]:
    """(size, time) of every NCCL curve of a CSV."""
    curves: dict[Key, list[tuple[float, float]]] = {}
    for row in read_collective_table(path):
        if row["dtype"] == DTYPE:
            key = (row["device"], row["collective"], row["num_devices"], "nccl", row["nccl_version"])
            curves.setdefault(key, []).append((row["size_bytes"], row["time_s"]))
    return curves


def engine_points(folder: Path) -> dict[Key, list[tuple[float, float]]]:
    """(size, time) of every all-reduce of a serving engine: the fastest of its kernels inside a CUDA graph."""
    curves: dict[Key, list[tuple[float, float]]] = {}
    for system, device in sorted(SYSTEMS.items()):
        for framework in FRAMEWORKS:
            paths = all_versions(folder, system, "comm", framework, "custom_allreduce_perf")
            path = next((path for path in paths if not is_copied(path)), None)
            if path is None:
                continue
            counts = ("num_gpus", "message_size")
            columns = read_perf_table(path, texts=("kernel_source",), counts=counts)
            graph = np.array([not name.endswith("eager") for name in columns["kernel_source"]])
            columns = fastest(where(columns, graph), counts)
            for num_devices in np.unique(columns["num_gpus"]):
                group = where(columns, columns["num_gpus"] == num_devices)
                sizes = ENGINE_ELEMENT_BYTES * group["message_size"]
                key = (device, "all_reduce", int(num_devices), framework, path.parent.name)
                curves[key] = list(zip(sizes.tolist(), group["time_s"].tolist(), strict=True))
    return curves


def files(nccl_table: Path, aiconfigurator_core: Path) -> dict[str, str]:
    """Curves of collectives, from a CSV of NCCL's times and the tables of the engines' own all-reduce."""
    curves = nccl_points(nccl_table) | engine_points(data_folder(aiconfigurator_core))
    return {CURVE_FILE.name: listing("curves", [_row(key, curves[key]) for key in sorted(curves)], source=SOURCE)}


def _row(key: Key, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    sizes, times = np.array(sorted(points), dtype=float).T
    return {
        **dict(zip(("device", "collective", "num_devices", "library", "version"), key, strict=True)),
        "median_error": round(left_out_error(sizes, times).median, 4),
        "sizes_bytes": [int(size) for size in sizes],
        "times_s": [float(f"{time:.4g}") for time in smoothed_time_s(sizes, times, sizes)],
    }


if __name__ == "__main__":
    write_files(files)
