"""Drafts that a plan chooses, against every option simulated by itself, by load.

Usage: ``python tests/benchmarks/speculation.py [--models NAME,…] [--profiles NAME,…]``. For each model, shipped profile
of accepted drafts and load (requests in flight, a rate under an SLO, the highest rate within SLOs) every method and
depth of the profile, and none, is searched and simulated by itself. Then the plan is asked which of n-grams, EAGLE-3 or
both to take, or none.

Prints, for each load that the plan is not best at, what it chose and what is; then the share of loads within 2 % of the
best of all simulated, the largest loss, the share in which drafts are rightly on or off (a tie of no drafts with the
best counts as either), and the same of the table by load, which is closed form, beside every option simulated with the
plan's own workers. What is asked: 2 %, and 95 %.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.drafts import speculation_by_load
from meshplan.planner.serving.problem.config import ServingConfig, Speculation
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.branch import TIE
from meshplan.planner.serving.search.search import search_serving
from meshplan.planner.serving.search.slo_judgement import judge
from meshplan.planner.serving.search.trials import FEWEST

MODELS = {"llama-3.1-8b": 1, "qwen3-30b-a3b": 2, "llama-3.1-70b": 8}  # with the devices that may be used
NGRAMS = ("ngram",)
CHOICES = (NGRAMS, ("eagle3",), ("ngram", "eagle3"))
HEAD = {"draft_model": "some/head"}  # which n-grams alone have not
IN_FLIGHT = (1, 4, 16, 32, 64, 128, 256, 512)
LOADS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"{many} in flight", {"workload": {"concurrency": many}}) for many in IN_FLIGHT),
    ("2 requests/s", {"workload": {"request_rate_per_s": 2.0}, "slo": {"tpot_p95_s": 0.03}}),
    ("highest, TPOT 10 ms", {"slo": {"ttft_p95_s": 2.0, "tpot_p95_s": 0.01}}),
    ("highest, TPOT 50 ms", {"slo": {"ttft_p95_s": 2.0, "tpot_p95_s": 0.05}}),
)
MOST_LOSS, NONE = 0.02, None

Option = Speculation | None


def problem_of(catalog: Catalog, model: str, profile: str, load: dict[str, Any], choose: tuple[str, ...]) -> Any:
    """The question: one answer of 256 tokens to 512."""
    document = {
        "kind": "serving",
        "model": model,
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "constraints": {"target": "vllm", "max_devices": MODELS[model]},
        "fixed": {"mode": "aggregated"},
        **load,
        "workload": {"input_length": 512, "output_length": 256, **load.get("workload", {})},
        "speculation": {"choose": list(choose), "profile": profile, **({} if choose == NGRAMS else HEAD)},
    }
    return resolve_serving(read_serving_spec(document), catalog, Path()).problem


def every_option(problem: ServingProblem) -> dict[Option, float]:
    """The best score of a deployment with each option by itself, smaller is better.

    Of highest rates only those count that longer runs keep: the chosen ones'.
    """
    found: dict[Option, float] = {}
    for stated in problem.with_each_draft:
        solution, report = search_serving(stated)
        settled = [one.score for one in report.simulated if not problem.has_free_rate or one.judged.is_settled]
        found[stated.speculation] = min([solution.objective or math.inf, *settled])
    return found


def table_against_simulation(
    problem: ServingProblem, config: ServingConfig
) -> tuple[Option, float, dict[Option, float]]:
    """What the table says at the load of the plan's workers, and every option simulated with these workers."""
    (pool,) = config.pools
    each = max((problem.workload.concurrency or 1) // pool.num_workers, 1)
    held = {
        drafts: 1.0 / judge(problem, replace(config, speculation=drafts), num_requests=FEWEST).output_tokens_per_s
        for drafts in (None, *problem.speculation_options)
    }
    slots = replace(pool, limits=replace(pool.limits, max_num_seqs=each))
    said = speculation_by_load(problem.site, slots, problem.workload, problem.speculation_options)[-1].best
    return said, held[said], held


def named(option: Option) -> str:
    """A method and its depth."""
    return "none" if option is None else f"{option.method} {option.num_draft_tokens}"


class Tally:
    """Losses and rights of many choices."""

    def __init__(self, name: str) -> None:
        self.name, self.losses, self.rights = name, list[float](), list[bool]()

    def note(self, where: str, chosen: Option, score: float, held: dict[Option, float]) -> None:
        """One choice and its score against every option that was allowed."""
        best = min(held, key=lambda option: held[option])
        loss = score / held[best] - 1.0
        drafted = min(value for option, value in held.items() if option is not None)
        is_tie = abs(held[NONE] / drafted - 1.0) <= TIE
        self.losses.append(loss)
        self.rights.append(is_tie or (chosen is None) == (held[NONE] < drafted))
        if loss > MOST_LOSS or not self.rights[-1]:
            print(f"{where}: {self.name} {named(chosen)}, best {named(best)}, {loss:.1%} lost", flush=True)

    def print(self) -> None:
        """The shares."""
        number = len(self.losses)
        within = sum(loss <= MOST_LOSS for loss in self.losses)
        print(
            f"{self.name}: {within} of {number} within {MOST_LOSS:.0%} of the best, mean loss "
            f"{sum(self.losses) / number:.2%}, most {max(self.losses):.1%}; on or off right in "
            f"{sum(self.rights)} of {number} ({sum(self.rights) / number:.1%})"
        )


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--profiles", default="gsm8k,sharegpt")
    options = parser.parse_args()
    plans, table = Tally("plan"), Tally("table by load")
    plan_s: list[float] = []
    every_s: list[float] = []
    off = 0
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        asked = itertools.product(options.models.split(","), options.profiles.split(","), LOADS)
        for model, profile, (load_name, load) in asked:
            where = f"{model}, {profile}, {load_name}"
            start = time.process_time()
            every = every_option(problem_of(catalog, model, profile, load, CHOICES[-1]))
            every_s.append(time.process_time() - start)
            for choose in CHOICES:
                problem = problem_of(catalog, model, profile, load, choose)
                start = time.process_time()
                solution, _ = search_serving(problem)
                plan_s.append(time.process_time() - start)
                held = {option: every[option] for option in (None, *problem.speculation_options)}
                if solution.assignment is None or min(held.values()) == math.inf:
                    print(f"{where}: {'no plan' if solution.assignment is None else 'a plan'}, but not by itself")
                    continue
                config = solution.assignment.candidate.config
                plans.note(f"{where}, {'+'.join(choose)}", config.speculation, solution.objective or math.inf, held)
                off += held[None] < min(value for option, value in held.items() if option is not None)
                if problem.workload.concurrency is not None and choose == CHOICES[-1]:
                    table.note(where, *table_against_simulation(problem, config))
    plans.print()
    table.print()
    print(f"no drafts are best in {off} of {len(plans.losses)} questions")
    print(f"CPU-s a plan {sum(plan_s) / len(plan_s):.2f}, every option by itself {sum(every_s) / len(every_s):.2f}")


if __name__ == "__main__":
    main()
