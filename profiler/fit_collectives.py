"""Makes ``catalogs/seed/collective_curves.json`` from a published table of NCCL times.

Run by hand when the table changes (the table is not part of meshplan)::

    python -m meshplan.profiler.fit_collectives nccl.csv.gz > catalogs/seed/collective_curves.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshplan.catalogs.collective_curves import interpolated_time_s
from meshplan.catalogs.importers.kernel_tables import read_collective_table
from meshplan.profiler.least_squares import FloatArray, RelativeError, relative_error

SOURCE = "NCCL times published with AIConfigurator (https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
# The table has the same sizes for one-byte and two-byte elements; training and serving reduce 16-bit numbers.
DTYPE = "half"


def interpolation_error(sizes_bytes: FloatArray, times_s: FloatArray) -> RelativeError:
    """Error of each inner point, predicted from all the others."""
    predicted = [
        interpolated_time_s(np.delete(sizes_bytes, index), np.delete(times_s, index), sizes_bytes[index])
        for index in range(1, len(sizes_bytes) - 1)
    ]
    return relative_error(np.array(predicted), times_s[1:-1])


def main(arguments: Sequence[str]) -> None:
    """Write the JSON text to standard output."""
    curves: dict[tuple[str, str, int, str], list[tuple[int, float]]] = {}
    for row in read_collective_table(Path(arguments[0])):
        if row["dtype"] == DTYPE:
            key = (row["device"], row["collective"], row["num_devices"], row["nccl_version"])
            curves.setdefault(key, []).append((row["size_bytes"], row["time_s"]))
    lines = []
    for (device, collective, num_devices, nccl_version), points in sorted(curves.items()):
        sizes, times = np.array(sorted(points), dtype=float).T
        content = {
            "device": device,
            "collective": collective,
            "num_devices": num_devices,
            "nccl_version": nccl_version,
            "median_error": round(interpolation_error(sizes, times).median, 4),
            "sizes_bytes": [int(size) for size in sizes],
            "times_s": [float(f"{time:.4g}") for time in times],
        }
        lines.append(json.dumps(content))
    listing = ",\n".join(lines)
    sys.stdout.write(f'{{"source": {json.dumps(SOURCE)},\n"curves": [\n{listing}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
