"""A referee for expert placements, written from the format's definition: plain loops, nothing of the planner.

``run`` solves an instance and has the referee judge the answer.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.expert_placement.search.solve import answer, solve

HERE = Path(__file__).parent


def referee_balance(load: Any, rows: list[list[int]], num_devices: int, speed: list[float]) -> float:
    values = []
    for layer, row in zip(load, rows, strict=True):
        per_device = len(row) // num_devices
        time = [0.0] * num_devices
        for slot, expert in enumerate(row):
            time[slot // per_device] += float(layer[expert]) / row.count(expert) / speed[slot // per_device]
        values.append(sum(map(float, layer)) / sum(speed) / max(time) if max(time) > 0 else 1.0)
    return sum(values) / len(values)


def referee_cross(transitions: Any, rows: list[list[int]], num_devices: int) -> float:
    same = total = 0.0
    for layer, table in enumerate(transitions):
        here, after = rows[layer], rows[layer + 1]
        per_device = len(here) // num_devices
        for e, f in product(range(len(table)), repeat=2):
            total += float(table[e][f])
            for d in range(num_devices):
                mine, theirs = (row[d * per_device : (d + 1) * per_device] for row in (here, after))
                same += float(table[e][f]) * mine.count(e) / here.count(e) * theirs.count(f) / after.count(f)
    return 1 - same / total if total else 0.0


def referee_moves(rows: list[list[int]], current: Any, num_devices: int) -> int:
    moved = 0
    for row, old in zip(rows, current, strict=True):
        per_device = len(row) // num_devices
        for d in range(num_devices):
            part = slice(d * per_device, (d + 1) * per_device)
            moved += len(set(row[part]) - {int(expert) for expert in old[part]})
    return moved


def judge(document: dict[str, Any], given_answer: dict[str, Any]) -> None:
    """Legal, and every claimed number true."""
    rows = given_answer["physical_to_logical_map"]
    experts, devices = document["num_experts"], document["num_devices"]
    slots = experts + document.get("num_redundant_experts", 0)
    speed = [float(value) for value in document.get("device_speed", [1.0] * devices)]
    assert [len(row) for row in rows] == [slots] * document["num_layers"]
    for row in rows:
        assert set(row) == set(range(experts))
        for d in range(devices):
            part = row[d * slots // devices : (d + 1) * slots // devices]
            assert len(set(part)) == len(part)
    assert given_answer["duplicates_on_device"] == 0
    if document.get("objective") == "robust":
        balance = min(referee_balance(case, rows, devices, speed) for case in document["scenarios"])
    else:
        balance = referee_balance(document["load"], rows, devices, speed)
    assert given_answer["balancedness"] == pytest.approx(balance, abs=1e-9)
    objective, sign = balance, 1
    if "transitions" in document:
        cross = referee_cross(document["transitions"], rows, devices)
        assert given_answer["cross_device_fraction"] == pytest.approx(cross, abs=1e-9)
        if document["objective"] == "balance+affinity":
            objective, sign = cross, -1
            assert balance >= document.get("min_balancedness", 0.0) - 1e-12
    if "current" in document:
        moved = referee_moves(rows, document["current"], devices)
        assert given_answer["moved_experts"] == moved
        assert moved <= document.get("max_moved_experts", moved)
    assert sign * (given_answer["bound"] - objective) >= -1e-12
    gap = abs(objective - given_answer["bound"]) / abs(objective) if objective else float(given_answer["bound"] != 0)
    assert given_answer["gap"] == pytest.approx(gap, abs=1e-12)
    if given_answer["status"] == "optimal":
        assert gap < 1e-6


def run(document: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    problem = ExpertPlacementProblem.from_document(document, HERE)
    found = answer(problem, solve(problem, seed=seed))
    json.dumps(found, allow_nan=False)
    judge(document, found)
    return found


def eplb_balance(load: Any, num_redundant: int, num_devices: int) -> float:
    """The global policy of EPLB from its description: copy the expert with the largest share, then longest first."""
    rows = []
    for layer in load:
        counts = [1] * len(layer)
        for _ in range(num_redundant):
            counts[max(range(len(layer)), key=lambda e: layer[e] / counts[e])] += 1
        pieces = sorted(
            ((layer[e] / counts[e], e) for e in range(len(layer)) for _ in range(counts[e])),
            key=lambda piece: -piece[0],
        )
        devices: list[list[int]] = [[] for _ in range(num_devices)]
        busy = [0.0] * num_devices
        for size, expert in pieces:
            free = [d for d in range(num_devices) if len(devices[d]) < len(pieces) // num_devices]
            device = min(free, key=lambda d: busy[d])
            devices[device].append(expert)
            busy[device] += size
        rows.append([expert for device in devices for expert in device])
    return referee_balance(load, rows, num_devices, [1.0] * num_devices)
