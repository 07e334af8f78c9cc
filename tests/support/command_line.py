"""A command line run inside the tests: what it left behind, and a small question to ask it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The smallest shipped model: its search takes a fifth of a second, and hundreds of tests ask for it.
SPEC = """\
kind: training
model: llama-3.2-1b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {sequence_length: 4096, global_batch_size: 64, num_training_tokens: 1e9}
"""
# Which of these replicas to rent: capacities are given, nothing is looked up.
CAPACITIES: dict[str, Any] = {
    "kind": "gpu-allocation",
    "gpu_types": [{"name": "l4", "usd_per_hour": 0.7}],
    "buckets": [{"input_tokens": [1, 250], "output_tokens": [1, 250]}],
    "request_rate_per_s": [6.0],
    "max_request_rate_per_s": {"l4": [2.0]},
}


@dataclass(frozen=True)
class Outcome:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]
