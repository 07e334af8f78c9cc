"""How fast and how good the GPU allocation solver is; prints figures, asserts nothing.

python tests/benchmarks/gpu_allocation.py FOLDER [--answers DIR]   every instance of a folder, against reference.csv
python tests/benchmarks/gpu_allocation.py --large [--seeds N] [--write DIR]    generated: 32 types × 40² buckets
python tests/benchmarks/gpu_allocation.py FOLDER --year            each instance over 8,760 hours with switching costs
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.planner.gpu_allocation.nodes.problem import lifted
from meshplan.planner.gpu_allocation.nodes.schedule import solve_schedule
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem
from meshplan.planner.gpu_allocation.replicas.solve import answer, solve

# Name, USD/h, peak FLOP/s (16 bit), bytes/s, bytes of memory: round datasheet figures, to give realistic ratios.
FAMILIES = (
    ("l4", 0.70, 121e12, 300e9, 24e9),
    ("a10g", 1.01, 125e12, 600e9, 24e9),
    ("l40s", 1.90, 362e12, 864e9, 48e9),
    ("a100", 3.67, 312e12, 2039e9, 80e9),
    ("h100", 7.516, 989e12, 3350e9, 80e9),
    ("h200", 8.90, 989e12, 4800e9, 141e9),
    ("mi300x", 6.30, 1307e12, 5300e9, 192e9),
    ("b200", 12.50, 2250e12, 8000e9, 192e9),
)
MODEL_PARAMETERS, KV_BYTES_PER_TOKEN, TPOT_SLO_S = 8e9, 131072, 0.12
VARIANT_SPREAD = 0.03  # how far offers of one family lie apart


def generate(
    *, num_types: int = 32, side: int = 40, usd_per_hour: float = 200.0, noise: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """A roofline-like instance whose closed bound is ``usd_per_hour``; types of one family are near-identical.

    ``noise`` multiplies each rate by exp(noise · N(0, 1)): at 0 a few types win everywhere, at 0.1 every type is best
    for some buckets.
    """
    rng = np.random.default_rng(seed)
    edges_in, edges_out = np.geomspace(16, 32000, side + 1), np.geomspace(4, 8000, side + 1)
    tokens_in, tokens_out = (grid.ravel() for grid in np.meshgrid(edges_in[1:], edges_out[1:], indexing="ij"))
    types, capacities = [], []
    for g in range(num_types):
        family, usd, flops, bandwidth, memory = FAMILIES[g % len(FAMILIES)]
        vary = 1 + VARIANT_SPREAD * rng.standard_normal(3)
        context = tokens_in + tokens_out / 2
        batch = np.minimum(256.0, (0.9 * memory - 2 * MODEL_PARAMETERS) / (context * KV_BYTES_PER_TOKEN))
        prefill_s = 2 * MODEL_PARAMETERS * tokens_in / (0.5 * flops * vary[0])
        cache_bytes = np.maximum(batch, 1) * context * KV_BYTES_PER_TOKEN
        step_s = (2 * MODEL_PARAMETERS + cache_bytes) / (0.7 * bandwidth * vary[1])
        rate = (
            1 / (prefill_s + tokens_out * step_s / np.maximum(batch, 1)) * np.exp(noise * rng.standard_normal(side**2))
        )
        capacities.append(np.where((batch >= 1) & (step_s < TPOT_SLO_S), rate, 0.0))
        types.append({"name": f"{family}-{g // len(FAMILIES)}", "usd_per_hour": round(usd * vary[2], 3)})
    capacity = np.array(capacities)
    price = np.array([gpu_type["usd_per_hour"] for gpu_type in types])
    traffic = rng.lognormal(0, 1, side**2)
    traffic *= np.exp(-((np.log(tokens_in) - 6.5) ** 2) / 4 - (np.log(tokens_out) - 5.5) ** 2 / 3)
    traffic[capacity.max(axis=0) <= 0] = 0.0
    with np.errstate(divide="ignore"):
        cost = np.where(capacity > 0, price[:, None] / capacity, np.inf).min(axis=0)
    traffic *= usd_per_hour / (traffic[traffic > 0] @ cost[traffic > 0])
    edges_in, edges_out = edges_in.round(), edges_out.round()
    return {
        "kind": "gpu-allocation",
        "name": f"large-t{num_types}-s{side}-usd{usd_per_hour:g}-noise{noise:g}-seed{seed}",
        "gpu_types": types,
        "buckets": [
            {
                "input_tokens": [int(edges_in[i]), int(edges_in[i + 1])],
                "output_tokens": [int(edges_out[j]), int(edges_out[j + 1])],
            }
            for i in range(side)
            for j in range(side)
        ],
        "request_rate_per_s": traffic.tolist(),
        "max_request_rate_per_s": {
            gpu_type["name"]: row.tolist() for gpu_type, row in zip(types, capacity, strict=True)
        },
    }


def run(document: dict[str, Any], base: Path, reference: float | None, answers: Path | None) -> float:
    """Solve one instance and print its line; its processor seconds."""
    problem = GpuAllocationProblem.from_document(document, base)
    solution = solve(problem)
    if answers:
        (answers / f"{problem.name}.json").write_text(json.dumps(answer(problem, solution)))
    line = f"{problem.name:42s} {solution.status.value:10s} cpu {solution.cpu_s * 1e3:8.1f} ms"
    if solution.objective is not None and solution.bound is not None and solution.gap is not None:
        line += f"  {solution.objective:10.3f} USD/h  bound {solution.bound:10.3f}  gap {solution.gap:.3%}"
        if reference is not None:
            line += f"  ratio to reference {solution.objective / reference:.6f}"
    print(line, flush=True)
    return solution.cpu_s


def year(document: dict[str, Any], base: Path, hours: int = 8760) -> float:
    """Schedule one instance over a year of daily and weekly waves with noise and growth; its processor seconds."""
    problem = GpuAllocationProblem.from_document(document, base)
    hour, rng = np.arange(hours), np.random.default_rng(0)
    traffic = 0.55 + 0.35 * np.sin(2 * np.pi * (hour % 24 - 9) / 24) + 0.1 * np.sin(2 * np.pi * hour / 168)
    traffic *= np.exp(0.08 * rng.standard_normal(hours)) * (1 + 0.3 * hour / hours)
    solution = solve_schedule(lifted(problem), (traffic / traffic.max()).tolist(), start_usd=0.5, stop_usd=0.1)
    line = f"{problem.name:42s} {solution.status.value:10s} cpu {solution.cpu_s:8.2f} s"
    if solution.assignment is not None and solution.objective is not None and solution.gap is not None:
        line += f"  {solution.objective:12.0f} USD  gap {solution.gap:.2%}  {solution.assignment.num_switches} changes"
        line += f"  the peak's fleet throughout {solution.assignment.constant_usd:12.0f} USD"
    print(line, flush=True)
    return solution.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="instances, with reference.csv if there is one")
    parser.add_argument("--answers", type=Path, help="write the answers here")
    parser.add_argument("--large", action="store_true", help="generated instances, 32 types × 40² buckets")
    parser.add_argument("--seeds", type=int, default=1, help="draws of each generated instance")
    parser.add_argument("--year", action="store_true", help="schedule the folder's instances over a year")
    parser.add_argument("--write", type=Path, help="write the generated instances here")
    options = parser.parse_args()
    documents: list[tuple[dict[str, Any], Path]] = []
    references: dict[str, float] = {}
    if options.large:
        cases = [(usd, noise) for noise in (0.0, 0.1) for usd in (30.0, 50.0, 100.0, 200.0, 1000.0, 5000.0)]
        documents = [
            (generate(usd_per_hour=usd, noise=noise, seed=seed), Path())
            for seed in range(options.seeds)
            for usd, noise in cases
        ]
        for document, _ in documents if options.write else []:
            (options.write / f"{document['name']}.json").write_text(json.dumps(document))
    elif options.folder:
        documents = [(json.loads(path.read_text()), options.folder) for path in sorted(options.folder.glob("*.json"))]
        table = options.folder / "reference.csv"
        rows = csv.DictReader(table.read_text().splitlines()) if table.exists() else []
        references = {row["name"]: float(row["reference_objective"]) for row in rows if row["reference_objective"]}
    else:
        parser.error("give a folder, or --large")
    if options.year:
        times = [year(document, base) for document, base in documents]
    else:
        times = [run(document, base, references.get(document["name"]), options.answers) for document, base in documents]
    print(
        f"{len(times)} instances, cpu_s median {np.median(times):.4f}, p95 {np.percentile(times, 95):.4f}, "
        f"max {max(times):.4f}"
    )


if __name__ == "__main__":
    main()
