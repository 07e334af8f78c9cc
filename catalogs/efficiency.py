"""Fitted efficiency of matrix products: how it is named as facts of a device, and how the seed file is read.

A curve is three facts per precision (the model stands in :mod:`meshplan.planner.estimators.compute`): the rate of a
large product, the bandwidth at which operands stream, and the inner length that costs as much as filling the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.units import Dimension, parse_quantity

# Precisions of matrix products that a curve may be for; as `workload.precision` names them.
GEMM_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8")
RATE_FIELD = "gemm_rate_flops_per_s"
BANDWIDTH_FIELD = "gemm_bandwidth_bytes_per_s"
SATURATION_FIELD = "gemm_inner_saturation"


def gemm_curves(values: Mapping[str, float]) -> dict[str, tuple[float, float, float]]:
    """Precision → (rate FLOP/s, bandwidth bytes/s, inner saturation) from a device's field values.

    >>> gemm_curves({"gemm_rate_flops_per_s.bf16": 8e14, "gemm_bandwidth_bytes_per_s.bf16": 2e12,
    ...              "gemm_inner_saturation.bf16": 60.0, "tdp_w": 700.0})
    {'bf16': (800000000000000.0, 2000000000000.0, 60.0)}
    """
    curves = {}
    for precision in GEMM_PRECISIONS:
        names = tuple(f"{field}.{precision}" for field in (RATE_FIELD, BANDWIDTH_FIELD, SATURATION_FIELD))
        if all(name in values for name in names):
            curves[precision] = (values[names[0]], values[names[1]], values[names[2]])
    return curves


def curve_facts(content: Mapping[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """The facts of one device in the seed file ``efficiency.yaml``, in the exchange form.

    Raises:
        CatalogError: the file names a source or a precision that it does not have.
    """
    measured = content["same_silicon"].get(device, device)
    rows: Mapping[str, Any] = content["gemm_curves"][measured]
    yield from (fact for precision, row in rows.items() for fact in _facts(content, precision, row))
    for precision, same in content["same_kernels"].items():
        if same in rows:
            yield from _facts(content, precision, rows[same])


def _facts(content: Mapping[str, Any], precision: str, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if precision not in GEMM_PRECISIONS:
        raise CatalogError(f"efficiency.yaml: unknown precision {precision!r}; one of {', '.join(GEMM_PRECISIONS)}")
    ((_, source),) = content["sources"].items()
    error = f"held-out error median {row['median_error']:.1%}, 90th percentile {row['p90_error']:.1%}"
    values = {
        RATE_FIELD: parse_quantity(row["rate"], Dimension.FLOPS_PER_S),
        BANDWIDTH_FIELD: parse_quantity(row["bandwidth"], Dimension.BYTES_PER_S),
        SATURATION_FIELD: float(row["inner_saturation"]),
    }
    for field, value in values.items():
        yield {
            "field": f"{field}.{precision}",
            "value": float(f"{value:.6g}"),  # what the file prints, without the rounding of the prefix
            "num_samples": row["num_samples"],
            "level": source["level"],
            "source": f"{source['citation'].strip()}; {error}",
            "date": str(source["date"]),
        }
