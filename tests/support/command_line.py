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
