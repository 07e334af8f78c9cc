"""The run of a training plan as people read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.reports.parts import rejected_section
from meshplan.cli.reports.screens.first_screen import first_screen
from meshplan.cli.reports.screens.parts import MOST_LINES
from meshplan.cli.reports.training.plan import report
from meshplan.cli.reports.whole_run.forecast import probability_text, run_sentence
from meshplan.cli.web.pages.views.training import sections
from meshplan.planner.core.plan import Interval, Plan
from meshplan.planner.service import make_plan

SPEC = {
    "kind": "training",
    "model": "llama-3.2-1b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64, "num_training_tokens": "300B"},
    "run": {"failures": "rsc-1", "finish_by": "60 d"},
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(SPEC, Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))


def test_the_first_screen_says_when_it_ends(plan: Plan) -> None:
    screen = first_screen(plan)
    assert screen is not None
    told = " ".join(screen.split())
    assert "of the run's time" in told.lower()
    assert "within 60.0 d with probability" in told
    assert len(screen.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("hours", "is_said"), [(20.9, True), (0.1, False)])
def test_a_spare_that_saves_days_is_said_beside_the_answer(hours: float, is_said: bool, plan: Plan) -> None:
    assert plan.run is not None
    rows = [
        {"spare_nodes": 0, "waiting_share": 0.08, "hours_saved": None},
        {"spare_nodes": 1, "waiting_share": 0.0, "hours_saved": hours},
    ]
    ten_days = {**plan.predicted, "run_time_s": Interval(value=864e3, low=8e5, high=9e5)}
    said = run_sentence(replace(plan, run={**plan.run, "spare_nodes": 0, "spares": rows}, predicted=ten_days))
    assert ("One more node as a spare (cluster.spare_nodes: 1) would end it 20.9 h earlier." in said) is is_said


def test_the_whole_report_says_how_often_to_save_and_what_spares_save(plan: Plan) -> None:
    told = " ".join(report(plan).split())
    assert "6.5 interruptions per 1,000 node-days" in told
    assert "Young's formula says" in told
    assert "What spare nodes are worth" in told
    assert "Not said, and assumed: run.restart_time" in told
    assert "share of the run that trains" in told


@pytest.mark.parametrize(("value", "text"), [(0.0, "below 1 %"), (0.5, "50%"), (1.0, "above 99 %")])
def test_a_probability_is_never_certain(value: float, text: str) -> None:
    assert probability_text(value) == text


def test_its_page_says_the_same(plan: Plan) -> None:
    shown = sections(plan)
    assert any("interruption" in sentence for sentence in shown["sentences"])
    assert shown["tables"][0]["caption"] == "What spare nodes are worth"
    assert any("Young's formula" in note for note in shown["notes"])


@pytest.mark.parametrize(
    ("limit", "said"), [("time of the run", "7.0 d too much"), ("host memory", "591 KiB too much")]
)
def test_a_miss_has_the_unit_of_its_limit(limit: str, said: str, plan: Plan) -> None:
    """605,000 s too much of a run were told as KiB."""
    row = {"reason": f"over the limit: {limit}", "count": 3, "nearest_miss": 605e3, "example": plan.config}
    assert said in rejected_section(replace(plan, rejected=(row,)), 80).replace(".0 KiB", " KiB").replace(
        "590.8", "591"
    )


@pytest.mark.parametrize(("objective", "is_said"), [("energy", True), ("throughput", False)])
def test_a_late_plan_names_the_limit_that_would_hold_it(objective: str, is_said: bool, plan: Plan) -> None:
    assert plan.run is not None
    late = replace(plan, spec={**plan.spec, "objective": objective}, run={**plan.run, "finish_by_probability": 0.01})
    assert ("constraints.max_run_time: 60.0 d" in run_sentence(late)) is is_said
