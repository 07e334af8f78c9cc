"""Hosts of two types far apart, in network namespaces: the chosen plan against one that crosses the lines in turn.

All plans of all scenarios, with order and regret, are printed by ``tests/benchmarks/mixed_netns.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_shares import missing_shares
from mixed_netns import OTHERS, SCENARIOS, measured, table
from netns import skip_unless_possible

pytestmark = pytest.mark.netns

CROSSING = "equal layers, in turn"


@pytest.fixture(autouse=True)
def _requirements() -> None:
    skip_unless_possible("training")
    if reason := missing_shares():
        pytest.skip(reason)


def test_a_plan_that_crosses_sites_in_turn_takes_longer_as_predicted(tmp_path: Path) -> None:
    # What is asked for here is the order of two plans that are far apart: links need not be exact.
    outcome = measured(SCENARIOS[-1], tmp_path, {CROSSING: OTHERS[CROSSING]}, quick_links=True)
    chosen, crossing = outcome.runs
    assert chosen.predicted_s < crossing.predicted_s, table(outcome)
    assert chosen.measured_s < crossing.measured_s, table(outcome)
