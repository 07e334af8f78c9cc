"""Questions about sites far apart, from spec to plan: what is chosen, the figures, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SolverError, SpecError
from meshplan.cli.reports.screens.first_screen import first_screen
from meshplan.cli.reports.screens.parts import MOST_LINES
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.training.far_apart.answer import answer
from meshplan.planner.training.plan_document import TrainingPlanDocument

PINS = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "activation_recompute": "none"}


def question(*sizes: int, total: str = "10 Gb/s", batch: int = 32, **far_apart: Any) -> dict[str, Any]:
    """Islands of so many nodes with two devices each."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    islands = [{"nodes": list(range(end - size, end))} for size, end in zip(sizes, ends, strict=True)]
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {
            "devices": {"type": "h100-sxm-80gb", "per_node": 2, "nodes": sum(sizes)},
            "links": {
                "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
                "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
                "islands": islands,
                "between_islands": {"total": total, "latency": "30 ms"},
            },
        },
        "workload": {"sequence_length": 4096, "global_batch_size": batch},
        "fixed": PINS,
        "far_apart": far_apart,
    }


def rows(plan: Plan) -> dict[str, dict[str, Any]]:
    assert plan.far_apart is not None
    TrainingPlanDocument.model_validate_json(json.dumps(plan.to_document()))
    return {row["name"]: row for row in plan.far_apart["ways"]}


@pytest.fixture(scope="module")
def equal(catalog: Catalog) -> Plan:
    return make_plan(question(1, 1, more_tokens={"diloco": 0.02}), catalog)


def test_the_first_screen_says_what_a_question_mark_is_and_what_was_published(equal: Plan) -> None:
    """Of the way that is taken, and of the fastest that is not because nobody has said its tokens."""
    screen = first_screen(equal)
    assert screen is not None
    assert len(screen.splitlines()) <= MOST_LINES
    told = " ".join(screen.split())
    unsaid = [row for row in rows(equal).values() if row["way"] not in (None, "data-parallel", "diloco")]
    fastest = max(unsaid, key=lambda row: row["tokens_per_s"] or 0.0)
    assert "?: far_apart.more_tokens does not say" in told
    assert "Published, diloco: loss" in told
    assert f"Published, {fastest['way']}: " in told
    assert told.count("Published") == 2


def test_a_way_with_a_number_is_chosen_where_it_is_better(equal: Plan) -> None:
    table = rows(equal)
    assert equal.far_apart is not None
    assert equal.far_apart["chosen"].startswith("diloco")
    chosen = table[equal.far_apart["chosen"]]
    assert chosen["effective_tokens_per_s"] == pytest.approx(chosen["tokens_per_s"] / 1.02)
    assert chosen["effective_tokens_per_s"] > table["synchronous plan"]["tokens_per_s"]
    assert equal.predicted["tokens_per_s"].value == pytest.approx(chosen["tokens_per_s"])
    assert equal.predicted["tokens_per_s_per_device"].value == pytest.approx(chosen["tokens_per_s"] / 4)
    assert sum(row["share"] for row in equal.breakdown) == pytest.approx(1.0)
    assert any("sites" in what for what in equal.provenance["not_validated"])


def test_no_cost_in_tokens_is_assumed(equal: Plan) -> None:
    table = rows(equal)
    assert table["powersgd"]["effective_tokens_per_s"] is None
    assert table["data-parallel"]["effective_tokens_per_s"] == table["data-parallel"]["tokens_per_s"]


def test_equal_sites_take_equal_shares_and_are_never_more_than_their_sum(equal: Plan) -> None:
    assert equal.far_apart is not None
    table = rows(equal)
    assert [site["sequences"] for site in equal.far_apart["sites"]] == [16, 16]
    together = 2 * table["one site alone"]["tokens_per_s"]
    assert all(row["tokens_per_s"] <= together * 1.0001 for row in table.values() if row["tokens_per_s"])
    hidden = table["streaming-diloco 4-bit"]
    assert hidden["overlap_steps"] < hidden["sync_steps"] // hidden["fragments"]


def test_without_numbers_the_synchronous_plan_stays(catalog: Catalog, equal: Plan) -> None:
    free = make_plan(question(1, 1), catalog)
    assert free.far_apart is not None
    assert free.far_apart["chosen"] == "synchronous plan"
    assert "more_tokens" in free.far_apart["why"]
    alone = {key: value for key, value in question(1, 1).items() if key != "far_apart"}
    before = make_plan(alone, catalog)
    assert (free.config, free.predicted, free.rank_table) == (before.config, before.predicted, before.rank_table)
    slower, faster = rows(equal), rows(make_plan(question(1, 1, total="40 Gb/s"), catalog))
    for name, row in slower.items():
        if row["step_s"] is not None and row.get("sync_steps") == faster[name].get("sync_steps"):
            assert faster[name]["step_s"] <= row["step_s"] * 1.0001


def test_unequal_sites_finish_together(catalog: Catalog) -> None:
    plan = make_plan(question(2, 1, batch=96, way="diloco", sync_steps=50, outer_gradient_bits=[16]), catalog)
    assert plan.far_apart is not None
    large, small = plan.far_apart["sites"]
    assert large["sequences"] + small["sequences"] == 96
    assert large["sequences"] == pytest.approx(64, abs=4)
    assert large["step_s"] == pytest.approx(small["step_s"], rel=0.1)
    assert rows(plan)["diloco 16-bit"]["sync_steps"] == 50


def refused(document: dict[str, Any], catalog: Catalog) -> str:
    with pytest.raises(SpecError) as caught:
        make_plan(document, catalog)
    return str(caught.value)


def test_what_is_not_compared_says_so(catalog: Catalog) -> None:
    plain = question(1, 1)
    del plain["cluster"]["links"]["islands"], plain["cluster"]["links"]["between_islands"]
    assert "needs sites" in refused(plain, catalog)
    assert "no multiple of fragments" in refused(question(1, 1, sync_steps=5, fragments=2), catalog)
    assert "at most 4" in refused(question(1, 1, sync_steps=10, fragments=2, overlap_steps=5), catalog)
    assert "not among ways" in refused(question(1, 1, way="diloco", ways=["powersgd"]), catalog)
    degraded = question(1, 1)
    degraded["cluster"]["links"]["degraded"] = [{"from": 0, "to": 1, "bandwidth": "1 GB/s"}]
    assert "degraded" in refused(degraded, catalog)
    with pytest.raises(SpecError, match="ask meshplan plan"):
        estimate_plan(question(1, 1), catalog)


def test_states_that_fit_nowhere_are_told_and_count_in_the_bound(catalog: Catalog, equal: Plan) -> None:
    """With room for its states the way is faster than the synchronous plan, which is not optimal without."""
    plan = make_plan(question(1, 1, way="diloco", outer_state="host", ways=["diloco"]), catalog)
    assert plan.far_apart is not None
    assert plan.far_apart["chosen"] == "synchronous plan"
    assert "cluster.host_memory" in plan.far_apart["why"]
    with_room = [row["step_s"] for name, row in rows(equal).items() if name.startswith("diloco")]
    assert plan.solution["bound"] <= min(with_room) < plan.solution["objective"]
    assert plan.solution["status"] == "feasible"
    assert "were not searched" in plan.far_apart["why"]


def test_a_budget_that_ends_before_sites_are_planned_once_more_keeps_the_answer(catalog: Catalog, equal: Plan) -> None:
    """The plans that are known are given; one that leaves memory is not found in time."""

    def planned(question: Question) -> Plan:
        if "memory_headroom" in question.document["constraints"]:
            raise SolverError("no plan found within the time limit")
        return replace(equal, memory={**equal.memory, "limit_bytes": equal.memory["worst"]["safe_bytes"]})

    asked = {**question(1, 1, way="diloco", ways=["diloco"], outer_state="device"), "constraints": {}}
    plan = answer(Question(document=asked, catalog=catalog), planned)
    assert plan.far_apart is not None
    assert plan.far_apart["chosen"] == "synchronous plan"
    assert "leaves room" in plan.far_apart["why"]


def test_sites_are_planned_once_more_for_a_way_that_lacks_memory(catalog: Catalog, equal: Plan) -> None:
    """So much is left free that the fastest plan of a site just fits: its way has no room beside it."""
    limit, safe = equal.memory["limit_bytes"], equal.memory["worst"]["safe_bytes"]
    ways = ["8-bit", "diloco"]
    asked = question(1, 1, way="diloco", ways=ways, outer_state="device", outer_gradient_bits=[4])
    asked["constraints"] = {"memory_headroom": f"{limit - safe - 0.1 * 2**30:.0f} B"}
    plan = make_plan(asked, catalog)
    row = rows(plan)["diloco 4-bit"]
    assert rows(plan)["8-bit"]["step_s"] is not None
    assert plan.far_apart is not None
    assert plan.far_apart["chosen"] == "diloco 4-bit"
    assert plan.config != equal.config
    assert plan.memory["worst"]["safe_bytes"] + row["state_bytes"] <= plan.memory["limit_bytes"]
    assert plan.memory["limit_bytes"] == pytest.approx(safe, rel=0.01)
    assert plan.solution["bound"] <= equal.predicted["iteration_s"].value < row["step_s"]


def test_a_pipeline_that_never_flushes_stands_in_the_table_and_is_chosen_with_a_number(catalog: Catalog) -> None:
    """Its step is the slower of a site and a hop of all activations; its weights lie twice."""
    plan = make_plan(question(1, 1, ways=["async-pipeline"], more_tokens={"async-pipeline": 0.0}), catalog)
    row = rows(plan)["async-pipeline"]
    hop_s = 32 * 4096 * 2048 * 2 / 1.25e9 + 0.03
    assert plan.far_apart is not None
    inner_s = max(site["step_s"] for site in plan.far_apart["sites"])
    assert row["step_s"] == pytest.approx(max(inner_s, hop_s), rel=1e-6)
    assert row["state_bytes"] > 0.0
    assert "AdamW degrades" in row["published_loss"]
    unsaid = make_plan(question(1, 1, ways=["async-pipeline"]), catalog)
    assert rows(unsaid)["async-pipeline"]["effective_tokens_per_s"] is None
    assert unsaid.far_apart is not None
    assert unsaid.far_apart["chosen"] != "async-pipeline"
