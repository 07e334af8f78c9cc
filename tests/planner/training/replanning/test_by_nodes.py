"""A plan whose nodes come and go: plans by number of nodes, and the run that follows from the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.plan import Plan
from meshplan.planner.goodput.availability.trace import AvailabilityTrace
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.store import plan_from_document
from meshplan.planner.training.replanning.by_nodes import MOST_COUNTS, counts_of, steady, without

TRACE = "time_s,nodes,usd_per_node_hour\n0,3,10\n40000,2,20\n80000,3,10\n120000,1,20\n200000,1,20\n"


def question(trace: str | None = "trace.csv", **run: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 3}]},
        "workload": {"sequence_length": 4096, "global_batch_size": 240, "num_training_tokens": "300B"},
        "run": run if trace is None else {"availability": trace, **run},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("traces")
    (made / "trace.csv").write_text(TRACE)
    (made / "all.csv").write_text("time_s,nodes\n0,3\n5000000,3\n")
    (made / "none.csv").write_text("time_s,nodes\n0,0\n5000000,0\n")
    return made


@pytest.fixture(scope="module")
def plan(catalog: Catalog, folder: Path) -> Plan:
    return make_plan(question(), catalog, base=folder)


def test_the_run_trains_as_much_as_the_trace_lets_it(plan: Plan) -> None:
    assert plan.run is not None
    played = plan.run["availability"]
    assert played["mean_nodes"] == pytest.approx((3 * 40 + 2 * 40 + 3 * 40 + 80) / 200)
    assert played["progress_share"] < played["mean_nodes"] / 3
    assert played["progress_share"] <= played["hindsight_share"]
    paid = (3 * 10 * 40 + 2 * 20 * 40 + 3 * 10 * 40 + 20 * 80) / 200 * 24
    assert played["usd_per_day"] == pytest.approx(paid)
    days = plan.predicted["run_time_s"].value / 86_400
    assert plan.predicted["usd_per_run"].value == pytest.approx(paid * days)


def test_plans_by_number_of_nodes_are_those_of_the_smaller_questions(plan: Plan, catalog: Catalog) -> None:
    assert plan.run is not None
    rows = plan.run["by_nodes"]
    assert [row["nodes"] for row in rows] == [1, 2, 3]
    direct = make_plan(without(question(), [2]), catalog)
    assert rows[1]["tokens_per_s"] == pytest.approx(direct.predicted["tokens_per_s"].value)
    assert rows[1]["config"] == direct.config


def test_the_plan_itself_is_the_one_on_all_nodes(plan: Plan, catalog: Catalog) -> None:
    assert plan.config == make_plan(question(None), catalog).config


def test_it_is_read_back_as_it_was_stored(plan: Plan) -> None:
    assert plan_from_document(plan.to_document(), name="a file").run == plan.run


def test_all_nodes_all_the_time_change_nothing_but_the_interval(catalog: Catalog, folder: Path) -> None:
    usual, there = make_plan(question(None), catalog), make_plan(question("all.csv"), catalog, base=folder)
    assert there.predicted["run_time_s"].value == pytest.approx(usual.predicted["run_time_s"].value, rel=1e-3)


def test_never_enough_nodes_is_said(catalog: Catalog, folder: Path) -> None:
    with pytest.raises(SpecError, match="makes no progress on a trace of at most 0"):
        make_plan(question("none.csv"), catalog, base=folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cluster": {"nodes": [{"type": "dgx-h100", "count": 3}], "spare_nodes": 1}}, "drop cluster.spare_nodes"),
        ({"constraints": {"max_run_time": "9 d"}}, "give run.finish_by"),
    ],
)
def test_what_does_not_go_together(catalog: Catalog, folder: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make_plan({**question(), **change}, catalog, base=folder)


def test_one_configuration_has_no_plans_by_nodes(catalog: Catalog, folder: Path) -> None:
    with pytest.raises(SpecError, match="ask meshplan plan"):
        estimate_plan(question(), catalog, base=folder)


@pytest.mark.parametrize("run", [False, "availability", [None]])
def test_an_estimate_of_a_malformed_run_is_refused(run: object, catalog: Catalog, folder: Path) -> None:
    with pytest.raises(SpecError, match="run"):
        estimate_plan({**question(), "run": run}, catalog, base=folder)


def test_numbers_of_nodes_leave_as_few_idle_as_they_can() -> None:
    trace = AvailabilityTrace(name="x", times_s=np.arange(101.0), nodes=np.arange(100) + 1)
    found = counts_of([trace], 100)
    assert len(found) == MOST_COUNTS
    assert max(np.diff(found)) <= 20
    assert found[-1] == 100


def test_a_steady_question_is_as_it_was() -> None:
    assert steady(question(None)) == question(None)
    assert steady({"run": {"availability": "x", "failures": "rsc-1"}}) == {"run": {"failures": "rsc-1"}}
