"""Every way to generate on some of the machines: which of them, with which engine and format, who is the root.

All are priced, so that the least is proven under the estimate; where the budget ends that, :func:`least_token_s` bounds
what was not priced. Machines of a kind are alike: a group is how many of
each kind it has, and which kind its root is of. Of a pipeline's placements of layers one is priced for each group, main
host and last machine: the least (:func:`~meshplan.planner.edge.token_time.layers_on`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshplan.planner.core.budget import Budget
from meshplan.planner.edge.engines import ENGINES, RPC, TPI_LLM, EdgeEngine
from meshplan.planner.edge.exchange import sent_s
from meshplan.planner.edge.problem import WEIGHT_BYTES, EdgeProblem
from meshplan.planner.edge.token_time import (
    GRAPH_BYTES_PER_LAYER,
    Group,
    TokenTime,
    cache_bytes,
    head_place,
    head_weights,
    layer_weights,
    layers_on,
    missing_bytes,
    stored_layer_weights,
    token_time,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One way and its time."""

    group: Group
    time: TokenTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All ways.

    Args:
        priced: those that run, the fastest first.
        rejected: reason → how many.
        nearest: bytes that the way with least of them lacks on a machine, and that way; None where none lacks any.
        is_whole: no way is left out.
    """

    priced: tuple[Priced, ...]
    rejected: Counter[str] = field(default_factory=Counter)
    nearest: tuple[float, Group] | None = None
    is_whole: bool = True


def every_option(problem: EdgeProblem, budget: Budget | None = None) -> Options:
    """Price every way that the question leaves open.

    Args:
        problem: the question.
        budget: once it is spent, and after Ctrl-C, the ways that are priced are all there are; None: no limit.
    """
    budget = budget or Budget()
    rejected: Counter[str] = Counter()
    found: list[Priced] = []
    nearest: tuple[float, Group] | None = None
    is_whole = False
    with budget.keeping():
        for group in _groups(problem, rejected):
            budget.check()
            lacks = missing_bytes(problem, group)
            if any(lacks) and not _streams(problem, group, lacks):
                rejected[_out_of_memory(group.engine)] += 1
                if nearest is None or max(lacks) < nearest[0]:
                    nearest = (max(lacks), group)
                continue
            found.append(Priced(group=group, time=token_time(problem, group)))
        is_whole = True
    found.sort(key=lambda one: (one.time.total_s, len(one.group.machines), one.group.machines))
    return Options(priced=tuple(found), rejected=rejected, nearest=nearest, is_whole=is_whole)


def least_token_s(problem: EdgeProblem) -> float:
    """Seconds that no way of generating a token can beat: W / Σ 1/τ_i, in the quickest format.

    τ_i is what machine i takes for a weight. A token is multiplied with W weights; split in the best way over all
    machines at once they take that long. Equal parts, a pipeline and one machine take no less; caches, exchanges and
    drives add to it.
    """
    weights = layer_weights(problem.shape) + head_weights(problem.shape)
    rates = [sum(kind.count / kind.weight_s(one) for kind in problem.kinds) for one in problem.formats]
    return weights / max(rates)


def _streams(problem: EdgeProblem, group: Group, lacks: Sequence[float]) -> bool:
    """Whether what has no room is read from drives."""
    drives = [problem.kinds[index].drive_bytes_per_s for index in group.machines]
    return _reads_drives(group.engine) and all(
        not lacking or drive is not None for lacking, drive in zip(lacks, drives, strict=True)
    )


def _reads_drives(engine: EdgeEngine) -> bool:
    return engine.splits == "nothing" or engine.name == TPI_LLM


def _out_of_memory(engine: EdgeEngine) -> str:
    drive = ", and no drive is stated" if _reads_drives(engine) else ""
    return f"{engine.name}: more than the memory of a machine{drive}"


def _groups(problem: EdgeProblem, rejected: Counter[str]) -> Iterator[Group]:
    engines = [engine for engine in ENGINES if not problem.engines or engine.name in problem.engines]
    for engine in engines:
        formats = [one for one in problem.formats if one in engine.formats]
        if not formats:
            rejected[f"{engine.name} takes weights in {' and '.join(engine.formats)} alone"] += 1
            continue
        if reason := engine.refuses_model(problem.shape):
            rejected[reason] += 1
            continue
        for machines in _choices(problem, engine):
            kinds = [problem.kinds[index] for index in set(machines)]
            if reason := engine.refuses_group(problem.shape, kinds, len(machines)):
                rejected[reason] += 1
                continue
            for weight_format in formats:
                group = Group(engine=engine, weight_format=weight_format, machines=machines)
                if engine.name != RPC:
                    yield group
                elif placed := _placed(problem, group):
                    yield placed
                else:
                    rejected[_out_of_memory(engine)] += 1


def _choices(problem: EdgeProblem, engine: EdgeEngine) -> Iterator[tuple[int, ...]]:
    """Machines by their kinds, the root's first: every number of each kind, every kind as the root."""
    for counts in itertools.product(*(range(kind.count + 1) for kind in problem.kinds)):
        number = sum(counts)
        if not number or (engine.splits == "nothing" and number > 1) or (engine.splits == "layers" and number == 1):
            continue
        for root, count in enumerate(counts):
            if count:
                rest = [index for index, many in enumerate(counts) for _ in range(many - (index == root))]
                for last in _last(problem, engine, root, rest):
                    yield (root, *sorted(rest, key=lambda index: index == last))


def _last(problem: EdgeProblem, engine: EdgeEngine, root: int, rest: list[int]) -> list[int]:
    """Kinds of which the last machine may be: of a pipeline it multiplies with the vocabulary, unless the root does."""
    if engine.splits == "layers" and not problem.kinds[root].is_accelerator:
        return sorted(set(rest))
    return rest[-1:] or [root]


def _placed(problem: EdgeProblem, group: Group) -> Group | None:
    """The group with its layers; None where they have no room."""
    shape, size = problem.shape, WEIGHT_BYTES[group.weight_format]
    number = shape.num_hidden_layers
    cache = cache_bytes(shape, group.engine, problem.context_tokens)
    stored, read = (size * stored_layer_weights(shape) + cache) / number, layer_weights(shape) / number
    head = head_place(problem, group)
    caps, seconds = [], []
    for place, index in enumerate(group.machines):
        kind = problem.kinds[index]
        other = size * head_weights(shape) * ((place == 0) + (place == head))
        caps.append(min(number, int(max(0.0, kind.usable_bytes - other) / stored)))
        graph = sent_s(problem.network, GRAPH_BYTES_PER_LAYER) if place and problem.network else 0.0
        mean = cache_bytes(shape, group.engine, problem.mean_context_tokens) / number / kind.bytes_per_s
        seconds.append(read * kind.weight_s(group.weight_format) + mean + graph)
    layers = layers_on(caps, seconds, number)
    if layers is None:
        return None
    return Group(engine=group.engine, weight_format=group.weight_format, machines=group.machines, layers=layers)
