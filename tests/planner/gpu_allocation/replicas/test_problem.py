"""Malformed GPU allocation instances: every problem at once, each with its path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem

DATA = Path(__file__).parents[3] / "data" / "gpu_allocation"


def toy() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "toy.json").read_text())
    return document


def refused(document: Any, base: Path = DATA) -> dict[str, str]:
    """Path → message of every problem found."""
    with pytest.raises(SpecError) as caught:
        GpuAllocationProblem.from_document(document, base)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_every_shipped_instance_is_read() -> None:
    for path in sorted(DATA.glob("*.json")):
        problem = GpuAllocationProblem.from_document(json.loads(path.read_text()), DATA)
        assert problem.name == path.stem


@pytest.mark.parametrize(
    ("key", "value", "path", "message"),
    [
        ("kind", "gpu_allocation", "kind", "expected 'gpu-allocation'"),
        ("name", 7, "name", "expected text, got 7"),
        ("gpu_types", [], "gpu_types", "at least one entry"),
        ("gpu_types", {"A10G": 1.0}, "gpu_types", "expected a list"),
        ("buckets", None, "buckets", "at least one entry, got nothing"),
        ("request_rate_per_s", [1.0, 2.0], "request_rate_per_s", "has 2 entries, but there are 4 buckets"),
        ("request_rate_per_s", "rates", "request_rate_per_s", "expected an array"),
        ("request_rate_per_s", [1, -2, 3, 4], "request_rate_per_s[1]", "expected a finite number >= 0, got -2"),
        ("request_rate_per_s", [1, 2, math.nan, 4], "request_rate_per_s[2]", "expected a finite number >= 0, got nan"),
        ("request_rate_per_s", [1, 2, 10**400, 4], "request_rate_per_s[2]", "expected a finite number >= 0"),
        ("request_rate_per_s", [1, True, 3, 4], "request_rate_per_s[1]", "expected a finite number >= 0, got True"),
        ("max_request_rate_per_s", [[1, 2, 3, 4]], "max_request_rate_per_s", "one array per GPU type"),
        ("max_utilization", 0.0, "max_utilization", "above 0 and up to 1"),
        ("max_utilization", 85, "max_utilization", "above 0 and up to 1 (such as 0.85), got 85"),
        ("max_utilization", "0.85", "max_utilization", "(such as 0.85), got '0.85'"),
        ("min_spare_replicas", 1.5, "min_spare_replicas", "whole number >= 0, got 1.5"),
        ("min_spare_replicas", -1, "min_spare_replicas", "whole number >= 0, got -1"),
        ("max_utilisation", 0.9, "max_utilisation", "unknown key; did you mean 'max_utilization'?"),
    ],
)
def test_a_wrong_value_is_refused_at_its_key(key: str, value: Any, path: str, message: str) -> None:
    assert message in refused(toy() | {key: value})[path]


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"usd_per_hour": -1.0}, "usd_per_hour", "expected a finite number >= 0, got -1.0"),
        ({"usd_per_hour": None}, "usd_per_hour", "is missing; expected a finite number >= 0"),
        ({"max_count": 2.5}, "max_count", "whole number >= 0, got 2.5"),
        ({"max_count": -3}, "max_count", "whole number >= 0, got -3"),
        ({"name": ""}, "name", "expected a name"),
        ({"terms": "spott"}, "terms", "got 'spott'; did you mean 'spot'?"),
        ({"region": 3}, "region", "expected text or null"),
        ({"interruption_headroom": 1.0}, "interruption_headroom", "from 0 to below 1, got 1.0"),
        ({"usd_per_hr": 1.0}, "usd_per_hr", "unknown key; did you mean 'usd_per_hour'?"),
    ],
)
def test_one_wrong_value_of_a_type(change: dict[str, Any], path: str, message: str) -> None:
    document = toy()
    document["gpu_types"][1] |= change
    assert message in refused(document)[f"gpu_types[1].{path}"]


@pytest.mark.parametrize("key", ["eur_per_hour", "currency"])
def test_other_money_is_refused_without_a_wrong_hint(key: str) -> None:
    document = toy()
    document["gpu_types"][0][key] = document["gpu_types"][0].pop("usd_per_hour")
    ((path, message),) = refused(document).items()
    assert path == f"gpu_types[0].{key}"
    assert "convert to usd_per_hour" in message


def test_names_must_be_unique_and_have_capacities() -> None:
    document = toy()
    document["gpu_types"][1]["name"] = "A10G"
    found = refused(document)
    assert "also the name of gpu_types[0]" in found["gpu_types[1].name"]
    assert "no GPU type of that name" in found["max_request_rate_per_s.A100-80GB"]
    document = toy()
    del document["max_request_rate_per_s"]["A10G"]
    assert "no array for the GPU type 'A10G'" in refused(document)["max_request_rate_per_s"]


def test_buckets_are_ranges_of_whole_tokens() -> None:
    document = toy()
    document["buckets"][0] = {"input_tokens": [250, 1], "output_tokens": [1]}
    document["buckets"][1] = [1, 250]
    found = refused(document)
    assert found["buckets[0].input_tokens"] == "the least, 250, is above the most, 1; swap them"
    assert "expected [least, most] tokens" in found["buckets[0].output_tokens"]
    assert "expected an object" in found["buckets[1]"]


def test_all_problems_at_once() -> None:
    document = toy() | {"max_utilization": 2, "min_spare_replicas": "one", "colour": "blue"}
    document["gpu_types"][0]["usd_per_hour"] = "cheap"
    assert set(refused(document)) == {"max_utilization", "min_spare_replicas", "colour", "gpu_types[0].usd_per_hour"}


def test_a_long_array_of_nonsense_does_not_flood_the_message() -> None:
    document = toy()
    document["buckets"] *= 100
    document["request_rate_per_s"] = [-1.0] * 400
    document["max_request_rate_per_s"] = {name: [1.0] * 400 for name in document["max_request_rate_per_s"]}
    found = refused(document)
    assert found["request_rate_per_s"] == "395 more entries are wrong in the same array"


@pytest.mark.parametrize("document", [[], "instance", None, 3])
def test_not_an_object(document: Any) -> None:
    assert "expected an object" in refused(document)[""]


def test_arrays_from_a_file_beside_the_instance(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", rate=np.array([6.0, 3.0, 15.0, 6.0]))
    document = toy() | {"request_rate_per_s": {"file": "arrays.npz", "key": "rate"}}
    assert GpuAllocationProblem.from_document(document, tmp_path) == GpuAllocationProblem.from_document(toy(), DATA)


def test_numbers_in_a_file_are_checked_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", rate=np.array([1.0, math.inf, -1.0, 2.0]), matrix=np.ones((2, 2)))
    found = refused(toy() | {"request_rate_per_s": {"file": "arrays.npz", "key": "rate"}}, tmp_path)
    assert set(found) == {"request_rate_per_s[1]", "request_rate_per_s[2]"}
    found = refused(toy() | {"request_rate_per_s": {"file": "arrays.npz", "key": "matrix"}}, tmp_path)
    assert found["request_rate_per_s"] == "is 2-dimensional; needs a list of numbers"
