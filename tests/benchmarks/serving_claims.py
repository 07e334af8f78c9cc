"""Random serving questions against what they claim: each plan's SLOs are held against longer runs of other requests.

Usage: ``python tests/benchmarks/serving_claims.py [NUM] [--seed N] [--others] [--without-slo]``. Every question is
planned; the plan is then simulated with :data:`LONGER_RUN` requests of two other seeds, twenty times those of a first
run, and its latencies are held against the SLOs as they are. With ``--others`` the other deployments that were
simulated are too (free load: their highest rates by the same search on the longer run): none may beat the plan by more
than its gap. With ``--without-slo`` all questions give a rate and no limit: the queue must not be shown to grow in the
longer runs.

Prints every question whose SLO is broken, by how much, or whose queue grows, and the shares, of given rates and of
highest ones; a share below 99 % is a defect.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.branch import Simulated
from meshplan.planner.serving.search.search import search_serving
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.search.trials import LONGER_RUN

OTHER_SEEDS = (101, 102)


def question(rng: random.Random, *, has_slo: bool = True) -> dict[str, Any]:
    """A deployment of one or two nodes; half of the questions give a rate, the others ask for the highest; without an
    SLO all give one.
    """
    workload: dict[str, Any] = {
        "input_length": rng.choice([500, 1000, 4000]),
        "output_length": rng.choice([100, 200, 800]),
        "length_ratio": rng.choice([1.0, 0.5]),
    }
    has_rate = rng.random() < 0.6 or not has_slo
    if has_rate:
        workload["request_rate_per_s"] = rng.choice([2, 5, 10, 20, 40])
    return {
        "kind": "serving",
        "model": rng.choice(["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"]),
        "cluster": {"nodes": [{"type": "dgx-h100", "count": rng.choice([1, 2])}]},
        "workload": workload,
        "slo": {"ttft_p99_s": rng.choice([0.5, 1.0, 2.0]), "tpot_p95_s": rng.choice([0.03, 0.05])} if has_slo else {},
        "objective": "num_devices" if has_rate else rng.choice(["max_request_rate", "throughput_per_device"]),
    }


def longer(problem: ServingProblem, one: Simulated, seed: int) -> float:
    """The largest latency/limit of a deployment in a longer run at its own rate; ∞ where its queue is shown to grow."""
    rate = one.judged.requests_per_s
    judged = judge(problem, one.candidate.config, request_rate_per_s=rate, num_requests=LONGER_RUN, seed=seed)
    is_lost = judged.pace is not None and judged.pace.is_lost
    return math.inf if is_lost else judged.worst_ratio


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--without-slo", action="store_true")
    options = parser.parse_args()
    rng, answered, beaten = random.Random(options.seed), 0, 0
    kept: dict[bool, list[bool]] = {True: [], False: []}  # by whether the rate is given
    gaps: list[float] = []
    plan_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        for index in range(options.number):
            asked = question(rng, has_slo=not options.without_slo)
            problem = resolve_serving(read_serving_spec(asked), catalog, Path()).problem
            start = time.process_time()
            solution, report = search_serving(problem)
            plan_s.append(time.process_time() - start)
            best = solution.assignment
            if best is None or solution.objective is None or solution.gap is None:
                continue
            answered += 1
            ratios = [longer(problem, best, seed) for seed in OTHER_SEEDS]
            kept["request_rate_per_s" in asked["workload"]] += [ratio <= 1.0 for ratio in ratios]
            gaps += [solution.gap] if problem.has_free_load else []
            if max(ratios) > 1.0:
                print(f"{index}: latency/limit {max(ratios):.3f} over {asked}", flush=True)
            if options.others:
                bound = solution.objective * (1.0 - solution.gap) * (1.0 - 1e-9)
                for other in report.simulated:
                    if other.score < bound and all(longer(problem, other, seed) <= 1.0 for seed in OTHER_SEEDS):
                        beaten += 1
                        print(f"{index}: {other.score:g} beats {solution.objective:g} with gap {solution.gap:.3f}")
    print(f"{answered} of {options.number} questions have a plan")
    for is_given, name in ((True, "given rates"), (False, "highest rates")):
        if kept[is_given]:
            share = sum(kept[is_given]) / len(kept[is_given])
            print(f"{name}: SLOs kept in {sum(kept[is_given])} of {len(kept[is_given])} longer runs ({share:.1%})")
    print(
        f"{beaten} plans beaten by more than their gap; the median gap of highest rates is "
        f"{statistics.median(gaps or [0.0]):.1%}"
    )
    mean, middle = statistics.mean(plan_s), statistics.median(plan_s)
    print(f"search {mean:.2f} CPU-s on average, {middle:.2f} median, {max(plan_s):.2f} most")


if __name__ == "__main__":
    main()
