"""A run's log: what is counted, and what it makes of the rate that was believed."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.goodput.conditions import FailureRate
from meshplan.planner.goodput.published import TYPICAL
from meshplan.planner.goodput.run_log import gamma_quantile, read_run_log, updated_rate

DAY = 86_400.0
LOG = """time_s,event,tokens
0,train,0
1000,stop,1000
1100,train,900
3100,stop,2900
3400,train,2800
4400,now,3800
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.csv"
    path.write_text(text)
    return path


def test_what_is_counted(tmp_path: Path) -> None:
    found = read_run_log(written(tmp_path, LOG), nodes=4)
    assert (found.interruptions, found.training_s, found.wall_s) == (2, 4000.0, 4400.0)
    assert found.node_days == pytest.approx(4 * 4000 / DAY)
    assert found.restart_s == pytest.approx((100 + 300) / 2)
    assert found.tokens_per_s == pytest.approx((1000 + 2000 + 1000) / 4000)
    # 3,800 of 4,000 tokens were kept, in 4,000 of 4,400 s.
    assert found.ratio == pytest.approx(3800 / 4400)


def test_nodes_of_the_log_count(tmp_path: Path) -> None:
    text = "time_s,event,tokens,nodes\n0,train,0,8\n86400,stop,5,\n86500,train,5,6\n172900,now,9,\n"
    assert read_run_log(written(tmp_path, text), nodes=99).node_days == pytest.approx(8 + 6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time_s,event\n", "columns must be"),
        ("time_s,event,tokens,colour\n", "columns must be"),
        ("time_s,event,tokens\n", "no stretch"),
        ("time_s,event,tokens\n0,train,0\n", "no stretch"),
        ("time_s,event,tokens\n0,stop,0\n", "line 2"),
        ("time_s,event,tokens\n0,train,0\n5,train,3\n", "line 3"),
        ("time_s,event,tokens\n9,train,0\n5,stop,3\n", "before that of the line above"),
        ("time_s,event,tokens\n0,train,7\n5,stop,3\n", "fewer than"),
        ("time_s,event,tokens\n0,train,0\n5,now,3\n6,train,3\n", "ends a log"),
        ("time_s,event,tokens\n0,train,nan\n", "line 2"),
        ("time_s,event,tokens\n0,pause,1\n", "event is"),
    ],
)
def test_a_log_that_cannot_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        read_run_log(written(tmp_path, text), nodes=1)


def test_a_long_count_outweighs_what_was_believed() -> None:
    after = updated_rate(TYPICAL, 2_000, 100_000)
    assert after.per_node_day == pytest.approx(0.02, rel=0.01)
    assert after.low < 0.02 < after.high
    assert after.high / after.low < 1.1


def test_no_day_changes_nothing() -> None:
    after = updated_rate(TYPICAL, 0, 1e-9)
    assert after.per_node_day == pytest.approx(TYPICAL.per_node_day)
    assert math.log(after.high / after.low) == pytest.approx(math.log(TYPICAL.high / TYPICAL.low), rel=0.15)


def test_quiet_days_lower_the_rate_and_stops_raise_it() -> None:
    quiet, loud = updated_rate(TYPICAL, 0, 1000), updated_rate(TYPICAL, 20, 1000)
    assert quiet.per_node_day < TYPICAL.per_node_day < loud.per_node_day


def test_the_interval_holds_the_true_rate_nine_times_in_ten() -> None:
    draw = random.Random(5)
    inside = 0
    for _ in range(2000):
        shape = 4.0
        true = draw.gammavariate(shape, 0.01 / shape)
        spread = math.exp(1.645 / math.sqrt(shape))
        prior = FailureRate(per_node_day=0.01, low=0.01 / spread, high=0.01 * spread, source="")
        count, left = 0, 500.0
        while (left := left - draw.expovariate(true)) > 0.0:
            count += 1
        after = updated_rate(prior, count, 500.0)
        inside += after.low <= true <= after.high
    assert inside / 2000 == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("shape", "share", "value"), [(2.0, 0.95, 4.7439), (10.0, 0.05, 5.4254), (1.0, 0.5, 0.6931)])
def test_quantiles_are_those_of_the_tables(shape: float, share: float, value: float) -> None:
    assert gamma_quantile(shape, share) == pytest.approx(value, rel=0.02)
