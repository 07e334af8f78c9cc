"""Which templates have layers that take the same? Of those, one is priced.

A layer is priced by what a micro-batch has of it on one device: tensor, context and expert parallelism, the width of
experts and the size of a micro-batch. Data parallelism moves groups to other places on the nodes: what their links take
follows from the members that a group has on the node that holds fewest of them
(:func:`~meshplan.planner.cluster.network.rank_layout.fewest_on_a_slot`). DeepSeek-V3 on 2,048 devices has 745,578
templates and 181,776 layers.

Assumes: a sequence is split in a ring, and a switch joins the devices of a node; else every template is by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshplan.planner.cluster.network.rank_layout import fewest_on_a_slot
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.training.problem.problem import TrainingProblem
from meshplan.planner.training.search.bounds.distinct import distinct, firsts

_STYLES = ("context_parallel_style", "context_parallel_heads")
_SIZES = (
    "tensor_parallel",
    "context_parallel",
    "micro_batch_size",
    "expert_parallel",
    "expert_tensor_parallel",
    "sequence_parallel",
)


def alike_layers(problem: TrainingProblem, columns: Mapping[str, IntArray]) -> tuple[IntArray, IntArray]:
    """Templates of which one stands for all whose layers take the same [k], and which of them does for each [n].

    Args:
        problem: the question.
        columns: what each template chooses, [n].
    """
    every = np.arange(len(columns["data_parallel"]))
    if problem.machine.mesh is not None or any(style in problem.fixed for style in _STYLES):
        return every, every
    tensor, context, data = (columns[f"{name}_parallel"] for name in ("tensor", "context", "data"))
    experts, width = columns["expert_parallel"], columns["expert_tensor_parallel"]
    one, devices = np.ones_like(tensor), tensor * context * data
    groups = ((tensor, one), (context, tensor), (experts, width), (width, one))
    places = [fewest_on_a_slot(*group, devices, problem.machine.domain_size) for group in groups]
    keys = np.zeros(len(every), dtype=np.int64)
    for column in (*(columns[name] for name in _SIZES), *places):
        values, which = distinct(column)
        keys = keys * len(values) + which
        if len(keys) and len(values) > 1:  # keys stay as small as there are different layers
            values, keys = distinct(keys)
    values, which = distinct(keys)
    return firsts(which, len(values)), which
