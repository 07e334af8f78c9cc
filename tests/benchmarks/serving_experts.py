"""What experts placed by recorded routing do to serving plans over two nodes.

Usage: ``python tests/benchmarks/serving_experts.py``.

Prints three lines a case: experts in order → placed, both with the recorded loads, under the plan's own load. Recorded:
the counts of ``tests/data`` (OLMoE-1B-7B and Mixtral-8x7B, three layers each). Hidden pairs: Mixtral's shape with even
loads and 77.5 % of the tokens staying in one of four hidden pairs of experts, so that placing saves changes of device
alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshplan.planner.core.kinds import Question
from meshplan.planner.expert_placement.problem.recordings import ExpertRecording
from meshplan.planner.service import load_catalog
from meshplan.planner.serving.expert_plan import place_served_experts
from meshplan.planner.serving.problem.expert_routing import Dispatch
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.service import plan

DATA = Path(__file__).parents[1] / "data"
OLMOE, MIXTRAL = "olmoe-1b-7b", "mixtral-8x7b"
LAYERS, EXPERTS, STAYING = 32, 8, 0.775


def recorded(model: str) -> ExpertRecording:
    """Published counts; Mixtral's with transitions of first choices."""
    name = {OLMOE: "olmoe", MIXTRAL: "mixtral"}[model]
    document = json.loads((DATA / f"{name}_expert_counts.json").read_text())
    ways = document.get("transitions")
    return ExpertRecording(
        load=np.array([document["c4"]], dtype=float),
        layer_ids=(0, 7, 15),
        transitions=None if ways is None else np.array(ways, dtype=float),
    )


def hidden_pairs() -> ExpertRecording:
    """Even loads whose tokens mostly stay in pairs that each layer numbers in its own way."""
    draw = np.random.default_rng(0)
    pair = np.array([draw.permutation(EXPERTS) // 2 for _ in range(LAYERS)])
    same = pair[:-1, :, None] == pair[1:, None, :]
    ways = 1000.0 * np.where(same, STAYING / 2, (1.0 - STAYING) / (EXPERTS - 2))
    return ExpertRecording(load=np.full((1, LAYERS, EXPERTS), 1000.0), layer_ids=tuple(range(LAYERS)), transitions=ways)


def spec(model: str, per_node: int, network: str, concurrency: int) -> dict[str, Any]:
    """Two nodes of H100, attention data parallel and experts over all devices."""
    devices = 2 * per_node
    return {
        "kind": "serving",
        "model": model,
        "cluster": {
            "devices": {"type": "h100-sxm-80gb", "per_node": per_node, "nodes": 2},
            "links": {
                "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
                "inter_node": {"bandwidth": network, "latency": "5 us"},
            },
        },
        "workload": {"input_length": 2048, "output_length": 256, "concurrency": concurrency},
        "fixed": {
            "mode": "aggregated",
            "num_workers": 1,
            "tensor_parallel": 1,
            "attention_data_parallel": devices,
            "expert_parallel": devices,
        },
    }


LEAST_BALANCE = 0.95  # where changes of device are minimised
CASES: tuple[tuple[str, dict[str, Any], str, ExpertRecording, int], ...] = (
    *(
        (f"OLMoE 2 × 8, {copies} copies", spec(OLMOE, 8, "400 Gb/s", 256), "returns", recorded(OLMOE), copies)
        for copies in (0, 16)
    ),
    *(
        (f"{name} 2 × 2, {network}", spec(MIXTRAL, 2, network, 64), dispatch, recording, 0)
        for name, recording in (("Mixtral", recorded(MIXTRAL)), ("hidden pairs", hidden_pairs()))
        for network in ("400 Gb/s", "100 Gb/s")
        for dispatch in ("returns", "stays")
    ),
)


def main() -> None:
    """Print the table."""
    catalog = load_catalog()
    for name, document, dispatch, recording, copies in CASES:
        made = plan(Question(document=document, catalog=catalog))
        problem = resolve_serving(read_serving_spec(document), catalog, Path()).problem
        choices: dict[str, Any] = {"dispatch": Dispatch(dispatch), "num_redundant_experts": copies}
        if recording.transitions is not None:
            choices |= {"objective": "balance+affinity", "min_balancedness": LEAST_BALANCE}
        found = place_served_experts(made, problem, {"c4": recording}, **choices).document
        sides = [found["served"][side] for side in ("current", "new")]
        moved = [found[side].get("cross_device_fraction", float("nan")) for side in ("today", "new")]
        print(
            f"{name}, {dispatch}: load {sides[0]['load_factor']:.3f} → {sides[1]['load_factor']:.3f}, change device "
            f"{moved[0]:.1%} → {moved[1]:.1%}"
        )
        for metric in ("ttft_mean_s", "tpot_mean_s"):
            before, after = (side[metric] for side in sides)
            planned = found["served"]["as planned"][metric]
            print(f"    {metric} {before:.5f} → {after:.5f} ({after / before - 1:+.1%}; as planned {planned:.5f})")


if __name__ == "__main__":
    main()
