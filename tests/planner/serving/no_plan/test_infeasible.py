"""Serving questions without a plan: what stands in the way, and what would do."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving_questions import load, small, spec

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.budget import Budget
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.serving import service
from meshplan.planner.serving.no_plan import infeasible
from meshplan.planner.serving.no_plan.binding import CAPACITY, Binding
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.search import search_serving


def test_an_impossible_slo_names_what_would_do(catalog: Catalog) -> None:
    made = make_plan(spec(slo={"tpot_p95_s": 0.01}, fixed={"mode": "aggregated"}), catalog)
    assert made.solution["status"] == "infeasible"
    assert not made.config
    assert made.solution["binding_constraint"].startswith("tpot_p95_s")
    assert made.solution["binding_constraint"].count("SLO") == 1, "said once, in one unit"
    reached = float(made.solution["least_change"][0]["change"].split(": ")[1])
    lifted = make_plan(spec(slo={"tpot_p95_s": reached}, fixed={"mode": "aggregated"}), catalog)
    assert lifted.config, "what the error advises must work"


def test_an_slo_below_the_weights_read_time_is_violated_by_every_load(catalog: Catalog) -> None:
    made = make_plan(spec(slo={"tpot_mean_s": 1e-6, "ttft_mean_s": 1e-6}), catalog)
    assert made.solution["status"] == "infeasible"
    assert made.solution["binding_constraint"]


def test_a_model_larger_than_any_worker_is_infeasible(catalog: Catalog) -> None:
    made = make_plan(spec(model="llama-3.1-405b", fixed={"tensor_parallel": 2, "pipeline_parallel": 1}), catalog)
    assert made.solution["status"] == "infeasible"
    assert "do not fit the device" in made.rejected[0]["reason"]


def test_bursts_that_no_rate_spreads_are_named_with_what_would_do(catalog: Catalog) -> None:
    asked = spec(
        model="llama-3.1-8b",
        workload={"input_length": 1024, "output_length": 32, "burstiness": 16, "num_requests": 400},
        slo={"ttft_p99_s": 0.06},
        fixed={"mode": "aggregated", "tensor_parallel": 1, "pipeline_parallel": 1},
    )
    solution = make_plan(asked, catalog).solution
    assert solution["status"] == "infeasible"
    assert "workload.burstiness: 16" in solution["binding_constraint"]
    changes = dict(change["change"].split(": ") for change in solution["least_change"] if ": " in change["change"])
    assert float(changes["ttft_p99_s"]) > asked["slo"]["ttft_p99_s"]
    steady = {**asked["workload"], "burstiness": float(changes["workload.burstiness"])}
    assert make_plan({**asked, "workload": steady}, catalog).config
    assert make_plan({**asked, "slo": {"ttft_p99_s": float(changes["ttft_p99_s"])}}, catalog).config


@pytest.mark.parametrize(
    ("fixed", "changes"),
    [
        ({"prefill": {"tensor_parallel": 8}}, {"without fixed.prefill"}),
        ({"prefill": {"tensor_parallel": 8}, "mode": "disaggregated"}, {"without fixed.mode and fixed.prefill"}),
        ({"mode": "disaggregated"}, {"without fixed.mode: disaggregated"}),
    ],
)
def test_advice_names_the_pins_that_the_spec_has(fixed: dict[str, Any], changes: set[str], catalog: Catalog) -> None:
    model = {"model": "llama-3.1-8b", "workload": load(request_rate_per_s=1.0), "constraints": {"max_devices": 1}}
    solution = make_plan(spec(**model, fixed=fixed), catalog).solution
    assert solution["status"] == "infeasible"
    assert {one["change"] for one in solution["least_change"] if one["change"].startswith("without")} == changes


def test_too_many_requests_are_a_lack_of_capacity(catalog: Catalog) -> None:
    workload = {"input_length": 1000, "output_length": 200, "request_rate_per_s": 500, "num_requests": 200}
    made = make_plan(small("l40s", model="llama-3.1-8b", workload=workload, slo={"tpot_p95_s": 0.05}), catalog)
    assert made.solution["binding_constraint"].startswith("capacity: 4 devices")
    assert any("devices instead of 4" in change["change"] for change in made.solution["least_change"])
    assert made.solution["tried"]


def test_more_devices_are_looked_for_among_the_copies_that_carry_the_rate(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of devices that may be used, not of all that a node has; and one search finds the fewest."""
    asked, search = [], infeasible.search_serving

    def recorded(problem: ServingProblem, **options: Any) -> Any:
        asked.append(problem)
        return search(problem, **options)

    monkeypatch.setattr(infeasible, "search_serving", recorded)
    workload = {"input_length": 1000, "output_length": 200, "request_rate_per_s": 40, "num_requests": 200}
    slo, limits = {"tpot_p95_s": 0.05, "ttft_p95_s": 1.0}, {"max_devices": 1}
    question = small("l40s", model="llama-3.1-8b", workload=workload, slo=slo, constraints=limits)
    changes = {
        one["constraint"].partition(":")[0]: one for one in make_plan(question, catalog).solution["least_change"]
    }
    lower = float(changes["request_rate_per_s"]["change"].split(": ")[1])
    copies = math.ceil(40 / lower)
    sizes = [problem.num_devices for problem in asked if problem.num_devices > 1]
    assert sizes in ([copies], [copies, math.ceil(1.25 * 40 / lower)])
    found = int(changes["devices"]["change"].split(" ")[0])
    assert 1 < found <= max(sizes)


def test_a_model_that_does_not_fit_lacks_memory(catalog: Catalog) -> None:
    made = make_plan(small("l4", fixed={"tensor_parallel": 1, "pipeline_parallel": 1}), catalog)
    assert made.solution["binding_constraint"].startswith("memory: ")
    assert "are missing" in made.solution["binding_constraint"]


@pytest.mark.parametrize(
    ("fixed", "engine", "said"),
    [
        ({"tensor_parallel": 1}, "vllm", "memory: TP1 on dgx-h200"),
        ({"pipeline_parallel": 2}, "vllm", "speculation needs pipeline_parallel = 1 (pinned: pipeline_parallel 2)"),
        ({}, "llama.cpp", "of other layouts: llama.cpp: a worker lies on one host"),
    ],
)
def test_layouts_that_hold_the_model_but_are_refused_for_it(
    fixed: dict[str, Any], engine: str, said: str, catalog: Catalog
) -> None:
    """Stages with drafts, several hosts: it was taken for an SLO that no worker keeps, and ended as a bug."""
    is_llama_cpp = engine == "llama.cpp"
    asked = spec(
        model="llama-3.1-405b" if is_llama_cpp else "llama-3.1-70b",
        cluster={"nodes": [{"type": "dgx-h100", "count": 2} if is_llama_cpp else {"type": "dgx-h200", "count": 1}]},
        workload={"input_length": 1000, "output_length": 500, "request_rate_per_s": 1},
        slo={"ttft_p99_s": 2.0},
        constraints={"target": engine},
        fixed=fixed,
        **({} if is_llama_cpp else {"speculation": {"num_draft_tokens": 3, "acceptance": 0.7, "draft_cost": 0.05}}),
    )
    assert said in make_plan(asked, catalog).solution["binding_constraint"]


@pytest.mark.parametrize(("device", "engine", "is_planned"), [("t4", "vllm", False), ("t4", "llama.cpp", True)])
def test_a_format_without_kernels_on_the_device_is_no_plan(
    device: str, engine: str, is_planned: bool, catalog: Catalog
) -> None:
    """vLLM has none for mxfp4 before Ampere, llama.cpp has."""
    asked = spec(
        model="gpt-oss-20b",
        cluster={"devices": {"type": device, "per_node": 1, "nodes": 1}},
        workload={"input_length": 500, "output_length": 100, "concurrency": 1},
        slo={},
        constraints={"target": engine},
    )
    made = make_plan(asked, catalog)
    assert bool(made.config) is is_planned
    said = made.solution.get("binding_constraint", "")
    assert is_planned or "vllm has no kernels for weights in mxfp4" in said


def test_a_format_that_the_engine_makes_itself_comes_before_another_checkpoint(catalog: Catalog) -> None:
    """vLLM casts weights to fp8 as it loads them; mxfp8 is a little wider, and somebody else's checkpoint."""
    cluster = {"nodes": [{"type": "rtx-4090-pcie-8", "count": 1}]}
    workload = {"input_length": 2000, "output_length": 500, "request_rate_per_s": 0.2, "num_requests": 100}
    limits = {"max_devices": 2, "target": "vllm"}
    asked = {"model": "mistral-small-24b", "cluster": cluster, "workload": workload, "constraints": limits}
    solution = make_plan({"kind": "serving", **asked}, catalog).solution
    assert solution["binding_constraint"].startswith("memory: ")
    assert solution["least_change"][0]["change"] == "quantization: [fp8]"


def test_a_pair_of_workers_needs_two_devices(catalog: Catalog) -> None:
    """Prefill and decode workers apart do not carry what one device does not: the rate is too high for it."""
    asked = spec(
        model="qwen3-30b-a3b",
        workload={"input_length": 2000, "output_length": 500, "request_rate_per_s": 6, "num_requests": 200},
        slo={"ttft_p95_s": 2, "tpot_p95_s": 0.05},
        constraints={"max_devices": 1},
    )
    solution = make_plan(asked, catalog).solution
    assert solution["binding_constraint"].startswith("capacity: 1 device finishes at most")
    changes = [change["change"] for change in solution["least_change"]]
    assert any(change.startswith("request_rate_per_s") for change in changes)
    assert any(change.startswith("quantization: [") for change in changes), "half the weights, more requests at once"
    assert not any(shape["num_devices"] > 1 for shape in solution["what_if"])


def test_narrower_weights_are_offered_where_reading_them_takes_too_long(catalog: Catalog) -> None:
    asked = spec(
        model="llama-3.1-70b",
        workload={"input_length": 1000, "output_length": 100, "request_rate_per_s": 0.2, "num_requests": 100},
        slo={"tpot_p95_s": 0.016},
        constraints={"max_devices": 4},
        fixed={"mode": "aggregated"},
    )
    solution = make_plan(asked, catalog).solution
    assert solution["binding_constraint"].startswith("tpot_p95_s")
    (change,) = [one["change"] for one in solution["least_change"] if one["change"].startswith("quantization")]
    assert make_plan({**asked, "quantization": [change.split("[")[1].rstrip("]")]}, catalog).config


def test_nothing_is_tried_once_the_time_is_over(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for the whole answer: what would do is looked for as long as there is time."""
    seen: list[Budget] = []

    def late(*asked: Any, budget: Budget, **settings: Any) -> dict[str, Any]:
        seen.append(budget)
        over = Budget(1.0, None, elapsed_s=2.0)
        return infeasible.explain_infeasible(*asked, budget=over, **settings)

    monkeypatch.setattr(service, "explain_infeasible", late)
    solution = make_plan(spec(slo={"tpot_p95_s": 0.001}), catalog).solution
    assert seen, "the question's own budget is handed on"
    assert solution["status"] == "infeasible"
    assert solution["binding_constraint"].startswith("tpot_p95_s")
    assert solution["least_change"] == []
    assert solution["tried"][-1] == "no more within the time limit of 1 s"


def test_a_deployment_that_another_search_finds_on_the_same_devices_is_named_by_its_pins(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight devices instead of eight helps nobody; the pins do: with them the question has an answer."""
    asked = small("l40s", model="llama-3.1-8b", workload=load(request_rate_per_s=1.0), slo={"tpot_p95_s": 0.05})
    problem = resolve_serving(read_serving_spec(asked), catalog, Path()).problem
    there = search_serving(problem)[0].assignment
    assert there is not None
    monkeypatch.setattr(infeasible._Changes, "_best", lambda self, problem: there)
    binding = Binding(kind=CAPACITY, text="too slow")
    changes = infeasible._Changes(problem=problem, binding=binding, seed=0, budget=Budget(memory_limit_bytes=None))
    change = next(changes._more_devices())["change"]
    assert change.startswith("fixed: {mode: aggregated")
    assert make_plan({**asked, **yaml.safe_load(change)}, catalog).config


def test_an_estimate_of_too_slow_workers_names_pins_that_carry_the_rate(catalog: Catalog) -> None:
    """It said that weights do not fit the device, of workers whose weights do."""
    asked = {**spec(model="llama-3.1-70b", workload=load(request_rate_per_s=5.0)), "fixed": {}}
    with pytest.raises(SpecError, match=r"finishes at most .* of the 5 requests/s: pin one that does") as raised:
        estimate_plan(asked, catalog)
    pins = re.search(r"such as (fixed: .*}), or let", str(raised.value))
    assert pins is not None
    assert estimate_plan({**asked, **yaml.safe_load(pins[1])}, catalog).config


def test_api_servers_that_bind_are_named_and_relieved(catalog: Catalog) -> None:
    """One H100 computes more tokens of a small model than its API server hands on one by one."""
    asked = {
        "kind": "serving",
        "model": "llama-3.2-1b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "constraints": {"max_devices": 1, "target": "vllm"},
        "workload": {"input_length": 220, "output_length": 200, "request_rate_per_s": 90.0},
        "slo": {"ttft_p99_s": 2.0},
    }
    refused = make_plan(asked, catalog).solution
    assert "API servers" in refused["binding_constraint"]
    changes = [one["change"] for one in refused["least_change"]]
    for change, fixed in (("api_servers: 4", {"api_servers": 4}), ("stream_interval: 10", {"stream_interval": 10})):
        assert f"fixed.{change}" in changes
        assert make_plan({**asked, "fixed": fixed}, catalog).config
    each_token = make_plan({**asked, "slo": {"ttft_p99_s": 2.0, "itl_p99_s": 0.1}}, catalog).solution
    assert not any("stream_interval" in one["change"] for one in each_token["least_change"])
    without = make_plan({**asked, "constraints": {"max_devices": 1, "target": "llama.cpp"}}, catalog).solution
    assert not any("stream_interval" in one["change"] for one in without.get("least_change", []))
