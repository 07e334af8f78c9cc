"""Small sweeps, and a place to answer their points that is no process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshplan.planner.sweep.answer import Outcome
from meshplan.planner.sweep.points import Question

# Each point is answered in a tenth of a second.
BASE: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
    "fixed": {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1},
}
SWEEP = """\
kind: sweep
name: batches
base: base.yaml
over:
  workload.global_batch_size: [64, 128]
  workload.sequence_length: [2048, 4k]
group_by: [workload.sequence_length]
"""
# No device holds the 405 billion parameters of this one's points.
TOO_LARGE = """\
kind: sweep
base: base.yaml
points:
  - {model: llama-3.1-405b}
  - {workload.global_batch_size: 64}
"""


def write_sweep(folder: Path, text: str = SWEEP) -> Path:
    """A sweep file in a folder, beside its base."""
    import yaml

    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


class HereRunner:
    """Answers in this process, when it is asked what has ended, by a given function."""

    def __init__(self, answer: Callable[[Question], Outcome], room: int = 2) -> None:
        self._answer, self._most = answer, room
        self._taken: deque[Question] = deque()
        self.answered: list[str] = []
        self.is_closed = False

    @property
    def where(self) -> str:
        """In words."""
        return "this process"

    @property
    def room(self) -> int:
        """How many more questions can be taken now."""
        return self._most - len(self._taken)

    def start(self, question: Question) -> None:
        """Begin to answer a question."""
        self._taken.append(question)

    def ended(self, _wait_s: float) -> Sequence[tuple[str, Outcome]]:
        """The outcome of the first question taken."""
        if not self._taken:
            return []
        question = self._taken.popleft()
        self.answered.append(question.digest)
        return [(question.digest, self._answer(question))]

    def close(self) -> None:
        """End whatever is being done."""
        self.is_closed = True
