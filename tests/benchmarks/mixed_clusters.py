"""Random mixed clusters, served: python tests/benchmarks/mixed_clusters.py [NUMBER] [--seed S] [--fleet]

Asks for the highest rate of each of NUMBER clusters (default 200) of two or three node types, and prints every
violation of what must hold:

- a part (the cluster without one node type, or with a node less) is never faster than the whole could be, which is the
  whole's rate over 1 − gap;
- the same nodes in another order give the same rate;
- no plan whose ``kind: gpu-allocation`` rents the same nodes for more than that rate keeps its SLOs (``--fleet``: this
  asks a second solver and replays its plan, some seconds a cluster).

The last line is the figure.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import make_plan

NODES = ("dgx-h100", "dgx-a100-80gb", "dgx-h200", "dgx-b200")
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b")
# The fleet is asked for this much more than serving finds.
MORE = 1.03


def question(rng: random.Random) -> dict[str, Any]:
    """A random mixed cluster and load."""
    types = rng.sample(NODES, rng.choice((2, 2, 2, 3)))
    return {
        "kind": "serving",
        "model": rng.choice(MODELS),
        "cluster": {"nodes": [{"type": name, "count": rng.choice((1, 1, 2))} for name in types]},
        "workload": {"input_length": rng.choice((500, 2000, 4000)), "output_length": rng.choice((100, 300, 500))},
        "objective": "max_request_rate",
        "slo": {"ttft_p99_s": rng.choice((1.0, 2.0, 4.0)), "tpot_p95_s": rng.choice((0.04, 0.08))},
    }


def parts(nodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The cluster without one type, and with one node less of one type."""
    found = [[one for one in nodes if one is not left] for left in nodes]
    for index, one in enumerate(nodes):
        if one["count"] > 1:
            found.append([*nodes[:index], {**one, "count": one["count"] - 1}, *nodes[index + 1 :]])
    return found


def rate(plan: Plan) -> float:
    """Requests/s of a plan; 0 where there is none."""
    return float(plan.predicted["requests_per_s"].value) if plan.config else 0.0


def most(plan: Plan) -> float:
    """The rate that no deployment exceeds."""
    return rate(plan) / (1.0 - float(plan.solution["gap"])) if plan.config else 0.0


def fleet(asked: dict[str, Any], wanted: float) -> dict[str, Any]:
    """The same nodes as offers, and the rate as a bucket."""
    load = asked["workload"]
    offers = [{"type": one["type"], "max_nodes": one["count"]} for one in asked["cluster"]["nodes"]]
    prompt, answer = [load["input_length"]] * 2, [load["output_length"]] * 2
    bucket = {"input_tokens": prompt, "output_tokens": answer, "request_rate_per_s": wanted}
    return {
        "kind": "gpu-allocation",
        "model": asked["model"],
        "market": {"rent": "node", "offers": offers},
        "workload": {"buckets": [bucket]},
        "slo": asked["slo"],
        "constraints": {"target": "vllm"},
    }


def main() -> None:
    """Ask, compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", action="store_true")
    options = parser.parse_args()
    rng, violations, gains = random.Random(options.seed), 0, []
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog.open(f"sqlite:///{Path(folder) / 'catalog.sqlite'}")
        for number in range(options.number):
            asked = question(rng)
            nodes = asked["cluster"]["nodes"]
            whole = make_plan(asked, catalog)
            found = [make_plan({**asked, "cluster": {"nodes": part}}, catalog) for part in parts(nodes)]
            wrong = [f"a part is faster: {rate(one):.4g}" for one in found if rate(one) > most(whole) * (1.0 + 1e-6)]
            turned = make_plan({**asked, "cluster": {"nodes": nodes[::-1]}}, catalog)
            if abs(rate(turned) - rate(whole)) > 1e-9 * rate(whole):
                wrong.append(f"in another order: {rate(turned):.4g}")
            if options.fleet and whole.config:
                other = make_plan(fleet(asked, MORE * rate(whole)), catalog)
                if other.solution["status"] != "infeasible":
                    wrong.append(f"gpu-allocation serves {MORE * rate(whole):.4g}: {other.solution['status']}")
            best = max(map(rate, found), default=0.0)
            gains.append(rate(whole) / best if best else 1.0)
            violations += len(wrong)
            gap = whole.solution["gap"] or 0.0
            print(
                f"{number}: {rate(whole):.4g}/s, gap {gap:.2%}, the best part {best:.4g}/s",
                *wrong,
                sep="; ",
                flush=True,
            )
            if wrong:
                print("  ", asked)
    mean = sum(gains) / max(len(gains), 1)
    print(f"{violations} violations in {options.number} clusters; the whole is {mean:.2f} times the best part")


if __name__ == "__main__":
    main()
