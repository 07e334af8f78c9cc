"""A malformed rank-mapping document is refused with every problem named by its path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.catalogs.errors import SpecError
from meshplan.planner.rank_mapping.problem import RankMappingProblem


def document(**changes: Any) -> dict[str, Any]:
    matrix = np.full((4, 4), 25e9)
    base: dict[str, Any] = {
        "kind": "rank-mapping",
        "name": "four",
        "num_nodes": 4,
        "devices_per_node": 8,
        "pipeline_parallel": 2,
        "data_parallel_nodes": 2,
        "pipeline_message_bytes": 1e7,
        "data_parallel_message_bytes": 1e9,
        "num_microbatches_exposed": 8,
        "bandwidth_bytes_per_s": matrix.tolist(),
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def problems_of(base: Path, **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        RankMappingProblem.from_document(document(**changes), base)
    return {problem.path: problem.message for problem in caught.value.problems}


def with_link(value: object, *, sender: int = 1, receiver: int = 2) -> list[list[object]]:
    matrix: list[list[object]] = [[25e9] * 4 for _ in range(4)]
    matrix[sender][receiver] = value
    return matrix


def test_a_good_document_is_read_with_defaults(tmp_path: Path) -> None:
    problem = RankMappingProblem.from_document(document(devices_per_node=..., name=...), tmp_path)
    assert problem.devices_per_node == 1
    assert problem.name == ""
    assert problem.latency_s.shape == (4, 4)
    assert not problem.latency_s.any()


def test_directions_may_differ(tmp_path: Path) -> None:
    problem = RankMappingProblem.from_document(document(bandwidth_bytes_per_s=with_link(1e9)), tmp_path)
    assert problem.bandwidth_bytes_per_s[1, 2] == 1e9
    assert problem.bandwidth_bytes_per_s[2, 1] == 25e9


def test_the_diagonal_means_nothing(tmp_path: Path) -> None:
    matrix = with_link(0.0, sender=1, receiver=1)
    matrix[0][0] = None
    problem = RankMappingProblem.from_document(document(bandwidth_bytes_per_s=matrix), tmp_path)
    assert np.isfinite(problem.bandwidth_bytes_per_s).all()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, None])
def test_a_dead_link_is_named(tmp_path: Path, value: object) -> None:
    problems = problems_of(tmp_path, bandwidth_bytes_per_s=with_link(value))
    assert "from node 1 to node 2" in problems["bandwidth_bytes_per_s[1][2]"]


def test_many_dead_links_are_counted_and_lonely_nodes_named(tmp_path: Path) -> None:
    matrix = np.full((4, 4), 25e9)
    matrix[3, :] = 0.0
    with pytest.raises(SpecError) as caught:
        RankMappingProblem.from_document(document(bandwidth_bytes_per_s=matrix.tolist()), tmp_path)
    assert "disconnected: node 0 cannot be reached from 1 of 4 nodes (3)" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        RankMappingProblem.from_document(document(bandwidth_bytes_per_s=np.zeros((4, 4)).tolist()), tmp_path)
    assert "4 more links" in str(caught.value)


def test_two_halves_without_a_link_between_them_are_disconnected(tmp_path: Path) -> None:
    matrix = np.full((4, 4), 25e9)
    matrix[:2, 2:] = matrix[2:, :2] = 0.0
    with pytest.raises(SpecError) as caught:
        RankMappingProblem.from_document(document(bandwidth_bytes_per_s=matrix.tolist()), tmp_path)
    assert "node 0 cannot reach 2 of 4 nodes (2, 3)" in str(caught.value)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (np.ones((3, 4)).tolist(), "is 3 × 4, expected num_nodes × num_nodes = 4 × 4"),
        (np.ones(4).tolist(), "is 4, expected"),
        ([[1.0, 2.0], [3.0]], "not a rectangular array"),
        ([["25 GB/s"] * 4] * 4, "not a rectangular array of numbers"),
        (..., "is missing"),
    ],
)
def test_a_matrix_of_the_wrong_shape(tmp_path: Path, matrix: object, words: str) -> None:
    assert words in problems_of(tmp_path, bandwidth_bytes_per_s=matrix)["bandwidth_bytes_per_s"]


def test_a_matrix_of_the_wrong_shape_with_a_bad_number_of_nodes(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, num_nodes="four", bandwidth_bytes_per_s=np.ones((3, 4)).tolist())
    assert set(problems) == {"num_nodes", "bandwidth_bytes_per_s"}


@pytest.mark.parametrize("fastest", [25.0, 200.0, 25_000.0])
def test_a_bandwidth_in_another_unit_is_named_with_the_right_one(tmp_path: Path, fastest: float) -> None:
    """GB/s, Gb/s and MB/s."""
    problems = problems_of(tmp_path, bandwidth_bytes_per_s=np.full((4, 4), fastest).tolist())
    assert f"has {fastest:g} bytes/s as its fastest link" in problems["bandwidth_bytes_per_s"]
    assert "25 GB/s is 25e9" in problems["bandwidth_bytes_per_s"]


def test_a_latency_in_another_unit_is_named_with_the_right_one(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, latency_s=np.full((4, 4), 5.0).tolist())
    assert "5 µs is 5e-6" in problems["latency_s"]


def test_one_slow_link_among_fast_ones_is_no_wrong_unit(tmp_path: Path) -> None:
    problem = RankMappingProblem.from_document(document(bandwidth_bytes_per_s=with_link(1e3)), tmp_path)
    assert problem.bandwidth_bytes_per_s[1, 2] == 1e3


def test_degrees_must_fill_the_nodes(tmp_path: Path) -> None:
    assert "more than the 4 nodes" in problems_of(tmp_path, pipeline_parallel=3)["num_nodes"]
    assert "leave 2 of 4 nodes" in problems_of(tmp_path, pipeline_parallel=1)["num_nodes"]


def test_unknown_keys_get_a_suggestion(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, pipeline_paralel=2, pipeline_parallel=...)
    assert "did you mean 'pipeline_parallel'" in problems["pipeline_paralel"]
    assert problems["pipeline_parallel"] == "is missing; expected a whole number >= 1"


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    problems = problems_of(
        tmp_path,
        kind="rank-maping",
        name=3,
        data_parallel_nodes=True,
        pipeline_message_bytes=-1,
        data_parallel_message_bytes="1 GB",
        num_microbatches_exposed=math.nan,
        latency_s=with_link(-1e-6),
        bandwidth_bytes_per_s=with_link(0),
    )
    assert set(problems) == {
        "kind",
        "name",
        "data_parallel_nodes",
        "pipeline_message_bytes",
        "data_parallel_message_bytes",
        "num_microbatches_exposed",
        "latency_s[1][2]",
        "bandwidth_bytes_per_s[1][2]",
    }


def test_a_matrix_is_read_from_a_file_beside_the_instance(tmp_path: Path) -> None:
    np.savez(tmp_path / "links.npz", bandwidth=np.full((4, 4), 5e9))
    reference = {"file": "links.npz", "key": "bandwidth"}
    problem = RankMappingProblem.from_document(document(bandwidth_bytes_per_s=reference), tmp_path)
    assert problem.bandwidth_bytes_per_s[0, 1] == 5e9
