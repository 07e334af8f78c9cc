"""Makes ``attention_surfaces.json`` and ``latent_surfaces.json`` of ``catalogs/seed`` from published kernel tables.

Run by hand when the tables change (they are not part of meshplan)::

    python -m meshplan.profiler.shipped.fit_attention AICONFIGURATOR_CORE catalogs/seed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.importers.perf_tables import (
    SYSTEMS,
    Columns,
    data_folder,
    fastest,
    newest_table,
    read_perf_table,
    where,
)
from meshplan.catalogs.surfaces import attention as attention_surfaces
from meshplan.catalogs.surfaces import latent_attention as latent_surfaces
from meshplan.catalogs.surfaces.files import FRAMEWORKS
from meshplan.catalogs.surfaces.grid import FloatArray
from meshplan.catalogs.surfaces.time_tables import Points, TimeTable, table_row
from meshplan.profiler.fitting.surface_fit import cross_validated, fit_time_table
from meshplan.profiler.shipped.command import AICONFIGURATOR, write_files

# Tables that no device could have produced: rows of 4.29 GB of cache in 1.24 ms are 3.5 TB/s, an A100 has 2.0 TB/s.
IMPOSSIBLE = {("a100_sxm", "decode", "trtllm")}
# Spelling of the tables → ours.
DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}
# B bytes/s, R FLOP/s, t₀ s: of a Hopper device; the fit finds the others from there.
_START = (2e12, 3e14, 1e-5)
# A table of fewer measurements says little: fewer knots than points on one axis.
MIN_SAMPLES = 200
# Heads per KV head that are off by more than this in the median get a knot besides those at powers of two.
OWN_KNOT_ERROR = 0.04


def files(aiconfigurator_core: Path) -> dict[str, str]:
    """Surfaces of attention, and of latent attention."""
    folder = data_folder(aiconfigurator_core)
    return {
        attention_surfaces.SURFACES.shipped.name: attention_surfaces.SURFACES.text(
            attention_rows(folder), source=AICONFIGURATOR
        ),
        latent_surfaces.SURFACES.shipped.name: latent_surfaces.SURFACES.text(
            latent_rows(folder), source=AICONFIGURATOR
        ),
    }


def octaves(low: float, high: float, *, step: int = 1) -> FloatArray:
    """Powers of two from ``low`` to ``high``, every ``step``-th."""
    return 2.0 ** np.arange(np.log2(low), np.log2(high) + 0.5, step)


def attention_rows(folder: Path, systems: Mapping[str, str] = SYSTEMS) -> Iterator[dict[str, Any]]:
    """One stored table for each device, phase, framework, type of the cache, with and without a window."""
    for system, device in sorted(systems.items()):
        for phase in attention_surfaces.PHASES:
            for framework in FRAMEWORKS:
                for (kv_dtype, windowed), kernel, columns in attention_samples(folder, system, phase, framework):
                    keys = {"device": device, "phase": phase, "framework": framework}
                    table = fit_attention(columns, phase, kv_dtype, kernel)
                    yield keys | {"kv_dtype": kv_dtype, "windowed": windowed} | table_row(table)


def fit_attention(columns: Columns, phase: str, kv_dtype: str, kernel: str) -> TimeTable:
    """A table over u, L, length/L, g and d; a group far from its neighbours gets a knot of its own."""
    points = attention_points(columns, phase)

    def fitted(groups: FloatArray) -> Callable[[Points, FloatArray], TimeTable]:
        return partial(
            fit_time_table,
            formula=attention_surfaces.attention_formula(phase, kv_dtype),
            start=_START,
            knots=_attention_knots(points, groups, phase),
            rising=attention_surfaces.RISING,
            kernel=kernel,
        )

    measured = np.unique(points[3])
    plain = np.intersect1d(measured, octaves(1, 64))
    groups = np.unique([measured[0], *plain, measured[-1]])
    if set(measured) - set(groups):
        off = np.abs(fitted(groups)(points, columns["time_s"]).time_s(points) / columns["time_s"] - 1.0)
        odd = [group for group in measured if np.median(off[points[3] == group]) > OWN_KNOT_ERROR]
        groups = np.union1d(groups, odd)
    return cross_validated(fitted(groups), points, columns["time_s"])


def attention_samples(
    folder: Path, system: str, phase: str, framework: str
) -> Iterator[tuple[tuple[str, bool], str, Columns]]:
    """((type of the cache, windowed), kernel, measurements), with the type of queries that was measured most."""
    name = "context_attention_perf" if phase == "prefill" else "generation_attention_perf"
    path = newest_table(folder, system, "attention", framework, name)
    if path is None or (system, phase, framework) in IMPOSSIBLE:
        return
    counts = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size")
    columns = read_perf_table(path, texts=("attn_dtype", "kv_cache_dtype"), counts=counts, optional=("window_size",))
    for stored, kv_dtype in DTYPES.items():
        of_type = columns["kv_cache_dtype"] == stored
        queries, sizes = np.unique(columns["attn_dtype"][of_type].astype(str), return_counts=True)
        if not len(sizes) or sizes.max() < MIN_SAMPLES:
            continue
        # Where both were measured about as often, an engine with an fp8 cache runs fp8 queries.
        query = queries[np.flatnonzero(sizes >= 0.9 * sizes.max())[-1]]
        for windowed in (False, True):
            mask = of_type & (columns["attn_dtype"] == query) & ((columns["window_size"] > 0) == windowed)
            if mask.sum() >= MIN_SAMPLES:
                kernel = f"{framework} {path.parent.name}, {query} queries"
                yield (kv_dtype, windowed), kernel, fastest(where(columns, mask), counts)


def attention_points(columns: Columns, phase: str) -> Points:
    """Measured coordinates (u, L, length/L, g, d)."""
    heads, kv_heads = columns["num_heads"], columns["num_key_value_heads"]
    length = columns["isl"] if phase == "prefill" else columns["step"] + columns["isl"]
    window = columns["window_size"]
    attended = np.where(window > 0, np.minimum(length, window), length)
    units = columns["batch_size"] * (heads if phase == "prefill" else kv_heads)
    return units, attended, length / attended, heads / kv_heads, columns["head_dim"]


def _attention_knots(points: Points, groups: FloatArray, phase: str) -> tuple[FloatArray, ...]:
    units, attended, spread, _, width = points
    # Prefill times follow u more smoothly: few sequences fill a device. Decode hardly sees what a window hides.
    units_step, spread_step = (2, 2) if phase == "prefill" else (1, 3)
    farther = octaves(4, max(spread.max(), 4.0), step=spread_step)
    return (
        octaves(1, units.max(), step=units_step),
        octaves(max(2.0 ** np.floor(np.log2(attended.min())), 1.0), attended.max()),
        np.array([1.0, *farther]) if spread.max() > 1.0 else np.ones(1),
        groups,
        np.unique(width),
    )


def latent_rows(folder: Path, systems: Mapping[str, str] = SYSTEMS) -> Iterator[dict[str, Any]]:
    """One stored table for each device, phase, framework and type of the cache."""
    for system, device in sorted(systems.items()):
        for phase in attention_surfaces.PHASES:
            for framework in latent_surfaces.FRAMEWORKS:
                for dtype, kernel, columns in latent_samples(folder, system, phase, framework):
                    keys = {"device": device, "phase": phase, "framework": framework, "scope": latent_surfaces.KERNEL}
                    table = fit_latent(columns, phase, dtype, kernel)
                    yield keys | {"dtype": dtype} | table_row(table)


def latent_samples(folder: Path, system: str, phase: str, framework: str) -> Iterator[tuple[str, str, Columns]]:
    """(type of the cache, kernel, measurements)."""
    name = {"prefill": "context_mla_perf", "decode": "generation_mla_perf"}[phase]
    path = newest_table(folder, system, "mla", framework, name)
    if path is None:
        return
    counts = ("batch_size", "isl", "step", "num_heads")
    columns = read_perf_table(path, texts=("kv_cache_dtype",), counts=counts)
    for stored, dtype in DTYPES.items():
        chosen = where(columns, columns["kv_cache_dtype"] == stored)
        if len(chosen["time_s"]) >= MIN_SAMPLES:
            yield dtype, f"{framework} {path.parent.name}", fastest(chosen, counts)


def fit_latent(columns: Columns, phase: str, dtype: str, kernel: str) -> TimeTable:
    """A table over sequences, heads and length."""
    length = columns["isl"] if phase == "prefill" else columns["step"] + columns["isl"]
    points = (columns["batch_size"], columns["num_heads"], length)
    fit = partial(
        fit_time_table,
        formula=latent_surfaces.latent_formula(phase, dtype),
        start=_START,
        knots=tuple(octaves(1, values.max()) for values in points),
        rising=latent_surfaces.RISING,
        kernel=kernel,
    )
    return cross_validated(fit, points, columns["time_s"])


if __name__ == "__main__":
    write_files(files)
