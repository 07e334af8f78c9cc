"""Makes ``recurrent_kernels.json`` of ``catalogs/seed`` from published kernel tables.

A table times one recurrence over E = sequences × state elements (decode) or tokens × state elements (prefill) of one
layer; what ships is t = t₀ + E/r. Its error is that on each count of heads, by the line of the others.

States of a timed decode that a cache holds from one repetition to the next are left out: between two tokens of a
request all layers and all weights pass through it.

Run by hand when the tables change (they are not part of meshplan)::

    python -m meshplan.profiler.shipped.fit_recurrent AICONFIGURATOR_CORE catalogs/seed
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.efficiency import KERNEL_S
from meshplan.catalogs.importers.perf_tables import (
    SYSTEMS,
    Columns,
    data_folder,
    fastest,
    newest_table,
    read_perf_table,
    where,
)
from meshplan.catalogs.surfaces.files import FRAMEWORKS
from meshplan.catalogs.surfaces.grid import FloatArray
from meshplan.catalogs.surfaces.recurrent import DECODE, KERNELS, PREFILL
from meshplan.profiler.fitting.least_squares import fit_positive, relative_error
from meshplan.profiler.shipped.command import AICONFIGURATOR, write_files

# Kind of recurrent mixer → (folder, table). The tables of Mamba-2 time its convolution alone.
TABLES = {"gated-delta": ("linear_attention", "gdn_perf"), "kimi-delta": ("kda", "kda_perf")}
# Phase → as the tables call it. `verify` times several drafted tokens a request.
PHASES = {DECODE: "generation", PREFILL: "context"}
CONVOLUTION = "causal_conv1d"
SIZES = ("batch_size", "seq_len", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
# t₀ s, r elements/s: of a Hopper device; the fit finds the others from there.
_START = (5e-6, 5e11)
MIN_SAMPLES = 8  # a line has two parameters, and some are held out
# States in fp32 of twice the largest second-level cache of these devices (128 MB), and such that the launch is most of
# the time: 2 MB pass in half a microsecond.
UNCACHED_ELEMENTS, LAUNCH_ELEMENTS = 2**26, 2**19


def files(aiconfigurator_core: Path) -> dict[str, str]:
    """Recurrences by kind, device, framework and phase."""
    rows = recurrent_rows(data_folder(aiconfigurator_core))
    return {KERNELS.shipped.name: KERNELS.text(rows, source=AICONFIGURATOR)}


def recurrent_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """One stored line for each device, kind, framework and phase that was measured."""
    for system, device in sorted(SYSTEMS.items()):
        for kind, (family, name) in TABLES.items():
            for framework in FRAMEWORKS:
                path = newest_table(folder, system, family, framework, name)
                if path is None:
                    continue
                columns = read_perf_table(path, texts=("kernel_source", "phase"), counts=SIZES)
                for phase in PHASES:
                    chosen = recurrence(columns, phase)
                    if len(chosen["time_s"]) >= MIN_SAMPLES:
                        keys = {"device": device, "kind": kind, "framework": framework, "phase": phase}
                        yield keys | {"version": path.parent.name} | fitted(chosen)


def recurrence(columns: Columns, phase: str) -> Columns:
    """The fastest recurrence of each size in a phase; convolutions are other kernels."""
    is_scan = np.array([not name.startswith(CONVOLUTION) for name in columns["kernel_source"]])
    chosen = fastest(where(columns, is_scan & (columns["phase"] == PHASES[phase])), SIZES)
    if phase != DECODE:
        return chosen
    elements = updated_elements(chosen)
    return where(chosen, (elements <= LAUNCH_ELEMENTS) | (elements >= UNCACHED_ELEMENTS))


def updated_elements(columns: Columns) -> FloatArray:
    """Tokens × elements of the state that each of them updates."""
    tokens = columns["batch_size"] * np.maximum(columns["seq_len"], 1.0)
    return np.asarray(tokens * columns["num_v_heads"] * columns["head_k_dim"] * columns["head_v_dim"], dtype=float)


def fitted(columns: Columns) -> dict[str, Any]:
    """The line, and its error where each count of heads is predicted from the others."""
    elements, times_s, heads = updated_elements(columns), columns["time_s"], columns["num_v_heads"]
    start_s, elements_per_s = fit_line(elements, times_s)
    predicted = np.empty_like(times_s)
    for count in np.unique(heads):
        start, rate = fit_line(elements[heads != count], times_s[heads != count])
        predicted[heads == count] = start + elements[heads == count] / rate
    error = relative_error(predicted, times_s)
    return {
        "start_s": float(f"{max(start_s, KERNEL_S):.3g}"),  # a table without launch-bound sizes tells no start
        "elements_per_s": float(f"{elements_per_s:.4g}"),
        "num_samples": len(elements),
        "median_error": round(error.median, 3),
        "p90_error": round(error.p90, 3),
    }


def fit_line(elements: FloatArray, times_s: FloatArray) -> FloatArray:
    """(t₀, r) of the line that is nearest in relative terms."""
    return fit_positive(lambda at: at[0] + elements / at[1], times_s, np.array(_START))


if __name__ == "__main__":
    write_files(files)
