"""Step time of training with whole sources and frameworks held out, beside what is asked of it.

    python tests/benchmarks/training_time.py OBSERVATIONS.jsonl...

Prints errors (plain, and with each source weighing the same), how often intervals hold, pooled and for each framework
(beside the 99 % band of its number of runs, as if they were independent and as correlated as runs of one model and
device are), mixtures of experts, and the order of plans of one question, all of it with
constants that were fitted without the source. Takes eight minutes of CPU, most of them for the folds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from math import comb
from pathlib import Path

import numpy as np

from meshplan.cli.observed import log, training_runs
from meshplan.planner.core.plan import Interval
from meshplan.planner.service import load_catalog
from meshplan.planner.training.measured.calibrate import calibrate
from meshplan.planner.training.measured.observations import ObservedRun
from meshplan.planner.training.measured.validate import question
from meshplan.planner.validation.held_out import HeldOut
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import ValidatedRow, rank_quality

# Frameworks that are maintained and widely used, as of 2023 and later.
MAINTAINED = (
    *("megatron", "nemo-mlperf", "zero-bubble", "nemo-automodel"),
    *("torchtitan", "composer", "huggingface-deepspeed"),
)
# Sources of 2026-11-20, by the first part of their groups; the others came later.
OLD = (
    *("internevo", "korthikanti", "mlperf-training", "mpt", "megatron-bridge", "sc21", "oneflow", "zero-bubble"),
    *("sailor", "megatron-core-moe", "torchtitan"),
)
COVERED, OUTSIDE = 0.9, 0.005  # share of runs that intervals are to hold; of a 99 % band on either side
RATE = "tokens_per_s_per_device"


def main(paths: Sequence[Path]) -> None:
    rows = [row for path in paths for row in read_rows(path)]
    trained = training_runs(rows, load_catalog("sqlite://"))
    report(calibrate(trained.runs, source=trained.source, log=log).folds, trained.runs)


def report(folds: dict[str, tuple[HeldOut, ...]], runs: Iterable[ObservedRun]) -> None:
    """Print the table."""
    source, framework = folds["source"], folds["framework"]
    errors("step time, source held out (asked 9 / 13 / 28)", source)
    errors("step time, framework held out", framework)
    kept = [item for item in source if item.key[0] in MAINTAINED]
    errors("large maintained frameworks, source held out (asked 6 / 9 / 20)", kept)
    errors("old sources, group held out (3.3 / 6.1 / 16.0 before)", [i for i in folds["group"] if i.source in OLD])
    experts = [item for item in source if item.strategy == "MoE"]
    errors("mixtures of experts, source held out (asked 10 % median)", experts)
    for name, items in (("source", source), ("framework", framework), ("mixtures of experts", experts)):
        print(f"inside the interval, {name}: {inside(items):.1%} (asked {'85' if items is experts else '85-95'} %)")
    correlation = correlation_inside(source)
    print(
        f"two runs of one model and device: being inside has correlation {correlation:.2f} about the framework's share"
    )
    for key, members in grouped(source, lambda item: item.key[0]).items():
        share, count = inside(members), independent(members, correlation)
        print(
            f"  {key:24s} {len(members):4d} runs {share:6.1%}  {verdict(share, len(members))}, "
            f"as {count} independent ones {verdict(share, count)}"
        )
    known = {run.id: run for run in runs}
    order("old sources (asked 98 %, 0.3 % mean, 5 % worst)", [item for item in source if item.source in OLD], known)
    order("new sources (asked 85 %, 3 % mean)", [item for item in source if item.source not in OLD], known)


def errors(title: str, items: Iterable[HeldOut]) -> None:
    """Median, mean and 90th percentile, over runs and over sources that weigh the same."""
    by_source = grouped(items, lambda item: item.source)
    sizes = np.array([abs(item.error) for members in by_source.values() for item in members])
    weights = np.array([1.0 / len(members) for members in by_source.values() for _ in members])
    if not len(sizes):
        return
    sorted_sizes = np.argsort(sizes)
    passed = np.cumsum(weights[sorted_sizes]) / weights.sum()
    median, p90 = (sizes[sorted_sizes][int(np.searchsorted(passed, share))] for share in (0.5, 0.9))
    print(
        f"{title}: {len(sizes)} runs {np.median(sizes):.1%} / {np.mean(sizes):.1%} / {np.quantile(sizes, 0.9):.1%}; "
        f"{len(by_source)} sources alike {median:.1%} / {np.average(sizes, weights=weights):.1%} / {p90:.1%}"
    )


def grouped(items: Iterable[HeldOut], label: Callable[[HeldOut], str]) -> dict[str, list[HeldOut]]:
    """The predictions by a label, sorted."""
    groups: dict[str, list[HeldOut]] = {}
    for item in items:
        groups.setdefault(label(item), []).append(item)
    return dict(sorted(groups.items()))


def inside(items: Sequence[HeldOut]) -> float:
    """Share of the runs that their interval holds."""
    return float(np.mean([bool(item.is_covered) for item in items]))


def verdict(share: float, count: int) -> str:
    """The band of so many runs, and whether a share lies in it."""
    least, most = band(count)
    return f"band {least:.1%}-{most:.1%}" + ("" if least <= share <= most else " below" if share < least else " above")


def independent(items: Sequence[HeldOut], correlation: float) -> int:
    """Independent runs that the runs of groups stand for: n/(1 + (m − 1)·ρ), m the mean size of a run's group.

    Kish, Survey Sampling (1965), section 5.4.
    """
    sizes = np.array([len(members) for members in grouped(items, lambda item: item.group).values()])
    return max(1, round(sizes.sum() / (1.0 + ((sizes**2).sum() / sizes.sum() - 1.0) * correlation)))


def correlation_inside(items: Sequence[HeldOut]) -> float:
    """ρ, of whether intervals of two runs of a group (source, model, device) hold, about their framework's share.

    The mean product over all such pairs, over the mean square.
    """
    products = pairs = squares = 0.0
    for framework in grouped(items, lambda item: item.key[0]).values():
        mean = inside(framework)
        for members in grouped(framework, lambda item: item.group).values():
            off = np.array([bool(item.is_covered) - mean for item in members])
            products += off.sum() ** 2 - (off**2).sum()
            pairs += len(off) * (len(off) - 1)
            squares += (off**2).sum()
    return max(0.0, products / pairs / (squares / len(items)))


def band(count: int) -> tuple[float, float]:
    """Least and largest share of runs that 99 % of such frameworks have inside, were runs independent."""
    chances = [comb(count, held) * COVERED**held * (1.0 - COVERED) ** (count - held) for held in range(count + 1)]
    passed = np.cumsum(chances)
    return int(np.argmax(passed > OUTSIDE)) / count, int(np.argmax(passed >= 1.0 - OUTSIDE)) / count


def order(title: str, items: Iterable[HeldOut], runs: dict[str, ObservedRun]) -> None:
    """Pairs of plans of one question in the measured order, and what picking the predicted best costs."""
    found = rank_quality([ranked(item, runs[item.id]) for item in items])
    if found is not None:
        print(
            f"order, {title}: {found.pair_order:.1%} of {found.num_pairs} pairs, regret {found.mean_regret:.2%} mean, "
            f"{found.worst_regret:.1%} worst, of {found.num_groups} questions"
        )


def ranked(item: HeldOut, run: ObservedRun) -> ValidatedRow:
    """A held-out prediction as a row that can be ranked by its rate."""
    tokens = run.problem.workload.tokens_per_step / run.problem.machine.num_devices
    measured = tokens / run.measured["iteration_s"]
    value = measured / (1.0 + item.error)
    return ValidatedRow(
        id=item.id,
        group=item.group,
        question=question(run),
        status="ok",
        predicted={RATE: Interval(value=value, low=value, high=value)},
        measured={RATE: measured},
        error={RATE: value / measured - 1.0},
    )


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
