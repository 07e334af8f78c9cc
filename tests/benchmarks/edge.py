"""Small machines against published times of a token: distributed-llama on up to eight, llama.cpp's RPC servers.

    python tests/benchmarks/edge.py [--fit]

Constants are solved from Llama 2 7B alone (three kinds of machines, ten times): κ and the rate of each machine from
what the root computes, the cost of a message from what it transfers. Every other model, the later releases and other
machines are held out. ``--fit`` solves them again and prints them.

What the releases exchange: *gathered* (to 0.6) gathers queries, keys, values, both halves of the MLP and both outputs
on the root, which alone multiplies with the vocabulary; *star* (0.7 to 0.10) adds up on the root; *everyone* (from 0.12
on) is what plans are made for. Bytes of the first two are held against the published ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshplan.catalogs.constants.machines.small_machines import small_machines
from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.edge.engines import BY_NAME
from meshplan.planner.edge.exchange import star_s
from meshplan.planner.edge.plan import COMPUTE_FACTOR, NETWORK_FACTOR
from meshplan.planner.edge.problem import USABLE_SHARE, WEIGHT_BYTES, EdgeProblem, MachineKind, Network
from meshplan.planner.edge.resolve import CARD_SHARE, MESSAGE_S
from meshplan.planner.edge.token_time import (
    UNSPLIT_WEIGHTS,
    Group,
    TokenTime,
    head_weights,
    layer_weights,
    token_time,
)

ROWS = Path(__file__).parents[1] / "data" / "published" / "edge.yaml"
FITTED = "llama-2-7b"
Q80 = WEIGHT_BYTES["q8_0"]
PHASES = 8  # of a layer of the gathered protocol: one way each, one after the other
MILLI, KIB = 1e3, 1024.0
BOARDS = ("raspberry-pi-4b", "raspberry-pi-5")
TOKENS = 16  # of a prompt and of an answer: the samples of the readme
Constants = Mapping[str, float]  # machine → weights/s, "unsplit" → κ, "message of MACHINE" → s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published time beside its prediction, milliseconds; ``parts`` is the prediction's work and transfers."""

    what: str
    held_out: bool
    work: tuple[float, float] | None
    transfer: tuple[float, float] | None
    total: tuple[float, float]
    parts: tuple[float, float]


def gathered_bytes(shape: ModelShape, machines: int) -> tuple[float, float]:
    """Bytes that the root sends and receives for a token, releases to 0.6.

    Each worker's parts of six vectors come in; three vectors and the others' part of the MLP go out to each.
    """
    others, wide = machines - 1, float(shape.hidden_size)
    keys = 2.0 * shape.num_key_value_heads * shape.head_dim
    sent = others * (3.0 * wide + shape.intermediate_size * (1.0 - 1.0 / machines))
    received = others / machines * (3.0 * wide + keys + shape.intermediate_size)
    return (Q80 * shape.num_hidden_layers * sent, Q80 * shape.num_hidden_layers * received)


def star_bytes(shape: ModelShape, machines: int) -> tuple[float, float]:
    """The same of releases 0.7 to 0.10: two all-reduces a layer."""
    each = 2.0 * shape.num_hidden_layers * (machines - 1) * Q80 * shape.hidden_size
    return (each, each)


PROTOCOLS: Mapping[str, Callable[[ModelShape, int], tuple[float, float]]] = {
    "gathered": gathered_bytes,
    "star": star_bytes,
}


def shipped(document: Mapping[str, Any]) -> dict[str, float]:
    constants = {"unsplit": UNSPLIT_WEIGHTS}
    for name, machine in small_machines().items():
        constants |= {name: machine.weights_per_s, f"message of {name}": machine.message_s}
    for name, alone in document["alone"].items():
        shape = seed_model_shape(alone["model"])
        weights = layer_weights(shape) + head_weights(shape) + UNSPLIT_WEIGHTS * shape.num_hidden_layers
        constants |= {name: weights / (alone["ms"] / MILLI), f"message of {name}": MESSAGE_S}
    return constants


def network_of(document: Mapping[str, Any], machine: str) -> Network:
    said = document["machines"][machine]
    return Network(bytes_per_s=float(said["link"]), latency_s=float(said["latency_s"]), shared_air=False)


def kind_of(machine: str, count: int, constants: Constants) -> MachineKind:
    known = small_machines().get(machine)
    return MachineKind(
        name=machine,
        count=count,
        usable_bytes=math.inf if known is None else USABLE_SHARE * known.memory_bytes,
        bytes_per_s=math.inf if known is None else known.memory_bandwidth_bytes_per_s,
        weights_per_s=constants[machine],
        message_s=constants[f"message of {machine}"],
        drive_bytes_per_s=None,
        is_accelerator=False,
        is_measured=True,
        addresses=(),
        source="",
    )


def problem_of(model: str, kinds: Sequence[MachineKind], network: Network | None) -> EdgeProblem:
    return EdgeProblem(
        shape=seed_model_shape(model),
        kinds=tuple(kinds),
        network=network,
        prompt_tokens=TOKENS,
        generated_tokens=TOKENS,
        formats=("q4_0",),
        engines=(),
        most_token_s=None,
    )


def predicted(document: Mapping[str, Any], row: Mapping[str, Any], machines: int, constants: Constants) -> TokenTime:
    """Time of a token by the row's release."""
    machine, network = row["machine"], network_of(document, row["machine"])
    if row["protocol"] == "everyone":
        problem = problem_of(row["model"], [kind_of(machine, machines, constants)], network)
        group = Group(engine=BY_NAME["distributed-llama"], weight_format="q4_0", machines=(0,) * machines)
        return token_time(problem, group)
    shape, handled = seed_model_shape(row["model"]), constants[f"message of {machine}"]
    weights = layer_weights(shape) / machines + head_weights(shape)
    weights += constants["unsplit"] * shape.num_hidden_layers
    if row["protocol"] == "star":
        each = star_s(network, machines, Q80 * shape.hidden_size, handled)
        transfer = 2.0 * shape.num_hidden_layers * each
    else:
        phases = PHASES * shape.num_hidden_layers if machines > 1 else 0
        sent = sum(gathered_bytes(shape, machines))
        transfer = phases * (network.latency_s + (machines - 1) * handled) + sent / network.bytes_per_s
    return TokenTime(compute_s=weights / constants[machine], network_s=transfer)


def compared(document: Mapping[str, Any], constants: Constants) -> Iterator[Row]:
    for row in document["rows"]:
        for machines, work, transfer, *whole in row["times"]:
            found = predicted(document, row, machines, constants)
            parts = work is not None
            total = work + transfer if parts else whole[0]
            yield Row(
                what=f"{row['model']} on {machines} x {row['machine']} ({row['protocol']}, {row['source']})",
                held_out=row["model"] != FITTED,
                work=(work, MILLI * found.compute_s) if parts else None,
                transfer=(transfer, MILLI * found.network_s) if parts and machines > 1 else None,
                total=(total, MILLI * found.total_s),
                parts=(MILLI * found.compute_s, MILLI * found.network_s),
            )


# --- the fit ----------------------------------------------------------------------------------------------------------


def fitted(document: Mapping[str, Any]) -> dict[str, float]:
    """The constants solved from Llama 2 7B alone, by least squares of logarithms."""
    rows = [(row, time) for row in document["rows"] if row["model"] == FITTED for time in row["times"]]
    names = [*dict.fromkeys(row["machine"] for row, _ in rows), "unsplit"]
    base = {**shipped(document), **dict.fromkeys(names, 2e7)}

    def work_errors(logs: np.ndarray) -> np.ndarray:
        tried = {**base, **dict(zip(names, np.exp(logs), strict=True))}
        found = [MILLI * predicted(document, row, time[0], tried).compute_s / time[1] for row, time in rows]
        return np.log(np.array(found))

    start = [*(23.0 for _ in names[1:]), 17.0]
    constants = {**base, **dict(zip(names, np.exp(solved(work_errors, start)), strict=True))}
    for machines in (BOARDS, ("c3d-highcpu-30",)):
        constants |= messages(document, machines, constants)
    return constants


def messages(document: Mapping[str, Any], machines: Sequence[str], constants: Constants) -> dict[str, float]:
    """The cost of a message to some machines, from their transfers."""
    rows = [row for row in document["rows"] if row["model"] == FITTED and row["machine"] in machines]
    several = [(row, time) for row in rows for time in row["times"] if time[0] > 1]

    def errors(logs: np.ndarray) -> np.ndarray:
        tried = {**constants, **{f"message of {name}": math.exp(logs[0]) for name in machines}}
        found = [MILLI * predicted(document, row, time[0], tried).network_s / time[2] for row, time in several]
        return np.log(np.array(found))

    (log,) = solved(errors, [-9.0])
    return {f"message of {name}": math.exp(log) for name in machines}


def solved(errors: Callable[[np.ndarray], np.ndarray], start: Sequence[float]) -> np.ndarray:
    """Least squares by Gauss and Newton with differences."""
    values, step = np.array(start), 1e-5
    for _ in range(60):
        now = errors(values)
        slopes = np.array([(errors(values + step * unit) - now) / step for unit in np.eye(len(values))]).T
        values = values - np.linalg.lstsq(slopes, now, rcond=None)[0]
    return values


# --- what is printed --------------------------------------------------------------------------------------------------


def summary(name: str, pairs: Sequence[tuple[float, float]]) -> None:
    errors = np.array([abs(one / published - 1.0) for published, one in pairs])
    factors = sorted((max(a / b, b / a) for a, b in pairs), reverse=True)
    print(
        f"{name}: {len(pairs)} times, median error {np.median(errors):.1%}, mean {np.mean(errors):.1%}, widest factors "
        f"{', '.join(f'{factor:.2f}' for factor in factors[:3])}"
    )


def inside(row: Row) -> bool:
    """Whether the published time is within the interval that a plan would print."""
    work, transfer = row.parts
    low = work / COMPUTE_FACTOR + transfer / NETWORK_FACTOR
    return low <= row.total[0] <= work * COMPUTE_FACTOR + transfer * NETWORK_FACTOR


def byte_errors(document: Mapping[str, Any]) -> Iterator[float]:
    for row in document["bytes"]:
        shape = seed_model_shape(row["model"])
        for machines, *stated in row["kib"]:
            counted = PROTOCOLS[row["protocol"]](shape, machines)
            yield from (one / KIB / said - 1.0 for one, said in zip(counted, stated, strict=True))


def pipelines(document: Mapping[str, Any], constants: Constants) -> None:
    for row in document["pipelines"]:
        layers = seed_model_shape(row["model"]).num_hidden_layers
        host = replace(kind_of("raspberry-pi-5", 1, constants), usable_bytes=math.inf)
        if "machine" in row:
            group = Group(engine=BY_NAME["llama.cpp"], weight_format=row["weights"], machines=(0,))
            time = token_time(problem_of(row["model"], [host], None), group)
        else:
            rate = CARD_SHARE * float(row["card_bytes_per_s"])
            card = replace(host, bytes_per_s=rate, weights_per_s=math.inf, message_s=MESSAGE_S)
            network = network_of(document, "nuc")
            group = Group(
                engine=BY_NAME["llama.cpp-rpc"], weight_format=row["weights"], machines=(0, 1), layers=(0, layers)
            )
            time = token_time(problem_of(row["model"], [host, card], network), group)
        print(
            f"{row['model']} {row['weights']}: {row['tokens_per_s']} tokens/s, predicted {1.0 / time.total_s:.3g}"
            f"{' (solved from)' if row['fitted'] else ''} – {row['source']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="solve the constants again and print them")
    document = yaml.safe_load(ROWS.read_text())
    constants: Constants = shipped(document)
    if parser.parse_args().fit:
        constants = fitted(document)
        for name, value in constants.items():
            print(f"{name}: {value:.4g}")
    rows = list(compared(document, constants))
    for row in rows:
        parts = "" if row.work is None else f"; work {row.work[0]:.0f}, {row.work[1]:.0f}"
        parts += "" if row.transfer is None else f"; transfer {row.transfer[0]:.1f}, {row.transfer[1]:.1f}"
        mark = "held out" if row.held_out else "solved from"
        print(f"{row.what}, {mark}: {row.total[0]:.0f} ms, predicted {row.total[1]:.0f}{parts}")
    print()
    for name, chosen in (("solved from", False), ("held out", True)):
        some = [row for row in rows if row.held_out is chosen]
        summary(f"{name}, a token", [row.total for row in some])
        summary(f"{name}, the root's work", [row.work for row in some if row.work is not None])
        summary(f"{name}, transfers", [row.transfer for row in some if row.transfer is not None])
        print(f"{name}, within the interval: {sum(map(inside, some))} of {len(some)}")
    errors = list(byte_errors(document))
    print(f"bytes over the root's link: {len(errors)} figures, largest error {max(map(abs, errors)):.2%}\n")
    pipelines(document, constants)


if __name__ == "__main__":
    main()
