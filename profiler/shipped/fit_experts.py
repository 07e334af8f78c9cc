"""Makes ``catalogs/seed/expert_surfaces.json`` from published tables of fused expert layers.

Run by hand when the tables change (they are not part of meshplan)::

    python -m meshplan.profiler.shipped.fit_experts AICONFIGURATOR_CORE AICONFIGURATOR_0_7_0 catalogs/seed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.importers.perf_tables import data_folder
from meshplan.catalogs.surfaces.experts import (
    ELEMENT_BYTES,
    SHAPE_STEP,
    SHAPE_TOKENS,
    SKEW_KNOTS,
    SURFACES,
    ExpertFeatures,
    ExpertShape,
    ExpertSurface,
    expert_formula,
    grid_points,
    surface_row,
)
from meshplan.catalogs.surfaces.grid import FloatArray, filled, grid_value
from meshplan.catalogs.surfaces.time_tables import STEP
from meshplan.profiler.fitting.gemm_model import HELD_OUT_FRACTION
from meshplan.profiler.fitting.least_squares import RelativeError, fit_positive, held_out, relative_error
from meshplan.profiler.fitting.surface_fit import fit_grid, fit_grid_robustly
from meshplan.profiler.shipped.command import AICONFIGURATOR, write_files
from meshplan.profiler.shipped.expert_tables import ExpertSamples, expert_samples, older_expert_samples
from meshplan.profiler.shipped.fit_attention import octaves

KNOTS = (
    octaves(2.0**-8, 2.0**14),
    octaves(1, 256, step=2),
    octaves(2048, 8192),
    octaves(16, 16384, step=2),
    SKEW_KNOTS,
)
# Left out to keep the file small: on these, SGLang and vLLM run mostly the same kernels of FlashInfer and Triton.
LEFT_OUT = {(device, "sglang") for device in ("b300", "gb200", "gb300", "l40s", "rtx-pro-6000")}
# Name of the surfaces of vLLM's kernels before release 0.15.
OLDER = "vllm-2025"
OLDER_SOURCE = "Fitted to kernel times published with AIConfigurator, aiconfigurator 0.7.0 (as the others)"
# R FLOP/s, B bytes/s, t₀, t_e and t_n s: of a Hopper device; the fit finds the others from there.
_START = np.array([5e14, 3e12, 3e-5, 1e-7, 1e-9])
ITERATIONS = 15


def files(aiconfigurator_core: Path, aiconfigurator: Path) -> dict[str, str]:
    """Surfaces of fused experts; ``aiconfigurator`` is an unpacked wheel of release 0.7.0."""
    surfaces = [
        fit_experts(samples, device=device, quantization=quantization, framework=framework)
        for device, framework, quantization, samples in shipped_samples(data_folder(aiconfigurator_core))
    ]
    older = [
        fit_experts(samples, device=device, quantization=quantization, framework=OLDER)
        for device, quantization, samples in older_expert_samples(data_folder(aiconfigurator))
    ]
    rows, shared = stored([*surfaces, *older])
    rows[len(surfaces) :] = [row | {"source": OLDER_SOURCE} for row in rows[len(surfaces) :]]
    return {SURFACES.shipped.name: SURFACES.text(rows, **shared)}


def shipped_samples(folder: Path) -> Iterator[tuple[str, str, str, ExpertSamples]]:
    """(device, framework, quantization, samples) of every surface that ships."""
    return (found for found in expert_samples(folder) if found[:2] not in LEFT_OUT)


def stored(surfaces: Sequence[ExpertSurface]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of a file, and the source, grid and shapes that they share."""
    shapes = sorted({shape for surface in surfaces for shape in surface.shapes})
    knots = [[float(position) for position in positions] for positions in KNOTS]
    rows = [surface_row(surface, shapes) for surface in surfaces]
    return rows, {"source": AICONFIGURATOR, "knots": knots, "shapes": shapes}


def fit_experts(
    samples: ExpertSamples, *, device: str, quantization: str, framework: str, seed: int = 0
) -> ExpertSurface:
    """Fit a surface, and say how well a fit predicts measurements, and shapes, that it has not seen.

    Args:
        samples: measured layers.
        device: slug.
        quantization: type of weights and activations.
        framework: whose kernels.
        seed: for the random fifths.
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
        first = chosen[0]
        shape, skew = shapes[index[first]], float(samples.skew[first])
        times[chosen] = surface.time_s(samples.tokens[chosen], shape, skew=skew)
    return times


def _fitted(samples: ExpertSamples, device: str, quantization: str, framework: str) -> ExpertSurface:
    features, element_bytes = samples.features(), ELEMENT_BYTES[quantization]

    def base(parameters: FloatArray) -> FloatArray:
        return expert_formula(parameters, features, element_bytes=element_bytes)

    parameters = fit_positive(base, samples.time_s, _START)
    residuals = np.log(samples.time_s / base(parameters))
    points = grid_points(features)
    corrections, weights = fit_grid_robustly(
        KNOTS, points, residuals, iterations=ITERATIONS, first_iterations=ITERATIONS
    )
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
        source=AICONFIGURATOR,
    )


def _by_shape(samples: ExpertSamples, features: ExpertFeatures, residuals: FloatArray) -> dict[ExpertShape, FloatArray]:
    """What the grid leaves over, for each shape: [tokens, skew]."""
    shapes, index = samples.shape_index()
    positions = np.arange(1.0, len(shapes) + 1.0)
    skew = np.where(features.skewed, SKEW_KNOTS[1], SKEW_KNOTS[0])
    points = (positions[index], samples.tokens, skew)
    values, weights = fit_grid(
        (positions, SHAPE_TOKENS, SKEW_KNOTS), points, residuals, smoothing=0.0, iterations=ITERATIONS
    )
    # What a shape's kernel is off by hardly depends on routing: where one was not measured, the other stands for it.
    values = np.where(weights > 0, values, np.where(weights[..., ::-1] > 0, values[..., ::-1], 0.0))
    values = np.round(values / SHAPE_STEP) * SHAPE_STEP
    return {shape: values[row] for row, shape in enumerate(shapes) if (weights[row] > 0).any()}


if __name__ == "__main__":
    write_files(files)
