"""Fits a :class:`~meshplan.catalogs.surfaces.gemm.GemmSurface` to measured products, and makes the shipped ones.

First the four parameters of the formula, then the corrections at every measured size by kriging
(:mod:`meshplan.profiler.fitting.kriging`). How rough the surface is in n, and how noisy the measurements are, is what a
hidden fifth of the products of the fit itself says; products that an error is stated for take no part in that choice.

Run by hand to make the shipped file (four minutes of one core)::

    python -m meshplan.profiler.shipped.fit_gemm gemm.csv.gz AICONFIGURATOR_CORE catalogs/seed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.importers.perf_tables import SYSTEMS, data_folder, fastest, newest_table, read_perf_table, where
from meshplan.catalogs.surfaces.gemm import SURFACES, GemmSurface, base_time_s, surface_row
from meshplan.catalogs.surfaces.grid import grid_value
from meshplan.catalogs.surfaces.time_tables import Points
from meshplan.profiler.fitting.gemm_model import HELD_OUT_FRACTION, GemmSamples
from meshplan.profiler.fitting.kriging import Prior, krige
from meshplan.profiler.fitting.least_squares import FloatArray, fit_positive, folds, held_out, relative_error
from meshplan.profiler.shipped.command import write_files
from meshplan.profiler.shipped.fit_efficiency import load

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
# A surface forgets itself over so many octaves of m and k. In n, where tiles are chosen and wasted, it is rougher; by
# how much depends on the library: the fit chooses. Single m and n have something of their own (a tile's edge), k is
# the length of the innermost loop and has not.
_LENGTH_M, _LENGTH_K = 8.0, 4.0
_OWN_SHARES = (0.03, 0.3, 0.0)
PRIORS = tuple(
    Prior(lengths=(_LENGTH_M, length_n, _LENGTH_K), own_shares=_OWN_SHARES, noise=noise)
    for length_n, noise in product((0.5, 2.0), (0.003, 0.01, 0.03, 0.1))
)
# Where a lattice of all measured sizes would have more knots a product than this, sizes are thinned to octaves.
MAX_KNOTS_PER_SAMPLE = 4
KNOTS_PER_OCTAVE = 1.0
Knots3 = tuple[FloatArray, FloatArray, FloatArray]
_START = (2e12, 60.0, 3e-6)  # B, k₀, t₀; R starts from the fastest products


def fit_surface(samples: GemmSamples, *, device: str, kernel: str, seed: int = 0) -> GemmSurface:
    """Fit a surface, and say how well fits predict the products that they have not seen: each fifth in turn.

    Args:
        samples: measured products of any size, at least two values in each direction.
        device: slug.
        kernel: name of the kernel, a key of :data:`ELEMENT_BYTES`.
        seed: for the random fifths.
    """
    predicted = np.empty(len(samples))
    for hidden in folds(len(samples), fraction=HELD_OUT_FRACTION, seed=seed):
        unseen = samples.where(hidden)
        fitted = _fitted(samples.where(~hidden), device, kernel, seed)
        predicted[hidden] = fitted.time_s(unseen.m, unseen.n, unseen.k)
    error = relative_error(predicted, samples.time_s)
    return replace(_fitted(samples, device, kernel, seed), median_error=error.median, p90_error=error.p90)


def _fitted(samples: GemmSamples, device: str, kernel: str, seed: int) -> GemmSurface:
    element_bytes = ELEMENT_BYTES[kernel]

    def base(parameters: FloatArray) -> FloatArray:
        return base_time_s(parameters, samples.m, samples.n, samples.k, element_bytes=element_bytes)

    start = np.array([float(np.quantile(samples.flops_per_s, 0.95)), *_START])
    parameters = fit_positive(base, samples.time_s, start)
    residuals = np.log(samples.time_s / base(parameters))
    rate, bandwidth, saturation, launch_s = (float(parameter) for parameter in parameters)
    knots, points = _lattice(samples), (samples.m, samples.n, samples.k)
    return GemmSurface(
        device=device,
        kernel=kernel,
        element_bytes=element_bytes,
        base=(rate, bandwidth, saturation, launch_s),
        knots=knots,
        corrections=krige(knots, points, residuals, _likeliest(knots, points, residuals, seed)),
        num_samples=len(samples),
        median_error=math.nan,
        p90_error=math.nan,
        source=SOURCE,
    )


def _likeliest(knots: Knots3, points: Points, residuals: FloatArray, seed: int) -> Prior:
    """The prior under which a fit predicts a fifth that was hidden from it best, in the mean of |log error|."""
    hidden = held_out(len(residuals), fraction=HELD_OUT_FRACTION, seed=seed)
    seen, unseen = tuple(axis[~hidden] for axis in points), tuple(axis[hidden] for axis in points)

    def error(prior: Prior) -> float:
        surface = krige(knots, seen, residuals[~hidden], prior)
        return float(np.abs(grid_value(knots, surface, unseen) - residuals[hidden]).mean())

    return min(PRIORS, key=error)


def _lattice(samples: GemmSamples) -> Knots3:
    """Every measured size; thinned where few of their combinations were measured."""
    measured = np.unique(samples.m), np.unique(samples.n), np.unique(samples.k)
    if math.prod(len(sizes) for sizes in measured) <= MAX_KNOTS_PER_SAMPLE * len(samples):
        return measured
    return _knots(samples.m), _knots(samples.n), _knots(samples.k)


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


def wheel_tables(folder: Path, systems: Mapping[str, str] = SYSTEMS) -> dict[tuple[str, str], GemmSamples]:
    """(device, kernel) → products of TensorRT-LLM in the wheel's tables."""
    tables = {}
    for system, device in systems.items():
        path = newest_table(folder, system, "gemm", "trtllm", "gemm_perf")
        if path is None:
            continue
        columns = read_perf_table(path, texts=("gemm_dtype",), counts=("m", "n", "k"))
        for kernel in ELEMENT_BYTES:
            found = where(columns, columns["gemm_dtype"] == kernel)
            if len(found["time_s"]):
                found = fastest(found, ("m", "n", "k"))
                tables[device, kernel] = GemmSamples(m=found["m"], n=found["n"], k=found["k"], time_s=found["time_s"])
    return tables


def files(gemm_table: Path, aiconfigurator_core: Path) -> dict[str, str]:
    """Surfaces of matrix products, from a CSV of products; the folder adds the devices that the CSV has not."""
    tables = load(gemm_table)
    known = {device for device, _ in tables}
    newer = wheel_tables(data_folder(aiconfigurator_core))
    tables |= {key: samples for key, samples in newer.items() if key[0] not in known}
    return {SURFACES.shipped.name: SURFACES.text(fitted_rows(tables), source=SOURCE)}


def fitted_rows(tables: Mapping[tuple[str, str], GemmSamples]) -> list[dict[str, Any]]:
    """Fit every table: rows of a surface file."""
    return [
        surface_row(fit_surface(samples, device=device, kernel=kernel))
        for (device, kernel), samples in sorted(tables.items())
    ]


if __name__ == "__main__":
    write_files(files)
