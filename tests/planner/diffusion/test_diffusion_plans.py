"""Diffusion plans: no independent enumeration finds a better one, pins never help, refusals say what binds."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
from diffusion_questions import spec

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import estimate_plan, explain_instead, make_plan

TIE = 0.0025


def value(plan: Any, objective: str) -> float:
    """Of an estimate, what the objective makes least."""
    predicted, devices = plan.predicted, plan.solution["num_devices"]
    return {
        "latency": lambda: predicted["latency_s"].value,
        "energy": lambda: predicted["energy_per_item_j"].value,
        "usd_per_item": lambda: predicted["usd_per_item"].value,
        "throughput_per_device": lambda: devices / predicted["images_per_s"].value,
    }[objective]()


@pytest.mark.parametrize("objective", ["latency", "energy", "usd_per_item", "throughput_per_device"])
def test_nothing_is_better_than_the_plan(objective: str, catalog: Catalog) -> None:
    """Every product of powers of two that the model allows, priced one by one."""
    plan = make_plan(spec(objective=objective, workload={"batch_size": 2}), catalog)
    assert plan.solution["status"] == "optimal"
    chosen = plan.solution["objective"]
    least = 1.0 / chosen if objective == "throughput_per_device" else chosen
    for u, r, c in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2)):
        if u * r * c <= 8:
            fixed = {"ulysses": u, "ring": r, "cfg_parallel": c, "replicas": 8 // (u * r * c)}
            other = estimate_plan(spec(workload={"batch_size": 2}, fixed=fixed), catalog)
            assert value(other, objective) >= least * (1.0 - TIE) - 1e-12, fixed


def test_a_pin_never_improves_and_more_devices_never_hurt(catalog: Catalog) -> None:
    free = make_plan(spec("wan2.1-t2v-1.3b"), catalog)
    for pin in ({"ulysses": 2}, {"ring": 2}, {"batch_size": 2}, {"ulysses": 4, "ring": 2}):
        pinned = make_plan(spec("wan2.1-t2v-1.3b", fixed=pin), catalog)
        assert pinned.solution["bound"] >= free.solution["bound"]
        assert {name: pinned.config[name] for name in pin} == pin
    more = make_plan(spec("wan2.1-t2v-1.3b", count=2), catalog)
    assert more.solution["bound"] <= free.solution["bound"]


def test_no_batch_needs_fewer_devices(catalog: Catalog) -> None:
    """Powers of two alone were tried and eight devices proven the fewest: batches of 15 keep 33 s on seven."""
    asked = {"model": "stable-diffusion-3.5-medium", "node": "dgx-b200", "objective": "num_devices"}
    limits = {"slo": {"latency_s": 33}}
    free = make_plan(spec(**asked, **limits, workload={"request_rate_per_s": 3}), catalog)
    for batch in range(1, 33):
        pinned = {"request_rate_per_s": 3, "batch_size": batch}
        other = make_plan(spec(**asked, **limits, workload=pinned), catalog)
        assert not other.config or other.solution["objective"] >= free.solution["bound"], batch


@pytest.mark.parametrize("limit", [{"max_power_w": 3000}, {"max_usd_per_hour": 40}])
def test_without_a_rate_as_many_replicas_run_as_a_limit_lets_run(limit: dict[str, float], catalog: Catalog) -> None:
    """A cluster larger than its power or budget is used in part: it has a plan, and no pin of replicas has a better."""
    question = {"model": "sana-1.5-1.6b", "count": 3, "objective": "usd_per_item", "constraints": limit}
    plan = make_plan(spec(**question), catalog)
    assert plan.solution["status"] == "optimal"
    for replicas in (1, 2, 4, 8):
        pinned = make_plan(spec(**question, fixed={"replicas": replicas}), catalog)
        least = pinned.solution["objective"] or math.inf
        assert least >= plan.solution["bound"] * (1.0 - 1e-12), replicas
    one_more = {**plan.config, "replicas": plan.config["replicas"] + 1}
    assert make_plan(spec(**question, fixed=one_more), catalog).solution["status"] == "infeasible"


@pytest.mark.parametrize("limit", ["max_power_w", "max_usd_per_hour"])
def test_the_least_change_of_a_limit_suffices_and_is_what_the_nearest_plan_takes(limit: str, catalog: Catalog) -> None:
    """Without the limit all replicas would run, and twenty times the power was said to be needed."""
    none = make_plan(spec("sana-1.5-1.6b", count=3, constraints={limit: 1.0}), catalog)
    changes = [item["change"] for item in none.solution["least_change"]]
    (least,) = (float(one.split()[1]) for one in changes if one.startswith(f"constraints.{limit}"))
    found = make_plan(spec("sana-1.5-1.6b", count=3, constraints={limit: least}), catalog)
    assert found.config["replicas"] == 1
    assert least == pytest.approx(none.solution["nearest_miss"]["excess"] + 1.0, rel=0.002)


def test_pinned_replicas_are_held_to_the_utilization_of_others(catalog: Catalog) -> None:
    """One replica that must be busy 95 % of the time is no answer, pinned or not."""
    alone = estimate_plan(spec(fixed={}), catalog).predicted["images_per_s"].value
    asked = {"objective": "num_devices", "workload": {"request_rate_per_s": 0.95 * alone, "batch_size": 1}}
    degrees = {"ulysses": 1, "ring": 1, "cfg_parallel": 1}
    free = make_plan(spec(**asked, fixed=degrees), catalog)
    assert free.config["replicas"] == 2
    assert make_plan(spec(**asked, fixed={**degrees, "replicas": 1}), catalog).solution["status"] == "infeasible"


def test_pipefusion_is_chosen_only_where_stale_activations_are_allowed(catalog: Catalog) -> None:
    assert make_plan(spec("flux.1-dev"), catalog).config["pipefusion"] == 1
    pinned = make_plan(spec("flux.1-dev", constraints={"stale_activations": True}, fixed={"pipefusion": 4}), catalog)
    assert pinned.config["pipefusion"] == 4
    assert pinned.provenance["unmeasured"] == ["pipefusion"]


def test_ranges_are_wider_where_nothing_was_measured(catalog: Catalog) -> None:
    def spread(**fixed: int) -> float:
        found = estimate_plan(spec(fixed=fixed), catalog).predicted["latency_s"]
        return found.high / found.low

    assert spread(cfg_parallel=2) == pytest.approx(spread(ulysses=2) ** 2)
    ampere = estimate_plan(spec(node="dgx-a100-80gb"), catalog)
    assert ampere.provenance["calibration"]["num_runs"] == 0
    assert ampere.predicted["latency_s"].high > 1.5 * ampere.predicted["latency_s"].value


def test_fewest_devices_carry_the_rate(catalog: Catalog) -> None:
    asked = {"request_rate_per_s": 2.0}
    plan = make_plan(spec(objective="num_devices", workload=asked, slo={"latency_s": 3.0}), catalog)
    assert plan.predicted["images_per_s"].value >= 2.0
    assert plan.predicted["latency_s"].value <= 3.0
    assert plan.solution["utilization"] <= 0.9
    fewer = {
        **spec(workload=asked, slo={"latency_s": 3.0}),
        "constraints": {"max_devices": plan.solution["num_devices"] - 1},
    }
    assert make_plan(fewer, catalog).solution["status"] == "infeasible"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"slo": {"latency_s": 0.05}}, r"slo\.latency_s: .* at the nearest, the limit is 50"),
        ({"slo": {"usd_per_item": 1e-6}}, r"slo\.usd_per_item"),
        ({"constraints": {"max_power_w": 100}}, r"constraints\.max_power_w: .* W at the nearest"),
        (
            {"workload": {"request_rate_per_s": 1000}},
            r"devices: \d+ are needed, 8 may be used \(\d+ replicas of \d; \d fit the hosts\)",
        ),
    ],
)
def test_no_plan_names_what_binds(more: dict[str, Any], words: str, catalog: Catalog) -> None:
    plan = make_plan(spec(**more), catalog)
    assert plan.solution["status"] == "infeasible"
    assert re.search(words, plan.solution["binding_constraint"]), plan.solution["binding_constraint"]
    assert plan.solution["nearest_miss"]["excess"] > 0


def test_too_high_a_rate_is_answered_by_the_fewest_devices_and_by_the_highest_rate(catalog: Catalog) -> None:
    asked = spec("flux.1-dev", workload={"request_rate_per_s": 4.0}, slo={"latency_s": 10.0})
    told = " ".join(change["change"] for change in make_plan(asked, catalog).solution["least_change"])
    devices = re.search(r"(\d+) devices instead of 8", told)
    rate = re.search(r"request_rate_per_s: ([\d.]+) instead of 4", told)
    assert devices, told
    assert rate, told

    def status(nodes: int, most: int, rate: float) -> str:
        cluster = {"nodes": [{"type": "dgx-h100", "count": nodes}]}
        limits = {"workload": {"request_rate_per_s": rate}, "constraints": {"max_devices": most}}
        return str(make_plan({**asked, "cluster": cluster, **limits}, catalog).solution["status"])

    enough = int(devices[1])
    assert status(-(-enough // 8), enough, 4.0) != "infeasible"
    assert status(-(-enough // 8), enough - 1, 4.0) == "infeasible"
    assert status(1, 8, float(rate[1])) != "infeasible"
    assert status(1, 8, 1.01 * float(rate[1])) == "infeasible"


def test_a_model_too_large_for_the_device(catalog: Catalog) -> None:
    document = spec("wan2.1-t2v-14b")
    document["cluster"] = {
        "devices": {"type": "rtx-4090", "per_node": 8, "nodes": 1},
        "links": {"intra_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
    }
    plan = make_plan(document, catalog)
    assert plan.solution["binding_constraint"].startswith("memory: a rank needs")


def test_every_problem_at_once(catalog: Catalog) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(spec(workload={"height": 1000, "frames": 16}, objective="num_devices", fixed={"ulysses": 3}), catalog)
    assert {problem.path for problem in caught.value.problems} == {
        "workload.height",
        "workload.frames",
        "objective",
        "fixed",
    }
    with pytest.raises(SpecError, match="1008"):
        make_plan(spec(workload={"height": 1000}), catalog)
    with pytest.raises(SpecError, match="ttft_p99_s is of language models"):
        make_plan(spec(slo={"ttft_p99_s": 1}), catalog)
    with pytest.raises(SpecError, match="xDiT has no tensor_parallel for PixArt"):
        make_plan(spec(fixed={"tensor_parallel": 2}), catalog)


def test_instead_prices_another_choice(catalog: Catalog) -> None:
    plan = make_plan(spec("flux.1-dev"), catalog)
    other, sentence = explain_instead(plan, {"ulysses": 1, "ring": 1}, catalog)
    assert other is not None
    assert other.config["ulysses"] == 1
    assert sentence.endswith("worse")


def test_one_question_has_one_answer(catalog: Catalog) -> None:
    first, second = (make_plan(spec("sana-1.5-1.6b"), catalog).digest for _ in range(2))
    assert first == second


def test_nodes_of_one_type_may_be_listed_apart(catalog: Catalog) -> None:
    """As in the other kinds; it was refused as two types of node."""
    apart = spec()
    apart["cluster"]["nodes"] *= 2
    together = make_plan(spec(count=2), catalog)
    assert make_plan(apart, catalog).config == together.config
    apart["cluster"]["nodes"][1] = {"type": "dgx-a100-80gb", "count": 1}
    with pytest.raises(SpecError, match="one type of node at a time"):
        make_plan(apart, catalog)


@pytest.mark.parametrize("section", ["fixed", "workload"])
def test_an_estimate_of_a_malformed_section_is_refused(section: str, catalog: Catalog) -> None:
    with pytest.raises(SpecError, match=section):
        estimate_plan(spec(**{section: [None, None]}), catalog)


@pytest.mark.parametrize("section", ["workload", "fixed"])
def test_a_batch_that_has_no_room_is_named_where_it_was_asked(section: str, catalog: Catalog) -> None:
    solution = make_plan(spec(**{section: {"batch_size": 256}}), catalog).solution
    assert f"without {section}.batch_size: 256" in [item["change"] for item in solution["least_change"]]
    assert f"{section}.batch_size dropped" in solution["tried"]
