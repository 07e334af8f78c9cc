"""Lengths from files and histograms, good and bad."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from meshplan.catalogs.errors import SpecError
from meshplan.planner.lengths.reading import packed_documents, read_lengths
from meshplan.planner.lengths.spec import SequenceLengthsSpec


def _spec(**content: Any) -> SequenceLengthsSpec:
    return SequenceLengthsSpec.model_validate(content)


def test_every_format_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,length\nx,12\ny,3\n")
    (tmp_path / "b.csv").write_text("12\n3\n")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"length\n12\n3\n"))
    (tmp_path / "d.json").write_text("[12, 3]")
    (tmp_path / "e.json").write_text('{"lengths": [12, 3]}')
    np.savez(tmp_path / "f.npz", lengths=np.array([12, 3]))
    for path in tmp_path.iterdir():
        assert read_lengths(path).tolist() == [12, 3], path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "tokens\n1\n", "no column 'length'"),
        ("a.csv", "length\n1\nx\n-3\n", "line 3: must be a whole number of tokens"),
        ("a.csv", "length\n", "there are no lengths"),
        ("a.csv", "length\n1.5\n", "line 2"),
        ("a.csv", "length\n99999999999999999999999\n", "line 2"),
        ("a.json", '{"length": [1]}', "object with 'lengths'"),
        ("a.json", "[1, true, 0]", "entry 2"),
        ("a.json", "[1, ", "not JSON"),
        ("a.npz", "no archive", "npz"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecError, match=message):
        read_lengths(tmp_path / name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing\.csv"):
        packed_documents(_spec(file="missing.csv"), 4096, tmp_path)


def test_a_histogram_has_the_mean_of_its_bins(tmp_path: Path) -> None:
    bins = [{"length": "4k", "count": 1}, {"least": 1000, "most": 2000, "count": 3}]
    documents = packed_documents(_spec(histogram=bins), 8192, tmp_path)
    assert documents.table.mean == pytest.approx((4096 + 3 * 1500) / 4, rel=0.02)
    assert documents.table.longest == 4096


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"file": "a", "histogram": [{"length": 1, "count": 1}]},
        {"histogram": []},
        {"histogram": [{"length": 1, "least": 1, "most": 2, "count": 1}]},
        {"histogram": [{"least": 5, "most": 2, "count": 1}]},
        {"histogram": [{"length": 5, "count": 0}]},
        {"file": "a", "packing": "tight"},
        {"file": "a", "lengths": 3},
    ],
)
def test_bad_specs_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _spec(**content)


def test_dropping_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="drop leaves no document: the shortest has 9000 tokens"):
        packed_documents(_spec(histogram=[{"length": 9000, "count": 1}], longer="drop"), 8192, tmp_path)
