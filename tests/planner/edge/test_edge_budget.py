"""Questions about machines at home whose time ends, and malformed ones with unknown names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SolverError, SpecError
from meshplan.planner.core.budget import Budget
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.plan_document import document_problems
from meshplan.planner.edge import options
from meshplan.planner.edge.options import every_option, least_token_s
from meshplan.planner.edge.plan_document import PLAN
from meshplan.planner.edge.resolve import resolve
from meshplan.planner.edge.service import plan
from meshplan.planner.edge.spec import read_edge_spec

LINKS = {"bandwidth": "1 Gb/s", "latency": "0.1 ms"}
MIXED = [
    {"type": "raspberry-pi-5", "count": 3},
    {"type": "rtx-4090", "count": 1},
    {"memory": "64 GB", "memory_bandwidth": "80 GB/s", "drive_bandwidth": "3 GB/s", "count": 2},
]


def question(catalog: Catalog, budget: Budget | None = None, **other: Any) -> Question:
    document = {"kind": "edge", "model": "llama-3.1-8b", "devices": MIXED, "links": LINKS, **other}
    return Question(document=document, catalog=catalog, budget=budget or Budget())


def ticking(limit: int) -> Budget:
    """A budget that is spent when its clock has been looked at some times: each time is a second."""
    seconds = iter(range(1_000_000))
    return Budget(float(limit), clock=lambda: float(next(seconds)))


def interrupted_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C while that way is priced."""
    priced, calls = options.token_time, iter(range(1, 1_000_000))

    def price(*given: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return priced(*given)

    monkeypatch.setattr(options, "token_time", price)


def is_kept(cut: Plan, whole: Plan) -> None:
    """A plan that was cut short: less was priced, and its bound holds for what was not."""
    assert cut.config
    assert cut.solution["num_candidates"] < whole.solution["num_candidates"]
    assert cut.solution["bound"] <= whole.solution["objective"] <= cut.solution["objective"]
    assert cut.solution["gap"] > 0.0
    assert cut.solution["status"] == "feasible"
    assert document_problems(PLAN, cut.to_document()) == []


def test_a_time_limit_keeps_the_best_so_far_with_its_gap(catalog: Catalog) -> None:
    whole = plan(question(catalog))
    assert whole.solution["status"] == "optimal"
    assert "stopped" not in whole.solution
    cut = plan(question(catalog, ticking(6)))
    is_kept(cut, whole)
    assert cut.solution["stopped"] == "time limit of 6 s"


def test_ctrl_c_keeps_the_best_so_far(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan(question(catalog))
    interrupted_at(monkeypatch, 4)
    is_kept(plan(question(catalog)), whole)


def test_a_budget_that_ends_before_any_way_is_no_infeasible_question(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SolverError, match="no plan found within the time limit"):
        plan(question(catalog, ticking(1)))
    with pytest.raises(SolverError, match="no plan found within the time limit"):  # what was priced is too slow
        plan(question(catalog, ticking(3), constraints={"time_per_token": "1 us"}))
    interrupted_at(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        plan(question(catalog))


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("formats", [["q4_0"], ["q4_0", "q8_0", "f16"]])
def test_no_way_beats_the_bound(catalog: Catalog, model: str, formats: list[str]) -> None:
    asked = question(catalog, model=model, quantization=formats)
    problem = resolve(read_edge_spec(asked.document), catalog, asked.base)
    ways = every_option(problem)
    assert ways.is_whole
    assert 0.0 < least_token_s(problem) <= min(way.time.total_s for way in ways.priced)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(colour="red"),
        lambda document: document["links"].update(latency="soon"),
    ],
)
def test_what_is_malformed_and_unknown_names_are_told_in_one_run(
    catalog: Catalog, change: Callable[[dict[str, Any]], None]
) -> None:
    devices = [{"type": "raspberry-pi-6"}, {"type": "raspberry-pi-5", "drive": "floppy"}, "no machine"]
    document: dict[str, Any] = {"kind": "edge", "model": "llama-9", "devices": devices[:2], "links": {**LINKS}}
    change(document)
    with pytest.raises(SpecError) as told:
        plan(Question(document=document, catalog=catalog))
    paths = {problem.path for problem in told.value.problems}
    assert {"model", "devices[0].type", "devices[1].drive"} < paths
    with pytest.raises(SpecError):
        plan(Question(document={**document, "devices": devices}, catalog=catalog))
