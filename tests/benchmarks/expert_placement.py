"""Run a folder of expert-placement instances and print what was reached, how surely, and how fast.

    python tests/benchmarks/expert_placement.py FOLDER [--seed N] [--answers FOLDER]
    python tests/benchmarks/expert_placement.py --members      # what each member of the portfolio is worth

With a ``reference.csv`` beside the instances (columns name, sense, reference_objective, eplb_balancedness, eplb_cpu_s)
the ratio to its objective and the distance from EPLB are printed, too. ``--members`` generates its own seeded loads.
"""

from __future__ import annotations

import argparse
import csv
import json
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np

from meshplan.planner.core.arrays import FloatArray
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.balance import balance as portfolio
from meshplan.planner.expert_placement.search.solve import answer, solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--members", action="store_true", help="generated loads, without one member at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="write NAME.json here")
    options = parser.parse_args()
    if options.members:
        compare_members(options.seed)
        return
    if options.folder is None:
        parser.error("give a FOLDER, or --members")
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


# Layers, experts, devices, redundant experts: few slots a device and many, with copies and without, and small layers.
SHAPES = (
    (58, 256, 32, 0),
    (58, 256, 64, 64),
    (58, 256, 32, 64),
    (24, 128, 64, 0),
    (24, 128, 64, 64),
    (32, 64, 48, 32),
    (32, 8, 8, 8),
    (32, 8, 4, 4),
)
LOADS = ("zipf 1", "zipf 1.5", "lognormal 0.5", "lognormal 1")


def load_of(kind: str, layers: int, experts: int, rng: np.random.Generator) -> FloatArray:
    """[L, E] tokens: ranks permuted per layer, or independent draws."""
    name, parameter = kind.split()
    if name == "zipf":
        ranks = np.stack([rng.permutation(experts) for _ in range(layers)]) + 1.0
        return np.round(1e6 / ranks ** float(parameter))
    return np.round(1e4 * rng.lognormal(0.0, float(parameter), (layers, experts)))


def nothing(*_: object, **__: object) -> None:
    """Stands in for a member."""


# Names in the module of the portfolio that are replaced, by member.
WITHOUT: dict[str, dict[str, object]] = {
    "none left out": {},
    "2 exchanges": {"exchange_until_rest": nothing},
    "3 other counts": {"try_other_counts": nothing},
    "4 perturbation": {"perturb": nothing},
    "5 exact pairing": {"SLOTS_PER_DEVICE": 0},
    "6 exact search": {"is_small": lambda *_: False},
}


def compare_members(seed: int) -> None:
    """Print the mean balancedness over all loads and the largest loss on one, without each member in turn."""
    reached: dict[str, dict[str, float]] = {}
    spent: dict[str, float] = {}
    for member, replaced in WITHOUT.items():
        with ExitStack() as stack:
            for name, stand_in in replaced.items():
                stack.enter_context(mock.patch.object(portfolio, name, stand_in))
            for layers, experts, devices, redundant in SHAPES:
                for kind in LOADS:
                    problem = ExpertPlacementProblem.from_document(
                        {
                            "num_layers": layers,
                            "num_experts": experts,
                            "num_devices": devices,
                            "num_redundant_experts": redundant,
                            "load": load_of(kind, layers, experts, np.random.default_rng(seed)),
                        },
                        Path(),
                    )
                    solution = solve(problem, seed=seed)
                    case = f"{layers} x {experts} on {devices}, {redundant} redundant, {kind}"
                    reached.setdefault(member, {})[case] = solution.objective or 0.0
                    spent[member] = spent.get(member, 0.0) + solution.cpu_s
    whole = reached["none left out"]
    for member, values in reached.items():
        losses = {case: whole[case] - value for case, value in values.items()}
        worst = max(losses, key=lambda case: losses[case])
        worse = sum(loss > 1e-6 for loss in losses.values())
        better = sum(loss < -1e-6 for loss in losses.values())
        mean = sum(values.values()) / len(values)
        print(
            f"{member:16s} mean {mean:.5f} ({sum(losses.values()) / len(losses):+.5f}), worse on {worse}, better on "
            f"{better} of {len(losses)}, worst by {losses[worst]:.5f} ({worst}), {spent[member]:.1f} CPU-s"
        )


if __name__ == "__main__":
    main()
