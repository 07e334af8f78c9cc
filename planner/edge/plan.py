"""The plan of machines at home: what runs where, how fast, and what else there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.units import format_duration
from meshplan.planner.core.plan import Interval, Plan, PlanIdentity, own_version, plain, shape_document
from meshplan.planner.core.plan_document import MAX_NUMBER
from meshplan.planner.core.text import counted
from meshplan.planner.edge.options import Options, Priced
from meshplan.planner.edge.problem import EdgeProblem
from meshplan.planner.edge.resolve import sources
from meshplan.planner.edge.token_time import Group, held_bytes

# Factors that cover the published times which no constant was solved from, both ways: of the work of measured machines
# the widest of fifteen (Llama 3 8B on four Raspberry Pi 5), of exchanges the second widest of twelve (Llama 2 13B on
# eight Raspberry Pi 4; the widest, 5.2, is Llama 2 70B there). `python tests/benchmarks/edge.py`, 2026-11-26.
COMPUTE_FACTOR, NETWORK_FACTOR = 1.41, 3.2
# Of machines that are described by their peak, and of engines that nothing was held against. Assumed: attained shares
# of the peak in published times are between 0.26 and 0.58.
DESCRIBED_FACTOR = 2.0
# Of experts on several machines: the one published time, Qwen3-30B-A3B on four Raspberry Pi 5, is 2.27 times shorter.
EXPERTS_FACTOR = 2.3


def interval(problem: EdgeProblem, priced: Priced) -> Interval:
    """Seconds of a generated token, and the range in which they are expected."""
    time, group = priced.time, priced.group
    measured = all(problem.kinds[index].is_measured for index in group.machines) and group.engine.is_compared
    factor = COMPUTE_FACTOR if measured else DESCRIBED_FACTOR
    if problem.shape.moe is not None and group.engine.splits == "matrices":
        factor = max(factor, EXPERTS_FACTOR)
    low = time.compute_s / factor + time.network_s / NETWORK_FACTOR + time.least_drive_s
    high = time.compute_s * factor + time.network_s * NETWORK_FACTOR + time.most_drive_s
    return Interval(value=time.total_s, low=low, high=high)


def predicted(problem: EdgeProblem, priced: Priced) -> dict[str, Interval]:
    """Metric → interval."""
    token = interval(problem, priced)
    rate = Interval(value=1.0 / token.value, low=1.0 / token.high, high=1.0 / token.low)
    return {"tokens_per_s": rate, "time_per_token_s": token}


def config_document(problem: EdgeProblem, group: Group) -> dict[str, Any]:
    """What runs where, the root or main host first."""
    held = held_bytes(problem, group)
    places = []
    taken: dict[int, int] = {}
    for place, index in enumerate(group.machines):
        kind, number = problem.kinds[index], taken.get(index, 0)
        taken[index] = number + 1
        machine: dict[str, Any] = {
            "type": kind.name,
            "role": _role(group, place),
            "address": kind.addresses[number] if kind.addresses else "",
            "memory_bytes": held[place],
            "usable_bytes": kind.usable_bytes,
            "is_accelerator": kind.is_accelerator,
        }
        places.append(machine | ({"layers": group.layers[place]} if group.layers else {}))
    return {"engine": group.engine.name, "weights": group.weight_format, "machines": places}


def _role(group: Group, place: int) -> str:
    if len(group.machines) == 1:
        return "alone"
    if group.engine.splits == "layers":
        return "server" if place else "main host"
    return "worker" if place else "root"


def label(problem: EdgeProblem, group: Group) -> str:
    """A group in words: ``4 × raspberry-pi-5``."""
    counts = {index: group.machines.count(index) for index in group.machines}
    return " + ".join(f"{count} × {problem.kinds[index].name}" for index, count in counts.items())


def row_of(problem: EdgeProblem, priced: Priced, why: str) -> dict[str, Any]:
    """One way as a row of the plan's table."""
    time, token = priced.time, interval(problem, priced)
    return {
        "why": why,
        "engine": priced.group.engine.name,
        "weights": priced.group.weight_format,
        "machines": label(problem, priced.group),
        "num_machines": len(priced.group.machines),
        "tokens_per_s": 1.0 / time.total_s,
        "time_per_token_s": time.total_s,
        "low_s": token.low,
        "high_s": token.high,
        "compute_s": time.compute_s,
        "network_s": time.network_s,
        "drive_s": time.drive_s,
        "memory_bytes": max(held_bytes(problem, priced.group)),
    }


def alternatives(problem: EdgeProblem, options: Options) -> list[dict[str, Any]]:
    """The chosen way, then the fastest of each engine on each number of machines."""
    rows: list[dict[str, Any]] = []
    listed: set[tuple[str, int]] = set()
    for priced in options.priced:
        key = (priced.group.engine.name, len(priced.group.machines))
        if key not in listed:
            listed.add(key)
            rows.append(row_of(problem, priced, "chosen" if not rows else "best of its kind"))
    return rows


def breakdown(problem: EdgeProblem, priced: Priced) -> list[dict[str, Any]]:
    """Where the time of a token goes."""
    time = priced.time
    level = "fitted to published measurements" if priced.group.engine.is_compared else "assumed"
    parts = {"machines": time.compute_s, "network": time.network_s, "drive": time.drive_s}
    return [
        {"name": name, "seconds": seconds, "share": seconds / time.total_s, "evidence": level}
        for name, seconds in parts.items()
        if seconds > 0.0
    ]


def notes(problem: EdgeProblem, priced: Priced) -> list[str]:
    """What a reader should doubt of this answer."""
    group, slowest = priced.group, problem.prompt_tokens * interval(problem, priced).high
    said = [
        f"the prompt of {counted(problem.prompt_tokens, 'token')} takes {format_duration(slowest)} at most, as long as "
        "so many generated tokens; how much faster batches of it are was measured too seldom"
    ]
    if any(not problem.kinds[index].is_measured for index in group.machines):
        said.append(
            "rates of described machines are a share of their peak: run the model on one of them and give "
            "attained_bandwidth (bytes of the model × tokens/s) for a narrower range"
        )
    if not group.engine.is_compared:
        said.append(f"no published time of {group.engine.name} was held against this")
    if priced.time.network_s > priced.time.compute_s:
        said.append("the network takes longer than the machines: fewer machines, or a cable in place of Wi-Fi")
    if problem.network is not None and problem.network.shared_air:
        said.append("no time over Wi-Fi was held against this")
    if len(group.machines) == 1 and sum(kind.count for kind in problem.kinds) > 1:
        said.append("one machine alone is fastest: what others add in speed, messages cost")
    return said


def provenance(problem: EdgeProblem, priced: Priced | None) -> dict[str, Any]:
    """What the numbers rest on."""
    return {
        "meshplan": own_version(),
        "sources": dict(sources(problem)),
        "model": shape_document(problem.shape),
        "notes": [] if priced is None else notes(problem, priced),
    }


def content(problem: EdgeProblem) -> Mapping[str, Any]:
    """Every catalog entry that the answer rests on."""
    kinds = [plain(kind) | {"weights_per_s": min(kind.weights_per_s, MAX_NUMBER)} for kind in problem.kinds]
    return {"model": shape_document(problem.shape), "machines": kinds}


def make_plan(problem: EdgeProblem, options: Options, *, solution: Mapping[str, Any], identity: PlanIdentity) -> Plan:
    """The plan of the fastest way."""
    best = options.priced[0]
    machines = config_document(problem, best.group)
    return Plan(
        config=machines,
        predicted=predicted(problem, best),
        memory={"worst": {"weights_and_cache_bytes": max(held_bytes(problem, best.group))}},
        breakdown=tuple(breakdown(problem, best)),
        provenance=provenance(problem, best),
        solution=solution,
        alternatives=tuple(alternatives(problem, options)),
        rejected=tuple(rejected_rows(options)),
        **identity,
    )


def rejected_rows(options: Options) -> list[dict[str, Any]]:
    """What rules and memory rule out, with counts."""
    return [{"reason": reason, "count": count, "example": None} for reason, count in options.rejected.most_common()]
