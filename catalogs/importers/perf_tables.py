"""Reads the kernel tables of the ``aiconfigurator-core`` wheel: parquet files, one measured kernel per row.

They lie under ``systems/data/SYSTEM/FAMILY/FRAMEWORK/VERSION/NAME.parquet`` and have a column ``latency`` in
milliseconds. As with CSV tables, a file with a missing column, or a value outside its sane range, is rejected as
a whole. pyarrow is needed to read them: ``pip install 'meshplan[aiconfigurator]'``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.errors import CatalogError, Problem
from meshplan.catalogs.importers.csv_tables import MAX_PROBLEMS, refusal
from meshplan.catalogs.surfaces.files import FRAMEWORKS

Columns = dict[str, NDArray[Any]]
# Folder of the wheel → slug of the device.
SYSTEMS: Mapping[str, str] = {
    "a100_sxm": "a100-sxm-80gb",
    "b200_sxm": "b200-sxm-180gb",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
# A kernel takes between a tenth of a launch and a minute; seconds or microseconds in place of ms fall outside.
_MIN_LATENCY_MS, _MAX_LATENCY_MS = 1e-4, 6e4
_MAX_COUNT = 2**31
TEXT_SUFFIX = ".txt"
# Pairs of counts of which the first is never the greater one.
_ORDERED = (("num_key_value_heads", "num_heads"), ("topk", "num_experts"), ("moe_ep_size", "num_experts"))


def data_folder(root: Path) -> Path:
    """The folder of the systems under an unpacked or installed wheel.

    Raises:
        CatalogError: there is none.
    """
    packages = (root / "aiconfigurator_core", root / "aiconfigurator")
    for folder in (root, root / "systems" / "data", *(package / "systems" / "data" for package in packages)):
        if any((folder / system).is_dir() for system in SYSTEMS):
            return folder
    raise CatalogError(
        f"{root} holds no kernel tables: give the folder of the installed package aiconfigurator_core, or of its "
        f"systems/data (with {', '.join(sorted(SYSTEMS)[:3])}, …)"
    )


def newest_table(folder: Path, system: str, family: str, framework: str, name: str) -> Path | None:
    """The file of the newest version of a framework; None where there is none."""
    return next(iter(all_versions(folder, system, family, framework, name)), None)


def all_versions(folder: Path, system: str, family: str, framework: str, name: str) -> list[Path]:
    """The files of every version of a framework, newest first."""
    files = (folder / system / family / framework).glob(f"*/{name}.parquet")
    return sorted(files, key=lambda file: _version(file.parent.name), reverse=True)


def read_perf_table(
    path: Path, *, texts: Sequence[str], counts: Sequence[str], optional: Sequence[str] = ()
) -> Columns:
    """The named columns of a table, and ``time_s`` made of its ``latency``.

    Args:
        path: a parquet file, or ``.txt`` with comma-separated columns as wheels of before 0.8 have it.
        texts: columns of text.
        counts: columns of whole numbers, not negative.
        optional: those of ``counts`` that older tables lack; they are zeros there.

    Raises:
        CatalogError: pyarrow is not installed; unreadable; or malformed, then all problems are listed.
    """
    table = _text_table(path) if path.suffix == TEXT_SUFFIX else _parquet(path)
    problems = [
        Problem(path="columns", message=f"no column {name!r}; the file has {', '.join(table)}")
        for name in (*texts, *counts, "latency")
        if name not in table and name not in optional
    ]
    if problems:
        raise refusal(path, problems)
    problems += origin_problems(path, table)
    columns = {name: np.asarray(table[name], dtype=object) for name in texts}
    for name in counts:
        values = table.get(name, [0] * len(table["latency"]))
        columns[name] = _numbers(values, name, problems, low=0.0, high=_MAX_COUNT, whole=True)
    latency = _numbers(table["latency"], "latency", problems, low=_MIN_LATENCY_MS, high=_MAX_LATENCY_MS, whole=False)
    for name in texts:
        for row in np.flatnonzero([not isinstance(value, str) or not value for value in columns[name]])[:3]:
            problems.append(Problem(path=f"row {row}", message=f"{name}: {columns[name][row]!r} is not a text"))
    for less, more in _ORDERED:
        if less in columns and more in columns:
            for row in np.flatnonzero(columns[less] > columns[more])[:3]:
                message = f"{less} {columns[less][row]:g} is more than {more} {columns[more][row]:g}; columns swapped?"
                problems.append(Problem(path=f"row {row}", message=message))
    if not len(latency):
        problems.append(Problem(path="", message="the table has no rows"))
    if problems:
        raise refusal(path, problems[:MAX_PROBLEMS])
    return columns | {"time_s": latency * 1e-3}


def origin_problems(path: Path, table: Mapping[str, Sequence[Any]]) -> list[Problem]:
    """Whether the rows say that they are of the framework whose folder they lie in, and of one device.

    The wheel has tables of SGLang's all-reduce that are copies of TensorRT-LLM's.
    """
    found = []
    framework, named = path.parent.parent.name, {str(name) for name in table.get("framework", ())}
    if framework in FRAMEWORKS and named and {name.lower() for name in named} != {framework}:
        message = f"rows of {', '.join(sorted(named))} in the folder of {framework}: a copied file?"
        found.append(Problem(path="framework", message=message))
    devices = sorted({str(name) for name in table.get("device", ())})
    if len(devices) > 1:
        found.append(Problem(path="device", message=f"rows of several devices: {', '.join(devices)}"))
    return found


def is_copied(path: Path) -> bool:
    """Whether a table lies in the folder of another framework than its rows name."""
    return any(problem.path == "framework" for problem in origin_problems(path, _parquet(path, ["framework"])))


def where(columns: Columns, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Columns:
    """The rows under a mask, or in an order."""
    return {name: values[rows] for name, values in columns.items()}


def fastest(columns: Columns, keys: Sequence[str]) -> Columns:
    """One row for each combination of ``keys``: the fastest of the kernels that were measured for it."""
    order = np.lexsort((columns["time_s"], *(columns[key] for key in keys)))
    ordered = where(columns, order)
    changed = np.zeros(len(order), dtype=bool)
    changed[:1] = True
    for key in keys:
        changed[1:] |= ordered[key][1:] != ordered[key][:-1]
    return where(ordered, changed)


def _numbers(
    values: Sequence[Any], name: str, problems: list[Problem], *, low: float, high: float, whole: bool
) -> NDArray[np.float64]:
    try:
        numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
    except (TypeError, ValueError):
        problems.append(Problem(path="columns", message=f"{name}: texts where numbers belong; are columns swapped?"))
        return np.zeros(0)
    wrong = ~((numbers >= low) & (numbers <= high))
    if whole:
        wrong |= numbers != np.floor(numbers)
    for row in np.flatnonzero(wrong)[:3]:
        kind = "a whole number of" if whole else "within"
        message = f"{name}: {numbers[row]:g} is not {kind} {low:g} … {high:g}; another unit, or swapped?"
        problems.append(Problem(path=f"row {row}", message=message))
    return numbers


def _parquet(path: Path, columns: list[str] | None = None) -> dict[str, list[Any]]:
    try:
        import pyarrow  # optional
        from pyarrow import parquet
    except ImportError as error:
        raise CatalogError("reading parquet tables needs pyarrow: pip install 'meshplan[aiconfigurator]'") from error
    try:
        return dict(parquet.read_table(path, columns=columns).to_pydict())
    except (OSError, pyarrow.ArrowException) as error:
        raise CatalogError(f"cannot read the table {path}: {error}") from error


def _text_table(path: Path) -> dict[str, list[Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeError, csv.Error) as error:
        raise CatalogError(f"cannot read the table {path}: {error}") from error
    return {name: [row[name] for row in rows] for name in rows[0] if name is not None} if rows else {}


def _version(text: str) -> tuple[tuple[int, int], ...]:
    """Order of versions such as 1.3.0rc20 < 1.3.0rc23 < 1.3.0: a release candidate comes before its release."""
    release, _, candidate = text.partition("rc")
    numbers = [int(part) if part.isdigit() else 0 for part in release.split(".")]
    return (*((1, number) for number in numbers), (0, int(candidate)) if candidate.isdigit() else (0, 10**6))
