"""Groups of layers that an engine keeps the same blocks of cache for, and what each takes of the host.

vLLM gives layers with caches of one kind – full attention, one window, recurrent states – to groups of g layers, so
that a block is as large in each; g is the least count of a kind, or the greatest where that is less than 1.5 times the
least (0.26.0: v1/core/kv_cache_utils.py). For every group each iteration makes a table of blocks and the inputs of its
kernels anew, on the host, before anything runs::

    groups = Σ over kinds ⌈layers of the kind / g⌉        host time = t · (groups - 1) beside what the engine's takes

A model whose layers are alike has one. Nemotron-Nano-9B-v2 has 4 layers of attention and 27 of Mamba-2: g = 4, and
eight groups.

*t.* A trace of that model on one H200 (vLLM 0.26.0, profiler on, 2026-11-27): 4.9 ms of work of the host in an
iteration of one decode, without the launch of its graph, and 1.7 ms of Qwen3-30B-A3B, which has one group: 0.45 ms for
each of the seven more. That host was slow: its launches of a prompt of Nemotron took 55.6 ms there, for which published
servers' constants say 26 (56 layers of 0.4 to 0.46 ms). Scaled by that, 0.21 ms (``engines.yaml``). Engines that
prepare an iteration while the one before runs hide it: decodes of one sequence took 5.35 ms there, their kernels 5.14.

Assumes: groups of windows cost as much as those of states. Where an engine hides its host behind the devices
(``hides_host`` in ``engines.yaml``; ML.ENERGY's servers of vLLM 0.11.1 by their ``async-scheduling``), this is hidden
with the rest of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from meshplan.catalogs.models.shapes import ModelShape

# Layers of the most frequent kind over those of the least up to which all are padded to the former.
PADDED_UP_TO = 1.5


def num_cache_groups(shape: ModelShape) -> int:
    """Groups of a model's layers by what they keep of a sequence; 1 where nothing is kept, too."""
    kinds: Counter[Hashable] = Counter()
    for layer in range(shape.num_hidden_layers):
        if shape.has_attention(layer):
            kinds[shape.attention_form(layer), shape.window(layer)] += 1
        if shape.has_recurrent(layer):
            kinds["states"] += 1
    if not kinds:
        return 1
    least, most = min(kinds.values()), max(kinds.values())
    size = most if most < PADDED_UP_TO * least else least
    return sum(-(-count // size) for count in kinds.values())
