"""Allocations from models and workloads: what is refused, what is planned, and that the replay proves it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.plan import Plan, canonical_json
from meshplan.planner.gpu_allocation.nodes.solve import solve_fleet
from meshplan.planner.gpu_allocation.replay import NUM_RUNS, lower_limit
from meshplan.planner.gpu_allocation.resolve import resolve_allocation
from meshplan.planner.gpu_allocation.search import Compiled, compile_question, replay_scenario, search_allocation
from meshplan.planner.gpu_allocation.spec import read_allocation_spec
from meshplan.planner.service import make_plan

SPEC: dict[str, Any] = {
    "kind": "gpu-allocation",
    "name": "chat",
    "model": "llama-3.1-8b",
    "market": {
        "offers": [
            {"type": "aws-g5-xlarge"},
            {"type": "aws-g6e-xlarge", "terms": ["on-demand", "spot"], "interruption_headroom": 0.2},
            {"type": "dgx-h100"},
        ]
    },
    "workload": {
        "burstiness": 2,
        "buckets": [
            {"input_tokens": [16, 256], "output_tokens": [8, 128], "request_rate_per_s": 20.0},
            {"input_tokens": [257, 2048], "output_tokens": [33, 128], "request_rate_per_s": 5.0},
            {"input_tokens": [2049, 16000], "output_tokens": [8, 64], "request_rate_per_s": 1.0},
        ],
    },
    "slo": {"ttft_p99_s": 4.0, "tpot_p99_s": 0.08},
    "replay": {"num_requests": 500},
}


def spec(**parts: Any) -> dict[str, Any]:
    """The question with other parts; None leaves one out."""
    changed = {**copy.deepcopy(SPEC), **parts}
    return {key: value for key, value in changed.items() if value is not None}


_COMPILED: dict[str, Compiled] = {}


def compiled(document: dict[str, Any], catalog: Catalog) -> Compiled:
    """The problem of a question, made once for all tests that ask it."""
    key = canonical_json(document)
    if key not in _COMPILED:
        _COMPILED[key] = compile_question(resolve_allocation(read_allocation_spec(document), catalog, Path()))
    return _COMPILED[key]


def refused(document: dict[str, Any], catalog: Catalog, base: Path = Path()) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        make_plan(document, catalog, base=base)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    return make_plan(SPEC, catalog)


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_promised_99th_percentile_is_kept_by_the_lower_limit(plan: Plan) -> None:
    assert plan.solution["status"] == "optimal"
    assert plan.solution["kept"]
    assert plan.answer is not None
    promises = plan.answer["replays"][0]["promises"]
    assert {row["promise"] for row in promises} == {"ttft_p99_s", "tpot_p99_s"}
    assert all(0.99 <= row["lower_limit"] <= row["attained"] for row in promises)


def test_other_requests_than_those_of_the_search_keep_it_too(catalog: Catalog) -> None:
    searched = search_allocation(compiled(SPEC, catalog))
    assert searched.solution.assignment is not None
    problem = searched.compiled
    seen = replay_scenario(problem, searched.solution.assignment, 0, range(10**6, 10**6 + NUM_RUNS))
    assert all(kept.attained >= 0.99 for kept in seen.kept)


def test_a_spent_budget_ends_the_replay_and_says_so(catalog: Catalog, plan: Plan) -> None:
    limited = make_plan(SPEC, catalog, time_limit_s=1e-9)
    assert (limited.solution["status"], limited.solution["kept"]) == ("feasible", None)
    assert limited.solution["stopped"]
    assert limited.answer is not None
    assert plan.answer is not None
    assert [one["num_runs"] for one in limited.answer["replays"]] == [1]
    assert limited.solution["objective"] <= plan.solution["objective"]


def test_money_adds_up_and_every_bucket_is_routed(plan: Plan) -> None:
    assert plan.answer is not None
    fleet = plan.answer["fleets"][0]
    assert sum(unit["usd_per_hour"] for unit in fleet["units"]) == pytest.approx(plan.solution["objective"])
    for bucket in plan.answer["services"][0]["buckets"]:
        weights = bucket["scenarios"][0]["weights"]
        assert sum(weights.values()) == pytest.approx(1.0, abs=1e-5)
        assert set(weights) <= set(bucket["max_request_rate_per_s"])
    for row in fleet["replicas"]:
        assert row["utilization"][0] <= row["ceiling"] + 1e-6


def test_the_same_question_gives_the_same_bytes(plan: Plan, catalog: Catalog) -> None:
    again = make_plan(json.loads(json.dumps(SPEC)), catalog)
    assert canonical_json(again.to_document(clocks=False)) == canonical_json(plan.to_document(clocks=False))


def test_no_alternative_is_cheaper_and_looser_promises_cost_no_more(plan: Plan) -> None:
    assert plan.answer is not None
    found, cost = plan.answer["alternatives"], plan.solution["objective"]
    for value in (*found["single_type"].values(), *found["without"].values()):
        assert value is None or value >= cost - 1e-9
    growth = [row["objective"] for row in found["growth"]]
    assert growth == sorted(growth)
    front = [row["objective"] for row in found["pareto"] if row["objective"] is not None]
    assert front == sorted(front, reverse=True)


def test_burstier_arrivals_never_need_less(catalog: Catalog) -> None:
    replays = [{"burstiness": bursts, "num_requests": 500} for bursts in (1, 4)]
    questions = [spec(slo={"ttft_p90_s": 4.0, "tpot_p90_s": 0.08}, replay=replay) for replay in replays]
    calm, wild = (search_allocation(compiled(one, catalog)).solution.objective for one in questions)
    assert calm is not None
    assert wild is not None
    assert calm <= wild + 1e-9


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_looser_promises_serve_no_less_of_any_bucket(catalog: Catalog, factor: float) -> None:
    tight = compiled(SPEC, catalog)
    loose = compiled(spec(slo={key: factor * limit for key, limit in SPEC["slo"].items()}), catalog)
    rows = dict(zip([kind.name for kind in loose.problem.kinds], loose.problem.max_request_rate_per_s, strict=True))
    for kind, row in zip(tight.problem.kinds, tight.problem.max_request_rate_per_s, strict=True):
        if kind.name in rows:  # a kind may be outdone where promises are loose
            assert all(more >= less - 1e-9 for more, less in zip(rows[kind.name], row, strict=True))
    assert (solve_fleet(loose.problem).objective or 0.0) <= (solve_fleet(tight.problem).objective or 0.0) + 1e-9


def test_tensor_parallel_groups_are_kinds_where_promises_need_them(catalog: Catalog) -> None:
    tight = compiled(spec(slo={"ttft_p99_s": 0.5}), catalog)
    sizes = {kind.num_devices for kind in tight.problem.kinds}
    assert len(sizes) > 1
    assert all(any(row) for row in tight.problem.max_request_rate_per_s)


# --- more than one service, scenario or role --------------------------------------------------------------------------


def test_a_router_that_sees_prompts_only_pays_for_it(catalog: Catalog) -> None:
    buckets = [
        {"input_tokens": [16, 512], "output_tokens": [8, 64], "request_rate_per_s": 20.0},
        {"input_tokens": [16, 512], "output_tokens": [65, 2000], "request_rate_per_s": 4.0},
        {"input_tokens": [513, 9000], "output_tokens": [8, 500], "request_rate_per_s": 2.0},
    ]
    costs = []
    for knows in ("lengths", "input_length"):
        workload = {"buckets": buckets, "router_knows": knows}
        made = make_plan(spec(workload=workload, replay={"num_requests": 500, "enabled": knows != "lengths"}), catalog)
        assert made.answer is not None
        assert made.solution["kept"] in (None, True)
        costs.append(solve_fleet(compiled(spec(workload=made.spec["workload"]), catalog).problem).objective or 0.0)
    first, second, _ = (one["scenarios"][0]["weights"] for one in made.answer["services"][0]["buckets"])
    assert first == second
    assert costs[0] <= costs[1] + 1e-9


def test_router_weights_are_in_the_routers_steps(catalog: Catalog) -> None:
    market = {"offers": [{"type": "aws-g5-xlarge", "max_nodes": 3}, {"type": "aws-g6e-xlarge"}]}
    few = {"slo": {"ttft_p90_s": 4.0, "tpot_p90_s": 0.08}, "replay": {"num_requests": 500}}
    made = make_plan(spec(market=market, constraints={"routing_steps": 4}, **few), catalog)
    assert made.answer is not None
    assert made.solution["kept"]
    for bucket in made.answer["services"][0]["buckets"]:
        weights = bucket["scenarios"][0]["weights"].values()
        assert sum(weights) == pytest.approx(1.0, abs=1e-12)
        assert all(abs(4 * share - round(4 * share)) < 1e-9 for share in weights)
    assert "routing_steps" in next(iter(refused(spec(constraints={"routing_steps": 0}), catalog)))


def test_two_models_share_a_fleet(catalog: Catalog) -> None:
    first = {"name": "small", **{key: SPEC[key] for key in ("model", "workload", "slo")}}
    second = {**copy.deepcopy(first), "name": "other", "model": "mistral-7b"}
    both = spec(model=None, workload=None, slo=None, services=[first, second], replay={"enabled": False})
    made = make_plan(both, catalog)
    assert made.answer is not None
    assert [service["name"] for service in made.answer["services"]] == ["small", "other"]
    assert {row["service"] for row in made.answer["fleets"][0]["replicas"]} == {"small", "other"}
    alone = [
        solve_fleet(compiled(spec(model=one["model"]), catalog).problem).objective or 0.0 for one in (first, second)
    ]
    together = solve_fleet(compiled(both, catalog).problem).objective or 0.0
    assert together <= sum(alone) + 1e-9


def test_off_peak_hours_need_a_smaller_fleet(catalog: Catalog) -> None:
    cases = [{"name": "day", "rate_factor": 1.0, "weight": 16}, {"name": "night", "rate_factor": 0.2, "weight": 8}]
    made = make_plan(spec(scenarios={"policy": "expected", "cases": cases}, replay={"enabled": False}), catalog)
    assert made.answer is not None
    day, night = made.answer["fleets"]
    assert night["usd_per_hour"] < day["usd_per_hour"]
    mean = (16 * day["usd_per_hour"] + 8 * night["usd_per_hour"]) / 24
    assert made.answer["usd_per_hour"] == pytest.approx(mean)
    assert made.solution["objective"] == pytest.approx(mean)


def test_prefill_and_decode_may_lie_on_different_types(catalog: Catalog) -> None:
    apart = spec(constraints={"disaggregated": True})
    both = compiled(apart, catalog).problem
    assert {kind.role.value for kind in both.kinds} == {"mixed", "prefill", "decode"}
    together = solve_fleet(compiled(SPEC, catalog).problem).objective or 0.0
    assert (solve_fleet(both).objective or 0.0) <= together + 1e-9


def test_spares_and_limits_reach_the_fleet(catalog: Catalog) -> None:
    plain = compiled(SPEC, catalog).problem
    spare = compiled(spec(constraints={"min_spare_replicas": 1}), catalog).problem
    assert (solve_fleet(spare).objective or 0.0) > (solve_fleet(plain).objective or 0.0)
    whole = solve_fleet(compiled(spec(market={**SPEC["market"], "rent": "device"}), catalog).problem).objective
    assert (whole or 0.0) <= (solve_fleet(plain).objective or 0.0) + 1e-9


def test_a_trace_is_cut_into_buckets_and_replayed(catalog: Catalog, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    num = 400
    arrival = np.cumsum(rng.exponential(0.1, num))
    prompts, answers = rng.integers(20, 3000, num), rng.integers(5, 400, num)
    lines = [f"{a:.4f},{i},{o}" for a, i, o in zip(arrival, prompts, answers, strict=True)]
    (tmp_path / "t.csv").write_text("arrival_s,input_length,output_length\n" + "\n".join(lines) + "\n")
    made = make_plan(spec(workload={"trace": "t.csv", "input_edges": [500, 1500]}), catalog, base=tmp_path)
    assert made.answer is not None
    buckets = made.answer["services"][0]["buckets"]
    rate = sum(bucket["scenarios"][0]["request_rate_per_s"] for bucket in buckets)
    assert rate == pytest.approx((num - 1) / (arrival[-1] - arrival[0]), rel=1e-3)
    assert made.answer["replays"][0]["num_requests"] >= 20 * 500
    assert made.solution["kept"]


def test_a_day_is_planned_hour_by_hour(catalog: Catalog) -> None:
    factors = [0.2] * 8 + [1.0] * 8 + [0.5] * 8
    day = spec(
        schedule={"hourly_rate_factor": factors},
        switching={"start_usd": 0.3, "stop_usd": 0.1},
        replay={"enabled": False},
    )
    made = make_plan(day, catalog)
    assert made.answer is not None
    schedule = made.answer["schedule"]
    assert [row["rate_factor"] for row in schedule["hours"]] == factors
    rent = sum(row["usd_per_hour"] for row in schedule["hours"])
    assert rent + schedule["switching_usd"] == pytest.approx(schedule["usd"])
    assert schedule["bound_usd"] <= schedule["usd"] < schedule["constant_usd"]
    assert schedule["hours"][10]["usd_per_hour"] == pytest.approx(made.solution["objective"])


# --- no plan ----------------------------------------------------------------------------------------------------------


def test_promises_that_no_type_keeps_name_the_bucket_and_the_nearest_promise(catalog: Catalog) -> None:
    tight = spec(slo={"ttft_p99_s": 0.05, "tpot_p99_s": 0.08})
    made = make_plan(tight, catalog)
    assert made.solution["status"] == "infeasible"
    assert "2049–16000 input and 8–64 output tokens" in made.solution["binding_constraint"]
    (change,) = made.solution["least_change"]
    eased = {**tight["slo"], **change["slo"]}
    assert solve_fleet(compiled(spec(slo=eased), catalog).problem).assignment is not None
    almost = {key: 0.98 * limit if key in change["slo"] else limit for key, limit in eased.items()}
    assert solve_fleet(compiled(spec(slo=almost), catalog).problem).assignment is None


def test_caps_below_the_need_say_by_how_much(catalog: Catalog) -> None:
    capped = spec(market={"offers": [{"type": "aws-g6e-xlarge", "max_nodes": 2}]})
    made = make_plan(capped, catalog)
    assert made.solution["status"] == "infeasible"
    change = made.solution["least_change"][0]
    assert change["change"] == f"{change['more']} more aws-g6e-xlarge/us-east-1 (max_nodes {2 + change['more']})"
    capped["market"]["offers"][0]["max_nodes"] = 2 + change["more"]
    assert solve_fleet(compiled(capped, catalog).problem).assignment is not None
    capped["market"]["offers"][0]["max_nodes"] -= 1
    assert solve_fleet(compiled(capped, catalog).problem).assignment is None
    assert 0.0 < made.solution["served_fraction"] < 1.0


def test_a_quota_below_the_need_says_by_how_much(catalog: Catalog) -> None:
    market: dict[str, Any] = {
        "offers": [{"type": "aws-g6e-xlarge"}],
        "quotas": [{"region": "us-east-1", "max_devices": 2}],
    }
    made = make_plan(spec(market=market), catalog)
    change = made.solution["least_change"][0]
    assert change["constraint"] == "quota of us-east-1: 2 devices"
    needed = int(change["change"].rsplit(" ", 1)[1].rstrip(")"))
    for most, feasible in ((needed, True), (needed - 1, False)):
        market["quotas"][0]["max_devices"] = most
        assert (solve_fleet(compiled(spec(market=market), catalog).problem).assignment is not None) == feasible
    market["quotas"] = [{"provider": "gcp", "max_devices": 2}]
    assert "no offer is of gcp" in refused(spec(market=market), catalog)["market.quotas[0]"]


def test_caps_hold_by_type_region_and_zone(catalog: Catalog) -> None:
    zones = ["us-east-1a", "us-east-1b"]
    market: dict[str, Any] = {"offers": [{"type": "aws-g6e-xlarge", "zones": zones, "max_nodes": 2}]}
    free = compiled(spec(market=market), catalog).problem
    assert [offer.name for offer in free.offers] == [f"aws-g6e-xlarge/us-east-1/{zone}" for zone in zones]
    found = solve_fleet(free).assignment
    assert found is not None
    assert max(found.units[0]) <= 2 < sum(found.units[0])
    market["quotas"] = [{"type": "aws-g6e-xlarge", "zone": "us-east-1a", "max_devices": 1}]
    capped = solve_fleet(compiled(spec(market=market), catalog).problem).assignment
    assert capped is not None
    assert capped.units[0][0] <= 1
    market["quotas"] = [{"zone": "us-east-1c", "max_devices": 2}]
    assert "no offer is of us-east-1c" in refused(spec(market=market), catalog)["market.quotas[0]"]


def test_a_quota_that_binds_has_its_price_in_words(catalog: Catalog) -> None:
    market: dict[str, Any] = {"offers": [{"type": "aws-g6e-xlarge"}]}
    alone = solve_fleet(compiled(spec(market=market), catalog).problem).assignment
    assert alone is not None
    fewer = alone.units[0][0] - 1  # so that a whole node of another type has to come in
    market["offers"].append({"type": "dgx-h100"})
    market["quotas"] = [{"type": "aws-g6e-xlarge", "max_devices": fewer}]
    made = make_plan(spec(market=market, replay={"enabled": False}), catalog)
    assert made.answer is not None
    (row,) = made.answer["alternatives"]["larger_quota"]
    market["quotas"][0]["max_devices"] = fewer + 1
    assert row["objective"] == pytest.approx(solve_fleet(compiled(spec(market=market), catalog).problem).objective)
    saved = made.solution["objective"] - row["objective"]
    assert f"1 more device for aws-g6e-xlarge saves {saved:.2f} USD/h" in made.answer["notes"]


def test_a_budget_below_the_least_says_the_least(catalog: Catalog) -> None:
    made = make_plan(spec(constraints={"max_usd_per_hour": 1.0}), catalog)
    (change, *_) = made.solution["least_change"]
    assert made.solution["status"] == "infeasible"
    assert "max_usd_per_hour: 1 USD/h" in made.solution["binding_constraint"]
    limit = float(change["change"].split(": ")[1])
    raised = spec(constraints={"max_usd_per_hour": limit})
    assert solve_fleet(compiled(raised, catalog).problem).assignment is not None


def test_nothing_to_be_had_at_all(catalog: Catalog) -> None:
    made = make_plan(spec(market={"offers": [{"type": "dgx-h100", "max_nodes": 0}]}), catalog)
    assert made.solution["served_fraction"] == 0.0
    assert made.solution["least_change"][0]["more"] == 1


def test_a_model_that_fits_no_node_says_so(catalog: Catalog) -> None:
    made = make_plan(spec(model="llama-3.1-405b", market={"offers": [{"type": "aws-g5-xlarge"}]}), catalog)
    assert "max_devices_per_replica" in made.solution["least_change"][0]["change"]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_every_problem_at_once(catalog: Catalog) -> None:
    bad = spec(market={"offers": [{"type": "dgx-h10", "max_nodes": -1}]}, slo={"ttft_p98_s": 1.0}, objectiv="cost")
    told = refused(bad, catalog)
    assert "did you mean 'dgx-h100'" in told["market.offers[0].type"]
    assert "market.offers[0].max_nodes" in told
    assert "ttft_p98_s" in told["slo"]
    assert told["objectiv"] == "unknown key; did you mean 'objective'?"


@pytest.mark.parametrize(
    ("offer", "path", "message"),
    [
        ({"type": "aws-g5-xlarge", "eur_per_hour_per_node": 1.0}, "market.offers[0]", "no exchange rates are kept"),
        ({"type": "aws-g5-xlarge", "regions": ["eu-west-1"]}, "market.offers[0].regions", "known: us-east-1"),
        ({"type": "aws-g5-xlarge", "terms": ["spot"]}, "market.offers[0].terms", "no price of aws-g5-xlarge for spot"),
        ({"type": "a30-pcie-8"}, "market.offers[0]", "give usd_per_hour_per_node"),
        # The second provider was left out without a word.
        (
            {"type": "dgx-h100", "usd_per_hour_per_node": 20.0, "providers": ["a", "b"]},
            "market.offers[0].usd_per_hour_per_node",
            "one price for several providers, terms or regions",
        ),
        (
            {"type": "aws-g6e-xlarge", "terms": ["spot"]},
            "market.offers[0].interruption_headroom",
            "spot nodes are interrupted",
        ),
    ],
)
def test_one_wrong_offer(catalog: Catalog, offer: dict[str, Any], path: str, message: str) -> None:
    assert message in refused(spec(market={"offers": [offer]}), catalog)[path]


def test_zero_rates_and_missing_promises(catalog: Catalog) -> None:
    buckets = [{**bucket, "request_rate_per_s": 0.0} for bucket in SPEC["workload"]["buckets"]]
    assert "every rate is 0" in refused(spec(workload={"buckets": buckets}), catalog)["workload"]
    # It ended as a division by zero.
    hours = {"hourly_rate_factor": [0.0, 0.0, 0.0]}
    assert "every hour is 0" in refused(spec(schedule=hours), catalog)["schedule.hourly_rate_factor"]
    assert "slo missing" in refused(spec(slo=None), catalog)[""]
    assert "slo is empty" in refused(spec(slo={}), catalog)[""]
    swapped = [{"input_tokens": [9, 1], "output_tokens": [1, 2], "request_rate_per_s": 1.0}]
    assert "swap them" in refused(spec(workload={"buckets": swapped}), catalog)["workload.buckets[0]"]


# --- the interval -----------------------------------------------------------------------------------------------------


def test_the_interval_widens_where_misses_come_together() -> None:
    scattered, together = np.ones((NUM_RUNS, 200), dtype=bool), np.ones((NUM_RUNS, 200), dtype=bool)
    scattered[:, 0] = False
    together[0, :NUM_RUNS] = False
    assert lower_limit(list(together)) < lower_limit(list(scattered)) < 0.995
    assert lower_limit(list(np.ones((NUM_RUNS, 200), dtype=bool))) == pytest.approx(0.999, abs=1e-4)


def test_the_interval_of_few_runs_is_students_of_their_number() -> None:
    """A search that runs out of time has fewer: of two that differ by 2 d the interval is 12.71 d either way."""
    runs = [np.arange(2000) < served for served in (1980, 1990)]
    mean, deviation = 0.9925, 0.0025
    assert lower_limit(runs) == pytest.approx(mean - 12.71 * deviation)


def test_head_room_is_capacity_kept_free(catalog: Catalog) -> None:
    problem = compiled(SPEC, catalog).problem
    half = replace(problem, kinds=tuple(replace(kind, headroom=0.5) for kind in problem.kinds))
    assert half.fill(0) == pytest.approx(0.5 * problem.fill(0))
