"""Precedence graph of a pipeline schedule: which operation waits for which.

Its nodes are *passes*: one operation, or a pair that runs as one. A pass waits for the pass before it on its stage and
for its inputs: a forward for the forward of the chunk before it on the micro-batch's path, a backward for the backward
of the chunk after it (at the end of the path for the forward of its own chunk), a weight gradient for its own backward.
The time of a step is the longest path through this graph.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from meshplan.planner.training.pipeline.orders import BACKWARD, FORWARD, WEIGHT, Op, PipelineOrder


class Pass(NamedTuple):
    """Operations that a stage runs as one.

    Args:
        stage: stage that runs it.
        ops: one operation, or a forward and a backward.
        inputs: operations whose results it needs.
    """

    stage: int
    ops: tuple[Op, ...]
    inputs: tuple[Op, ...]


def passes_in_order(order: PipelineOrder) -> list[Pass]:
    """All passes in topological order; the passes of a stage keep their order.

    Raises:
        ValueError: the schedule waits for itself.
    """
    import networkx as nx  # start-up: 0.2 s

    stages = _passes(order)
    passes = list(itertools.chain.from_iterable(stages))
    pass_of = {op: number for number, one in enumerate(passes) for op in one.ops}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(passes)))
    begin = 0
    for row in stages:
        nx.add_path(graph, range(begin, begin + len(row)))
        begin += len(row)
    graph.add_edges_from((pass_of[source], number) for number, one in enumerate(passes) for source in one.inputs)
    try:
        return [passes[number] for number in nx.topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        cycle = " → ".join(str(passes[edge[0]].ops) for edge in nx.find_cycle(graph))
        raise ValueError(f"the schedule waits for itself: {cycle}") from None


def _passes(order: PipelineOrder) -> list[list[Pass]]:
    """The passes of each stage, in order."""
    before = {later: earlier for path in order.paths for earlier, later in itertools.pairwise(path)}
    after = {earlier: later for later, earlier in before.items()}

    def inputs(op: Op) -> tuple[Op, ...]:
        """The operation whose result ``op`` needs; none at the start of a path."""
        kind, chunk, microbatch = op
        if kind == WEIGHT:
            return (Op(BACKWARD, chunk, microbatch),)
        if kind == FORWARD:
            return (Op(FORWARD, before[chunk], microbatch),) if chunk in before else ()
        return (Op(BACKWARD, after[chunk], microbatch) if chunk in after else Op(FORWARD, chunk, microbatch),)

    stages: list[list[Pass]] = [[] for _ in order.stages]
    for stage, ops in enumerate(order.stages):
        rest = iter(ops)
        for op in rest:
            if op in order.paired:
                partner = next(rest)
                stages[stage].append(Pass(stage, (op, partner), inputs(op) + inputs(partner)))
            else:
                stages[stage].append(Pass(stage, (op,), inputs(op)))
    return stages
