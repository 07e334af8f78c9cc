"""Served hybrids beside models whose mixers all are attention: errors with constants that have seen neither's runs.

    python tests/benchmarks/hybrids.py serving-mlenergy.jsonl --traces DIR

Both kinds come from one source with one engine, to which no constant is fitted, so that every model is left out. Some
rows are suspected by the source to wait for the host, most of them hybrids': all rows, then those without. Hybrids ran
on one kind of server alone: the same of its rows, so that hosts are alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.machines import read_rows

METRICS = ("itl_median_s", "output_tokens_per_s", "itl_p99_s")
HYBRID = "hybrid_override_pattern"
HOST_BOUND = "suspected host-bound"


def main() -> None:
    """Print median and mean of the absolute error, the median with its sign, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("observations", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    options = parser.parse_args()
    rows = {row["id"]: row for row in read_rows(options.observations)}
    result = validate_rows(list(rows.values()), Catalog.open("sqlite://"), traces=options.traces)
    on = {_servers(row) for row in rows.values() if HYBRID in row["model"]}
    kinds: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
        "all rows": lambda row: True,
        "without rows that may wait for the host": lambda row: not _waits(row),
        "on the devices that ran hybrids": lambda row: _servers(row) in on,
        "on these, without rows that may wait for the host": lambda row: _servers(row) in on and not _waits(row),
    }
    for words, is_asked in kinds.items():
        print(f"\n{words}")
        for metric in METRICS:
            errors: dict[bool, list[float]] = {True: [], False: []}
            for row in result.rows:
                source = rows[row.id]
                if row.status == "ok" and metric in row.error and is_asked(source):
                    errors[HYBRID in source["model"]].append(row.error[metric])
            ratio = np.median(np.abs(errors[True])) / np.median(np.abs(errors[False]))
            print(f"  {metric:<20} hybrids {_spread(errors[True])}; others {_spread(errors[False])}; ratio {ratio:.2f}")


def _servers(row: Mapping[str, Any]) -> tuple[str, int]:
    """Device and how many."""
    return row["hardware"]["device"], row["hardware"]["num_devices"]


def _waits(row: Mapping[str, Any]) -> bool:
    """The source suspects that it waits for the host."""
    return any(HOST_BOUND in caveat for caveat in row["caveats"])


def _spread(errors: list[float]) -> str:
    found = 100.0 * np.array(errors)
    return f"{np.median(abs(found)):.1f} / {abs(found).mean():.1f} % ({np.median(found):+.1f}) of {len(found)}"


if __name__ == "__main__":
    main()
