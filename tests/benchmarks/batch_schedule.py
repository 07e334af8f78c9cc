"""Batch and placement by goodput, on the measured workloads of Pollux.

    python tests/benchmarks/batch_schedule.py FOLDER

FOLDER holds throughput-NAME.csv.gz (step times by placement and local batch) and validation-NAME.csv.gz (metric and
gradient statistics along runs at several batches), as Pollux (OSDI 2021) published them. Three questions:

    steps     iterations to a metric at each batch, from when the smallest batch's run had it and the noise measured
              along the run itself (Pollux's way), along the run at the next smaller batch, at the smallest one
    choice    step times of every second row of the table, between them interpolated by local batch (or by one law for
              all placements), choose (batch, placement) by goodput; its measured goodput beside the best of the whole
              table, over the noise along the run and the size of the cluster
    schedule  time of the schedule of batches beside the best fixed one, on the measured step times
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.planner.batch_size.noise import NoiseScale
from meshplan.planner.batch_size.schedule import Option, best_schedule

# Metrics that are asked for: these shares of the way from a run's first value to the best that all runs reach.
GOALS = (0.5, 0.75, 0.9, 1.0)
# Smoothing of the noise: epochs on each side.
AROUND = 2
# Seconds that a change of batch costs.
CHANGE_S = 30.0
# Of a numeric slope, on logarithms.
STEP = 1e-5
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    with gzip.open(path, "rt") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


def runs_of(rows: list[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[int(row["batch_size"])].append(row)
    return dict(sorted(found.items()))


def noise_of(run: list[Row], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(progress, noise scale in samples) along a run: batch × variance / squared gradient, smoothed."""
    progress = np.array([row["progress"] for row in run])
    variance = np.array([row["grad_var"] for row in run])
    square = np.array([row["grad_sqr"] for row in run])
    smooth = [
        np.median(variance[max(0, at - AROUND) : at + AROUND + 1] / square[max(0, at - AROUND) : at + AROUND + 1])
        for at in range(len(run))
    ]
    return progress, batch * np.maximum(np.array(smooth), 1e-9)


def reached(run: list[Row], metric: float, what: str) -> float | None:
    """Iterations or progress of a run when it first has a metric, between its epochs."""
    before: Row | None = None
    for row in run:
        if row["metric"] >= metric:
            if before is None or row["metric"] == before["metric"]:
                return float(row[what])
            share = (metric - before["metric"]) / (row["metric"] - before["metric"])
            return float(before[what] + share * (row[what] - before[what]))
        before = row
    return None


def steps(runs: dict[int, list[Row]], noise_from: Callable[[int], int]) -> list[float]:
    """Errors of the iterations to each metric at every batch but the smallest.

    Args:
        runs: by batch.
        noise_from: batch → the batch whose run the noise was measured along.
    """
    base = min(runs)
    best = min(max(row["metric"] for row in run) for run in runs.values())
    first = max(run[0]["metric"] for run in runs.values())
    errors = []
    for batch, run in runs.items():
        if batch == base:
            continue
        # The source's variance is that of the smallest batch, whatever the run's own.
        progress, noise = noise_of(runs[noise_from(batch)], base)
        for goal in GOALS:
            metric = first + goal * (best - first)
            needs, measured = reached(runs[base], metric, "progress"), reached(run, metric, "iteration")
            if needs is None or measured is None:
                continue
            middles = (np.arange(2000) + 0.5) / 2000 * needs
            scale = np.exp(np.interp(middles, progress, np.log(noise)))
            # Progress per step over that of the smallest batch: the tokens that count.
            gain = (batch / base) * (1.0 + base / scale) / (1.0 + batch / scale)
            errors.append(abs(float(needs * np.mean(1.0 / gain)) / measured - 1.0))
    return errors


def fitted(rows: list[Row]) -> np.ndarray:
    """Parameters of the step-time law, on logarithms, by damped Gauss-Newton steps (Levenberg-Marquardt)."""
    times = np.log([row["step_time_s"] for row in rows])
    theta, damping = np.log([0.01, 1e-3, 0.01, 1e-3, 0.01, 1e-3, 1.0]), 1.0
    residual = np.log(law(theta, rows)) - times
    for _ in range(300):
        slopes = (
            np.stack([np.log(law(theta + STEP * unit, rows)) - times - residual for unit in np.eye(len(theta))]) / STEP
        )
        change = np.linalg.solve(slopes @ slopes.T + damping * np.eye(len(theta)), -slopes @ residual)
        tried = theta + np.clip(change, -1.0, 1.0)
        left = np.log(law(tried, rows)) - times
        if left @ left < residual @ residual:
            theta, residual, damping = tried, left, max(damping / 3.0, 1e-6)
        else:
            damping *= 3.0
    return np.asarray(theta)


def law(theta: np.ndarray, rows: list[Row]) -> np.ndarray:
    """Step time: (compute^g + sync^g)^(1/g), compute linear in the local batch, sync in the replicas."""
    fixed, each, one, more, far, further, power = np.exp(theta)
    power = 1.0 + power
    local = np.array([row["local_batch"] for row in rows])
    replicas = np.array([row["num_replicas"] for row in rows])
    nodes = np.array([row["num_nodes"] for row in rows])
    near_s = one + more * np.maximum(0.0, replicas - 2.0)
    far_s = far + further * np.maximum(0.0, replicas - 2.0)
    sync = np.where(replicas == 1, 1e-9, np.where(nodes == 1, near_s, far_s))
    return np.asarray(((fixed + each * local) ** power + sync**power) ** (1.0 / power))


def rates(rows: list[Row], step_s: np.ndarray, scale: float) -> np.ndarray:
    """Goodput: samples per second over the samples that the same progress takes."""
    batch = np.array([row["local_batch"] * row["num_replicas"] for row in rows])
    return np.asarray(batch / step_s / (1.0 + batch / scale))


def interpolated(known: list[Row], rows: list[Row]) -> np.ndarray:
    """Step times by the law, times what the same placement took beside it at neighbouring local batches."""
    theta = fitted(known)
    times, beside = law(theta, rows), law(theta, known)
    by_placement: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for row, expected in zip(known, beside, strict=True):
        by_placement[row["placement"]].append((row["local_batch"], row["step_time_s"] / expected))
    for at, row in enumerate(rows):
        points = sorted(by_placement[row["placement"]])
        if points:
            local, ratio = np.log(np.array(points)).T
            times[at] *= np.exp(np.interp(np.log(row["local_batch"]), local, ratio))
    return times


def choices(table: list[Row], scales: list[float], times: np.ndarray) -> list[float]:
    """Loss of goodput by the choice, for each noise scale and largest number of replicas."""
    found = []
    replicas = np.array([row["num_replicas"] for row in table])
    for most in sorted(set(replicas)):
        inside = np.flatnonzero(replicas <= most)
        rows = [table[at] for at in inside]
        measured = np.array([row["step_time_s"] for row in rows])
        for scale in scales:
            chosen = int(np.argmax(rates(rows, times[inside], scale)))
            true = rates(rows, measured, scale)
            found.append(1.0 - float(true[chosen] / true.max()))
    return found


def schedule(table: list[Row], progress: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """Seconds of the best schedule and of the best fixed batch, on measured step times of the whole cluster."""
    fastest: dict[float, float] = {}
    for row in table:
        batch = row["local_batch"] * row["num_replicas"]
        fastest[batch] = max(fastest.get(batch, 0.0), batch / row["step_time_s"])
    options = [Option(batch=batch, tokens_per_s=rate) for batch, rate in sorted(fastest.items())]
    keeps = np.append(True, np.diff(progress) > 0)
    shares = tuple(float(share) for share in progress[keeps] / progress[-1])
    scale = NoiseScale(shares=shares, tokens=tuple(float(value) for value in noise[keeps]))
    total = float(progress[-1]) * options[0].batch
    found = best_schedule(options, reference=options[0].batch, tokens=total, noise=scale, change_s=CHANGE_S)
    return found.seconds, found.fixed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    pooled: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("validation-*.csv.gz")):
        name = path.name.removeprefix("validation-").removesuffix(".csv.gz")
        runs, table = runs_of(read(path)), read(folder / f"throughput-{name}.csv.gz")
        table = [row for row in table if row["placement"] != ""]
        batches = sorted(runs)
        ways: dict[str, Callable[[int], int]] = {
            "own noise": lambda batch: batch,
            "next smaller": lambda batch, known=batches: known[known.index(batch) - 1],
            "smallest": lambda _, known=batches: known[0],
        }
        print(f"{name}, batches {batches}")
        for way, noise_from in ways.items():
            show(f"steps, {way}", steps(runs, noise_from), pooled)
        progress, noise = noise_of(runs[batches[0]], batches[0])
        scales = [float(noise[int(at * (len(noise) - 1))]) for at in (0.1, 0.5, 0.9)]
        show("choice, interpolated", choices(table, scales, interpolated(table[::2], table)), pooled)
        show("choice, one law", choices(table, scales, law(fitted(table[::2]), table)), pooled)
        best, fixed = schedule(table, progress, noise)
        print(f"  schedule: {best / fixed - 1.0:+.2%} time beside the best fixed batch")
    print("all")
    for way, errors in list(pooled.items()):
        show(way, errors, {})


def show(what: str, errors: list[float], pooled: dict[str, list[float]]) -> None:
    pooled.setdefault(what, []).extend(errors)
    median, mean = statistics.median(errors), statistics.mean(errors)
    print(f"  {what:22} {len(errors):4}: median {median:6.2%}, mean {mean:6.2%}, largest {max(errors):7.2%}")


if __name__ == "__main__":
    main()
