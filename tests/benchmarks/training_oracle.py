"""Random small training questions against every legal plan: does any beat the stated bound?

usage: python tests/benchmarks/training_oracle.py [QUESTIONS] [SEED]
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from core_cases import DENSE, MOE, problem_of
from degree_brute_force import brute_force, price_all

from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.problem import TrainingObjective
from meshplan.planner.training.search.degrees import search_degrees

# A model whose last stage has a layer that is none of a chunk: it predicts the token after the next.
PREDICTS_TWO = replace(MOE, num_nextn_predict_layers=1)


def main(count: int, seed: int) -> None:
    """Ask and print violations and the worst gap."""
    draw, violations, worst = random.Random(seed), 0, 0.0
    for index in range(count):
        problem = problem_of(
            draw.choice((DENSE, MOE, PREDICTS_TWO)),
            num_devices=draw.choice((2, 4, 6, 8)),
            global_batch_size=draw.choice((2, 4, 6, 12)),
            sequence_length=draw.choice((512, 1024, 4096)),
            rules=draw.choice((MEGATRON, ANY_FRAMEWORK)),
            objective=draw.choice(list(TrainingObjective)),
            limits={"memory_bytes": draw.choice((7.5e9, 9e9, 80e9))},
        )
        best = brute_force(problem, price_all(problem))
        solution, _ = search_degrees(problem)
        if solution.bound is None or solution.gap is None or not best:
            violations += (solution.bound is None) != (not best)
            continue
        worst = max(worst, solution.gap)
        if best[0][0] < solution.bound * (1.0 - 1e-6):
            violations += 1
            print(f"question {index}: {best[0]} beats the bound {solution.bound}")
    print(f"{count} questions, {violations} violations, worst gap {worst:.2%}")


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:] + ["200", "1"][len(sys.argv) - 1 :])))
