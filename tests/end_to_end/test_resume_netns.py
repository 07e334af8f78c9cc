"""A host dies: the others resume from the emitted plan for one fewer (:mod:`resumed_run`).

How long that takes beside the forecast is printed by ``tests/benchmarks/resume.py``: a test does not hang on clocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from netns import skip_unless_possible
from resumed_run import HOSTS, resumed

pytestmark = pytest.mark.netns


@pytest.fixture(autouse=True)
def _requirements() -> None:
    skip_unless_possible("training")


def test_a_run_resumes_on_fewer_hosts(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    assert [config["world_size"] for config in run.configs] == [HOSTS, HOSTS - 1]
    assert run.predicted_s > run.loading_s > 0.0
    assert run.measured_s > run.loading_s
