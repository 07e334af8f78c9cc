"""Sixty questions over all kinds: what each plan says, so that a change of structure can be held to "the same answers".

    python tests/benchmarks/same_answers.py --write answers.json      # before the change
    python tests/benchmarks/same_answers.py --against answers.json    # after it: prints every path that differs

Clocks and identifiers (plan id, wall and CPU seconds, time stamps) are left out; everything else of the plan counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
NOT_COMPARED = {"plan_id", "wall_s", "cpu_s", "created_at", "solver_wall_s"}
EXIT_INFEASIBLE = 3


def questions() -> dict[str, dict[str, Any] | Path]:
    """Each question by name: a document, or the file of a stand-alone problem."""
    listed = yaml.safe_load((ROOT / "tests" / "benchmarks" / "questions.yaml").read_text())
    asked: dict[str, dict[str, Any] | Path] = {}
    for kind in ("training", "serving", "gpu-allocation"):
        for name, question in listed[kind].items():
            nodes = question.pop("nodes", None)
            if nodes:
                question["cluster"] = {"nodes": [{"type": node, "count": count} for node, count in nodes.items()]}
            asked[f"{kind}/{name}"] = {"kind": kind, **question}
    for pattern in listed["stand-alone"]:
        (path,) = ROOT.glob(pattern)
        asked[f"stand-alone/{path.stem}"] = path
    for objective in ("balance", "balance+affinity", "robust", "migrate"):
        asked[f"expert-placement/{objective}"] = expert_placement(objective)
    return asked


def expert_placement(objective: str) -> dict[str, Any]:
    """A seeded instance: 4 layers of 16 experts on 4 devices, log-normal loads."""
    rng = np.random.default_rng(5)
    layers, experts, redundant = 4, 16, 0 if objective == "balance+affinity" else 4
    load = rng.lognormal(8, 0.7, (layers, experts)).round().astype(int)
    document: dict[str, Any] = {
        "kind": "expert-placement", "name": objective, "num_layers": layers, "num_experts": experts, "top_k": 2,
        "num_devices": 4, "devices_per_node": 2, "num_redundant_experts": redundant, "objective": objective,
        "load": load.tolist(),
    }  # fmt: skip
    if objective == "balance+affinity":
        document["transitions"] = rng.integers(0, 50, (layers - 1, experts, experts)).tolist()
        document["min_balancedness"] = 0.7
    if objective == "robust":
        del document["load"]
        document["scenarios"] = rng.lognormal(8, 0.7, (3, layers, experts)).round().astype(int).tolist()
    if objective == "migrate":
        row = [*range(experts), *range(redundant)]
        document |= {"current": [row] * layers, "max_moved_experts": 6}
    return document


def answer(question: dict[str, Any] | Path, scratch: Path) -> dict[str, Any]:
    """The plan's JSON as the command line prints it; the error where there is no plan to print."""
    file = question if isinstance(question, Path) else scratch / "question.json"
    if not isinstance(question, Path):
        file.write_text(json.dumps(question))
    command = [str(Path(sys.executable).parent / "meshplan"), "plan", str(file), "--no-store", "--format", "json"]
    command += ["--db", f"sqlite:///{scratch}/c.sqlite"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, EXIT_INFEASIBLE):
        return {"exit": done.returncode, "error": done.stderr.replace(str(scratch), "")}
    return without_clocks(json.loads(done.stdout))


def without_clocks(value: Any) -> Any:
    """Everything that the same question must answer alike."""
    if isinstance(value, dict):
        return {key: without_clocks(item) for key, item in value.items() if key not in NOT_COMPARED}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths whose values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}, key=str):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {str(before)[:60]!r} → {str(after)[:60]!r}"


def main() -> None:
    """Ask, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="part of the name")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    answers, changed = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, question in questions().items():
            if options.only not in name:
                continue
            answers[name] = answer(question, Path(folder))
            solution = answers[name].get("solution", answers[name])
            found = list(differences(before.get(name), answers[name])) if options.against else []
            changed += bool(found)
            mark = "" if not options.against else "  differs" if found else "  same"
            print(f"{name:36} {solution.get('status', 'error'):10} {solution.get('objective')!s:22}{mark}", flush=True)
            for line in found[:20]:
                print(f"    {line}")
    if options.write:
        options.write.write_text(json.dumps(answers, indent=1, sort_keys=True))
    print(f"{len(answers)} answers, {changed} differ" if options.against else f"{len(answers)} answers")


if __name__ == "__main__":
    main()
