"""Published serving runs against the bound of their devices: no run may be above it.

    python tests/benchmarks/overlap_bound.py OBSERVATIONS.jsonl…

Of each aggregated run that states its output rate (or its concurrency and times), the share of the bound at the
requests that its clients keep in flight, or else at the most that its scheduler takes. Prints the largest shares of
each file, and the median by engine. NanoFlow (arXiv:2408.12757) states 50 to 72 % of its optimum for itself, on A100,
where the optimum is the attained rate of matrix products; here it is the datasheet's, and all resources count.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.serving.estimator.bounds.overlap_bound import overlap_bound
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.quantization import SCHEMES
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader

SHOWN = 3


def requests_per_s(run: PreparedRun) -> float | None:
    """Measured requests/s; None where the row states none."""
    measured, workload = run.run.measured, run.run.workload
    devices, output = run.run.config.num_devices, workload.mean_lengths[1]
    if "requests_per_s" in measured:
        return float(measured["requests_per_s"])
    if "output_tokens_per_s" in measured:
        return float(measured["output_tokens_per_s"]) / output
    if "output_tokens_per_s_per_device" in measured:
        return float(measured["output_tokens_per_s_per_device"]) * devices / output
    if workload.concurrency and {"ttft_s", "tpot_s"} <= set(measured):  # Little's law of a closed loop
        return workload.concurrency / (float(measured["ttft_s"]) + (output - 1.0) * float(measured["tpot_s"]))
    return None


def share_of(prepared: PreparedRun) -> float | None:
    """Measured rate over the bound; None where the row does not say enough, or pools differ."""
    rate = requests_per_s(prepared)
    if rate is None or len(prepared.workers) != 1:
        return None
    (worker,), pool = prepared.workers, prepared.run.config.pools[0]
    flight = prepared.run.workload.concurrency or pool.limits.max_num_seqs * pool.num_workers
    most = -(-flight // pool.num_workers)
    narrow = SCHEMES[pool.quantization.mlp].weight_bytes < BYTES_16_BIT
    if narrow and pool.quantization.kv_bytes > 1.0:  # few rows state the cache's format: the bound is of the narrowest
        worker = replace(worker, quantization=replace(pool.quantization, kv_cache="fp8"))
    cached = prepared.run.workload.input_length * prepared.run.workload.prefix_hit_rate
    found = overlap_bound(
        worker, most_running=most, num_running=most, requests_per_s=rate / pool.num_workers, cached=cached
    )
    return found.share


def main(paths: list[Path]) -> None:
    reader = MachineReader(Catalog(open_database()))
    above = total = 0
    for path in paths:
        shares: list[tuple[float, str]] = []
        engines: dict[str, list[float]] = defaultdict(list)
        for line in path.read_text().splitlines():
            row = json.loads(line)
            try:
                prepared = PreparedRun(served_run(row, reader, {}))
                share = share_of(prepared)
            except (UnsupportedError, KeyError, ValueError, ZeroDivisionError):
                continue
            if share is not None:
                shares.append((share, str(row["id"])))
                engines[prepared.run.recipe.name].append(share)
        if not shares:
            continue
        shares.sort(reverse=True)
        total += len(shares)
        above += sum(share > 1.0 for share, _ in shares)
        print(f"{path.name}: {len(shares)} runs, {sum(share > 1.0 for share, _ in shares)} above the bound")
        print("  most: " + ", ".join(f"{share:.0%} {name}" for share, name in shares[:SHOWN]))
        for engine, found in sorted(engines.items()):
            middle, high = np.median(found), np.quantile(found, 0.95)
            print(f"  {engine}: {len(found)} runs, median {middle:.0%}, 95th percentile {high:.0%}")
    print(f"all: {above} of {total} runs above the bound")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
