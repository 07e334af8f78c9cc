"""SkyPilot's own ``Task.from_yaml`` over tasks of serving plans, offline. On demand: ``make test-launchers``."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from emit_cases import DEEPSEEK_V3, LLAMA_70B, MIXTRAL
from serving_cases import random_config, serving_request

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.orchestrators import skypilot_serve as emitter
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.engines import ENGINES

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 500


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # SkyPilot writes into the home folder when it is imported.
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
        import sky as module

        yield module


def read(sky: Any, text: str, folder: Path) -> Any:
    path = folder / "task.yaml"
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sky.Task.from_yaml(str(path))


def test_random_plans_are_accepted_with_hosts_enough(sky: Any, tmp_path: Path) -> None:
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
        task = read(sky, files[str(emitter.FILE)], tmp_path)
        (resources,) = task.resources
        rows = [line.split() for line in files["workers.txt"].splitlines() if not line.startswith("#")]
        assert task.num_nodes == len({row[2] for row in rows})
        assert resources.accelerators["H100"] * task.num_nodes >= config.num_devices
        assert 'launch.sh "$SKYPILOT_NODE_RANK"' in task.run


@pytest.mark.parametrize(
    ("old", "new"), [("num_nodes: ", "num_nodez: "), ("H100: 8", "H100: eight"), ("- 8000", "- [8000]")]
)
def test_mutations_are_refused(sky: Any, tmp_path: Path, old: str, new: str) -> None:
    draw = random.Random(2)
    request = serving_request(LLAMA_70B, random_config(draw, ENGINES["vllm"], LLAMA_70B), quantized_checkpoint=True)
    emitted = emit_serving(emitter.TARGET, request)
    text = next(file.content for file in emitted.artifacts if file.path == emitter.FILE)
    assert old in text
    with pytest.raises((ValueError, TypeError, AssertionError)):
        read(sky, text.replace(old, new), tmp_path)
