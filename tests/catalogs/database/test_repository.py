"""Domain objects out of the catalog."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.state import catalog_state, steady
from meshplan.catalogs.database.transfer import import_document
from meshplan.catalogs.errors import CatalogError, UnknownEntryError
from meshplan.catalogs.facts import Fact
from meshplan.catalogs.hardware import Evidence, EvidenceLevel


@pytest.mark.parametrize(
    ("ask", "kind", "hint"),
    [
        (lambda catalog: catalog.device("h100-sxm-80"), "device", "h100-sxm-80gb"),
        (lambda catalog: catalog.link("nvlink44"), "link", "nvlink4"),
        (lambda catalog: catalog.node_type("dgx-h10"), "node type", "dgx-h100"),
    ],
)
def test_unknown_names_come_with_the_closest(
    catalog: Catalog, ask: Callable[[Catalog], object], kind: str, hint: str
) -> None:
    with pytest.raises(UnknownEntryError, match=f"unknown {kind} .*did you mean") as caught:
        ask(catalog)
    assert hint in caught.value.suggestions


def test_one_by_one_and_all_at_once_agree(catalog: Catalog) -> None:
    assert catalog.devices() == tuple(catalog.device(device.slug) for device in catalog.devices())
    assert catalog.links() == tuple(catalog.link(link.slug) for link in catalog.links())
    assert catalog.node_types() == tuple(catalog.node_type(node.slug) for node in catalog.node_types())


def test_a_node_type_comes_whole(catalog: Catalog) -> None:
    node = catalog.node_type("gcp-a3-ultragpu-8g")
    assert node.device == catalog.device("h200-sxm-141gb")
    assert node.scale_out_link == catalog.link("roce-400g")
    assert [price.terms for price in node.prices] == ["spot", "on-demand"]
    assert node.prices == catalog.prices("gcp-a3-ultragpu-8g")
    assert catalog.prices("nothing-of-that-name") == ()


def test_models_are_stored_as_their_configuration(catalog: Catalog) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 8.0}, "architectures": ["X"]}
    model = {"name": "Tiny", "family": "llama", "config": config, "source": "a test", "date": "2026-11-21"}
    import_document(catalog.engine, {"format": FORMAT, "models": {"tiny-1b": model}})
    assert catalog.model("tiny-1b") == config
    assert {
        "slug": "tiny-1b",
        "name": "Tiny",
        "family": "llama",
        "source": "a test",
        "date": "2026-11-21",
    } in catalog.models()
    with pytest.raises(UnknownEntryError, match="tiny-1b"):
        catalog.model("tiny-2b")


def constants(framework: str, gemm_efficiency: float) -> dict[str, Any]:
    return {"framework": framework, "architecture": "hopper", "time": {"gemm_efficiency": gemm_efficiency}}


def test_calibrations_are_put_and_replaced(catalog: Catalog) -> None:
    assert catalog.calibration("a-framework", "hopper") is None
    for day, efficiency in ((20, 0.7), (21, 0.8)):
        document = constants("a-framework", efficiency)
        catalog.put_calibration("a-framework", "hopper", document, source=f"fit of 2026-11-{day}")
    assert catalog.calibration("a-framework", "hopper") == constants("a-framework", 0.8)


def test_the_users_calibration_replaces_the_shipped_one(catalog: Catalog) -> None:
    assert catalog.calibration("megatron", "hopper") is not None
    catalog.put_calibration("megatron", "hopper", constants("megatron", 0.8), source="fit of 2026-11-21")
    assert catalog.calibration("megatron", "hopper") == constants("megatron", 0.8)


def measured(value: float) -> Fact:
    evidence = Evidence(level=EvidenceLevel.MEASURED, source="profiler", date="2026-11-21", num_samples=5)
    return Fact(field="latency_s", value=value, evidence=evidence)


def test_measured_facts_are_added_and_forgotten(catalog: Catalog) -> None:
    published = catalog.link("infiniband-ndr")
    catalog.add_facts("link", "infiniband-ndr", [measured(7.5e-6)])
    assert catalog.link("infiniband-ndr").latency_s == 7.5e-6
    assert len(catalog.facts("link", "infiniband-ndr")) == 3
    assert catalog.forget("infiniband-ndr") == 1
    assert catalog.link("infiniband-ndr") == published


def test_a_steady_catalog_holds_until_the_state_changes(catalog: Catalog) -> None:
    before = steady(catalog, catalog_state(catalog.engine))
    shipped = before.calibration("megatron", "hopper")
    catalog.put_calibration("megatron", "hopper", constants("megatron", 0.8), source="fit of 2026-11-21")
    assert before.calibration("megatron", "hopper") == shipped
    after = steady(catalog, catalog_state(catalog.engine))
    assert after.calibration("megatron", "hopper") == constants("megatron", 0.8)
    assert after.node_type("dgx-h100") == catalog.node_type("dgx-h100")


def test_a_measurement_of_nothing_is_refused(catalog: Catalog) -> None:
    with pytest.raises(UnknownEntryError, match="infiniband-ndr"):
        catalog.add_facts("link", "infiniband-ndx", [measured(1e-5)])


def test_an_impossible_measurement_is_refused(catalog: Catalog) -> None:
    with pytest.raises(CatalogError, match="wrong prefix"):
        catalog.add_facts("link", "infiniband-ndr", [measured(10.0)])
    assert len(catalog.facts("link", "infiniband-ndr")) == 2
