"""Fits a :class:`~meshplan.catalogs.gemm_surfaces.GemmSurface` to measured products, and makes the shipped ones.

First the four parameters of the formula, then the corrections: simultaneous iterative reconstruction, in which every
product moves the eight knots around it by its own residual, averaged by weight (Gilbert, J. Theor. Biol. 36 (1972)
105). Knots without a product near them take the mean of their neighbours.

Run by hand to make the shipped file::

    python -m meshplan.profiler.gemm_surface gemm.csv.gz > catalogs/seed/gemm_surfaces.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshplan.catalogs.gemm_surfaces import GemmSurface, base_time_s, interpolation, surface_row
from meshplan.profiler.fit_shipped import load
from meshplan.profiler.gemm_model import HELD_OUT_FRACTION, GemmSamples
from meshplan.profiler.least_squares import FloatArray, fit_positive, held_out, relative_error

# Bytes of an element that moves: weights of the weight-only kernels are smaller than their 16-bit activations, and
# in small products, where bytes decide, weights are most of them.
ELEMENT_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "int8_wo": 1.0,
    "int4_wo": 0.5,
    "sq": 1.0,
}
SOURCE = (
    "Fitted to the GEMM times of TensorRT-LLM kernels published with AIConfigurator "
    "(https://github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
)
KNOTS_PER_OCTAVE = 1.0
ITERATIONS = 60
# A knot with less than this weight of products around it leans on its neighbours.
SMOOTHING = 0.05
_START = (2e12, 60.0, 3e-6)  # B, k₀, t₀; R starts from the fastest products


def fit_surface(samples: GemmSamples, *, device: str, kernel: str, seed: int = 0) -> GemmSurface:
    """Fit a surface, and say how well a fit predicts the fifth of the products that it has not seen.

    Args:
        samples: measured products of any size, at least two values in each direction.
        device: slug.
        kernel: name of the kernel, a key of :data:`ELEMENT_BYTES`.
        seed: of the random fifth.
    """
    hidden = held_out(len(samples), fraction=HELD_OUT_FRACTION, seed=seed)
    seen, unseen = samples.where(~hidden), samples.where(hidden)
    trial = _fitted(seen, samples, device, kernel)
    error = relative_error(trial.time_s(unseen.m, unseen.n, unseen.k), unseen.time_s)
    final = _fitted(samples, samples, device, kernel)
    return GemmSurface(
        device=device,
        kernel=kernel,
        element_bytes=final.element_bytes,
        base=final.base,
        knots=final.knots,
        corrections=final.corrections,
        num_samples=len(samples),
        median_error=error.median,
        p90_error=error.p90,
        source=SOURCE,
    )


def _fitted(samples: GemmSamples, grid: GemmSamples, device: str, kernel: str) -> GemmSurface:
    element_bytes = ELEMENT_BYTES[kernel]

    def base(parameters: FloatArray) -> FloatArray:
        return base_time_s(parameters, samples.m, samples.n, samples.k, element_bytes=element_bytes)

    start = np.array([float(np.quantile(samples.flops_per_s, 0.95)), *_START])
    parameters = fit_positive(base, samples.time_s, start)
    knots = (_knots(grid.m), _knots(grid.n), _knots(grid.k))
    residuals = np.log(samples.time_s / base(parameters))
    rate, bandwidth, saturation, launch_s = (float(parameter) for parameter in parameters)
    return GemmSurface(
        device=device,
        kernel=kernel,
        element_bytes=element_bytes,
        base=(rate, bandwidth, saturation, launch_s),
        knots=knots,
        corrections=_corrections(knots, (samples.m, samples.n, samples.k), residuals),
        num_samples=len(samples),
        median_error=0.0,
        p90_error=0.0,
        source=SOURCE,
    )


def _corrections(
    knots: tuple[FloatArray, FloatArray, FloatArray], points: tuple[FloatArray, ...], residuals: FloatArray
) -> FloatArray:
    shape = tuple(len(positions) for positions in knots)
    indices, weights = interpolation(knots, points)
    size = int(np.prod(shape))
    weight_at = np.bincount(indices.ravel(), weights.ravel(), minlength=size)
    lean = SMOOTHING / (SMOOTHING + weight_at.reshape(shape))
    table = np.zeros(size)
    for _ in range(ITERATIONS):
        missing = residuals - (table[indices] * weights).sum(axis=0)
        step = np.bincount(indices.ravel(), (weights * missing).ravel(), minlength=size)
        table = table + step / np.maximum(weight_at, SMOOTHING)
        grid = table.reshape(shape)
        table = ((1.0 - lean) * grid + lean * _neighbour_mean(grid)).ravel()
    return table.reshape(shape)


def _neighbour_mean(grid: FloatArray) -> FloatArray:
    total, count = np.zeros_like(grid), np.zeros_like(grid)
    for axis in range(grid.ndim):
        if grid.shape[axis] == 1:
            continue
        lower = [slice(None)] * grid.ndim
        upper = [slice(None)] * grid.ndim
        lower[axis], upper[axis] = slice(None, -1), slice(1, None)
        for here, there in ((tuple(lower), tuple(upper)), (tuple(upper), tuple(lower))):
            total[here] += grid[there]
            count[here] += 1.0
    return np.asarray(total / count)


def _knots(values: FloatArray) -> FloatArray:
    """The measured values thinned to one per octave, with the value one above each where it was measured.

    The table has pairs such as 256 and 257: both sides of a tile's edge, where the time jumps.
    """
    distinct = np.unique(values)
    chosen = [distinct[0]]
    for value in distinct[1:]:
        if np.log2(value / chosen[-1]) >= 1.0 / KNOTS_PER_OCTAVE - 1e-9:
            chosen.append(value)
    if chosen[-1] != distinct[-1]:
        chosen.append(distinct[-1])
    beyond = np.intersect1d(np.array(chosen) + 1.0, distinct)
    return np.union1d(chosen, beyond)


def main(arguments: Sequence[str]) -> None:
    """Write the JSON text to standard output."""
    tables = load(Path(arguments[0]))
    rows = [
        surface_row(fit_surface(samples, device=device, kernel=kernel))
        for (device, kernel), samples in sorted(tables.items())
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    sys.stdout.write(f'{{"source": {json.dumps(SOURCE)},\n"surfaces": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
