"""Measured efficiency of a device: how it is named as facts, and how the seed file is read.

A curve is three facts per precision (the model stands in :mod:`meshplan.planner.training.estimator.compute`): the rate
of a large product, the bandwidth at which operands stream, and the inner length that costs as much as filling the
pipeline.

An operator's scale is one fact per class: measured time over what meshplan predicts without it
(:mod:`meshplan.catalogs.surfaces.operator_scales`).
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
SCALE_FIELD = "operator_time_scale"
GEMM_CLASS, MEMORY_CLASS = "gemm", "memory"
ATTENTION_CLASSES = ("attention_prefill", "attention_decode")
# Classes of operators that are scaled on their own; products by precision.
OPERATOR_CLASSES = (*(f"{GEMM_CLASS}.{name}" for name in GEMM_PRECISIONS), *ATTENTION_CLASSES, MEMORY_CLASS)

# The roofline of a device without surfaces. Launch and tail of a kernel inside a replayed graph: median t₀ of the
# 16-bit GEMM surfaces (2.1 to 4.9 µs).
KERNEL_S = 2.5e-6
# Shares of the datasheet's rates that large products attain, medians over the shipped surfaces' devices.
GEMM_RATE_SHARE = 0.76
MEMORY_SHARE = 0.8
# FlashAttention-2/3 forward over the dense 16-bit peak (arXiv:2407.08608, figure 5: 0.55 to 0.75 at long sequences).
PREFILL_ATTENTION_SHARE = 0.5


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


def operator_scales(values: Mapping[str, float]) -> dict[str, float]:
    """Class of operators → factor of its times, from a device's field values; classes without one are left out.

    >>> operator_scales({"operator_time_scale.attention_decode": 1.5, "tdp_w": 700.0})
    {'attention_decode': 1.5}
    """
    named = ((name, f"{SCALE_FIELD}.{name}") for name in OPERATOR_CLASSES)
    return {name: values[field] for name, field in named if field in values}


def scale_of(scales: Mapping[str, float], name: str) -> float:
    """The factor of a class's times; products of an unmeasured precision take that of 16 bits, other classes 1.

    >>> scale_of({"gemm.bf16": 1.2}, "gemm.fp8"), scale_of({"gemm.bf16": 1.2}, "memory")
    (1.2, 1.0)
    """
    is_gemm = name.startswith(f"{GEMM_CLASS}.")
    chain = (name, f"{GEMM_CLASS}.bf16", f"{GEMM_CLASS}.fp16") if is_gemm else (name,)
    return next((scales[choice] for choice in chain if choice in scales), 1.0)


def curve_facts(content: Mapping[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """The facts of one device in the seed file ``efficiency.yaml``, in the exchange form.

    Raises:
        CatalogError: the file names a source or a precision that it does not have.
    """
    measured = content["same_silicon"].get(device, device)
    rows: Mapping[str, Any] = content["gemm_curves"][measured]
    share = float(content["power_limited"].get(device, 1.0))
    yield from (fact for precision, row in rows.items() for fact in _facts(content, precision, row, share))
    for precision, same in content["same_kernels"].items():
        if same in rows:
            yield from _facts(content, precision, rows[same], share)


def _facts(
    content: Mapping[str, Any], precision: str, row: Mapping[str, Any], share: float
) -> Iterator[dict[str, Any]]:
    if precision not in GEMM_PRECISIONS:
        raise CatalogError(f"efficiency.yaml: unknown precision {precision!r}; one of {', '.join(GEMM_PRECISIONS)}")
    ((_, source),) = content["sources"].items()
    error = f"held-out error median {row['median_error']:.1%}, 90th percentile {row['p90_error']:.1%}"
    values = {
        RATE_FIELD: share * parse_quantity(row["rate"], Dimension.FLOPS_PER_S),
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
