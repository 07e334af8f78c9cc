"""Numbers and arrays of stand-alone instances: what is read, what is refused with which path, and which files."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.planner.core.reading.instance_reader import InstanceReader
from meshplan.planner.expert_placement.problem.problem import ExpertPlacementProblem
from meshplan.planner.gpu_allocation.replicas.problem import GpuAllocationProblem
from meshplan.planner.rank_mapping.problem import RankMappingProblem

NUMBERS = [[1.0, 2.0], [3.0, 4.0]]


def complaints(read: Callable[[InstanceReader], object], base: Path = Path()) -> dict[str, str]:
    reader = InstanceReader(base)
    assert not read(reader)
    return {problem.path: problem.message for problem in reader}


@pytest.mark.parametrize("value", [0, 1.0, True, "2", [], math.nan])
def test_an_integer_is_whole_and_no_truth_value(value: Any) -> None:
    assert complaints(lambda reader: reader.integer(value, "n", least=1)) == {
        "n": f"expected a whole number >= 1, got {value!r}"
    }
    assert InstanceReader(Path()).integer(1, "n", least=1) == 1


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 10**400, True, "1", [1]])
def test_a_number_is_finite_and_within_its_rule(value: Any) -> None:
    assert complaints(lambda reader: reader.number(value, "x"))["x"].startswith("expected a finite number >= 0, got ")


def test_what_is_absent_is_missing() -> None:
    assert complaints(lambda reader: reader.number(None, "x", "a share")) == {"x": "is missing; expected a share"}
    assert "is missing; expected an array" in complaints(lambda reader: reader.array(None, "x"))["x"]


def test_a_wrong_name_or_key_gets_the_closest_known_one() -> None:
    reader = InstanceReader(Path())
    assert reader.one_of("spott", "terms", ["on-demand", "spot"]) == "on-demand"
    assert reader.one_of("x", "kind", ["y"]) == "y"
    reader.keys({"lod": 1, "name": 2, "zzzzzz": 3}, ["load", "name"], "gpu_types[0]")
    assert {problem.path: problem.message for problem in reader} == {
        "terms": "expected one of on-demand, spot, got 'spott'; did you mean 'spot'?",
        "kind": "expected 'y', got 'x'",
        "gpu_types[0].lod": "unknown key; did you mean 'load'?",
        "gpu_types[0].zzzzzz": "unknown key; known keys: load, name",
    }


def test_a_long_value_is_cut_short() -> None:
    assert len(complaints(lambda reader: reader.number("x" * 1000, "x"))["x"]) < 120


@pytest.mark.parametrize("value", [[[1, 2], [3]], [["1"]], [[1, "2"]], [[None]], [10**400], [{}], [[True, False]]])
def test_an_array_is_rectangular_and_of_numbers(value: Any) -> None:
    assert "not a rectangular array of numbers" in complaints(lambda reader: reader.array(value, "a") is not None)["a"]


def test_an_array_may_have_holes_where_its_reader_says_so() -> None:
    found = InstanceReader(Path()).array([[1, None]], "a", holes=True)
    assert found is not None
    assert found.tolist()[0][0] == 1.0
    assert np.isnan(found[0, 1])
    for value in ([[1, "2 GB/s"]], [[1, 10**400]], [[1, None], [2]]):
        assert complaints(lambda reader, value=value: reader.array(value, "a", holes=True) is not None)


def test_an_array_of_another_shape_is_refused_but_an_empty_one_fits_every_empty_shape() -> None:
    assert complaints(lambda reader: reader.shaped(NUMBERS, "a", (2, 3))) == {"a": "has shape [2, 2], expected [2, 3]"}
    found = InstanceReader(Path()).shaped([], "a", (0, 3, 3))
    assert found is not None
    assert found.shape == (0, 3, 3)


# --- files ------------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path(self.path).touch, ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An instance's folder, with all sorts of files in it and around it."""
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    for place in (tmp_path, inner, inner / "sub"):
        np.savez(place / "data.npz", load=np.array(NUMBERS), words=np.array(["a"]))
    (inner / "link.npz").symlink_to(tmp_path / "data.npz")
    (inner / "text.npz").write_text("not an archive")
    np.save(inner / "one.npy", np.array(NUMBERS))
    np.savez(inner / "objects.npz", load=np.array([Bomb(str(tmp_path / "executed"))], dtype=object))
    (inner / "raw.npz").write_bytes(pickle.dumps(Bomb(str(tmp_path / "executed"))))
    with zipfile.ZipFile(inner / "bytes.npz", "w") as archive:
        archive.writestr("load", b"1 2 3")
    np.savez_compressed(inner / "broken.npz", load=np.zeros(1000))
    whole = (inner / "broken.npz").read_bytes()
    (inner / "broken.npz").write_bytes(whole[:60] + b"\xff" * 20 + whole[80:])
    return inner


def test_arrays_are_read_from_the_instances_folder(folder: Path) -> None:
    found = InstanceReader(folder).array({"file": "data.npz", "key": "load"}, "load")
    assert found is not None
    assert found.tolist() == NUMBERS


@pytest.mark.parametrize(
    ("reference", "path", "says"),
    [
        ({"file": "../data.npz", "key": "load"}, "load.file", "does not lie beside the instance"),
        ({"file": "sub/data.npz", "key": "load"}, "load.file", "does not lie beside the instance"),
        ({"file": "/etc/hostname", "key": "load"}, "load.file", "does not lie beside the instance"),
        ({"file": "..", "key": "load"}, "load.file", "does not lie beside the instance"),
        ({"file": "link.npz", "key": "load"}, "load.file", "does not lie beside the instance"),
        ({"file": ".", "key": "load"}, "load.file", "does not lie beside the instance"),
        ({"file": "none.npz", "key": "load"}, "load.file", "there is no 'none.npz' beside the instance"),
        ({"file": "text.npz", "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "one.npy", "key": "load"}, "load.file", "not an .npz of plain numbers; save it with numpy.savez"),
        ({"file": "objects.npz", "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "raw.npz", "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "broken.npz", "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "a\0b.npz", "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "x" * 5000, "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "bytes.npz", "key": "load"}, "load.file", "not an .npz of plain numbers"),
        ({"file": "data.npz", "key": "words"}, "load", "not a number"),
        ({"file": "data.npz", "key": "laod"}, "load.key", "has no array 'laod'; did you mean 'load'?"),
        ({"file": "data.npz"}, "load", 'an array in a file is written {"file": "NAME.npz", "key": "NAME"}'),
        ({"file": "data.npz", "key": "load", "mode": "r"}, "load", "an array in a file is written"),
        ({"file": 3, "key": "load"}, "load", "an array in a file is written"),
    ],
)
def test_files_that_are_refused(folder: Path, reference: dict[str, Any], path: str, says: str) -> None:
    found = complaints(lambda reader: reader.array(reference, "load") is not None, folder)
    assert set(found) == {path}
    assert says in found[path]
    assert not (folder.parent / "executed").exists()


@pytest.mark.parametrize(
    ("read", "key"),
    [
        (ExpertPlacementProblem.from_document, "load"),
        (GpuAllocationProblem.from_document, "request_rate_per_s"),
        (RankMappingProblem.from_document, "bandwidth_bytes_per_s"),
    ],
)
def test_every_stand_alone_problem_guards_its_files(folder: Path, read: Callable[..., object], key: str) -> None:
    document = {"num_layers": 1, "num_experts": 2, "num_devices": 1, key: {"file": "../data.npz", "key": "load"}}
    with pytest.raises(Exception, match=rf"{key}.file: '../data.npz' does not lie beside the instance"):
        read(document, folder)
