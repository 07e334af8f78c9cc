"""What a question states and its plan does not use is said in the plan."""

from __future__ import annotations

from typing import Any

import pytest
from serving_questions import spec

from meshplan.catalogs.database.repository import Catalog
from meshplan.cli.reports.serving.certainty import calibration_text
from meshplan.planner.core.plan import Plan
from meshplan.planner.service import make_plan


def asked(catalog: Catalog, **changes: Any) -> Plan:
    """A free search, which answers with workers that do both."""
    small = {
        "model": "llama-3.1-8b",
        "workload": {"input_length": 500, "output_length": 50, "concurrency": 1},
        "slo": {},
    }
    plan = make_plan(spec(**small, objective="num_devices", **changes), catalog)
    assert [pool["role"] for pool in plan.config["pools"]] == ["mixed"]
    return plan


def test_a_connector_between_workers_that_are_not_there(catalog: Catalog) -> None:
    plan = asked(catalog, kv_connector="mooncake")
    (said,) = plan.provenance["without_use"]
    assert said.startswith("kv_connector mooncake: every worker of this plan prefills and decodes")
    assert "Without use: kv_connector mooncake" in calibration_text(plan, 80)
    assert Plan.from_document(plan.to_document()).provenance["without_use"] == [said]


def test_instances_that_hold_no_model_are_named_with_their_memory(catalog: Catalog) -> None:
    plan = asked(catalog, mig=["1g.10gb"])
    (said,) = plan.provenance["without_use"]
    assert said.startswith("mig 1g.10gb: an instance has ")
    assert "GiB" in said


@pytest.mark.parametrize("changes", [{}, {"kv_connector": "nixl"}])
def test_what_is_left_at_its_default_is_not_said(catalog: Catalog, changes: dict[str, Any]) -> None:
    assert "without_use" not in asked(catalog, **changes).provenance
