"""What an import may not do, and how it is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from meshplan.catalogs.database.document import FORMAT
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.database.seeds import seed_document
from meshplan.catalogs.database.transfer import import_document
from meshplan.catalogs.errors import CatalogError


@pytest.fixture
def catalog(database: Path) -> Catalog:
    return Catalog.open(str(database))


def calibration(**document: Any) -> dict[str, Any]:
    row = {"framework": "megatron", "architecture": "hopper", "source": "mine", "date": "2026-01-01"}
    return {"format": FORMAT, "calibrations": [{**row, "document": document}]}


NAMES = {"framework": "megatron", "architecture": "hopper"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "framework must be 'megatron'"),
        ({**NAMES, "time": {"gemm_efficiency": 0.0}}, "gemm_efficiency must be a number within"),
        ({**NAMES, "time": {"gemm_efficiency": "1"}}, "gemm_efficiency must be a number"),
        ({**NAMES, "time": []}, "time must be a mapping"),
        ({**NAMES, "time": {"gem_efficiency": 1}}, "did you mean 'gemm_efficiency'"),
        ({**NAMES, "tim": {}}, "unknown constant tim"),
        ({**NAMES, "error_p90": {"dense": 1e9}}, "error_p90.dense must be within"),
        ({**NAMES, "related_error_p90": 1.0}, "related_error_p90 must map kinds of work"),
        ({**NAMES, "by_kernels": [1]}, "by_kernels must map kinds of kernels"),
        ({**NAMES, "by_kernels": {"16-bit": {}}}, "by_kernels must hold 'other'"),
        ({**NAMES, "by_kernels": {"other": {"width": 1}}}, "by_kernels.other must map error_p90"),
        ({**NAMES, "by_kernels": {"other": {"error_p90": {"dense": 9.0}}}}, "by_kernels.other.error_p90.dense must be"),
        ({**NAMES, "by_kernels": {"other": {"error_basis": {"dense": 1}}}}, "by_kernels.other.error_basis must map"),
        ({**NAMES, "num_runs": -1}, "num_runs"),
        ({"engine": "megatron", "architecture": "hopper", "error_p90": {"ttft": 1}}, "error_p90 must hold"),
        ({"engine": "megatron", "architecture": "hopper", "constants": {"host_step_s": -1}}, "host_step_s must be"),
    ],
)
def test_poisoned_constants_are_refused(document: dict[str, Any], words: str, catalog: Catalog) -> None:
    before = catalog.calibration("megatron", "hopper")
    with pytest.raises(CatalogError, match=words):
        import_document(catalog.engine, calibration(**document))
    assert catalog.calibration("megatron", "hopper") == before


def test_every_set_that_ships_may_be_imported(catalog: Catalog) -> None:
    import_document(catalog.engine, {"format": FORMAT, "calibrations": seed_document()["calibrations"]})


def fact(**changes: Any) -> dict[str, Any]:
    row = {"field": "tdp_w", "value": 650.0, "level": "measured here", "source": "mine", "date": "2026-01-01"}
    return {"format": FORMAT, "devices": {"h100-sxm-80gb": {"facts": [{**row, **changes}]}}}


def test_facts_from_the_future_are_refused(catalog: Catalog) -> None:
    with pytest.raises(CatalogError, match="date 9999-12-31 is in the future"):
        import_document(catalog.engine, fact(date="9999-12-31"))
    import_document(catalog.engine, fact())
    assert catalog.device("h100-sxm-80gb").tdp_w == 650.0


@pytest.mark.parametrize("text", ["\x1b[2Jevil", "a\x07", "x" * 20_000])
def test_names_that_steer_a_terminal_are_refused(text: str, catalog: Catalog) -> None:
    entry = {"name": text, "vendor": "v", "architecture": "hopper"}
    with pytest.raises(CatalogError, match="name: holds"):
        import_document(catalog.engine, {"format": FORMAT, "devices": {"h100-sxm-80gb": entry}})


def test_an_override_of_a_seed_row_is_taken_back(meshplan: Command, catalog: Catalog) -> None:
    shipped = catalog.device("h100-sxm-80gb")
    nothing = meshplan("catalog", "remove", "h100-sxm-80gb")
    assert nothing.code == 4
    assert "nothing about" in nothing.err
    seeds = [one for one in seed_document()["devices"]["h100-sxm-80gb"]["facts"] if one["field"] == "tdp_w"]
    entry = {"name": "mine", "vendor": "nvidia", "architecture": "hopper", "facts": [{**seeds[0], "value": 333.0}]}
    import_document(catalog.engine, {"format": FORMAT, "devices": {"h100-sxm-80gb": entry}})
    assert catalog.device("h100-sxm-80gb").name == "mine"
    history = meshplan("catalog", "history", "--format", "json").json
    assert {(row["subject"], row["what"]) for row in history} == {
        ("h100-sxm-80gb", "tdp_w"),
        ("h100-sxm-80gb", "devices"),
    }
    assert meshplan("catalog", "history").code == 0
    assert "did you mean" in meshplan("catalog", "remove", "h100-sxm").err
    assert meshplan("catalog", "remove", "h100-sxm-80gb", "--format", "json").json["removed"] == 2
    assert catalog.device("h100-sxm-80gb") == shipped
    assert meshplan("catalog", "history", "--format", "json").json == []


def test_constants_are_taken_back(meshplan: Command, catalog: Catalog) -> None:
    shipped = catalog.calibration("megatron", "hopper")
    import_document(catalog.engine, calibration(**NAMES, num_runs=1))
    assert catalog.calibration("megatron", "hopper") != shipped
    assert meshplan("catalog", "remove", "megatron/hopper").code == 0
    assert catalog.calibration("megatron", "hopper") == shipped
