"""Questions that a planner gets wrong quietly: what must come out of each, and how the bad ones are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.service import estimate_plan, make_plan
from meshplan.planner.serving.problem.config import serving_config_from_document
from meshplan.planner.serving.problem.spec import read_serving_spec

SPEC: dict[str, Any] = {
    "kind": "serving",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 2000, "output_length": 300, "request_rate_per_s": 2, "num_requests": 200},
    "slo": {"ttft_p99_s": 3.0, "tpot_p95_s": 0.06},
}


def spec(**changes: Any) -> dict[str, Any]:
    return {**SPEC, **changes}


def workload(**changes: Any) -> dict[str, Any]:
    return {**SPEC["workload"], **changes}


def test_two_nodes_of_eight_are_planned(catalog: Catalog) -> None:
    """AIConfigurator refuses the system; more devices are never worse, and workers may reach over both nodes."""
    two = {"nodes": [{"type": "dgx-h100", "count": 2}]}
    free = workload(request_rate_per_s=None)
    plans = [
        make_plan(spec(workload=free, objective="max_request_rate", cluster=one), catalog)
        for one in (two, {**SPEC}["cluster"])
    ]
    assert serving_config_from_document(plans[0].config).num_devices <= 16
    assert plans[0].predicted["requests_per_s"].value >= 0.99 * plans[1].predicted["requests_per_s"].value
    wide = estimate_plan(
        spec(cluster=two, fixed={"mode": "aggregated", "tensor_parallel": 8, "pipeline_parallel": 2, "num_workers": 1}),
        catalog,
    )
    assert wide.config["num_devices"] == 16


def test_a_candidate_that_cannot_run_ends_no_search(catalog: Catalog) -> None:
    """Some layouts do not fit, some the engine rejects, some violate an SLO alone: each is counted."""
    made = make_plan(spec(quantization=["bf16", "fp8"]), catalog)
    assert made.config
    reasons = [row["reason"] for row in made.rejected]
    assert any("do not fit the device" in reason for reason in reasons)
    assert all(row["count"] >= 1 for row in made.rejected)


@pytest.mark.parametrize(("slo", "rate"), [({"itl_p99_s": 1e-5}, 2), ({"e2e_p50_s": 1e-3}, None)])
def test_an_slo_that_nothing_meets_ends_with_an_answer(
    catalog: Catalog, slo: dict[str, float], rate: float | None
) -> None:
    made = make_plan(spec(slo=slo, workload=workload(request_rate_per_s=rate)), catalog)
    assert made.solution["status"] == "infeasible"
    assert made.solution["binding_constraint"]
    assert not made.config


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"workload": workload(output_length=0)}, "output_length"),
        ({"workload": workload(input_length=0)}, "input_length"),
        ({"workload": workload(request_rate_per_s=-1)}, "request_rate_per_s"),
        ({"workload": workload(request_rate_per_s=math.nan)}, "request_rate_per_s"),
        ({"speculation": {"num_draft_tokens": 3, "acceptance": 0.7, "draft_cost": 1.5}}, "speculation.draft_cost"),
        ({"speculation": {"num_draft_tokens": 0, "acceptance": 0.7}}, "speculation.num_draft_tokens"),
        ({"slo": {"ttft_p99_s": 0}}, "slo.ttft_p99_s"),
    ],
)
def test_what_has_no_meaning_is_named(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        read_serving_spec(spec(**changes))
    assert path in str(refused.value)


def test_a_draft_as_large_as_the_model_never_helps(catalog: Catalog) -> None:
    """Even if everything it proposes were accepted: four drafted tokens cost four iterations more."""
    pinned = {"mode": "aggregated", "tensor_parallel": 4, "num_workers": 1}
    alone, drafted = (
        estimate_plan(spec(fixed=pinned, speculation=draft, workload=workload(request_rate_per_s=0.2)), catalog)
        for draft in (None, {"num_draft_tokens": 4, "acceptance": 1.0, "draft_cost": 1.0})
    )
    assert drafted.predicted["tpot_mean_s"].value >= 0.99 * alone.predicted["tpot_mean_s"].value
