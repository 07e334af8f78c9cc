"""Plans without some nodes: the question changes in nothing else, and the advice follows the repair time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import make_plan
from meshplan.planner.training.replanning.decision import decide, join_from_s
from meshplan.planner.training.replanning.replan import Replanned, without_nodes
from meshplan.planner.training.service import replan


def question(*, spare_nodes: int = 0, **run: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 3}], "spare_nodes": spare_nodes},
        "workload": {"sequence_length": 4096, "global_batch_size": 240, "num_training_tokens": "300B"},
        "run": run,
    }


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(question(), catalog)


def answers(plan: Plan, catalog: Catalog, **asked: Any) -> tuple[Replanned, ...]:
    return replan(Question(document=plan.spec, catalog=catalog), plan, **asked)


def test_fewer_nodes_are_never_faster(plan: Plan, catalog: Catalog) -> None:
    one, two = answers(plan, catalog, fewer=2)
    assert (one.lost, two.lost) == ((2,), (1, 2))
    assert 1.0 >= one.speed >= two.speed > 0.0


def test_no_rank_sits_on_a_lost_node(plan: Plan, catalog: Catalog) -> None:
    (row,) = answers(plan, catalog, without=[1])
    assert row.plan is not None
    assert row.plan.rank_table is not None
    assert 1 not in {host for host, _ in row.plan.rank_table}


@pytest.mark.parametrize("node", [-1, 3, 9])
def test_a_node_that_the_cluster_lacks_is_a_question_malformed(node: int, plan: Plan, catalog: Catalog) -> None:
    """It came back as a plan that does not exist, with the advice to wait for the repair."""
    with pytest.raises(SpecError, match=f"without: there is no node {node}: the cluster has 3, from 0"):
        answers(plan, catalog, without=[1, node])


def test_that_no_node_is_left_is_said_in_one_line(plan: Plan, catalog: Catalog) -> None:
    """A table has no room for the head of an error."""
    (row,) = answers(plan, catalog, without=[0, 1, 2])
    assert row.plan is None
    assert row.why_not.endswith("none is left")
    assert "\n" not in row.why_not
    assert "problem in" not in row.why_not


def test_the_plan_is_that_of_the_question_without_the_nodes(plan: Plan, catalog: Catalog) -> None:
    (row,) = answers(plan, catalog, without=[1])
    direct = make_plan(without_nodes(plan.spec, [1]), catalog)
    assert row.plan is not None
    assert row.plan.config == direct.config


def test_a_spare_takes_over(catalog: Catalog) -> None:
    made = make_plan(question(spare_nodes=1), catalog)
    (row,) = answers(made, catalog, without=[0])
    assert row.uses_spares
    assert row.speed == pytest.approx(1.0)


@pytest.mark.parametrize(("shard", "from_checkpoint"), [(24, True), (8, False)])
def test_states_that_only_a_lost_node_held_come_from_the_checkpoint(
    catalog: Catalog, shard: int, *, from_checkpoint: bool
) -> None:
    document = {**question(), "fixed": {"data_parallel_shard": shard, "zero_stage": 1, "context_parallel": 1}}
    made = make_plan({**document, "constraints": {"min_devices": 24}}, catalog)
    assert made.config["data_parallel"] == 24
    free = replace(made, spec=question())
    (row,) = answers(free, catalog, without=[2])
    assert row.moves is not None
    assert (row.moves.lost > 0.0) == from_checkpoint
    assert row.moves.kept + row.moves.moved == pytest.approx(0.0 if from_checkpoint else row.moves.needed)


def test_a_node_is_lost_once(plan: Plan) -> None:
    spec = without_nodes(plan.spec, [1])
    with pytest.raises(SpecError, match="not used by this plan already"):
        without_nodes(spec, [1])


@pytest.mark.parametrize("speed", [0.1, 0.5, 0.9])
def test_both_choices_cost_the_same_at_the_break_even(speed: float) -> None:
    even = decide(speed=speed, change_s=700.0, repair_s=1.0).from_s
    at = decide(speed=speed, change_s=700.0, repair_s=even)
    assert at.going_on_s == pytest.approx(at.waiting_s)
    assert decide(speed=speed, change_s=700.0, repair_s=1.01 * even).goes_on
    assert not decide(speed=speed, change_s=700.0, repair_s=0.99 * even).goes_on


def test_nothing_runs_on_what_is_left() -> None:
    none = decide(speed=0.0, change_s=700.0, repair_s=1e9)
    assert not none.goes_on
    assert math.isinf(none.from_s)


def test_more_nodes_are_planned_for_and_hold_what_they_need(plan: Plan, catalog: Catalog) -> None:
    more, less = answers(plan, catalog, fewer=1, more=1)
    assert (more.gained, more.lost, less.lost) == (1, (), (2,))
    assert more.speed >= 1.0
    assert more.moves is not None
    assert more.moves.lost == 0.0
    assert more.moves.moved > 0.0


@pytest.mark.parametrize("speed", [1.1, 2.0])
def test_joining_pays_from_when_both_have_trained_as_much(speed: float) -> None:
    stays = join_from_s(speed=speed, change_s=500.0)
    assert (stays - 500.0) * speed == pytest.approx(stays)


def test_nodes_that_do_not_help_are_left() -> None:
    assert math.isinf(join_from_s(speed=1.0, change_s=500.0))


def test_a_cluster_of_described_devices_loses_nodes_too(catalog: Catalog) -> None:
    """Its nodes were looked for among the catalog's types, which ended as a bug."""
    spec = question()
    link = {"bandwidth": "450 GB/s", "latency": "5 us"}
    spec["cluster"] = {
        "devices": {"type": "h100-sxm", "nodes": 3, "per_node": 4},
        "links": {"intra_node": link, "inter_node": {**link, "bandwidth": "50 GB/s"}},
    }
    made = make_plan(spec, catalog)
    (row,) = answers(made, catalog, without=[1])
    assert row.lost == (1,)
    assert row.plan is not None
    with pytest.raises(SpecError, match="there is no node 3: the cluster has 3, from 0"):
        answers(made, catalog, without=[3])
    more, _ = answers(made, catalog, more=1, fewer=1)
    assert more.plan is not None
    assert more.speed > 1.0


def test_a_job_on_one_node_can_grow(catalog: Catalog) -> None:
    """It was refused, since no node is left without its only one, whatever was asked."""
    spec = question()
    spec["cluster"] = {"nodes": [{"type": "dgx-h100", "count": 1}]}
    made = make_plan(spec, catalog)
    (row,) = answers(made, catalog, more=1)
    assert row.gained == 1
    assert row.speed > 1.0
    with pytest.raises(SpecError, match="no other is left"):
        answers(made, catalog)


def test_spares_take_over_for_every_node_of_the_job(catalog: Catalog) -> None:
    """One node and a spare: that the job runs on one node was said, and no answer given."""
    spec = question(spare_nodes=1)
    spec["cluster"]["nodes"][0]["count"] = 2
    made = make_plan(spec, catalog)
    (row,) = answers(made, catalog, fewer=3)
    assert row.uses_spares


def test_more_nodes_join_those_of_one_type_that_are_listed_apart(catalog: Catalog) -> None:
    spec = question()
    spec["cluster"] = {"nodes": [{"type": "dgx-h100", "count": 1}, {"type": "dgx-h100", "count": 1}]}
    more, _ = answers(make_plan(spec, catalog), catalog, more=1, fewer=1)
    assert more.plan is not None
    assert more.speed > 1.0


def test_a_node_without_ranks_is_not_missed(catalog: Catalog) -> None:
    """The job was told to start on the spares when one of the spares itself was gone."""
    made = make_plan(question(spare_nodes=1), catalog)
    used = {host for host, _ in made.rank_table or ()}
    (idle,) = set(range(3)) - used
    (row,) = answers(made, catalog, without=[idle])
    assert row.is_idle
    assert not row.uses_spares
    assert row.decision.going_on_s == 0.0
    assert row.decision.goes_on
    (other,) = answers(made, catalog, without=[min(used)])
    assert not other.is_idle
