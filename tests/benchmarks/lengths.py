"""Documents dealt out to micro-batches and groups, and attention by length and group: figures beside published ones.

python tests/benchmarks/lengths.py balance LENGTHS.csv.gz      # imbalance of micro-batches, 128K window
python tests/benchmarks/lengths.py attention TIMES.csv.gz      # kernel times, rows and lengths held out
python tests/benchmarks/lengths.py groups                      # mixed groups against every partition and assignment
"""

from __future__ import annotations

import csv
import gzip
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from meshplan.planner.lengths.attention_kernel import H100, KernelConstants, attention_forward_s
from meshplan.planner.lengths.balance import balanced
from meshplan.planner.lengths.distribution import table_of
from meshplan.planner.lengths.groups import GroupQuestion, mixed_groups, partitions
from meshplan.planner.lengths.packing import concatenated, fitted
from meshplan.planner.lengths.queue import DocumentQueue
from meshplan.planner.lengths.reading import read_lengths
from meshplan.planner.lengths.work import Work
from meshplan.profiler.fitting.least_squares import fit_positive

WINDOW = 131_072
# Forward FLOPs of Llama-2-7B: two a weight and token; four times the width a causal pair and layer.
LLAMA_2_7B = Work(per_token_s=2 * 6.74e9, per_pair_s=((None, 32 * 4 * 4096.0),))
STEPS, SEEDS = 200, 3


def balance(path: Path) -> None:
    table = table_of(read_lengths(path))
    print(
        f"imbalance: longest micro-batch over the mean; {WINDOW} tokens each, PP 4, Llama-2-7B by FLOPs, {STEPS} steps"
    )
    print("published (WLB-LLM, table 2; its own documents): as they come 1.44, greedy 1.41, two queues 1.05 in 20 ms,")
    print("integer program over four batches 1.09 in 25 s")
    for ranks in (1, 4):
        count = ranks * 4
        for seed in range(SEEDS):
            documents = fitted(table.stream(count * WINDOW * STEPS, seed=seed), WINDOW, "split")
            _as_they_come(documents, count, seed)
            _dealt(documents, ranks, seed)
            for most in (1.25, 1.5, 2.0):
                _held(documents, ranks, most, seed)


def _as_they_come(documents: np.ndarray, count: int, seed: int) -> None:
    packed = concatenated(documents, WINDOW)
    work = np.bincount(packed.sequence_of, LLAMA_2_7B.of(packed.pieces))
    steps = work[: len(work) // count * count].reshape(-1, count)
    print(f"  {count:3} micro-batches, seed {seed}: as they come       {(steps.max(1) / steps.mean(1)).mean():.3f}")


def _batches(documents: np.ndarray, count: int) -> list[np.ndarray]:
    ends = np.searchsorted(np.cumsum(documents), np.arange(1, STEPS) * count * WINDOW)
    return [part for part in np.split(documents, ends) if len(part)]


def _dealt(documents: np.ndarray, ranks: int, seed: int) -> None:
    found, least, milliseconds = [], [], []
    for part in _batches(documents, 4 * ranks):
        begin = time.process_time()
        one = balanced(LLAMA_2_7B.of(part), part, ranks=ranks, micro_batches=4, pipeline_parallel=4)
        milliseconds.append(1e3 * (time.process_time() - begin))
        found.append(one.imbalance)
        least.append(max(float(LLAMA_2_7B.of(part).max()) / float(one.work_s.mean()), 1.0))
    name = f"  {4 * ranks:3} micro-batches, seed {seed}: dealt out, one batch "
    print(f"{name}{np.mean(found):.3f} (bound {np.mean(least):.3f}), {np.median(milliseconds):.2f} CPU ms a batch")


def _held(documents: np.ndarray, ranks: int, most: float, seed: int) -> None:
    queue = DocumentQueue(
        work=LLAMA_2_7B,
        ranks=ranks,
        micro_batches=4,
        pipeline_parallel=4,
        window_tokens=WINDOW,
        most_tokens=int(most * WINDOW),
    )
    imbalance, gaps, milliseconds, waited, trained = [], [], [], 0.0, 0
    for part in _batches(documents, 4 * ranks):
        begin = time.process_time()
        queue.add(part)
        step = queue.next_step()
        milliseconds.append(1e3 * (time.process_time() - begin))
        if step is None:
            continue
        imbalance.append(step.assignment.imbalance)
        gaps.append(step.assignment.gap)
        waited += float((step.delays * step.tokens).sum())
        trained += int(step.tokens.sum())
    print(
        f"  {4 * ranks:3} micro-batches, seed {seed}: long held, at most {most:g} windows {np.mean(imbalance):.3f} "
        f"(90th percentile {np.quantile(imbalance, 0.9):.3f}, gap to the bound {np.mean(gaps):.2%}), "
        f"{np.median(milliseconds):.2f} CPU ms a batch (99th {np.quantile(milliseconds, 0.99):.1f}), "
        f"a token waits {waited / trained:.2f} steps, {queue.waiting} documents wait at the end"
    )


def attention(path: Path) -> None:
    with gzip.open(path, "rt") as stream:
        rows = list(csv.DictReader(stream))
    length, ranks, tensor, seconds = (
        np.array([float(row[name]) for row in rows])
        for name in ("length", "context_parallel", "tensor_parallel", "time_s")
    )
    heads = 64 / tensor

    def predicted(constants: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        named = KernelConstants(*constants)
        return attention_forward_s(length[chosen], ranks[chosen], heads=heads[chosen], constants=named)

    def fitted_to(chosen: np.ndarray) -> np.ndarray:
        return fit_positive(lambda constants: predicted(constants, chosen), seconds[chosen], np.array(H100))

    every = np.arange(len(rows))
    own = fitted_to(every)
    print(f"{len(rows)} timings; constants fitted to all: {', '.join(f'{value:.4g}' for value in own)}")
    print(f"  shipped: {', '.join(f'{value:.4g}' for value in H100)}")
    _errors("shipped, all rows", predicted(np.array(H100), every) / seconds - 1.0)
    folds = np.random.default_rng(0).permutation(len(rows)) % 10
    for name, group in (
        ("ten folds of rows", folds),
        ("lengths", length),
        ("context parallelism", ranks),
        ("tensor parallelism", tensor),
    ):
        errors = np.zeros(len(rows))
        for one in np.unique(group):
            held = np.flatnonzero(group == one)
            errors[held] = predicted(fitted_to(np.flatnonzero(group != one)), held) / seconds[held] - 1.0
        _errors(f"held out by {name}", errors)


def _errors(name: str, errors: Iterable[float]) -> None:
    size = np.abs(np.array(list(errors)))
    print(
        f"  {name}: median {np.median(size):.1%}, mean {size.mean():.1%}, 90th percentile {np.quantile(size, 0.9):.1%}"
    )


def groups() -> None:
    rng = np.random.default_rng(0)
    worst, static, gaps = 1.0, [], []
    for _ in range(60):
        question = _drawn(rng, 8, int(rng.integers(3, 6)))
        found = mixed_groups(question, static_size=8)
        best = _exhaustive_s(question)
        if found is not None:
            worst = max(worst, found.seconds / best)
    print(f"8 ranks, 3 to 5 documents, every partition and assignment: at most {worst - 1.0:.3%} above the best of 60")
    for ranks, documents in ((8, 60), (16, 120), (32, 240), (64, 480)):
        for _ in range(5):
            question = _drawn(rng, ranks, documents)
            begin = time.process_time()
            found = mixed_groups(question, static_size=8)
            spent = time.process_time() - begin
            equal = mixed_groups(_only(question, 8), static_size=8)
            if found is not None and equal is not None:
                static.append(found.seconds / equal.seconds)
                gaps.append(found.gap)
        print(
            f"{ranks} ranks, {documents} documents: over equal groups of 8, dealt out as well: "
            f"{np.mean(static[-5:]):.3f} (worst {max(static[-5:]):.3f}), gap {np.mean(gaps[-5:]):.1%}, "
            f"{1e3 * spent:.0f} ms"
        )


def _drawn(rng: np.random.Generator, ranks: int, documents: int) -> GroupQuestion:
    tokens = np.minimum(np.exp(rng.normal(7.5, 1.6, documents)).astype(int) + 64, 131_072)
    seconds = {}
    for power in range(ranks.bit_length()):
        size = 2**power
        whole = tokens + tokens.astype(float) ** 2 / 30_000
        seconds[size] = whole / size + 0.04 * tokens * (1 - 1 / size) + 50.0 * power
    return GroupQuestion(seconds=seconds, tokens=tokens, ranks=ranks, most_tokens=16_384, micro_batches=None)


def _only(question: GroupQuestion, size: int) -> GroupQuestion:
    return GroupQuestion(
        seconds={size: question.seconds[size]},
        tokens=question.tokens,
        ranks=question.ranks,
        most_tokens=question.most_tokens,
        micro_batches=None,
    )


def _exhaustive_s(question: GroupQuestion) -> float:
    best = np.inf
    for sizes in partitions(question.ranks, question.sizes):
        places = np.stack(np.meshgrid(*[np.arange(len(sizes))] * len(question.tokens), indexing="ij"), -1)
        places = places.reshape(-1, len(question.tokens))
        ends = np.zeros((len(places), len(sizes)))
        for document in range(len(question.tokens)):
            own = np.array([question.allowed_s(size)[document] for size in sizes])
            chosen = places[:, document]
            ends[np.arange(len(places)), chosen] += own[chosen]
        best = min(best, float(ends.max(axis=1).min()))
    return best


if __name__ == "__main__":
    what, files = sys.argv[1], [Path(name) for name in sys.argv[2:]]
    {"balance": balance, "attention": attention, "groups": groups}[what](*files)
