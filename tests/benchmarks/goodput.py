"""The share of a run that trains: against a simulation event by event, and against published points.

    python tests/benchmarks/goodput.py [SETTINGS] [--points GOODPUT.json]

``--points`` names a file of published results (id, quantity, given, value, compare). Nothing is fitted to a point that
judges:

- rates come with the point or, for mean times to failure, from the row of one-node jobs (which is not judged);
- restarts come with the point; else from the operator's *other* job (its ratio and incidents say how long a restart
  took), and where there is none from the default;
- where all others stand still for a stated time only, copies restart apart, eight of them unless the row says how many;
- a run with checkpoints in the background takes its step time from the same run's blocking checkpoints.

A row counts as missed beyond 3 points of a share, or 15 % of a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run_cases import drawn, simulated_ratio

from meshplan.planner.goodput.checkpoints import best_interval, daly_interval, efficiency
from meshplan.planner.goodput.conditions import Checkpoints, Interruptions
from meshplan.planner.goodput.copies import batch_share
from meshplan.planner.goodput.published import RESTART_S, counted_rate
from meshplan.planner.goodput.spares import waiting_share

INTERRUPTIONS = 30_000
# One simulated run scatters by up to some per cent where few interruptions wait long for nodes: settings that are
# further off than this are simulated again, so many times as long.
LOOKED_AT_AGAIN, AGAIN = 0.01, 20
# A step of the large jobs whose reports state none, where checkpoints are taken every step.
EVERY_STEP_S = 10.0
DAY = 86_400.0
# Errors beyond these are missed: points of a share, share of a time.
MOST_SHARE, MOST_TIME = 0.03, 0.15
# The point that the rate of all causes is taken from, and jobs of one operator that say how long the other restarts.
FITTED = "rsc-mttf-8"
OTHER_JOB = {"byterobust-ettr-dense": "byterobust-ettr-moe", "byterobust-ettr-moe": "byterobust-ettr-dense"}

# Copies that restart apart, of a job that does not say how many: 4 to 16 give 0.76 to 0.82 for the one that there is.
COPIES = 8

Given = dict[str, Any]
Point = dict[str, Any]


def against_simulation(count: int) -> None:
    errors, losses, daly, again = [], [], [], 0
    for seed in range(1000, 1000 + count):
        stops, costs, interval = drawn(seed)
        predicted = float(efficiency(interval, stops, costs)) * (1.0 - waiting_share(stops))
        measured = simulated_ratio(stops, costs, interval, seed=seed, many=INTERRUPTIONS)
        if abs(predicted / measured - 1.0) > LOOKED_AT_AGAIN:
            again += 1
            measured = simulated_ratio(stops, costs, interval, seed=seed, many=AGAIN * INTERRUPTIONS)
        errors.append(abs(predicted / measured - 1.0))
        best = best_interval(stops, costs)
        least = max(1.0, costs.durable_s - costs.block_s)
        every = [least * (20.0 / stops.per_s / least) ** (place / 20_000) for place in range(20_001)]
        exhaustive = float(efficiency(every, stops, costs).max())
        losses.append(1.0 - best.efficiency / exhaustive)
        short = max(least, daly_interval(stops, costs))
        daly.append(1.0 - float(efficiency(short, stops, costs)) / exhaustive)
    errors.sort()
    print(f"{count} random settings: ratio against {INTERRUPTIONS:,} simulated interruptions each:")
    print(f"  {again} of them, first more than {LOOKED_AT_AGAIN:.1%} off, {AGAIN} times as long")
    print(f"  median {errors[count // 2]:.2%}, largest {errors[-1]:.2%}, above 2 %: {sum(e > 0.02 for e in errors)}")
    print(f"  loss by the interval: at most {max(losses):.4%}; by Daly's formula {max(daly):.1%}")


def rate_of(given: Given) -> float | None:
    """Interruptions per second of a published job; None where its row says nothing of them."""
    nodes = given.get("num_devices", given.get("num_devices_max", 0)) / given.get("devices_per_node", 8)
    if "failures_per_node_day" in given:
        return float(given["failures_per_node_day"] * nodes / DAY)
    if "incidents" in given:
        return float(given["incidents"] / given["window_s"])
    return 1.0 / given["mean_time_between_failures_s"] if "mean_time_between_failures_s" in given else None


def ratio_of(given: Given, restart_s: float) -> float | None:
    """The ratio of a published job."""
    per_s = rate_of(given)
    if per_s is None:
        return None
    if "stall_s" in given:
        stops = Interruptions(per_s=per_s, restart_s=restart_s)
        return batch_share(stops, given.get("num_replicas", COPIES), stall_s=given["stall_s"])
    interval = given.get("checkpoint_interval_s", EVERY_STEP_S)
    costs = Checkpoints(block_s=given.get("checkpoint_block_s", 0.0))
    stops = Interruptions(per_s=per_s, restart_s=given.get("restart_s", restart_s))
    return float(efficiency(max(interval, 1e-3), stops, costs))


def restart_of(given: Given, ratio: float) -> float:
    """The restart with which a job has a ratio, by halving."""
    low, high = 0.0, DAY
    for _ in range(60):
        middle = 0.5 * (low + high)
        found = ratio_of(given, middle)
        low, high = (low, middle) if found is not None and found < ratio else (middle, high)
    return low


def against_points(path: Path) -> None:
    points = {point["id"]: point for point in json.loads(path.read_text())["points"]}
    print(f"{'point':36} {'published':>11} {'predicted':>11} {'error':>9}")
    for name, point in points.items():
        predicted, basis = prediction(name, point, points)
        sign = {"equal": "", "at_least": "≥ ", "at_most": "≤ "}[point["compare"]]
        text, error = ("not said", "") if predicted is None else (f"{predicted:.4g}", error_of(point, predicted))
        if basis != "no model":
            print(f"{name:36} {sign + format(point['value'], '.4g'):>11} {text:>11} {error:>9}  {basis}")


def prediction(name: str, point: Point, points: dict[str, Point]) -> tuple[float | None, str]:
    """What is predicted of a point, and what it rests on."""
    given = point["given"]
    if point["quantity"] == "mttf_s":
        stated = given.get("failures_per_node_day")
        rate = counted_rate("rsc-1-all-causes").per_node_day if stated is None else stated
        basis = (
            "rate given" if stated is not None else "its rate: not judged" if name == FITTED else "rate of rsc-mttf-8"
        )
        return DAY / (rate * given["num_devices"] / given["devices_per_node"]), basis
    if point["quantity"] == "ettr":
        other = OTHER_JOB.get(name)
        if other is None:
            return ratio_of(given, RESTART_S), "stated" if {"restart_s", "stall_s"} & set(given) else "default restart"
        restart = restart_of(points[other]["given"], points[other]["value"])
        return ratio_of(given, restart), f"restart {restart:,.0f} s of {other}"
    if point["quantity"] == "throughput_fraction" and name.endswith("-overlapped"):
        blocking = points[name.replace("-overlapped", "-blocking")]
        step = blocking["given"]["checkpoint_block_s"] * blocking["value"] / (1.0 - blocking["value"])
        costs = Checkpoints(block_s=given["checkpoint_block_s"])
        return float(efficiency(step, Interruptions(per_s=0.0, restart_s=0.0), costs)), f"step {step:.2f} s of blocking"
    return None, "no model"


def error_of(point: Point, predicted: float) -> str:
    """How far a prediction is off: points of a share, or per cent of a time; a bound that holds has no error."""
    value, holds = point["value"], {"at_least": predicted >= point["value"], "at_most": predicted <= point["value"]}
    if holds.get(point["compare"], False):
        return "holds"
    if point["quantity"] == "mttf_s":
        return f"{100 * (predicted / value - 1):+.1f} %" + ("  MISS" if abs(predicted / value - 1) > MOST_TIME else "")
    return f"{100 * (predicted - value):+.1f} pt" + ("  MISS" if abs(predicted - value) > MOST_SHARE else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=int, nargs="?", default=200)
    parser.add_argument("--points", type=Path)
    asked = parser.parse_args()
    against_simulation(asked.settings)
    if asked.points is not None:
        against_points(asked.points)


if __name__ == "__main__":
    main()
