"""SkyPilot's own ``Task.from_yaml`` over the task that we emit, offline. On demand: ``make test-launchers``."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable
from typing import Any

import pytest
from emit_cases import LLAMA_70B, config_for, request_for

from meshplan.planner.emit.orchestrators import skypilot as emitter
from meshplan.planner.launch.registry import emit

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500


def task_text(**choices: Any) -> str:
    request = request_for(LLAMA_70B, config_for(LLAMA_70B, **choices), hosts=(), image="registry.example/train:1")
    emitted = emit("skypilot", request, framework="megatron")
    return next(file.content for file in emitted.artifacts if file.path == emitter.FILE)


def test_version_is_the_one_that_the_files_name() -> None:
    assert importlib.metadata.version("skypilot") == emitter.VERIFIED.version


def test_random_plans_are_accepted_with_their_number_of_devices(read_task: Callable[[str], Any]) -> None:
    draw = random.Random(2)
    for _ in range(NUM_RANDOM_PLANS):
        tensor, data = draw.choice((1, 2, 4, 8)), draw.choice((8, 16, 24))
        task = read_task(task_text(tensor_parallel=tensor, data_parallel=data))
        (resources,) = task.resources
        assert task.num_nodes * resources.accelerators["H100"] == tensor * data
        assert resources.image_id == {None: "docker:registry.example/train:1"}
        assert 'launch.sh "$SKYPILOT_NODE_RANK"' in task.run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_nodes: 1", "num_nodez: 1"),
        ("num_nodes: 1", "num_nodes: one"),
        ("num_nodes: 1", "num_nodes: 0"),
        ("accelerators:", "acceleratorz:"),
        ("H100: 8", "H100: eight"),
        ("workdir: .", "workdir: [1]"),
    ],
)
def test_mutations_are_refused(read_task: Callable[[str], Any], old: str, new: str) -> None:
    text = task_text(data_parallel=8)
    assert old in text
    with pytest.raises((ValueError, TypeError, AssertionError)):
        read_task(text.replace(old, new))
