"""A host dies: the others resume from the emitted plan for one fewer (:mod:`resumed_run`).

How long that takes beside the forecast is printed by ``tests/benchmarks/resume.py``: a test does not hang on clocks.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from netns import missing_requirement
from resumed_run import HOSTS, resumed

pytestmark = pytest.mark.netns


@pytest.fixture(autouse=True)
def _requirements() -> None:
    reason = missing_requirement()
    if reason is None and importlib.util.find_spec("torch") is None:
        reason = "training needs torch: pip install torch==2.13.0 (make test-netns does)"
    if reason:
        pytest.skip(reason)


def test_a_run_resumes_on_fewer_hosts(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    assert [config["world_size"] for config in run.configs] == [HOSTS, HOSTS - 1]
    assert run.predicted_s > run.loading_s > 0.0
    assert run.measured_s > run.loading_s
