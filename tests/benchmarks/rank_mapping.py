"""Benchmark: python tests/benchmarks/rank_mapping.py (FOLDER | --families | --generate FILE) [--names …] [--seed N].

Prints objective, bound, gap, identity, CPU seconds and, where FOLDER has a reference.csv, the ratio to the best known
objective. ``--families`` solves generated instances (``rank_mapping_families.py``) with matrices from ``--seed``;
``--generate`` writes a 1,024-node instance: islands joined by slower links, some nodes and links degraded.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import rank_mapping_families as families

from meshplan.planner.rank_mapping.problem import RankMappingProblem
from meshplan.planner.rank_mapping.solve import answer, solve

HEAD = (
    f"{'instance':48} {'objective_s':>12} {'bound_s':>12} {'gap':>7} {'identity_s':>11} "
    f"{'cpu_s':>7} {'ratio':>8}  status"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--names", nargs="*", help="parts of names; without it all are solved")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="folder to write the answers to")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--generate", type=Path)
    arguments = parser.parse_args()
    if arguments.generate:
        arguments.generate.write_text(json.dumps(islands(seed=arguments.seed)))
        return
    print(HEAD)
    if arguments.families:
        for shape in families.SHAPES:
            problem = families.problem(*shape, arguments.seed)
            if not arguments.names or any(name in problem.name for name in arguments.names):
                print_row(problem.name, problem, None, 0)
        return
    references = read_references(arguments.folder / "reference.csv")
    for file in sorted(arguments.folder.glob("*.json")):
        if arguments.names and not any(name in file.stem for name in arguments.names):
            continue
        problem = RankMappingProblem.from_document(json.loads(file.read_text()), file.parent)
        document = print_row(file.stem, problem, references.get(file.stem), arguments.seed)
        if arguments.answers:
            (arguments.answers / file.name).write_text(json.dumps(document))


def print_row(name: str, problem: RankMappingProblem, reference: float | None, seed: int) -> dict[str, Any]:
    """Solve one instance and print a line; returns the answer."""
    solution = solve(problem, seed=seed)
    document = answer(problem, solution)
    ratio = f"{document['objective_s'] / reference:8.5f}" if reference else " " * 8
    print(
        f"{name:48} {document['objective_s']:12.6f} {document['bound_s']:12.6f} {document['gap']:7.2%} "
        f"{document['identity_s']:11.6f} {solution.cpu_s:7.2f} {ratio}  {document['status']}",
        flush=True,
    )
    return document


def read_references(file: Path) -> dict[str, float]:
    """Instance name → best known objective; empty without the file."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        return {row["name"]: float(row["reference_objective"]) for row in csv.DictReader(lines)}


def islands(*, seed: int = 0, num_islands: int = 8, island_nodes: int = 128) -> dict[str, object]:
    """P = 16, d = 64 on islands of unequal links, shuffled, with degraded nodes and degraded single links."""
    rng = np.random.default_rng(seed)
    nodes = num_islands * island_nodes
    island = rng.permutation(np.repeat(np.arange(num_islands), island_nodes))
    bandwidth = np.where(island[:, None] == island, 46e9, 12e9) * rng.normal(1.0, 0.04, (nodes, nodes)).clip(0.8, 1.2)
    slow_nodes = rng.choice(nodes, size=nodes // 128, replace=False)
    bandwidth[slow_nodes] *= 0.5
    slow_links = rng.random((nodes, nodes)) < 0.01
    bandwidth[slow_links] *= 0.25
    return {
        "kind": "rank-mapping",
        "name": f"islands-{nodes}n-pp16-dp64",
        "num_nodes": nodes,
        "devices_per_node": 8,
        "pipeline_parallel": 16,
        "data_parallel_nodes": 64,
        "pipeline_message_bytes": 41943040,
        "data_parallel_message_bytes": 818595840,
        "num_microbatches_exposed": 4,
        "bandwidth_bytes_per_s": np.round(bandwidth).tolist(),
    }


if __name__ == "__main__":
    main()
