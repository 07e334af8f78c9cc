"""Tables of kernel times as CSV: matrix products and collectives, one measured kernel per row.

The columns are those of the tables that AIConfigurator publishes, with sizes in bytes and times in seconds::

    device,dtype,m,n,k,time_s
    device,num_devices,collective,dtype,size_bytes,time_s,nccl_version

``size_bytes`` of a collective is the full buffer, as nccl-tests counts it.
"""

from __future__ import annotations

from pathlib import Path

from meshplan.catalogs.importers.csv_tables import CsvColumn, Row, read_table

# nccl-tests writes one of them without the underscores.
_ALIASES = {"alltoall": "all_to_all"}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
# A kernel takes between a tenth of a launch and a minute; times in ms or µs that lost their unit fall outside, or make
# the rate implausible.
_MIN_TIME_S, _MAX_TIME_S = 1e-7, 60.0
_MAX_DIMENSION = 2**24
# No accelerator sold until 2026 comes near: 20 PFLOP/s (nvfp4) and 10 TB/s per device.
_MAX_FLOPS_PER_S = 1e17
_MAX_BYTES_PER_S = 1e13

GEMM_COLUMNS = (
    CsvColumn(name="device"),
    CsvColumn(name="dtype"),
    *(CsvColumn(name=name, low=1, high=_MAX_DIMENSION, integer=True) for name in ("m", "n", "k")),
    CsvColumn(name="time_s", low=_MIN_TIME_S, high=_MAX_TIME_S),
)
COLLECTIVE_COLUMNS = (
    CsvColumn(name="device"),
    CsvColumn(name="num_devices", low=2, high=1e6, integer=True),
    CsvColumn(name="collective", choices=(*COLLECTIVES, *_ALIASES)),
    CsvColumn(name="dtype"),
    CsvColumn(name="size_bytes", low=1, high=1e13, integer=True),
    CsvColumn(name="time_s", low=_MIN_TIME_S, high=_MAX_TIME_S),
)


def read_gemm_table(path: Path) -> list[Row]:
    """Matrix products m×k by k×n, as ``device, dtype, m, n, k, time_s``.

    Raises:
        CatalogError: malformed, or a rate that no device reaches.
    """
    return read_table(path, GEMM_COLUMNS, check=_implausible_gemm)


def read_collective_table(path: Path) -> list[Row]:
    """Collectives of one node, as ``device, num_devices, collective, dtype, size_bytes, time_s, nccl_version``.

    Raises:
        CatalogError: malformed, or a bandwidth that no link reaches.
    """
    columns = (*COLLECTIVE_COLUMNS, CsvColumn(name="nccl_version"))
    rows = read_table(path, columns, check=_implausible_collective)
    return [row | {"collective": _ALIASES.get(row["collective"], row["collective"])} for row in rows]


def _implausible_gemm(row: Row) -> str | None:
    flops_per_s = 2.0 * row["m"] * row["n"] * row["k"] / row["time_s"]
    if flops_per_s <= _MAX_FLOPS_PER_S:
        return None
    return f"{flops_per_s:.3g} FLOP/s from m, n, k and time_s: more than any device; are columns swapped?"


def _implausible_collective(row: Row) -> str | None:
    bytes_per_s = row["size_bytes"] / row["time_s"]
    if bytes_per_s <= _MAX_BYTES_PER_S:
        return None
    return f"{bytes_per_s:.3g} bytes/s from size_bytes and time_s: more than any link; are columns swapped?"
