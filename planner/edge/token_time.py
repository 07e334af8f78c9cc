"""How long one generated token takes, and what each machine holds meanwhile.

A machine multiplies with w weights of b bytes in w · max(b/B, 1/P): its memory gives B bytes/s, its processor takes P
weights of 4 bits a second. A token reads every matrix once, of experts those that it visits, and the cache of the text
so far. Over n machines, L layers, h wide:

- *matrices split*: (w/n)·max(b/B, 1/P) + κ·L/P on the slowest machine, then 2·L all-reduces of h values
  (:mod:`.exchange`); κ is the work of a layer that all do alike (norms, quantising, barriers of threads) in weights.
- *layers split*: the machines work one after the other: Σ of their layers, a request and a reply for each remote one,
  and a description of the graph of each remote layer, which the main host sends again for every token.
- *alone*: all on one machine. Of x bytes that it needs d have no room: they come from its drive, at best those alone,
  at worst, because the page cache drops what it has not read for longest, all x; the mean is geometric, the range has
  both ends.
- *TPI-LLM*: matrices split, and the window is read from the drive while machines compute: the longer of both.

Sources of constants: below. Assumes: no prefill at the same time, one request, texts of the length that is stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.edge.engines import TPI_LLM, EdgeEngine
from meshplan.planner.edge.exchange import everyone_s, star_s, transfer_s
from meshplan.planner.edge.problem import BYTES_F32, WEIGHT_BYTES, EdgeProblem, MachineKind, Network

# κ: work of a layer that is not split, as much as the product with so many weights; solved for with the rates of three
# machines from ten times of Llama 2 7B on one to eight machines (`tests/benchmarks/edge.py --fit`, 2026-11-26).
UNSPLIT_WEIGHTS = 29.2e6
# Bytes that the main host of llama.cpp's RPC sends for each remote layer of each token. Solved from one figure: Gemma 3
# 4B in q4_0 on a remote RTX 5090 over 1 Gb/s, 33.18 tokens/s (llama.cpp, pull request 16276), of which logits take 8.4
# ms and the card 3.0 ms.
GRAPH_BYTES_PER_LAYER = 69e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Machines in the order in which they are started, the root or main host first.

    Args:
        engine: that runs on them.
        weight_format: of the weights.
        machines: index of each machine's kind in the problem.
        layers: of the model on each machine, of a pipeline; empty otherwise.
    """

    engine: EdgeEngine
    weight_format: str
    machines: tuple[int, ...]
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """Seconds of one generated token.

    Args:
        compute_s: on machines, weights and cache read from memory.
        network_s: between them.
        drive_s: beyond these, for weights that come from drives: between the least and the most.
        least_drive_s: where the page cache keeps what it can.
        most_drive_s: where it keeps nothing.
    """

    compute_s: float
    network_s: float
    drive_s: float = 0.0
    least_drive_s: float = 0.0
    most_drive_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.network_s + self.drive_s


# --- the model --------------------------------------------------------------------------------------------------------


def head_weights(shape: ModelShape) -> int:
    """Weights of the product with the vocabulary, tied or not."""
    return shape.vocab_size * shape.hidden_size


@cache
def layer_weights(shape: ModelShape) -> float:
    """Weights of all layers that one token is multiplied with."""
    return float(shape.num_active_parameters - shape.embedding_parameters - shape.lm_head_parameters)


@cache
def stored_layer_weights(shape: ModelShape) -> float:
    """Weights of all layers, every expert included."""
    return float(shape.num_parameters - shape.embedding_parameters - shape.lm_head_parameters)


def cache_bytes(shape: ModelShape, engine: EdgeEngine, tokens: float) -> float:
    """Keys and values of all layers for a text."""
    each = 2.0 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers
    return each * engine.cache_bytes * tokens


# --- what a machine holds ---------------------------------------------------------------------------------------------


def held_bytes(problem: EdgeProblem, group: Group) -> list[float]:
    """Bytes of weights and cache on each machine of a group, in its order."""
    shape, size, number = problem.shape, WEIGHT_BYTES[group.weight_format], len(group.machines)
    cache = cache_bytes(shape, group.engine, problem.context_tokens)
    layers = size * stored_layer_weights(shape)
    if group.engine.splits == "matrices":
        each = (layers + size * head_weights(shape) + cache) / number
        embedding = BYTES_F32 * shape.vocab_size * shape.hidden_size
        return [each + (embedding if place == 0 else 0.0) for place in range(number)]
    embedding = size * shape.vocab_size * shape.hidden_size
    if group.engine.splits == "nothing":
        return [layers + cache + embedding + size * shape.lm_head_parameters]
    share = [count / shape.num_hidden_layers for count in group.layers]
    held = [part * (layers + cache) for part in share]
    held[0] += embedding
    held[head_place(problem, group)] += size * head_weights(shape)
    return held


def head_place(problem: EdgeProblem, group: Group) -> int:
    """Which machine of a pipeline multiplies with the vocabulary: a card of the main host, else the last one."""
    return 0 if problem.kinds[group.machines[0]].is_accelerator else len(group.machines) - 1


def missing_bytes(problem: EdgeProblem, group: Group) -> list[float]:
    """What each machine lacks of memory."""
    held = held_bytes(problem, group)
    return [max(0.0, need - problem.kinds[kind].usable_bytes) for need, kind in zip(held, group.machines, strict=True)]


# --- time -------------------------------------------------------------------------------------------------------------


def token_time(problem: EdgeProblem, group: Group) -> TokenTime:
    """Time of a token of a group that has room, or a drive for what has none."""
    if group.engine.splits == "matrices":
        return _split_matrices(problem, group)
    if group.engine.splits == "layers":
        return _split_layers(problem, group)
    kind = problem.kinds[group.machines[0]]
    compute = (layer_weights(problem.shape) + head_weights(problem.shape)) * kind.weight_s(group.weight_format)
    compute += _cache_s(problem, group, kind, 1.0)
    return TokenTime(compute_s=compute, network_s=0.0, **_drive(problem, group, compute))


def _split_matrices(problem: EdgeProblem, group: Group) -> TokenTime:
    shape, number = problem.shape, len(group.machines)
    kinds = [problem.kinds[index] for index in sorted(set(group.machines))]
    weights = (layer_weights(shape) + head_weights(shape)) / number
    unsplit = UNSPLIT_WEIGHTS * shape.num_hidden_layers
    compute = max(
        weights * kind.weight_s(group.weight_format)
        + unsplit / kind.weights_per_s
        + _cache_s(problem, group, kind, 1.0 / number)
        for kind in kinds
    )
    network = 0.0
    if problem.network is not None and number > 1:
        handled = max(kind.message_s for kind in kinds)
        streams = group.engine.name == TPI_LLM
        size = WEIGHT_BYTES["q8_0"] if group.weight_format == "q4_0" else BYTES_F32
        reduce = star_s if streams else everyone_s
        network = 2 * shape.num_hidden_layers * reduce(problem.network, number, size * shape.hidden_size, handled)
        network += _ends_s(problem.network, shape, number, handled)
    return TokenTime(compute_s=compute, network_s=network, **_window(problem, group, compute + network))


def _ends_s(network: Network, shape: ModelShape, number: int, handled: float) -> float:
    """The embedded token to all workers, and their parts of the logits to the root, in f32."""
    sent = BYTES_F32 * (shape.hidden_size + shape.vocab_size / number)
    return 2.0 * network.latency_s + (number - 1) * (transfer_s(network, sent, handled) + handled - network.latency_s)


def _split_layers(problem: EdgeProblem, group: Group) -> TokenTime:
    shape, network = problem.shape, problem.network
    each = layer_weights(shape) / shape.num_hidden_layers
    compute = total = 0.0
    for place, (index, layers) in enumerate(zip(group.machines, group.layers, strict=True)):
        kind = problem.kinds[index]
        head = head_weights(shape) if place == head_place(problem, group) else 0
        compute += (layers * each + head) * kind.weight_s(group.weight_format)
        compute += _cache_s(problem, group, kind, layers / shape.num_hidden_layers)
        if place and network is not None:
            vector = BYTES_F32 * (shape.vocab_size if head else shape.hidden_size)
            total += transfer_s(network, BYTES_F32 * shape.hidden_size + layers * GRAPH_BYTES_PER_LAYER, kind.message_s)
            total += transfer_s(network, vector, kind.message_s)
    return TokenTime(compute_s=compute, network_s=total)


def _cache_s(problem: EdgeProblem, group: Group, kind: MachineKind, share: float) -> float:
    return share * cache_bytes(problem.shape, group.engine, problem.mean_context_tokens) / kind.bytes_per_s


def _drive(problem: EdgeProblem, group: Group, compute_s: float) -> dict[str, float]:
    """What one machine's drive adds: the page cache at best keeps what fits, at worst nothing."""
    (lacking,), kind = missing_bytes(problem, group), problem.kinds[group.machines[0]]
    if not lacking or kind.drive_bytes_per_s is None:
        return {}
    share = lacking / (lacking + kind.usable_bytes)
    read = WEIGHT_BYTES[group.weight_format] * (layer_weights(problem.shape) + head_weights(problem.shape))
    whole = read / kind.drive_bytes_per_s
    return _range(compute_s, max(compute_s, (1.0 - share) * compute_s + share * whole), max(compute_s, whole))


def _window(problem: EdgeProblem, group: Group, busy_s: float) -> dict[str, float]:
    """What reading a window from drives adds to the time in which machines are busy anyhow."""
    lacks = missing_bytes(problem, group)
    if not any(lacks):
        return {}
    least = most = 0.0
    read = WEIGHT_BYTES[group.weight_format] * layer_weights(problem.shape) / len(group.machines)
    for lacking, index in zip(lacks, group.machines, strict=True):
        drive = problem.kinds[index].drive_bytes_per_s
        if lacking and drive is not None:
            least, most = max(least, min(lacking, read) / drive), max(most, read / drive)
    return _range(busy_s, max(busy_s, least), max(busy_s, most))


def _range(base_s: float, least_s: float, most_s: float) -> dict[str, float]:
    return {
        "drive_s": math.sqrt(least_s * most_s) - base_s,
        "least_drive_s": least_s - base_s,
        "most_drive_s": most_s - base_s,
    }


def layers_on(caps: Sequence[int], seconds: Sequence[float], layers: int) -> tuple[int, ...] | None:
    """Layers for each machine of a pipeline: as many as fit where a layer takes least, at least one everywhere.

    Machines work one after the other, so that the sum of their times counts; layers are alike, so that filling the
    fastest first is the least sum. None where they do not fit.
    """
    placed = [1] * len(caps)
    if min(caps) < 1 or len(caps) > layers:
        return None
    left = layers - len(caps)
    for place in sorted(range(len(caps)), key=lambda index: seconds[index]):
        more = min(left, caps[place] - 1)
        placed[place] += more
        left -= more
    return None if left else tuple(placed)
