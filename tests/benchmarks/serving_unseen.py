"""Published served runs that nobody looked at before they were predicted, beside predictions of the shipped constants.

    python tests/benchmarks/serving_unseen.py [ID ...]

``tests/data/published/serving_runs.jsonl`` holds what a user could say of each server (model, boards, release, flags,
requests) and what its publisher printed; the publishers' simulators and advice were not taken. No constant is fitted to
these rows. With parts of ids only those that have one of them. Prints the signed error of each row, and median and sign
of the rows of one server. What they tell: ``planner/serving/measured/findings/unseen.md``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import ValidatedRow

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
METRICS = {
    "output_tokens_per_s": "tokens/s",
    "ttft_s": "first token",
    "ttft_p99_s": "first, p99",
    "tpot_s": "per token",
    "itl_median_s": "gap, median",
    "latency_s": "end to end",
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*")
    wanted = parser.parse_args().ids
    rows = [row for row in read_rows(PUBLISHED / "serving_runs.jsonl") if _is_asked(row["id"], wanted)]
    result = validate_rows(rows, Catalog.open("sqlite://"), traces=PUBLISHED)
    print("| run | " + " | ".join(METRICS.values()) + " |\n|---|" + "---:|" * len(METRICS))
    servers: dict[str, list[ValidatedRow]] = defaultdict(list)
    for row in result.rows:
        if row.status != "ok":
            print(f"| {row.id} | {row.reason} |" + " |" * (len(METRICS) - 1))
            continue
        servers[row.id.rpartition("-")[0]].append(row)
        print(f"| {row.id} | " + " | ".join(_signed([row], metric) for metric in METRICS) + " |")
    print("\n| server, median over its runs | " + " | ".join(METRICS.values()) + " |\n|---|" + "---:|" * len(METRICS))
    every = [row for found in servers.values() for row in found]
    for name, runs in [*servers.items(), ("all", every)]:
        print(f"| {name} ({len(runs)}) | " + " | ".join(_signed(runs, metric) for metric in METRICS) + " |")


def _is_asked(name: str, parts: Iterable[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _signed(rows: Sequence[ValidatedRow], metric: str) -> str:
    """Median error with its sign; of several rows the median of its size, too."""
    errors = [row.predicted[metric].value / row.measured[metric] - 1.0 for row in rows if metric in row.error]
    if not errors:
        return "-"
    signed = f"{100 * np.median(errors):+.1f} %"
    return signed if len(rows) == 1 else f"{100 * np.median(np.abs(errors)):.1f} % ({signed})"


if __name__ == "__main__":
    main()
