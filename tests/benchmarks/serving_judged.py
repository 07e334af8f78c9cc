"""Served runs that no constant has seen, by model and by server: the tables of two findings, as they stand there.

    python tests/benchmarks/serving_judged.py OBSERVATIONS --traces DIR

OBSERVATIONS is a folder with ``serving-mlenergy.jsonl`` and ``serving-silicon-disaggregated.jsonl``. Prints the tables
of ``ml_energy.md`` and ``disaggregated.md`` (``planner/serving/measured/findings``) with the shipped constants: median
and mean of the absolute error, and for the second the median with its sign.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import ValidatedRow

Source = Mapping[str, Any]
Judged = Sequence[tuple[ValidatedRow, Source]]

RATES_AND_GAPS = ("output_tokens_per_s", "itl_median_s", "itl_p90_s", "itl_p99_s")
MODELS = {
    "Llama-3.1-70B": ("Llama-3.1-70B",),
    "Qwen3-30B, code's too": ("Qwen3-30B", "Qwen3-Coder-30B"),
    "Qwen3-235B": ("Qwen3-235B",),
    "Qwen3-Coder-480B": ("Qwen3-Coder-480B",),
    "DeepSeek-R1 and V3.1": ("DeepSeek",),
    "gpt-oss": ("gpt-oss",),
    "Nemotron-Nano (hybrids)": ("Nemotron",),
}
MOST_IN_FLIGHT = 128


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("observations", type=Path)
    parser.add_argument("--traces", type=Path, required=True)
    options = parser.parse_args()
    catalog = Catalog.open("sqlite://")
    _print_models(_judged(options.observations / "serving-mlenergy.jsonl", options.traces, catalog))
    _print_servers(_judged(options.observations / "serving-silicon-disaggregated.jsonl", options.traces, catalog))


def _judged(path: Path, traces: Path, catalog: Catalog) -> Judged:
    """Predicted rows of a file, each beside what was read."""
    rows = {row["id"]: row for row in read_rows(path)}
    result = validate_rows(list(rows.values()), catalog, traces=traces)
    return [(row, rows[row.id]) for row in result.rows if row.status == "ok"]


def _print_models(judged: Judged) -> None:
    """Rates and gaps between tokens, by device and by model."""
    print("\n| rows | runs | output tokens/s | gap, median | gap, p90 | gap, p99 |\n|---|---:|---:|---:|---:|---:|")
    kinds: dict[str, Callable[[Source], bool]] = {
        "all": lambda row: True,
        "H100": lambda row: "h100" in row["hardware"]["device"],
        "single B200": _is_single_b200,
        "without single B200": lambda row: not _is_single_b200(row),
    }
    kinds |= {name: partial(_is_model, words) for name, words in MODELS.items()}
    for name, is_asked in kinds.items():
        chosen = [row for row, source in judged if is_asked(source)]
        cells = " | ".join(_spread(chosen, metric) for metric in RATES_AND_GAPS)
        print(f"| {name} | {len(chosen)} | {cells} |")


def _is_model(words: Sequence[str], row: Source) -> bool:
    return any(word in row["model"]["name"] for word in words)


def _is_single_b200(row: Source) -> bool:
    return row["hardware"]["device"].startswith("b200") and row["hardware"]["num_devices"] == 1


def _print_servers(judged: Judged) -> None:
    """Both latencies of disaggregated servers: all, few in flight, and these by engine, format and prompt."""
    print("\n| rows | runs | time per token | signed | time to first token | signed |\n|---|---:|---:|---:|---:|---:|")
    few = [(row, source) for row, source in judged if source["workload"]["concurrency"] <= MOST_IN_FLIGHT]
    groups: dict[str, list[ValidatedRow]] = {"all": [row for row, _ in judged]}
    groups[f"up to {MOST_IN_FLIGHT} in flight"] = [row for row, _ in few]
    for row, source in few:
        name = f"{source['framework']['name']}, {_format(source)}, prompts of {source['workload']['input_length']:,}"
        groups.setdefault(name, []).append(row)
    for name, chosen in groups.items():
        cells = " | ".join(
            f"{_spread(chosen, metric)} | {100 * np.median(_errors(chosen, metric)):+.1f} %"
            for metric in ("tpot_s", "ttft_s")
        )
        print(f"| {name} | {len(chosen)} | {cells} |")


def _format(row: Source) -> str:
    """Number format of the weights, which the source's ids name."""
    return "NVFP4" if "fp4" in row["id"] else "fp8"


def _spread(rows: Sequence[ValidatedRow], metric: str) -> str:
    """Median and mean of the absolute error."""
    errors = np.abs(_errors(rows, metric))
    return f"{100 * np.median(errors):.1f} / {100 * np.mean(errors):.1f} %"


def _errors(rows: Sequence[ValidatedRow], metric: str) -> list[float]:
    return [row.error[metric] for row in rows if metric in row.error]


if __name__ == "__main__":
    main()
