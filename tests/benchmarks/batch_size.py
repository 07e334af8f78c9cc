"""The law of efficiency against published runs at several batch sizes.

    python tests/benchmarks/batch_size.py EPOCHS.csv.gz

EPOCHS has dataset, network, batch_size, optimizer, learning_rate, run, target_metric, epochs_to_target (Zeus, NSDI
2023). For each workload and target the best learning rate of each batch counts (mean over its runs). The law's line
goes through the two batches beside the one that is judged, which is never among them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
from collections import defaultdict
from pathlib import Path

Epochs = dict[int, float]


def read(path: Path) -> dict[tuple[str, str, str], Epochs]:
    """(dataset, network, target) → batch → mean epochs with the best optimizer and learning rate."""
    runs: dict[tuple[str, str, str], dict[int, dict[tuple[str, str], list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["epochs_to_target"]:
                key = (row["dataset"], row["network"], row["target_metric"])
                how = (row["optimizer"], row["learning_rate"])
                runs[key][int(row["batch_size"])][how].append(float(row["epochs_to_target"]))
    return {
        key: {batch: min(map(statistics.mean, hows.values())) for batch, hows in batches.items()}
        for key, batches in runs.items()
    }


def predicted(batch: int, known: Epochs) -> float:
    """E(B) = E₀ (1 + B/N) through two batches; at least E₀ = 0 and 1/N = 0."""
    (low, at_low), (high, at_high) = sorted(known.items())
    slope = max(0.0, (at_high - at_low) / (high - low))
    start = at_low - slope * low
    return start + slope * batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("epochs", type=Path)
    errors: dict[str, list[float]] = defaultdict(list)
    for (dataset, network, _), epochs in read(parser.parse_args().epochs).items():
        batches = sorted(epochs)
        for place in range(1, len(batches) - 1):
            judged = batches[place]
            around = {batches[place - 1]: epochs[batches[place - 1]], batches[place + 1]: epochs[batches[place + 1]]}
            errors[f"{dataset} {network}"].append(abs(predicted(judged, around) / epochs[judged] - 1.0))
    for name, found in sorted(errors.items()):
        print(f"{name:32} {len(found):4} batches held out, error of the epochs: median {statistics.median(found):.1%}")
    pooled = [error for found in errors.values() for error in found]
    print(f"{'all':32} {len(pooled):4} batches held out, error of the epochs: median {statistics.median(pooled):.1%}")


if __name__ == "__main__":
    main()
