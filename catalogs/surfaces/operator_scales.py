"""How much slower or faster one machine's operators are than meshplan predicts without having measured it.

Each measured point of ``meshplan profile device`` is divided by the time that the shipped surfaces give for the same
shape (:func:`predicted_s`); a class's scale is the median ratio over its points, its spread their 10th and 90th
percentiles. An estimator multiplies the times of the class by the scale::

    gemm.bf16 …         products m×k by k×n of that precision, experts too
    attention_prefill   attention of new tokens to themselves and their context
    attention_decode    attention of one new token to its context
    memory              element-wise work, copies: whatever only moves bytes

Devices without a surface are compared with the roofline that the serving estimator falls back on. Points shorter than
20 µs are left out: a probe pays for its launch, an engine replays a graph.

Torch's attention is not the engines' kernel, so the scale of attention also contains the difference between the two,
besides how this machine differs; see ``meshplan profile device --with-attention``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from meshplan.catalogs.efficiency import (
    ATTENTION_CLASSES,
    GEMM_CLASS,
    GEMM_PRECISIONS,
    GEMM_RATE_SHARE,
    KERNEL_S,
    MEMORY_CLASS,
    MEMORY_SHARE,
    PREFILL_ATTENTION_SHARE,
)
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.measurements.types import Measurement, Metric, Spread
from meshplan.catalogs.surfaces.attention import attention_surface
from meshplan.catalogs.surfaces.gemm import gemm_surface

SHORTEST_S = 20e-6
SURFACE_BYTES = 2.0  # size of an element in the attention probes that the surfaces can be asked for
# Precision of a probe → kernel of the surfaces and bytes of an element.
_KERNELS = {"bf16": ("bfloat16", 2.0), "fp16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0)}
_ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
# Bytes moved per byte of the stated size.
_MEMORY_PROBES = {"memory_copy": 2.0, "elementwise": 3.0}


def operator_scales(
    device: Device, measurements: Iterable[Measurement], *, measured_as: Device | None = None
) -> dict[str, Spread]:
    """Class of operators → measured over predicted time, for the classes that were measured.

    Args:
        device: what was measured; its datasheet gives the roofline.
        measurements: those of a device run; probes of other things are skipped.
        measured_as: the device whose surfaces stand for this one's, as the estimator chooses it; None for itself.
    """
    ratios: dict[str, list[float]] = {}
    for measurement in measurements:
        name = operator_class(measurement)
        predicted = None if name is None else predicted_s(device, measurement, measured_as=measured_as)
        if name is not None and predicted is not None and predicted >= SHORTEST_S:
            ratios.setdefault(name, []).append(measured_s(measurement) / predicted)
    return {name: _spread(found) for name, found in ratios.items()}


def operator_class(measurement: Measurement) -> str | None:
    """The class that a measurement speaks for; None where it speaks for none."""
    if measurement.probe in _MEMORY_PROBES:
        return MEMORY_CLASS
    if measurement.probe == "gemm" and measurement.dtype in GEMM_PRECISIONS:
        return f"{GEMM_CLASS}.{measurement.dtype}"
    return measurement.probe if measurement.probe in ATTENTION_CLASSES else None


def measured_s(measurement: Measurement) -> float:
    """Seconds of one call: its work over the measured rate."""
    if measurement.metric is Metric.LATENCY_S:
        return measurement.spread.value
    return _work(measurement) / measurement.spread.value


def predicted_s(device: Device, measurement: Measurement, *, measured_as: Device | None = None) -> float | None:
    """Seconds of the same call without any measurement of this machine; None where there is no basis for it.

    Decode waits for memory: times of another device's surface are scaled by the ratio of the two bandwidths.
    """
    standing = measured_as or device
    dtype, shape = measurement.dtype or "", measurement.parameters
    peak = device.peak_flops_per_s.get(dtype)
    bandwidth = MEMORY_SHARE * device.memory_bandwidth_bytes_per_s
    if measurement.probe in _MEMORY_PROBES:
        return KERNEL_S + _work(measurement) / bandwidth
    if measurement.probe == "gemm":
        m, n, k = (float(shape[name]) for name in ("m", "n", "k"))
        kernel, element_bytes = _KERNELS.get(dtype, ("", _ELEMENT_BYTES.get(dtype, 2.0)))
        surface = gemm_surface(standing.slug, kernel)
        if surface is not None:
            # The surfaces of fp8 were timed with the kernels that quantise the operands; the probe's are quantised.
            unfused = max(surface.base[3] - KERNEL_S, 0.0) if dtype == "fp8" else 0.0
            least = KERNEL_S + element_bytes * (m * k + n * k) / device.memory_bandwidth_bytes_per_s
            seconds = float(surface.time_s(m, n, k))
            return max(seconds - unfused, min(seconds, least))
        if peak is None:
            return None
        moved = element_bytes * (m * k + n * k) + 2.0 * m * n
        compute = _work(measurement) / (GEMM_RATE_SHARE * peak)
        return float(KERNEL_S + (compute**4 + (moved / bandwidth) ** 4) ** 0.25)
    return _attention_s(device, standing, measurement.probe, shape, peak, _ELEMENT_BYTES.get(dtype, 2.0))


def _attention_s(
    device: Device, standing: Device, probe: str, shape: Mapping[str, Any], peak: float | None, element_bytes: float
) -> float | None:
    is_prefill = probe == "attention_prefill"
    new, context = (shape["tokens"], 0) if is_prefill else (1, shape["context"])
    surface = attention_surface(standing.slug, "prefill" if is_prefill else "decode")
    if surface is not None and element_bytes == SURFACE_BYTES:
        seconds = surface.time_s(
            batch=shape["batch"],
            context=max(context - 1, 0),
            new_tokens=new,
            num_heads=shape["heads"],
            num_kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
        )
        slower = standing.memory_bandwidth_bytes_per_s / device.memory_bandwidth_bytes_per_s
        return float(seconds if is_prefill else seconds * slower)
    if peak is None:
        return None
    pairs = shape["batch"] * (new * (new + 1) / 2.0 if is_prefill else context)
    compute = 4.0 * pairs * shape["heads"] * shape["head_dim"] / (PREFILL_ATTENTION_SHARE * peak)
    cache = 0.0 if is_prefill else 2.0 * shape["batch"] * context * shape["kv_heads"] * shape["head_dim"]
    moved = element_bytes * cache / (MEMORY_SHARE * device.memory_bandwidth_bytes_per_s)
    return float(KERNEL_S + max(compute, moved))


def _work(measurement: Measurement) -> float:
    """FLOPs or bytes of one call, as :mod:`meshplan.profiler.device.probes` counts them; a test holds them together."""
    shape = measurement.parameters
    if measurement.probe in _MEMORY_PROBES:
        return _MEMORY_PROBES[measurement.probe] * float(shape["size_bytes"])
    if measurement.probe == "gemm":
        return 2.0 * shape["m"] * shape["n"] * shape["k"]
    if measurement.probe == "attention_prefill":
        return 2.0 * shape["batch"] * shape["heads"] * float(shape["tokens"]) ** 2 * shape["head_dim"]
    element_bytes = _ELEMENT_BYTES.get(measurement.dtype or "", 2.0)
    return 2.0 * shape["batch"] * shape["kv_heads"] * float(shape["context"]) * shape["head_dim"] * element_bytes


def _spread(ratios: list[float]) -> Spread:
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    return Spread(value=float(middle), low=float(low), high=float(high), n=len(ratios))
