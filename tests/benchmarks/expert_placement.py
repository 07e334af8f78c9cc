"""Run a folder of expert-placement instances and print what was reached, how surely, and how fast.

    python tests/benchmarks/expert_placement.py FOLDER [--seed N] [--answers FOLDER]

With a ``reference.csv`` beside the instances (columns name, sense, reference_objective, eplb_balancedness, eplb_cpu_s)
the ratio to its objective and the distance from EPLB are printed, too.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.solve import answer, solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="write NAME.json here")
    options = parser.parse_args()
    reference = read_reference(options.folder / "reference.csv")
    print(f"{'instance':36s} {'objective':>10s} {'bound':>10s} {'gap':>9s} {'cpu_s':>7s} {'ratio':>9s} {'- eplb':>9s}")
    total_cpu = total_eplb = 0.0
    for path in sorted(options.folder.glob("*.json")):
        problem = ExpertPlacementProblem.from_document(json.loads(path.read_text()), path.parent)
        solution = solve(problem, seed=options.seed)
        document = answer(problem, solution)
        row = reference.get(problem.name, {})
        ratio, over = compared(document, solution.objective, row)
        print(
            f"{problem.name:36s} {solution.objective or 0:10.6f} {solution.bound or 0:10.6f} {solution.gap or 0:9.6f} "
            f"{solution.cpu_s:7.3f} {ratio:>9s} {over:>9s}  {solution.status.value} {solution.solver}"
        )
        total_cpu += solution.cpu_s
        total_eplb += float(row.get("eplb_cpu_s") or 0.0)
        if options.answers:
            options.answers.mkdir(parents=True, exist_ok=True)
            (options.answers / f"{problem.name}.json").write_text(json.dumps(document))
    print(f"total cpu_s {total_cpu:.3f}" + (f", EPLB {total_eplb:.3f}" if total_eplb else ""))


def read_reference(path: Path) -> dict[str, dict[str, str]]:
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def compared(document: dict[str, object], objective: float | None, row: dict[str, str]) -> tuple[str, str]:
    """Ratio to the reference, and balancedness above EPLB's; dashes where there is nothing to compare with."""
    known = row.get("reference_objective")
    ratio = f"{objective / float(known):9.6f}" if known and objective is not None and float(known) else "-"
    eplb, reached = row.get("eplb_balancedness"), document.get("balancedness")
    over = f"{reached - float(eplb):+9.6f}" if eplb and isinstance(reached, float) else "-"
    return ratio, over


if __name__ == "__main__":
    main()
