"""Random serving questions against what they claim: each plan's SLOs are held against longer runs of other requests.

Usage: ``python tests/benchmarks/serving_claims.py [NUM] [--seed N] [--others]``. Every question is planned; the plan is
then simulated with 20,000 requests, or twenty times those of its own run where that is less, of two other seeds, and
its latencies are held against the SLOs as they are. With ``--others`` the other deployments that were simulated are too
(free load: their highest rates by the same search on the longer run): none may beat the plan by more than its gap.

Prints every question whose SLO is broken, by how much, and the shares; a share below 99 % is a defect.
"""

from __future__ import annotations

import random
import sys
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

MOST_REQUESTS, TIMES_LONGER = 20_000, 20
OTHER_SEEDS = (101, 102)


def question(rng: random.Random) -> dict[str, Any]:
    """A deployment of one or two nodes; half of the questions give a rate, the others ask for the highest."""
    workload: dict[str, Any] = {
        "input_length": rng.choice([500, 1000, 4000]),
        "output_length": rng.choice([100, 200, 800]),
        "length_ratio": rng.choice([1.0, 0.5]),
    }
    has_rate = rng.random() < 0.6
    if has_rate:
        workload["request_rate_per_s"] = rng.choice([2, 5, 10, 20, 40])
    return {
        "kind": "serving",
        "model": rng.choice(["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"]),
        "cluster": {"nodes": [{"type": "dgx-h100", "count": rng.choice([1, 2])}]},
        "workload": workload,
        "slo": {"ttft_p99_s": rng.choice([0.5, 1.0, 2.0]), "tpot_p95_s": rng.choice([0.03, 0.05])},
        "objective": "num_devices" if has_rate else rng.choice(["max_request_rate", "throughput_per_device"]),
    }


def longer(problem: ServingProblem, one: Simulated, seed: int) -> float:
    """The largest latency/limit of a deployment in a longer run at its own rate."""
    num = min(MOST_REQUESTS, TIMES_LONGER * len(one.judged.run))
    rate = one.judged.requests_per_s
    judged = judge(problem, one.candidate.config, request_rate_per_s=rate, num_requests=num, seed=seed)
    return judged.worst_ratio


def main() -> None:
    """Ask, and print."""
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    rng = random.Random(numbers[1] if "--seed" in sys.argv else 1)
    num = numbers[0] if numbers else 100
    kept = runs = answered = beaten = 0
    plan_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        for index in range(num):
            asked = question(rng)
            problem = resolve_serving(read_serving_spec(asked), catalog, Path()).problem
            start = time.process_time()
            solution, report = search_serving(problem)
            plan_s.append(time.process_time() - start)
            best = solution.assignment
            if best is None or solution.objective is None or solution.gap is None:
                continue
            answered += 1
            for seed in OTHER_SEEDS:
                runs += 1
                ratio = longer(problem, best, seed)
                kept += ratio <= 1.0
                if ratio > 1.0:
                    print(f"{index}: latency/limit {ratio:.3f} over {asked}")
            if "--others" in sys.argv:
                bound = solution.objective * (1.0 - solution.gap) * (1.0 - 1e-9)
                for other in report.simulated:
                    if other.score < bound and all(longer(problem, other, seed) <= 1.0 for seed in OTHER_SEEDS):
                        beaten += 1
                        print(f"{index}: {other.score:g} beats {solution.objective:g} with gap {solution.gap:.3f}")
    print(f"{answered} of {num} questions have a plan; SLOs kept in {kept} of {runs} longer runs ({kept / runs:.1%})")
    print(f"{beaten} plans beaten by more than their gap; search {sum(plan_s) / num:.2f} CPU-s on average")


if __name__ == "__main__":
    main()
