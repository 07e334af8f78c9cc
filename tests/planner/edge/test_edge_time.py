"""Times and memory of machines at home: published bytes and limits, simulated messages, what must never happen."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.planner.edge.engines import BY_NAME
from meshplan.planner.edge.exchange import everyone_s, star_s
from meshplan.planner.edge.options import every_option
from meshplan.planner.edge.problem import USABLE_SHARE, WEIGHT_BYTES, EdgeProblem, MachineKind, Network
from meshplan.planner.edge.token_time import Group, layers_on, missing_bytes, token_time

PUBLISHED = yaml.safe_load((Path(__file__).parents[2] / "data" / "published" / "edge.yaml").read_text())
GIGABIT = Network(bytes_per_s=125e6, latency_s=1e-4, shared_air=False)
BOARD = MachineKind(
    name="board",
    count=4,
    usable_bytes=USABLE_SHARE * 8e9,
    bytes_per_s=11.4e9,
    weights_per_s=16.8e9,
    message_s=42.6e-6,
    drive_bytes_per_s=None,
    is_accelerator=False,
    is_measured=True,
    addresses=(),
    source="",
)


def problem(model: str = "llama-2-7b", *kinds: MachineKind, network: Network = GIGABIT, **other: Any) -> EdgeProblem:
    fields: dict[str, Any] = {
        "shape": seed_model_shape(model),
        "kinds": kinds or (BOARD,),
        "network": network,
        "prompt_tokens": 128,
        "generated_tokens": 128,
        "formats": ("q4_0",),
        "engines": (),
        "most_token_s": None,
    }
    return EdgeProblem(**{**fields, **other})


def simulated_star(network: Network, machines: int, vector_bytes: float, message_s: float) -> float:
    """Events of one all-reduce through machine 0: its link and its processor each take one message at a time."""
    wire, hands, events = 0.0, 0.0, [(0.0, "in")] * (machines - 1)
    heapq.heapify(events)
    summed = finished = 0.0
    while events:
        at, what = heapq.heappop(events)
        wire = max(wire, at) + vector_bytes / network.bytes_per_s
        hands = max(hands, wire) + message_s
        summed = max(summed, hands)
        if what == "in" and not any(kind == "in" for _, kind in events):
            for _ in range(machines - 1):
                heapq.heappush(events, (summed + network.latency_s, "out"))
        finished = max(finished, hands + network.latency_s)
    return finished


def test_a_star_sends_the_published_bytes() -> None:
    (row,) = (row for row in PUBLISHED["bytes"] if row["protocol"] == "star")
    shape = seed_model_shape(row["model"])
    quiet = replace(GIGABIT, latency_s=0.0)
    for machines, sent, received in row["kib"]:
        vector = WEIGHT_BYTES["q8_0"] * shape.hidden_size
        taken = 2 * shape.num_hidden_layers * star_s(quiet, machines, vector, 0.0) * quiet.bytes_per_s
        assert taken == pytest.approx((sent + received) * 1024.0, rel=2e-3)


@pytest.mark.parametrize("row", PUBLISHED["fits"], ids=lambda row: row["model"])
def test_memory_agrees_with_what_ran_and_what_did_not(row: dict[str, Any]) -> None:
    asked = problem(row["model"], replace(BOARD, count=8))
    for machines in (*row["machines"], *row["lacks"]):
        group = Group(engine=BY_NAME["distributed-llama"], weight_format="q4_0", machines=(0,) * machines)
        assert any(missing_bytes(asked, group)) == (machines in row["lacks"]), machines


def test_a_star_is_never_faster_than_its_root_can_be_and_never_slower_than_one_thing_at_a_time() -> None:
    """The formula lets nothing overlap; a simulation in which wire and processor overlap is a bound from below."""
    source = random.Random(3)
    for _ in range(50):
        network = Network(
            bytes_per_s=10 ** source.uniform(6, 9), latency_s=10 ** source.uniform(-5, -2), shared_air=False
        )
        machines, vector, message = source.randint(2, 9), source.uniform(1e3, 1e6), 10 ** source.uniform(-6, -4)
        simulated = simulated_star(network, machines, vector, message)
        formula = star_s(network, machines, vector, message)
        assert simulated <= formula * (1 + 1e-9) <= 2.0 * simulated + 1e-12


def test_a_switch_prefers_everyone_to_everyone_and_the_air_a_star() -> None:
    air = replace(GIGABIT, shared_air=True, latency_s=0.0)
    for machines in (3, 4, 8):
        assert everyone_s(GIGABIT, machines, 4e3, 1e-5) < star_s(GIGABIT, machines, 4e3, 1e-5)
        assert everyone_s(air, machines, 1e6, 0.0) > star_s(air, machines, 1e6, 0.0)
    assert everyone_s(GIGABIT, 1, 4e3, 1e-5) == star_s(GIGABIT, 1, 4e3, 1e-5) == 0.0


def test_layers_of_a_pipeline_are_the_least_of_all_placements() -> None:
    source = random.Random(5)
    for _ in range(200):
        number, layers = source.randint(1, 4), source.randint(1, 9)
        caps = [source.randint(0, 6) for _ in range(number)]
        seconds = [source.uniform(1.0, 9.0) for _ in range(number)]
        every = [placed for placed in itertools.product(*(range(1, cap + 1) for cap in caps)) if sum(placed) == layers]
        found = layers_on(caps, seconds, layers)
        assert (found is None) == (not every)
        if found is not None:
            cost = [sum(a * b for a, b in zip(placed, seconds, strict=True)) for placed in (found, *every)]
            assert cost[0] == pytest.approx(min(cost))


@pytest.mark.parametrize("seed", [*range(12), 22, 29])
def test_no_pipeline_that_can_be_written_down_is_faster_than_the_best_one(seed: int) -> None:
    """Every order of every two or three machines, with every number of layers on each, priced one by one.

    Those from 8 on are on Wi-Fi, where what a layer sends may decide on which machine it lies (of 22 and 29 it does).
    """
    source, rpc = random.Random(seed), BY_NAME["llama.cpp-rpc"]
    kinds = tuple(
        replace(
            BOARD,
            name=name,
            count=count,
            usable_bytes=source.uniform(2e8, 5e8),
            weights_per_s=10 ** source.uniform(9.5, 11),
            message_s=10 ** source.uniform(-5, -3),
            is_accelerator=name == "b" and seed % 2 == 1,
        )
        for name, count in (("a", 1), ("b", 1), ("c", 1))
    )
    network = GIGABIT if seed < 8 else replace(GIGABIT, bytes_per_s=10 ** source.uniform(7, 8), shared_air=True)
    asked = problem("llama-3.2-1b", *kinds, engines=("llama.cpp-rpc",), network=network)
    number, written = asked.shape.num_hidden_layers, []
    for size in (2, 3):
        for machines in itertools.permutations(range(3), size):
            for cuts in itertools.combinations(range(1, number), size - 1):
                layers = tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, number)))
                group = Group(engine=rpc, weight_format="q4_0", machines=machines, layers=layers)
                if not any(missing_bytes(asked, group)):
                    written.append(token_time(asked, group).total_s)
    found = every_option(asked).priced
    assert bool(found) == bool(written)
    if written:
        assert found[0].time.total_s == pytest.approx(min(written))


def test_more_machines_better_links_and_faster_memory_never_hurt() -> None:
    source = random.Random(7)
    for _ in range(8):
        fast = replace(BOARD, count=source.randint(1, 3), weights_per_s=10 ** source.uniform(9.5, 11))
        slow = replace(BOARD, name="slow", count=source.randint(1, 3), weights_per_s=10 ** source.uniform(9, 10))
        network = replace(GIGABIT, bytes_per_s=10 ** source.uniform(6, 9), latency_s=10 ** source.uniform(-5, -2))
        asked = problem("llama-3.2-3b", fast, slow, network=network)
        best = every_option(asked).priced[0].time.total_s
        better = (
            replace(asked, kinds=(replace(fast, count=fast.count + 1), slow)),
            replace(asked, kinds=(fast, replace(slow, weights_per_s=2.0 * slow.weights_per_s))),
            replace(asked, network=replace(network, latency_s=network.latency_s / 2.0)),
        )
        assert all(every_option(one).priced[0].time.total_s <= best * (1 + 1e-12) for one in better)


def test_equal_machines_of_two_kinds_are_one_kind() -> None:
    one = every_option(problem("llama-2-13b", BOARD)).priced[0].time.total_s
    two = every_option(problem("llama-2-13b", replace(BOARD, count=1), replace(BOARD, name="same", count=3)))
    assert two.priced[0].time.total_s == pytest.approx(one)


def test_weights_from_a_drive_lie_between_a_cache_that_keeps_and_one_that_drops() -> None:
    small = replace(BOARD, count=1, usable_bytes=2e9, drive_bytes_per_s=1e8)
    asked = problem("llama-2-7b", small)
    time = token_time(asked, Group(engine=BY_NAME["llama.cpp"], weight_format="q4_0", machines=(0,)))
    assert 0.0 < time.least_drive_s < time.drive_s < time.most_drive_s
    assert time.compute_s + time.most_drive_s == pytest.approx(6.607e9 * WEIGHT_BYTES["q4_0"] / 1e8, rel=1e-2)
    window = replace(asked, formats=("f32",), kinds=(replace(small, count=4),))
    streamed = every_option(window).priced[0]
    assert streamed.group.engine.name == "tpi-llm"
    assert streamed.time.drive_s > 0.0
