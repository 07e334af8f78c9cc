"""Makes ``catalogs/seed/expert_surfaces.json`` from published tables of fused expert layers.

Run by hand when the tables change (they are not part of meshplan)::

    python -m meshplan.profiler.fit_experts FOLDER_OF_AICONFIGURATOR_CORE catalogs/seed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.expert_surfaces import (
    ELEMENT_BYTES,
    GATED_PRODUCTS,
    PLAIN_PRODUCTS,
    SHAPE_STEP,
    SHAPE_TOKENS,
    SKEW_KNOTS,
    ExpertFeatures,
    ExpertSurface,
    Shape,
    expert_features,
    expert_formula,
    grid_points,
    surface_row,
)
from meshplan.catalogs.importers.perf_tables import FRAMEWORKS, SYSTEMS, all_versions, data_folder, read_perf_table
from meshplan.catalogs.surface_grid import FloatArray, filled, grid_value
from meshplan.catalogs.time_tables import STEP
from meshplan.profiler.fit_attention import SOURCE, octaves
from meshplan.profiler.gemm_model import HELD_OUT_FRACTION
from meshplan.profiler.least_squares import HUBER_THRESHOLD, RelativeError, fit_positive, held_out, relative_error
from meshplan.profiler.surface_fit import fit_grid

COUNTS = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
TEXTS = ("moe_dtype", "kernel_source", "distribution")
# Its times are below what reading the weights takes: 1.36 GB in 147 µs are 9.3 TB/s, a GB200 has 8.
IMPOSSIBLE = "moe_torch_flow_min_latency"
POWER_LAW = "power_law_"
# Fewer measurements are one model's; a surface of them would be asked for others.
MIN_SAMPLES = 500
KNOTS = (
    octaves(2.0**-8, 2.0**14),
    octaves(1, 256, step=2),
    octaves(2048, 8192),
    octaves(16, 16384, step=2),
    SKEW_KNOTS,
)
# R FLOP/s, B bytes/s, t₀, t_e and t_n s: of a Hopper device; the fit finds the others from there.
_START = np.array([5e14, 3e12, 3e-5, 1e-7, 1e-9])
_ROBUST_ROUNDS = 2
ITERATIONS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSamples:
    """Measured layers of one device, quantization and framework.

    Args:
        tokens: [n].
        shapes: (H, I, k, E, ep, products), [n, 6].
        skew: exponents, 0 where balanced, [n].
        time_s: [n].
        kernel: framework and versions.
    """

    tokens: FloatArray
    shapes: FloatArray
    skew: FloatArray
    time_s: FloatArray
    kernel: str

    def __len__(self) -> int:
        return len(self.time_s)

    def where(self, mask: NDArray[np.bool_]) -> ExpertSamples:
        """The samples under a mask."""
        return ExpertSamples(
            tokens=self.tokens[mask],
            shapes=self.shapes[mask],
            skew=self.skew[mask],
            time_s=self.time_s[mask],
            kernel=self.kernel,
        )

    def features(self) -> ExpertFeatures:
        """What formula and grid are functions of."""
        return expert_features(self.tokens, tuple(self.shapes.T), self.skew)

    def shape_index(self) -> tuple[list[Shape], NDArray[np.intp]]:
        """The distinct shapes, and the one of each sample."""
        distinct, index = np.unique(self.shapes, axis=0, return_inverse=True)
        return [_shape(row) for row in distinct], index.ravel()


def main(arguments: Sequence[str]) -> None:
    """Write the file."""
    surfaces = [
        fit_experts(samples, device=device, quantization=quantization, framework=framework)
        for device, framework, quantization, samples in expert_samples(data_folder(Path(arguments[0])))
    ]
    write_surfaces(Path(arguments[1]) / "expert_surfaces.json", surfaces)


def write_surfaces(path: Path, surfaces: Sequence[ExpertSurface]) -> None:
    """Write one surface a line, after the grid and the shapes that they share."""
    shapes = sorted({shape for surface in surfaces for shape in surface.shapes})
    lines = ",\n".join(json.dumps(surface_row(surface, shapes)) for surface in surfaces)
    knots = [[float(position) for position in positions] for positions in KNOTS]
    head = f'"source": {json.dumps(SOURCE)},\n"knots": {json.dumps(knots)},\n"shapes": {json.dumps(shapes)}'
    path.write_text(f'{{{head},\n"tables": [\n{lines}\n]}}\n', encoding="utf-8")


def expert_samples(folder: Path) -> Iterator[tuple[str, str, str, ExpertSamples]]:
    """(device, framework, quantization, samples) for all that were measured often enough."""
    for system, device in sorted(SYSTEMS.items()):
        for framework in FRAMEWORKS:
            samples = _read(folder, system, framework)
            for quantization in ELEMENT_BYTES:
                found = samples.get(quantization)
                if found is not None and len(found) >= MIN_SAMPLES:
                    yield device, framework, quantization, found


def _read(folder: Path, system: str, framework: str) -> dict[str, ExpertSamples]:
    """Quantization → samples: of several versions the newest counts, of its kernels the fastest."""
    rows: dict[str, dict[tuple[float, ...], tuple[float, str]]] = {}
    plain = _plain_models(folder, system)
    for path in all_versions(folder, system, "moe", framework, "moe_perf"):
        version = path.parent.name
        columns = read_perf_table(path, texts=TEXTS, counts=COUNTS)
        skew = np.array([_skew(text) for text in columns["distribution"]])
        numbers = np.stack([columns[name] for name in COUNTS], axis=1)
        for index, kind in enumerate(columns["moe_dtype"]):
            if columns["kernel_source"][index] == IMPOSSIBLE:
                continue
            tokens, hidden, size, top_k, experts, tensor, devices = numbers[index]
            products = PLAIN_PRODUCTS if (hidden, size, top_k, experts) in plain else GATED_PRODUCTS
            key = (tokens, hidden, size / tensor, top_k, experts, devices, products, skew[index])
            known = rows.setdefault(kind, {}).get(key)
            time_s = columns["time_s"][index]
            if known is None or (known[1] == version and time_s < known[0]):
                rows[kind][key] = (time_s, version)
    return {kind: _samples(found, framework) for kind, found in rows.items()}


def _plain_models(folder: Path, system: str) -> set[tuple[float, ...]]:
    """(hidden size, expert size, top-k, experts) of models without a gate, which TensorRT-LLM's tables name."""
    models: set[tuple[float, ...]] = set()
    for path in all_versions(folder, system, "moe", "trtllm", "moe_perf"):
        columns = read_perf_table(path, texts=TEXTS, counts=COUNTS)
        mask = np.array([name.endswith("nongated") for name in columns["kernel_source"]])
        names = ("hidden_size", "inter_size", "topk", "num_experts")
        models |= set(zip(*(columns[name][mask].tolist() for name in names), strict=True))
    return models


def _samples(rows: dict[tuple[float, ...], tuple[float, str]], framework: str) -> ExpertSamples:
    keys = np.array(list(rows))
    versions = sorted({version for _, version in rows.values()})
    return ExpertSamples(
        tokens=keys[:, 0],
        shapes=keys[:, 1:7],
        skew=keys[:, 7],
        time_s=np.array([time_s for time_s, _ in rows.values()]),
        kernel=f"{framework} {', '.join(versions)}",
    )


def _skew(text: str) -> float:
    return float(text.removeprefix(POWER_LAW)) if text.startswith(POWER_LAW) else 0.0


def _shape(row: FloatArray) -> Shape:
    hidden, size, top_k, experts, devices, products = (int(value) for value in row)
    return hidden, size, top_k, experts, devices, products


def fit_experts(
    samples: ExpertSamples, *, device: str, quantization: str, framework: str, seed: int = 0
) -> ExpertSurface:
    """Fit a surface, and say how well a fit predicts measurements, and shapes, that it has not seen.

    Args:
        samples: measured layers.
        device: slug.
        quantization: of weights and activations.
        framework: whose kernels.
        seed: of the random fifths.
    """

    def error(hidden: NDArray[np.bool_]) -> RelativeError:
        trial = _fitted(samples.where(~hidden), device, quantization, framework)
        unseen = samples.where(hidden)
        return relative_error(predicted_s(trial, unseen), unseen.time_s)

    shapes, index = samples.shape_index()
    rows = error(held_out(len(samples), fraction=HELD_OUT_FRACTION, seed=seed))
    new_shapes = error(held_out(len(shapes), fraction=HELD_OUT_FRACTION, seed=seed)[index])
    final = _fitted(samples, device, quantization, framework)
    return replace(
        final,
        median_error=rows.median,
        p90_error=rows.p90,
        new_shape_median_error=new_shapes.median,
        new_shape_p90_error=new_shapes.p90,
    )


def predicted_s(surface: ExpertSurface, samples: ExpertSamples) -> FloatArray:
    """The surface's times of the samples, [n]."""
    shapes, index = samples.shape_index()
    times = np.empty(len(samples))
    order = np.lexsort((samples.skew, index))
    edges = np.flatnonzero(np.diff(index[order]) | (np.diff(samples.skew[order]) != 0)) + 1
    for chosen in np.split(order, edges):
        hidden, size, top_k, experts, devices, products = shapes[index[chosen[0]]]
        times[chosen] = surface.time_s(
            samples.tokens[chosen],
            hidden_size=hidden,
            expert_size=size,
            top_k=top_k,
            num_experts=experts,
            expert_parallel=devices,
            gated=products == GATED_PRODUCTS,
            skew=float(samples.skew[chosen[0]]),
        )
    return times


def _fitted(samples: ExpertSamples, device: str, quantization: str, framework: str) -> ExpertSurface:
    features, element_bytes = samples.features(), ELEMENT_BYTES[quantization]

    def base(parameters: FloatArray) -> FloatArray:
        return expert_formula(parameters, features, element_bytes=element_bytes)

    parameters = fit_positive(base, samples.time_s, _START)
    residuals = np.log(samples.time_s / base(parameters))
    points = grid_points(features)
    # Single shapes ran a badly chosen kernel, up to six times slower: they must not pull the others along.
    trust = np.ones(len(samples))
    for _ in range(_ROBUST_ROUNDS):
        corrections, weights = fit_grid(KNOTS, points, residuals, trust=trust, iterations=ITERATIONS)
        rest = residuals - grid_value(KNOTS, corrections, points)
        trust = HUBER_THRESHOLD / np.maximum(np.abs(rest), HUBER_THRESHOLD)
    touched = weights > 0
    corrections = filled(np.round(corrections / STEP) * STEP, touched)
    rest = residuals - grid_value(KNOTS, corrections, points)
    return ExpertSurface(
        device=device,
        quantization=quantization,
        framework=framework,
        parameters=tuple(float(parameter) for parameter in parameters),
        knots=KNOTS,
        corrections=corrections,
        touched=touched,
        shapes=_by_shape(samples, features, rest),
        kernel=samples.kernel,
        num_samples=len(samples),
        median_error=0.0,
        p90_error=0.0,
        new_shape_median_error=0.0,
        new_shape_p90_error=0.0,
        source=SOURCE,
    )


def _by_shape(samples: ExpertSamples, features: ExpertFeatures, residuals: FloatArray) -> dict[Shape, FloatArray]:
    """What the grid leaves over, for each shape: [tokens, skew]."""
    shapes, index = samples.shape_index()
    positions = np.arange(1.0, len(shapes) + 1.0)
    skew = np.where(features.skewed, SKEW_KNOTS[1], SKEW_KNOTS[0])
    points = (positions[index], samples.tokens, skew)
    values, weights = fit_grid(
        (positions, SHAPE_TOKENS, SKEW_KNOTS), points, residuals, smoothing=0.0, iterations=ITERATIONS
    )
    values = np.round(values / SHAPE_STEP) * SHAPE_STEP
    return {shape: values[row] for row, shape in enumerate(shapes) if (weights[row] > 0).any()}


if __name__ == "__main__":
    main(sys.argv[1:])
