"""SkyPilot's own ``Task.from_yaml`` over tasks of serving plans, offline. On demand: ``make test-launchers``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from serving_cases import random_config, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.orchestrators import skypilot_serve as emitter
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.engines.table import ENGINES

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500


def test_random_plans_are_accepted_with_hosts_enough(read_task: Callable[[str], Any]) -> None:
    draw = random.Random(2)
    read_plans = 0
    while read_plans < NUM_RANDOM_PLANS:
        engine, shape = draw.choice(tuple(ENGINES)), draw.choice((LLAMA_70B, MIXTRAL, DEEPSEEK_V3))
        config = random_config(draw, ENGINES[engine], shape)
        try:
            emitted = emit_serving(emitter.TARGET, serving_request(shape, config, quantized_checkpoint=True))
        except CannotExpressError:
            continue
        read_plans += 1
        files = {str(file.path): file.content for file in emitted.artifacts}
        task = read_task(files[str(emitter.FILE)])
        (resources,) = task.resources
        rows = [line.split() for line in files["workers.txt"].splitlines() if not line.startswith("#")]
        assert task.num_nodes == len({row[2] for row in rows})
        assert resources.accelerators["H100"] * task.num_nodes >= config.num_devices
        assert 'launch.sh "$SKYPILOT_NODE_RANK"' in task.run


@pytest.mark.parametrize(
    ("old", "new"), [("num_nodes: ", "num_nodez: "), ("H100: 8", "H100: eight"), ("- 8000", "- [8000]")]
)
def test_mutations_are_refused(read_task: Callable[[str], Any], old: str, new: str) -> None:
    draw = random.Random(2)
    request = serving_request(LLAMA_70B, random_config(draw, ENGINES["vllm"], LLAMA_70B), quantized_checkpoint=True)
    emitted = emit_serving(emitter.TARGET, request)
    text = next(file.content for file in emitted.artifacts if file.path == emitter.FILE)
    assert old in text
    with pytest.raises((ValueError, TypeError, AssertionError)):
        read_task(text.replace(old, new))
