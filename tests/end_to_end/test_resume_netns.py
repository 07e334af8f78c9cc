"""A host dies: the others resume from the emitted plan for one fewer, when the forecast says (:mod:`resumed_run`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from netns import missing_requirement
from resumed_run import HOSTS, resumed

pytestmark = pytest.mark.netns

MOST_OFF = 0.2


@pytest.fixture(autouse=True)
def _requirements() -> None:
    reason = missing_requirement()
    if reason is None and importlib.util.find_spec("torch") is None:
        reason = "training needs torch: pip install torch==2.13.0 (make test-netns does)"
    if reason:
        pytest.skip(reason)


def test_a_run_resumes_on_fewer_hosts_when_the_forecast_says(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    assert [config["world_size"] for config in run.configs] == [HOSTS, HOSTS - 1]
    assert run.predicted_s / run.measured_s == pytest.approx(1.0, abs=MOST_OFF)
