"""Attention and FFN on different devices: what no worker exceeds, what links change, memory, plans and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError, SpecError
from meshplan.planner.core.certificate import AGREES
from meshplan.planner.core.kinds import Question
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.launch.serving import files
from meshplan.planner.service import make_plan
from meshplan.planner.serving.attention_ffn.placement import sizes
from meshplan.planner.serving.attention_ffn.worker import SeparatedWorker
from meshplan.planner.serving.estimator.bounds.overlap_bound import overlap_bound
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.problem.config import Layout, Role, serving_config_from_document
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.serving.resolve import resolve_serving
from meshplan.planner.serving.search.workers import PricedWorker, pool_of, priced_workers
from meshplan.planner.serving.service import certify
from meshplan.planner.store import plan_from_document

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "qwen3-30b-a3b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 2}], "usd_per_hour_per_node": 24.0},
    "workload": {"input_length": 1000, "output_length": 500, "request_rate_per_s": 20.0, "num_requests": 256},
    "slo": {"tpot_p95_s": 0.05},
    "constraints": {"rent": "device"},
    "attention_ffn": "disaggregated",
}
FOUR = {"tensor_parallel": 1, "attention_data_parallel": 4, "expert_parallel": 4}


def question(catalog: Catalog, **changes: Any) -> ServingProblem:
    return resolve_serving(read_serving_spec({**SPEC, **changes}), catalog, Path()).problem


def workers(problem: ServingProblem) -> list[PricedWorker]:
    return priced_workers(problem, Role.DECODE, Counter())


def separated(kind: PricedWorker) -> SeparatedWorker:
    assert isinstance(kind.worker, SeparatedWorker)
    return kind.worker


@pytest.fixture(scope="module")
def of_four(catalog: Catalog) -> list[PricedWorker]:
    """Four attention and four FFN devices, one to four micro-batches."""
    found = workers(question(catalog, fixed={"decode": FOUR}))
    assert [kind.placed.ffn and kind.placed.ffn.micro_batches for kind in found] == [1, 2, 3, 4]
    return found


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama-3.1-8b"])
def test_no_worker_exceeds_its_two_resources(catalog: Catalog, model: str) -> None:
    """At the peaks of data sheets, whatever the sizes of the sides and the micro-batches."""
    pins = {"tensor_parallel": 1, "expert_parallel": 4} if model.startswith("qwen") else {"tensor_parallel": 2}
    problem = question(catalog, model=model, constraints={"max_devices": 8}, fixed={"decode": pins})
    found = workers(problem)
    assert len({kind.placed.num_devices for kind in found}) > 1
    for kind in found:
        counts = kind.steady.num_seqs.astype(float)
        bound = overlap_bound(kind.worker, most_running=counts[-1], num_running=1.0, requests_per_s=1.0)
        assert kind.best_rate_per_s <= bound.requests_per_s


def test_equal_devices_on_both_sides_stay_below_the_bound_of_devices_that_share_all(catalog: Catalog) -> None:
    """Eight devices whose weights are each read once between them (tensor parallelism) can only do better."""
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "constraints": {"max_devices": 8}}
    pairs = question(catalog, **asked, fixed={"decode": {"tensor_parallel": 2}})
    apart = [kind for kind in workers(pairs) if kind.placed.num_devices == 8]
    pins = {"decode": {"tensor_parallel": 8, "pipeline_parallel": 1}}
    together = workers(question(catalog, **asked, attention_ffn=None, fixed=pins))
    best = max(
        overlap_bound(
            kind.worker, most_running=float(kind.steady.num_seqs[-1]), num_running=1.0, requests_per_s=1.0
        ).requests_per_s
        for kind in together
    )
    assert apart
    assert max(kind.best_rate_per_s for kind in apart) <= best


def test_slower_links_are_never_faster_and_fast_ones_leave_the_two_sides(of_four: list[PricedWorker]) -> None:
    running = np.array([8.0, 64.0, 512.0])
    for kind in of_four:
        worker = separated(kind)
        links = [
            replace(worker.link, bytes_per_s=rate, latency_s=latency)
            for rate, latency in ((1e9, 5e-6), (5e10, 5e-6), (5e10, 0.0), (1e18, 0.0))
        ]
        held = np.full_like(running, 1250.0)
        times = np.array([replace(worker, link=link).traversals_s(running, held)[0] for link in links])
        assert (np.diff(times, axis=0) <= 0.0).all()
        # Launching the exchange is left, and the way inside a node: less than a tenth of the two stages here.
        ((count, micro, (stages,)),) = worker.stages(running, [held])
        ideal = count * np.maximum(micro * np.maximum(stages.attention, stages.ffn), stages.attention + stages.ffn)
        assert (times[-1] >= ideal * (1.0 - 1e-9)).all()
        assert (times[-1] <= 1.2 * ideal + 2e-3).all()


def test_tables_are_the_pipeline_at_the_ends_of_a_request_and_never_below_it_between(
    of_four: list[PricedWorker],
) -> None:
    counts = np.array([1.0, 8.0, 64.0, 256.0])
    for kind in of_four:
        worker, cost = separated(kind), kind.cost
        for context in np.linspace(worker.contexts.least, worker.contexts.most, 5):
            table = np.array(
                [cost.decode_fixed_s[int(n)] + cost.decode_context_s[int(n)] * n * context for n in counts]
            )
            exact = worker.traversals_s(counts, np.full_like(counts, context))[0]
            assert (table >= exact * (1.0 - 1e-3)).all()  # fitted kernels are linear to a part in a thousand
            if context in (worker.contexts.least, worker.contexts.most):
                assert table == pytest.approx(exact, rel=0.01)  # knots between, and never falling


def test_decodes_without_graphs_are_launched_beside_the_two_sides(of_four: list[PricedWorker]) -> None:
    for kind in of_four:
        worker, graphed = separated(kind), kind.cost
        limits = replace(worker.limits, cuda_graphs=False)
        eager = replace(worker, limits=limits).step_cost()
        for running in (1, 64):
            for context in worker.contexts.ends:
                replayed, launched = (cost.step_s(running, running * context, 0, 0, 0.0) for cost in (graphed, eager))
                joined = (replayed**4 + graphed.prefill_least_s**4) ** 0.25
                assert launched == pytest.approx(joined, rel=1e-6)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama-3.1-8b"])
def test_the_two_sides_hold_the_model_once(catalog: Catalog, model: str) -> None:
    pins = FOUR if model.startswith("qwen") else {"tensor_parallel": 1, "attention_data_parallel": 1}
    problem = question(catalog, model=model, fixed={"decode": pins})
    assert problem.separation is not None
    for kind in workers(problem)[:4]:
        assert kind.placed.ffn is not None
        pool_side = kind.placed.memory.weights_bytes
        pool = kind.placed
        ffn = problem.separation.ffn_memory(problem, pool_of(problem, kind.placed, 1))
        whole = weights_bytes(problem.shape, pool.quantization, Layout())
        assert pool_side + pool.ffn.num_devices * ffn.weights_bytes == pytest.approx(whole)
        assert ffn.kv_capacity_tokens == 0


def test_sides_grow_by_powers_of_two_and_whole_domains(catalog: Catalog) -> None:
    machine = question(catalog, cluster={"nodes": [{"type": "dgx-h100", "count": 8}]}).machines["dgx-h100"]
    assert sizes(machine) == [1, 2, 4, 8, 16, 24, 32, 48, 64]


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> Plan:
    """Attention on older devices, experts on newer ones."""
    nodes = [{"type": "dgx-a100-80gb", "count": 1}, {"type": "dgx-h100", "count": 1}]
    pins = {"prefill": {"tensor_parallel": 2, "pipeline_parallel": 1}, "decode": FOUR}
    changes = {"cluster": {"nodes": nodes}, "objective": "usd_per_million_tokens", "fixed": pins}
    return make_plan({**SPEC, **changes}, catalog)


def test_a_plan_says_where_both_sides_lie_and_is_read_back(plan: Plan) -> None:
    decode = plan.config["pools"][1]
    assert decode["ffn"]["num_devices"] == 4
    assert decode["num_devices"] == 8 * decode["num_workers"]
    assert plan.rank_table is not None
    assert len(plan.rank_table) == plan.config["num_devices"]
    assert len(set(plan.rank_table)) == len(plan.rank_table)
    assert [row["pool"] for row in plan.memory["pools"]] == ["prefill", "decode", "decode FFN"]
    assert any("no run was compared" in doubt for doubt in plan.provenance["not_validated"])
    assert "usd_per_million_tokens" in plan.predicted
    assert "power_w" not in plan.predicted
    assert serving_config_from_document(plan.config).pools[1].ffn is not None
    assert plan_from_document(plan.to_document(), name="a plan") == plan
    overlap = {row["pool"]: row["share"] for row in (plan.answer or {})["overlap"]}
    assert 0.0 < overlap["decode"] <= 1.0


def test_a_second_simulation_agrees(plan: Plan, catalog: Catalog) -> None:
    assert certify(Question(document=plan.spec, catalog=catalog), plan).outcome == AGREES


def test_no_launcher_files_are_written(plan: Plan, catalog: Catalog) -> None:
    with pytest.raises(EmitError, match="plan without attention_ffn"):
        files(plan, "vllm", catalog, EmitOptions())


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"objective": "energy"}, "objective"),
        ({"fixed": {"mode": "aggregated"}}, "fixed.mode"),
        ({"mig": "choose"}, "mig"),
        ({"model": "deepseek-v4-pro"}, "model"),
        ({"model": "whisper-large-v3", "workload": {"audio": {"seconds": 20}, "output_length": 100}}, "workload.audio"),
    ],
)
def test_what_was_not_priced_is_refused_by_name(catalog: Catalog, changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=rf"{path}.*not with attention_ffn"):
        question(catalog, **changes)
