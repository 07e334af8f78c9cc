"""Training on several node types: python tests/benchmarks/mixed_training.py [NUMBER] [--seed S] [--fixed]

Asks for the shortest step of each of NUMBER random clusters (default 200) of two or three node types, and prints every
violation of what must hold:

- a part (the cluster without one node type, or with a node less) is never faster than the whole could be, which is the
  bound that the whole states;
- the whole is never slower than a part by more than the gap that it states.

``--fixed`` prints CPU seconds, memory and gap of the three questions of ``planner/training/mixed/README.md``.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.service import make_plan

NODES = ("dgx-h100", "dgx-a100-80gb", "dgx-h200", "dgx-b200", "aws-p3dn-24xlarge")
MODELS = ("llama-3.1-8b", "gpt-j-6b", "qwen3-8b")
MIB = 1024
FIXED: dict[str, dict[str, Any]] = {
    "8B, 16 A100 + 8 H100": {
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-a100-40gb", "count": 2}, {"type": "dgx-h100", "count": 1}]},
        "workload": {"sequence_length": 4096, "global_batch_size": 128, "precision": "bf16"},
    },
    "GPT-J 6B, 128 A100 + 384 V100": {
        "model": "gpt-j-6b",
        "cluster": {
            "nodes": [{"type": "dgx-a100-40gb", "count": 16}, {"type": "aws-p3dn-24xlarge", "count": 48}],
            "links": {
                "between_types": [
                    {"types": ["dgx-a100-40gb", "aws-p3dn-24xlarge"], "bandwidth": "10 Gb/s", "latency": "50 us"}
                ]
            },
        },
        "workload": {"sequence_length": 2048, "global_batch_size": 2048, "precision": "fp16"},
    },
    "70B, 128 each of four types": {
        "model": "llama-3.1-70b",
        "cluster": {"nodes": [{"type": name, "count": 16} for name in NODES[:4]]},
        "workload": {"sequence_length": 8192, "global_batch_size": 512, "precision": "bf16"},
    },
}


def question(rng: random.Random) -> dict[str, Any]:
    """A random mixed cluster and job."""
    types = rng.sample(NODES, rng.choice((2, 2, 2, 3)))
    # Volta has no bf16.
    precision = "fp16" if "aws-p3dn-24xlarge" in types else "bf16"
    links = [
        {"types": [first, second], "bandwidth": rng.choice(("5 Gb/s", "25 Gb/s", "100 Gb/s")), "latency": "20 us"}
        for index, first in enumerate(types)
        for second in types[index + 1 :]
    ]
    return {
        "kind": "training",
        "model": rng.choice(MODELS),
        "cluster": {
            "nodes": [{"type": name, "count": rng.choice((1, 2, 3))} for name in types],
            "links": {"between_types": links},
        },
        "workload": {"sequence_length": rng.choice((2048, 4096)), "global_batch_size": 64, "precision": precision},
    }


def parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The cluster without one type, and with a node less of each."""
    found = []
    nodes = document["cluster"]["nodes"]
    for index, node in enumerate(nodes):
        without = [one for other, one in enumerate(nodes) if other != index]
        found.append(with_nodes(document, without))
        if node["count"] > 1:
            fewer = [{**one, "count": one["count"] - (one is node)} for one in nodes]
            found.append(with_nodes(document, fewer))
    return found


def with_nodes(document: dict[str, Any], nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """The same job on other nodes, and the links that are left."""
    types = {node["type"] for node in nodes}
    cluster: dict[str, Any] = {"nodes": nodes}
    left = [one for one in document["cluster"]["links"]["between_types"] if types.issuperset(one["types"])]
    if left:
        cluster["links"] = {"between_types": left}
    return {**document, "cluster": cluster}


def violations(document: dict[str, Any], catalog: Catalog) -> tuple[list[str], float]:
    """What does not hold of one cluster, and the gap of its plan."""
    whole = make_plan(document, catalog)
    step = whole.solution.get("objective", float("inf"))
    bound = whole.solution.get("bound", float("inf"))
    found = []
    for part in parts(document):
        alone = make_plan(part, catalog).solution.get("objective")
        if alone is None:
            continue
        if alone < bound * (1.0 - 1e-9):
            found.append(
                f"{part['cluster']['nodes']} takes {alone:.4f} s, less than the whole's bound of {bound:.4f} s"
            )
        if step > alone * (1.0 + whole.solution.get("gap", 0.0) + 1e-9):
            found.append(f"{part['cluster']['nodes']} takes {alone:.4f} s, the whole {step:.4f} s")
    return found, float(whole.solution.get("gap", 0.0))


def main() -> None:
    """Print violations, or the figures of the fixed questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(str(Path(folder) / "catalog.sqlite"))
        if asked.fixed:
            for name, document in FIXED.items():
                started = time.process_time()
                made = make_plan({"kind": "training", **document}, catalog)
                seconds, peak = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
                step, gap = made.solution["objective"], made.solution["gap"]
                print(f"{name}: {step:.3f} s a step, gap {gap:.1%}, {seconds:.2f} CPU-s, {peak:.0f} MiB")
            return
        rng, count, gaps = random.Random(asked.seed), 0, []
        for index in range(asked.number):
            document = question(rng)
            found, gap = violations(document, catalog)
            gaps.append(gap)
            count += len(found)
            for line in found:
                print(f"{index}: {document['model']} {document['cluster']['nodes']}: {line}", flush=True)
    gaps.sort()
    print(f"{asked.number} clusters, {count} violations; gap median {gaps[len(gaps) // 2]:.1%}, largest {gaps[-1]:.1%}")


if __name__ == "__main__":
    main()
