"""Sweep files and their points: which questions are asked, in which order, and which are the same."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
from command_line import CAPACITIES
from hostile import HOSTILE_VALUES
from sweep_cases import BASE, SWEEP, write_sweep

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.reading.spec_reader import read_spec
from meshplan.planner.sweep.points import MAX_POINTS, Question, questions_of
from meshplan.planner.sweep.spec import SweepSpec, read_sweep


def asked(base: Path = Path(), spec: dict[str, Any] = BASE, state: str = "c", **sweep: Any) -> tuple[Question, ...]:
    read = read_spec(SweepSpec, {"kind": "sweep", "base": spec, **sweep})
    return questions_of(read, spec, base, catalog_state=state)


def test_a_grid_is_every_combination_the_last_field_fastest() -> None:
    found = asked(over={"cluster.nodes.0.count": [1, 2], "workload.sequence_length": [2048, "4k", 8192]})
    values = [tuple(one.values.values()) for one in found]
    assert values == [(1, 2048), (1, "4k"), (1, 8192), (2, 2048), (2, "4k"), (2, 8192)]
    assert found[4].document["cluster"]["nodes"][0]["count"] == 2
    assert found[4].document["workload"] == {"sequence_length": 4096, "global_batch_size": 64}


def test_a_list_is_asked_one_by_one_and_each_with_the_grid() -> None:
    points = [{"model": "llama-3.1-70b", "fixed": {"tensor_parallel": 8}}, {"model": "llama-3.1-8b"}]
    found = asked(points=points)
    assert [one.document["fixed"] for one in found] == [{"tensor_parallel": 8}, BASE["fixed"]]
    both = asked(points=points, over={"workload.global_batch_size": [64, 128]})
    sizes = [(one.document["model"], one.document["workload"]["global_batch_size"]) for one in both]
    assert sizes == [("llama-3.1-70b", 64), ("llama-3.1-70b", 128), ("llama-3.1-8b", 64), ("llama-3.1-8b", 128)]
    assert BASE["workload"]["global_batch_size"] == 64


def test_a_point_that_leaves_a_field_as_the_base_has_it_says_what_that_is() -> None:
    """Else its row has a gap there, and a best point is sought twice for the same value."""
    points = [{"model": "llama-3.1-70b", "cluster.nodes.0.count": 2}, {"model": BASE["model"]}, {"objective": "energy"}]
    found = asked(points=points)
    fields = ("model", "cluster.nodes.0.count")
    base = (BASE["model"], BASE["cluster"]["nodes"][0]["count"])
    assert [tuple(one.values[field] for field in fields) for one in found] == [("llama-3.1-70b", 2), base, base]
    assert "objective" not in found[0].values


def test_capacities_given_by_hand_may_vary() -> None:
    found = asked(spec=CAPACITIES, over={"gpu_types.0.usd_per_hour": [0.7, 0.8]})
    assert [one.document["gpu_types"][0]["usd_per_hour"] for one in found] == [0.7, 0.8]


@pytest.mark.parametrize("parts_first", [True, False])
def test_a_part_of_a_section_that_varies_is_asked_as_its_row_says(*, parts_first: bool) -> None:
    """A section that is put after its part would take the part's value away, and the row would name one not asked."""
    over = {"workload.sequence_length": [2048, 4096], "workload": [{"global_batch_size": 64}]}
    found = asked(over=over if parts_first else dict(reversed(over.items())))
    assert [one.values["workload.sequence_length"] for one in found] == [2048, 4096]
    assert [one.document["workload"] for one in found] == [
        {"sequence_length": length, "global_batch_size": 64} for length in (2048, 4096)
    ]
    whole = {"sequence_length": 1024, "global_batch_size": 64}
    with pytest.raises(SpecError, match=r"workload\.sequence_length: workload states it, too"):
        asked(over={**over, "workload": [whole]})
    with pytest.raises(SpecError, match=r"states it, too"):
        asked(over={"cluster.nodes.0.count": [1], "cluster.nodes[0].count": [2]})
    apart = asked(points=[{"workload": whole}, {"workload.sequence_length": 2048}])
    assert [one.values["workload.sequence_length"] for one in apart] == [1024, 2048]


def test_the_same_question_has_the_same_digest_and_any_other_another() -> None:
    over = {"workload.sequence_length": [2048]}
    one = asked(over=over)[0].digest
    assert asked(over={"workload.sequence_length": ["2k"]})[0].digest == one
    assert asked(points=[{"workload.sequence_length": 2048}], best="mfu", limit_s=5)[0].digest == one
    others = {
        asked(over={"workload.sequence_length": [4096]})[0].digest,
        asked(over=over, state="another catalog")[0].digest,
        asked(over=over, options={"seed": 1})[0].digest,
        asked(over=over, ask="estimate")[0].digest,
        one,
    }
    assert len(others) == 5


def test_the_content_of_a_named_file_is_part_of_the_question(tmp_path: Path) -> None:
    spec: dict[str, Any] = copy.deepcopy(BASE)
    spec["model"] = "config.json"
    over = {"workload.sequence_length": [2048]}
    digests = []
    for content in ("{}", "{ }", None):
        (tmp_path / "config.json").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        digests.append(asked(tmp_path, spec, over=over)[0].digest)
    assert len(set(digests)) == 3


def test_too_many_points_are_refused_before_they_are_written_out() -> None:
    over = {f"x{number}": list(range(1000)) for number in range(4)}
    with pytest.raises(SpecError, match=f"1000000000000 points, at most {MAX_POINTS}"):
        asked(over=over)


def test_every_field_that_no_spec_has_is_refused_with_its_path() -> None:
    with pytest.raises(SpecError) as error:
        asked(over={"workload.sequence_lenght": [1, 2], "fixed.tensor_parallel": [1, "many"]})
    message = str(error.value)
    assert "workload.sequence_lenght: unknown key; did you mean 'sequence_length'" in message
    assert "fixed.tensor_parallel" in message
    assert message.count("sequence_lenght") == 1
    with pytest.raises(SpecError, match=r"cluster\.nodes\.3\.count: '3' is not a section"):
        asked(over={"cluster.nodes.3.count": [1]})


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ({}, "give what varies"),
        ({"over": {}}, "give what varies"),
        ({"over": {"model": []}}, "over.model"),
        ({"over": {"model": ["a"]}, "points": [{"model": "b"}]}, "model: in over and in points"),
        ({"over": {"model": ["a"]}, "group_by": ["objective"]}, "objective does not vary"),
        ({"over": {"model": ["a"]}, "ovr": {}}, "ovr: unknown key; did you mean 'over'"),
        ({"over": {"model": ["a"]}, "ask": "estimate", "options": {"top": 3}}, "leave them out"),
        ({"over": {"model": ["a"]}, "options": {"time_limit_s": -1}}, "options.time_limit_s"),
        ({"over": {"model": ["a"]}, "pareto": ["mfu"]}, "pareto"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said_with_its_path(sweep: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        asked(**sweep)
    assert says in str(error.value)


def test_a_metric_that_no_plan_predicts_is_refused_before_any_point_is_answered() -> None:
    with pytest.raises(SpecError) as error:
        asked(over={"workload.global_batch_size": [64]}, best="tokens_per_second", pareto=["mfu", "latency"])
    assert "best: no plan predicts 'tokens_per_second'; did you mean 'tokens_per_s'" in str(error.value)
    assert "pareto[1]: no plan predicts 'latency'" in str(error.value)
    assert asked(over={"workload.global_batch_size": [64]}, best="mfu", pareto=["num_devices", "usd_per_run"])


def test_a_file_names_its_base_and_paths_are_those_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    write_sweep(tmp_path / "specs")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(SWEEP.replace("base.yaml", "specs/base.yaml"))
    read, spec, base = read_sweep(sweep)
    assert (read.name, spec, base) == ("batches", BASE, tmp_path / "specs")
    assert read.fields == ("workload.global_batch_size", "workload.sequence_length")


@pytest.mark.parametrize(
    "text",
    [
        "kind: sweep\nbase: /etc/passwd\nover: {model: [a]}\n",
        "kind: sweep\nbase: missing.yaml\nover: {model: [a]}\n",
        "kind: sweep\nbase: .\nover: {model: [a]}\n",
        "!!python/object/apply:os.system ['true']\n",
        "kind: sweep\nbase: &a {x: *a}\nover: {model: [a]}\n",
        "[" * 100_000,
        "\x00",
        "- 1\n",
        "",
    ],
)
def test_hostile_files_are_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(SpecError):
        read_sweep(path)


@pytest.mark.parametrize(
    "place", ["base", "over", "points", "options", "name", "group_by", "best", "pareto", "limit_s"]
)
def test_any_value_anywhere_is_taken_or_refused_in_words(place: str) -> None:
    for value in HOSTILE_VALUES:
        for put in (value, {"model": value}, {"model": [value]}, [value, value], {str(value): [1]}):
            document = {"kind": "sweep", "base": BASE, "over": {"workload.global_batch_size": [64]}, place: put}
            with contextlib.suppress(SpecError):
                read = read_spec(SweepSpec, document)
                questions_of(read, BASE, Path(), catalog_state="c")
